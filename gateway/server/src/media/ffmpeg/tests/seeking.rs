//! Frames reached by jumps and by excerpts are those of a whole decode.

use super::super::segments::{self, Way};
use super::super::tables::Tables;
use super::super::{knows_fps_mode, probe};
use super::*;

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
