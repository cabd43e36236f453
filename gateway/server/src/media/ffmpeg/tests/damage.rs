//! Damaged samples cost one attempt; who waits for a decoder holds no copy of anything.

use super::super::tables::Tables;
use super::*;

/// The clip with one sample, that of a frame, of which only the beginning is still right.
async fn with_broken_frame(ffmpeg: &Ffmpeg, name: &str, frame: usize) -> MemoryFile {
    let mut bytes = std::fs::read(media_directory().join(name)).unwrap();
    let whole = MemoryFile::new(&bytes).unwrap();
    let probe = ffmpeg.probe(&whole, &Flow::default()).await.unwrap();
    let tables = Tables::read(&whole).await.unwrap().unwrap();
    let place = probe.seek.as_ref().unwrap().place(frame);
    let sample = tables.movie.samples[place];
    let begin = sample.place as usize;
    // the length of its first unit and what that is stay: it looks whole from outside
    bytes[begin + 5..begin + sample.bytes as usize].fill(0);
    MemoryFile::new(&bytes).unwrap()
}

#[tokio::test]
async fn a_damaged_clip_is_refused_after_one_attempt() {
    let ffmpeg = ffmpeg();
    for (numbers, broken) in [(vec![0, 15], 15), (vec![0, 29], 29), (vec![20, 22], 22)] {
        let clip = with_broken_frame(&ffmpeg, "vid_cfr_h264.mp4", broken).await;
        let probe = ffmpeg.probe(&clip, &Flow::default()).await.unwrap();

        let refused = decode(&ffmpeg, &clip, &probe, &numbers).await.unwrap_err();

        assert_eq!(refused.kind, ErrorKind::MediaRejected, "{numbers:?}: {refused}");
        assert!(refused.message.contains("is damaged"), "{refused}");
        assert_eq!(ffmpeg.metrics.clips_decoded_again(), 0, "{numbers:?}");
        // what lies before the damage can be had
        let early = decode(&ffmpeg, &clip, &probe, &numbers[..1]).await.unwrap();
        assert_eq!(early.len(), 1);
    }
}

#[tokio::test]
async fn a_clip_that_waits_for_a_decoder_holds_no_excerpt() {
    let ffmpeg = ffmpeg_with(FfmpegLimits { max_processes: 1, ..limits() });
    let clip = clip("vid_cfr_h264.mp4");
    let flow = Flow::default();
    let probe = ffmpeg.probe(&clip, &flow).await.unwrap();
    let numbers = [0, 7, 15];
    ffmpeg.sync_option(&flow).await.unwrap();
    let only = ffmpeg.enter(&flow, 1).await;

    let mut waiting = ffmpeg.frames(&clip, &probe, &numbers, &flow).await.unwrap();
    {
        let mut next = Box::pin(waiting.next());
        while ffmpeg.places.waiting() == 0 {
            tokio::select! {
                frame = &mut next => panic!("decoded without a place: {:?}", frame.is_ok()),
                () = tokio::task::yield_now() => {}
            }
        }
    }
    assert!(!waiting.has_read_tables(), "nothing was read for an excerpt before its turn");

    drop(only);
    assert!(waiting.next().await.unwrap().is_some());
    assert!(waiting.has_read_tables());
}
