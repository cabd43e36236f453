//! Every clip of the handed set gives what its expectation says, and leaves nothing behind.

use super::segments::Way;
use super::*;
use gateway_media::RgbFrame;
use serde_json::Value;
use std::collections::HashMap;

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

async fn check_good(ffmpeg: &Ffmpeg, name: &str, expect: &Value) {
    let clip = clip(name);
    let probe = ffmpeg
        .probe(&clip, &Flow::default())
        .await
        .unwrap_or_else(|error| panic!("{name}: {error:?}"));
    let size = [probe.info.size.width, probe.info.size.height].map(u64::from);
    assert_eq!(Some(size.as_slice()), sides(&expect["upright_size"]).as_deref(), "{name}");
    assert_eq!(probe.info.num_frames, expect["frames"].as_u64().unwrap(), "{name}");
    if let Some(fps) = expect["avg_fps"].as_f64() {
        assert!((probe.info.fps - fps).abs() < 1e-3 * fps, "{name}: {} fps", probe.info.fps);
    }
    let duration = expect["duration_s"].as_f64().unwrap();
    let is_variable = expect["variable_rate"].as_bool() == Some(true);
    if !is_variable {
        let found = probe.info.duration_s;
        assert!((found - duration).abs() < 0.02 * duration, "{name}: {found} s");
    }
    check_probes(ffmpeg, (name, &clip, &probe), expect).await;
}

fn sides(value: &Value) -> Option<Vec<u64>> {
    value.as_array().map(|sides| sides.iter().filter_map(Value::as_u64).collect())
}

async fn check_probes(
    ffmpeg: &Ffmpeg,
    (name, clip, probe): (&str, &MemoryFile, &ClipProbe),
    expect: &Value,
) {
    let tolerance = expect["tolerance"].as_u64().unwrap();
    if let Some(points) = expect["points"].as_array() {
        let frames = decode(ffmpeg, clip, probe, &[0]).await.unwrap();
        for point in points {
            let at = [&point[0], &point[1]].map(|side| side.as_u64().unwrap() as u32);
            assert_near(pixel(&frames[0], at[0], at[1]), &point[2], tolerance, name);
        }
    }
    let Some(probes) = expect["probes"].as_array() else { return };
    let numbers: Vec<u64> = probes.iter().map(|probe| probe["frame"].as_u64().unwrap()).collect();
    let frames = decode(ffmpeg, clip, probe, &numbers).await.unwrap();
    assert_eq!(frames.len(), numbers.len(), "{name}");
    for (frame, expected) in frames.iter().zip(probes) {
        let place = format!("{name} frame {}", expected["frame"]);
        if expect["barcode"].as_bool() != Some(false) {
            assert_eq!(Some(bar_code(frame)), expected["source_number"].as_u64(), "{place}");
        }
        let found = pixel(frame, frame.size.width / 2, frame.size.height / 3);
        assert_near(found, &expected["rgb"], tolerance, &place);
        let time = expected["t"].as_f64().unwrap();
        let shown = probe.frame_times_s[expected["frame"].as_u64().unwrap() as usize];
        assert!((shown - time).abs() < 2e-3, "{place}: shown at {shown}, not {time}");
    }
    for question in expect["time_questions"].as_array().into_iter().flatten() {
        let time = question["t"].as_f64().unwrap();
        let shown = probe.frame_times_s.partition_point(|start| *start <= time) as u64 - 1;
        let frames = decode(ffmpeg, clip, probe, &[shown]).await.unwrap();
        assert_eq!(Some(bar_code(&frames[0])), question["source_number"].as_u64(), "{name} {time}");
    }
}

#[tokio::test]
async fn every_good_clip_has_the_frames_sizes_times_and_colours_expected() {
    let ffmpeg = ffmpeg();
    let expectations = expectations();
    let good: Vec<_> =
        expectations.iter().filter(|(_, expect)| expect["outcome"] == "ok").collect();
    assert!(good.len() >= 20, "{} clips", good.len());
    for (name, expect) in good {
        check_good(&ffmpeg, name, expect).await;
    }
    assert_eq!(ffmpeg.metrics.video_processes_now(), 0);
}

#[tokio::test]
async fn every_bad_clip_is_rejected_and_nothing_is_opened_in_its_name() {
    let ffmpeg = ffmpeg();
    for (name, _) in expectations().iter().filter(|(_, expect)| expect["outcome"] == "error") {
        let refused =
            ffmpeg.probe(&clip(name), &Flow::default()).await.map(|probe| probe.codec).unwrap_err();
        assert_eq!(refused.kind, ErrorKind::MediaRejected, "{name}: {refused:?}");
        assert!(!refused.message.contains("/proc"), "{name}: {refused}");
    }
}

