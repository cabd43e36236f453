//! The gateway's files about clips, found through links, without those that start
//! processes; and what is checked of them.

use crate::error::GatewayError;

/// As the gateway has it.
const START_PIXELS: u64 = 120_000_000;

pub struct FfmpegLimits {
    pub max_decoded_pixels: u64,
    pub max_duration: std::time::Duration,
}

fn rejected(message: &str) -> GatewayError {
    GatewayError(message.to_owned())
}

mod tables {
    use gateway_media::mp4::Movie;

    /// What the gateway reads of a clip in memory.
    pub(super) struct Tables {
        pub(super) movie: Movie,
        pub(super) is_clean: Vec<bool>,
    }
}

mod colours;
mod probe;
mod segments;
mod select;

use gateway_media::mp4::{Movie, Role};
use gateway_media::sampling::choose_frames;
use probe::{ClipProbe, Listing};
use segments::Way;

const MAX_FRAMES: usize = 768;
const LIMITS: FfmpegLimits = FfmpegLimits {
    max_decoded_pixels: 1 << 40,
    max_duration: std::time::Duration::from_secs(14_400),
};

pub fn check(bytes: &[u8]) {
    let _ = Listing::parse(bytes);
    let Some(movie) = Movie::read(bytes) else { return };
    let is_clean = movie.samples.iter().map(|sample| {
        let begin = sample.place as usize;
        let coded = &bytes[begin..begin + sample.bytes as usize];
        sample.is_key && movie.role(*sample, coded) == Role::Refresh
    });
    let tables = tables::Tables { is_clean: is_clean.collect(), movie };
    let Some(listing) = Listing::of_tables(&tables) else { return };
    let is_small = listing.check_size(1 << 26).is_ok() && listing.check_length(&LIMITS).is_ok();
    if !is_small || !listing.is_trustworthy() {
        return;
    }
    let Ok(probe) = listing.into_probe() else { return };
    if probe::check_duration(probe.info.duration_s, &LIMITS).is_ok() {
        reach(&probe, tables.movie.samples.len());
    }
}

/// Each frame that the model would be shown is decoded by one child, from where it can be.
fn reach(probe: &ClipProbe, num_samples: usize) {
    let info = &probe.info;
    assert!(info.fps.is_finite() && info.fps > 0.0, "{info:?}");
    assert!(probe.frame_times_s.windows(2).all(|pair| pair[0] <= pair[1]));
    assert_eq!(probe.frame_times_s.len(), num_samples);
    let frames = choose_frames(info.num_frames, info.fps, 1.0, MAX_FRAMES);
    let mut next = 0;
    for segment in segments::plan(probe, &frames) {
        assert_eq!(segment.picks.start, next);
        assert!(segment.picks.end > next);
        next = segment.picks.end;
        let picks = &frames[segment.picks.clone()];
        if segment.way == Way::Counted {
            assert!(!select::by_number(picks).is_empty());
            continue;
        }
        let table = probe.seek.as_ref().expect("a table to jump by");
        let begins = std::iter::once(segment.picks.start).chain(segment.stretches.clone());
        let ends = segment.stretches.iter().copied().chain([segment.picks.end]);
        for (begin, end) in begins.zip(ends) {
            let is_from_start = begin == 0;
            let needed = table.needed(&frames[begin..end], is_from_start).expect("a way");
            assert!(needed.start < needed.end && needed.end <= num_samples);
            for frame in &frames[begin..end] {
                assert!(needed.contains(&table.place(*frame as usize)));
            }
        }
    }
    assert_eq!(next, frames.len());
}
