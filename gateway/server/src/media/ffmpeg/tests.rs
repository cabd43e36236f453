//! FFmpeg on the sample clips: what the tests of several subjects share.

mod colours;
mod damage;
mod files;
mod limits;
mod seeking;
mod stills;

use super::*;
use gateway_media::RgbFrame;
use serde_json::Value;

fn media_directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/media")
}

fn expectations() -> serde_json::Map<String, Value> {
    let text = std::fs::read_to_string(media_directory().join("expect.json")).unwrap();
    let all: Value = serde_json::from_str(&text).unwrap();
    all["videos"].as_object().unwrap().clone()
}

fn limits() -> FfmpegLimits {
    FfmpegLimits {
        max_processes: 2,
        timeout: Duration::from_secs(120),
        max_frame_pixels: 64_000_000,
        max_decoded_pixels: 50_000_000_000,
        max_duration: Duration::from_secs(3600),
    }
}

fn ffmpeg() -> Ffmpeg {
    ffmpeg_with(limits())
}

fn ffmpeg_with(limits: FfmpegLimits) -> Ffmpeg {
    let found =
        Ffmpeg::find(std::env::var_os("PATH").as_deref(), limits, Arc::new(Metrics::default()));
    assert_eq!(found.missing(), None, "these tests need FFmpeg");
    found
}

fn clip(name: &str) -> MemoryFile {
    MemoryFile::new(&std::fs::read(media_directory().join(name)).unwrap()).unwrap()
}

async fn decode(
    ffmpeg: &Ffmpeg,
    clip: &MemoryFile,
    probe: &ClipProbe,
    numbers: &[u64],
) -> Result<Vec<RgbFrame>, GatewayError> {
    let flow = Flow::default();
    let mut stream = ffmpeg.frames(clip, probe, numbers, &flow).await?;
    let mut frames = Vec::new();
    while let Some(frame) = stream.next().await? {
        frames.push(frame);
    }
    Ok(frames)
}

fn pixel(frame: &RgbFrame, x: u32, y: u32) -> [u8; 3] {
    let place = ((y * frame.size.width + x) * 3) as usize;
    [frame.pixels[place], frame.pixels[place + 1], frame.pixels[place + 2]]
}

/// 16 cells along the bottom sixth, most significant bit left.
fn bar_code(frame: &RgbFrame) -> u64 {
    let y = frame.size.height - frame.size.height / 12;
    let cell = f64::from(frame.size.width) / 16.0;
    (0..16).fold(0, |number, bit| {
        let x = ((f64::from(bit) + 0.5) * cell) as u32;
        (number << 1) | u64::from(pixel(frame, x, y)[1] >= 128)
    })
}

fn assert_near(found: [u8; 3], expected: &Value, tolerance: u64, place: &str) {
    for (channel, value) in found.iter().zip(expected.as_array().unwrap()) {
        let distance = u64::from(*channel).abs_diff(value.as_u64().unwrap());
        assert!(distance <= tolerance, "{place}: {found:?} is not {expected}");
    }
}