#[tokio::test]
async fn a_truncated_clip_gives_the_frames_that_can_be_decoded() {
    let ffmpeg = ffmpeg();
    let clip = clip("vid_truncated_tail.mp4");

    let probe = ffmpeg.probe(&clip, &Flow::default()).await.unwrap();

    assert!((1..30).contains(&probe.info.num_frames), "{}", probe.info.num_frames);
    let all: Vec<u64> = (0..probe.info.num_frames).collect();
    let codes: Vec<u64> =
        decode(&ffmpeg, &clip, &probe, &all).await.unwrap().iter().map(bar_code).collect();
    assert_eq!(codes, all, "no frame twice");
}

#[tokio::test]
async fn a_promise_of_more_frames_than_there_are_is_a_refusal_not_a_repetition() {
    let ffmpeg = ffmpeg();
    let clip = clip("vid_two_frames.mp4");
    let probe = ffmpeg.probe(&clip, &Flow::default()).await.unwrap();

    let refused = decode(&ffmpeg, &clip, &probe, &[0, 1, 7]).await.unwrap_err();

    assert_eq!(refused.kind, ErrorKind::MediaRejected);
    assert!(refused.message.contains("2 of the 3"), "{refused}");
}

#[tokio::test]
async fn a_long_clip_is_sampled_by_number_without_holding_it() {
    let ffmpeg = ffmpeg();
    let clip = clip("vid_long_10min_30fps.mp4");
    let probe = ffmpeg.probe(&clip, &Flow::default()).await.unwrap();
    let numbers: Vec<u64> = (0..600).map(|second| second * 30).collect();

    let flow = Flow::default();
    let mut stream = ffmpeg.frames(&clip, &probe, &numbers, &flow).await.unwrap();
    let mut codes = HashMap::new();
    while let Some(frame) = stream.next().await.unwrap() {
        *codes.entry(bar_code(&frame)).or_insert(0) += 1;
    }

    // one bar code each half minute
    assert_eq!(codes.len(), 20);
    assert!(codes.values().all(|count| *count == 30), "{codes:?}");
}

/// Whether a process is there and not merely waiting to be buried.
fn is_running(id: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

#[tokio::test]
async fn dropping_a_stream_kills_its_child_and_frees_its_place() {
    let ffmpeg = ffmpeg_with(FfmpegLimits { max_processes: 1, ..limits() });
    let clip = clip("vid_long_10min_30fps.mp4");
    let probe = ffmpeg.probe(&clip, &Flow::default()).await.unwrap();
    let all: Vec<u64> = (0..probe.info.num_frames).collect();

    let flow = Flow::default();
    let mut stream = ffmpeg.frames(&clip, &probe, &all, &flow).await.unwrap();
    stream.next().await.unwrap();
    let id = stream.child_id().unwrap();
    assert!(is_running(id) && ffmpeg.metrics.video_processes_now() == 1);
    drop(stream);

    assert_eq!(ffmpeg.metrics.video_processes_now(), 0);
    // its place is free once it is dead, not when it is told to die
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let (is_free, is_alive) = (ffmpeg.places.free() == 1, is_running(id));
        assert!(!(is_free && is_alive), "two may run where one is allowed");
        if is_free {
            break;
        }
        assert!(Instant::now() < deadline, "the child outlived its stream");
        tokio::task::yield_now().await;
    }
    assert_eq!(decode(&ffmpeg, &clip, &probe, &[3]).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_child_that_takes_too_long_is_ended_with_a_named_error() {
    let ffmpeg = ffmpeg_with(FfmpegLimits { timeout: Duration::from_millis(1), ..limits() });
    // listing it takes a child
    let refused = ffmpeg.probe(&clip("vid_h264.mkv"), &Flow::default()).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::DeadlineExceeded);
    assert_eq!(ffmpeg.metrics.video_processes_now(), 0);
}

#[tokio::test]
async fn without_ffmpeg_the_error_says_what_to_install() {
    let nowhere = Ffmpeg::find(None, limits(), Arc::new(Metrics::default()));
    let refused = nowhere.probe(&clip("vid_h264.mkv"), &Flow::default()).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::MediaUnavailable);
    assert!(refused.message.contains("install the package ffmpeg"), "{refused}");
}

