//! Every clip of the sample set gives what its expectation says.

use super::*;
use std::collections::HashMap;

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
