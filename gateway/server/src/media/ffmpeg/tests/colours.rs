//! Colours that are not converted plainly: high dynamic range, and transparency.

use super::*;
use std::process::Command;

/// A clip of one grey after the other, made by FFmpeg with these options.
fn made(source: &str, options: &[&str], suffix: &str) -> MemoryFile {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(format!("clip.{suffix}"));
    let status = Command::new("ffmpeg")
        .args(["-nostdin", "-v", "error", "-f", "lavfi", "-i", source])
        .args(options)
        .arg(&path)
        .status()
        .unwrap();
    assert!(status.success(), "{source} {options:?}");
    MemoryFile::new(&std::fs::read(path).unwrap()).unwrap()
}

/// Ten levels of grey beside each other, as they are coded: a tenth of the range each.
const STEPS: &str = "color=gray:size=160x64:rate=5:duration=1,format=yuv420p10le,\
                     geq=lum='64+floor(X/16)*97':cb=512:cr=512";

fn high_range(transfer: &str) -> Vec<String> {
    let parameters = format!("transfer={transfer}:colorprim=bt2020:colormatrix=bt2020nc");
    let options = ["-c:v", "libx264", "-qp", "1", "-x264-params", &parameters];
    options.map(str::to_owned).to_vec()
}

async fn steps(ffmpeg: &Ffmpeg, transfer: &str, suffix: &str) -> (ClipProbe, Vec<u8>) {
    let options = high_range(transfer);
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let clip = made(STEPS, &options, suffix);
    let probe = ffmpeg.probe(&clip, &Flow::default()).await.unwrap();
    let frames = decode(ffmpeg, &clip, &probe, &[0, 4]).await.unwrap();
    assert_eq!(frames.len(), 2);
    let greys = (0..10).map(|step| {
        let [red, green, blue] = pixel(&frames[0], step * 16 + 8, 32);
        assert!(red.abs_diff(green) <= 2 && blue.abs_diff(green) <= 2, "{transfer} {step}");
        green
    });
    (probe, greys.collect())
}

#[tokio::test]
async fn clips_of_a_high_dynamic_range_are_mapped_to_the_whole_range_of_ordinary_ones() {
    let ffmpeg = ffmpeg();
    let (ordinary, plain) = steps(&ffmpeg, "bt709", "mp4").await;
    for transfer in ["smpte2084", "arib-std-b67"] {
        for suffix in ["mp4", "mkv"] {
            let (probe, mapped) = steps(&ffmpeg, transfer, suffix).await;
            assert_eq!(probe.info, ordinary.info);
            assert_ne!(probe.colours, ordinary.colours, "{transfer} in {suffix}");
            assert!(mapped.is_sorted(), "darker stays darker: {mapped:?}");
            assert!(mapped[0] <= 2 && mapped[9] >= 230, "{transfer}: {mapped:?}");
            assert_ne!(mapped, plain, "{transfer} in {suffix}");
        }
    }
}

#[tokio::test]
async fn a_transparent_animation_is_shown_over_white() {
    let ffmpeg = ffmpeg();
    // left half gone, right half blue
    let source = "color=blue:size=32x16:rate=4:duration=1,format=rgba,\
                  geq=r=10:g=20:b=200:a='if(lt(X,16),0,255)'";
    let clip = made(source, &["-f", "apng", "-pix_fmt", "rgba"], "png");
    let probe = ffmpeg.probe(&clip, &Flow::default()).await.unwrap();
    assert_eq!((probe.info.num_frames, probe.codec.as_str()), (4, "apng"));
    for frame in decode(&ffmpeg, &clip, &probe, &[0, 3]).await.unwrap() {
        assert_eq!(pixel(&frame, 4, 8), [255; 3]);
        assert_eq!(pixel(&frame, 28, 8), [10, 20, 200]);
    }
}