#[tokio::test]
async fn frames_larger_than_the_limit_are_refused_before_decoding() {
    let ffmpeg = ffmpeg_with(FfmpegLimits { max_frame_pixels: 128 * 96 - 1, ..limits() });
    let refused = ffmpeg.probe(&clip("vid_cfr_h264.mp4"), &Flow::default()).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::MediaRejected);
    assert!(refused.message.contains("12288"), "{refused}");
}

#[tokio::test]
async fn a_clip_too_long_is_refused_by_its_packets_with_both_figures() {
    let ffmpeg = ffmpeg_with(FfmpegLimits { max_duration: Duration::from_secs(100), ..limits() });
    let clip = clip("vid_long_10min_30fps.mp4");
    let refused = ffmpeg.probe(&clip, &Flow::default()).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::MediaRejected);
    assert!(refused.message.contains("600") && refused.message.contains("100 s"), "{refused}");
}

#[tokio::test]
async fn a_clip_that_only_decoding_can_count_is_refused_when_that_costs_too_much() {
    let ffmpeg = ffmpeg_with(FfmpegLimits { max_decoded_pixels: 1000, ..limits() });
    for name in ["vid_vp8.webm", "vid_mpeg4.avi"] {
        let refused = ffmpeg.probe(&clip(name), &Flow::default()).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::MediaRejected);
        assert!(refused.message.contains("limit is 1000"), "{refused}");
    }
    assert!(ffmpeg.probe(&clip("vid_cfr_h264.mp4"), &Flow::default()).await.is_ok());
}

/// Runs of that many picks, each begun by a jump, whatever it costs.
fn jumps(count: usize, length: usize) -> std::collections::VecDeque<segments::Segment> {
    (0..count)
        .step_by(length)
        .map(|first| {
            let picks = first..count.min(first + length);
            segments::Segment { way: Way::Sought, ..segments::Segment::whole(picks, 1) }
        })
        .collect()
}

/// One run of stretches of that many picks.
fn joint(count: usize, length: usize) -> std::collections::VecDeque<segments::Segment> {
    let stretches = (0..count).step_by(length).skip(1).collect();
    let whole = segments::Segment::whole(0..count, 1);
    [segments::Segment { way: Way::Excerpt, stretches, ..whole }].into()
}

/// One run of the whole clip.
fn counted(numbers: &[u64]) -> std::collections::VecDeque<segments::Segment> {
    let decoded = numbers.last().unwrap() + 1;
    [segments::Segment::whole(0..numbers.len(), decoded)].into()
}

async fn decode_seeking(
    ffmpeg: &Ffmpeg,
    (clip, probe): (&MemoryFile, &ClipProbe),
    numbers: &[u64],
    runs: std::collections::VecDeque<segments::Segment>,
) -> Vec<RgbFrame> {
    let flow = Flow::default();
    let mut stream = ffmpeg.frames(clip, probe, numbers, &flow).await.unwrap();
    *stream.segments() = runs;
    let mut frames = Vec::new();
    while let Some(frame) = stream.next().await.unwrap() {
        frames.push(frame);
    }
    frames
}

#[tokio::test]
async fn frames_reached_by_seeking_are_those_of_a_whole_decode_to_the_byte() {
    let ffmpeg = ffmpeg();
    let mut checked = 0;
    for (name, _) in expectations().iter().filter(|(_, expect)| expect["outcome"] == "ok") {
        let clip = clip(name);
        let probe = ffmpeg.probe(&clip, &Flow::default()).await.unwrap();
        if probe.seek.is_none() {
            continue;
        }
        let last = probe.info.num_frames - 1;
        let mut numbers = vec![(last / 3 + 1).min(last), last];
        numbers.dedup();

        let whole = decode_seeking(&ffmpeg, (&clip, &probe), &numbers, counted(&numbers)).await;
        let sought =
            decode_seeking(&ffmpeg, (&clip, &probe), &numbers, jumps(numbers.len(), 2)).await;

        assert_eq!(whole.len(), numbers.len(), "{name}");
        for ((number, whole), sought) in numbers.iter().zip(&whole).zip(&sought) {
            assert!(whole == sought, "{name}: frame {number}");
        }
        checked += 1;
    }
    assert!(checked >= 12, "{checked} clips can be sought in");
}

