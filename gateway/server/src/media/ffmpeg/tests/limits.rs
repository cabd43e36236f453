//! What limits refuse or end, and that nothing of it runs on.

use super::*;

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