#[tokio::test]
async fn stretches_in_one_child_give_the_frames_of_a_whole_decode_to_the_byte() {
    let ffmpeg = ffmpeg();
    let mut checked = 0;
    for (name, _) in expectations().iter().filter(|(_, expect)| expect["outcome"] == "ok") {
        let clip = clip(name);
        let probe = ffmpeg.probe(&clip, &Flow::default()).await.unwrap();
        let last = probe.info.num_frames - 1;
        let mut numbers = vec![0, last / 4, last / 2, last / 2 + 1, last];
        numbers.retain(|number| *number <= last);
        numbers.dedup();
        let is_joinable = |number: &u64| {
            probe.seek.as_ref().is_some_and(|table| table.is_joinable(*number as usize))
        };
        if !numbers.iter().all(is_joinable) {
            continue;
        }
        let flow = Flow::default();
        let whole = decode_seeking(&ffmpeg, (&clip, &probe), &numbers, counted(&numbers)).await;
        for length in [1, 2, 5] {
            let mut stream = ffmpeg.frames(&clip, &probe, &numbers, &flow).await.unwrap();
            *stream.segments() = joint(numbers.len(), length);
            for (number, whole) in numbers.iter().zip(&whole) {
                let found = stream.next().await.unwrap();
                assert!(found.as_ref() == Some(whole), "{name}: frame {number} of {numbers:?}");
                assert!(stream.segments().is_empty(), "{name}: it took a second child");
            }
        }
        checked += 1;
    }
    assert!(checked >= 6, "{checked} clips can be played in stretches");
}

#[tokio::test]
async fn an_index_that_leads_astray_costs_time_but_no_frame() {
    let ffmpeg = ffmpeg();
    let clip = clip("vid_cfr_h264.mp4");
    let mut probe = ffmpeg.probe(&clip, &Flow::default()).await.unwrap();
    let numbers = [0, 7, 15, 22];
    let right = decode_seeking(&ffmpeg, (&clip, &probe), &numbers, counted(&numbers)).await;

    // a stamp that no frame has: the first of a run, in its middle, its last
    for (frame, length) in [(0, 4), (15, 4), (22, 4), (15, 1), (7, 2), (15, 2)] {
        let stamps = &mut probe.seek.as_mut().unwrap().stamps;
        stamps[frame] += 1;
        let runs = jumps(4, length);
        let found = decode_seeking(&ffmpeg, (&clip, &probe), &numbers, runs).await;
        assert!(found == right, "frame {frame} in runs of {length}");
        probe.seek.as_mut().unwrap().stamps[frame] -= 1;
    }
    assert_eq!(ffmpeg.metrics.video_processes_now(), 0);
}

#[tokio::test]
async fn without_an_excerpt_the_rest_is_decoded_whole_and_counted() {
    let ffmpeg = ffmpeg();
    let numbers = [0, 7, 9];
    let plain = ffmpeg.probe(&clip("vid_cfr_h264.mp4"), &Flow::default()).await.unwrap();
    let (other, flow) = (clip("vid_h264.mkv"), Flow::default());
    let probe = ffmpeg.probe(&other, &flow).await.unwrap();
    let right = decode(&ffmpeg, &other, &probe, &numbers).await.unwrap();
    assert_eq!(ffmpeg.metrics.clips_decoded_again(), 0);

    // a file without the tables that were promised
    let found = decode_seeking(&ffmpeg, (&other, &plain), &numbers, joint(3, 1)).await;

    assert!(found == right);
    assert_eq!(ffmpeg.metrics.clips_decoded_again(), 1);
}

#[tokio::test]
async fn what_a_clips_own_tables_say_is_what_ffprobe_says() {
    let ffmpeg = ffmpeg();
    let mut checked = 0;
    for (name, _) in expectations().iter().filter(|(_, expect)| expect["outcome"] == "ok") {
        let clip = clip(name);
        let Some(tables) = Tables::read(&clip).await.unwrap() else { continue };
        let listed = ffmpeg.list(&clip, Some(&*tables), &Flow::default()).await.unwrap();
        let Some(own) = probe::Listing::of_tables(&tables) else { continue };
        assert!(listed.is_trustworthy() && own.is_trustworthy(), "{name}");
        assert_eq!(own.into_probe().unwrap(), listed.into_probe().unwrap(), "{name}");
        checked += 1;
    }
    assert!(checked >= 14, "{checked} clips have plain tables");
}

#[test]
fn versions_that_know_fps_mode_are_told_apart() {
    assert!(knows_fps_mode("ffmpeg version 5.1.9-0+deb12u1 Copyright"));
    assert!(knows_fps_mode("ffmpeg version n8.0 Copyright"));
    assert!(knows_fps_mode("ffmpeg version N-110000-gabcdef Copyright"));
    assert!(!knows_fps_mode("ffmpeg version 4.4.2-0ubuntu0.22.04.1 Copyright"));
    assert!(!knows_fps_mode("ffmpeg version 5.0.1 Copyright"));
}
