//! Which frame numbers of a clip the model is shown.

/// Slack in seconds that keeps a frame whose time falls just short of its turn.
const TOLERANCE_S: f64 = 1e-4;

/// Frame numbers, ascending, so that neighbours are at least `1 / target_fps` apart, plus the last
/// frame of the clip; thinned evenly to `max_frames` when there are more.
///
/// `num_frames` counts the frames of the stream and `video_fps` is their average rate. The work
/// grows with the clip's length times `target_fps`, so a caller bounds the length first. Empty only
/// for an empty clip; a clip without a usable rate gives its first frame.
///
/// Source: the extractor that the model was tuned with, constant-interval mode, as SGLang and
/// RTP-LLM restate it; every operation is an IEEE double in the order of that program.
pub fn choose_frames(
    num_frames: u64,
    video_fps: f64,
    target_fps: f64,
    max_frames: usize,
) -> Vec<u64> {
    if num_frames == 0 {
        return Vec::new();
    }
    let usable = |rate: f64| rate.is_finite() && rate > 0.0;
    if !usable(video_fps) || !usable(target_fps) || max_frames <= 1 {
        return vec![0];
    }
    thin(at_interval(num_frames, video_fps, 1.0 / target_fps), max_frames)
}

/// The first frame, then each first frame at least `interval_s` after the one before, then the end.
fn at_interval(num_frames: u64, video_fps: f64, interval_s: f64) -> Vec<u64> {
    let mut frames = vec![0_u64];
    let mut kept = 0_u64;
    loop {
        let kept_s = kept as f64 / video_fps;
        // a float past u64 saturates in the cast, and so ends the loop
        let due = ((kept_s + interval_s - TOLERANCE_S) * video_fps).ceil() as u64;
        let next = due.max(kept + 1);
        if next >= num_frames {
            break;
        }
        frames.push(next);
        kept = next;
    }
    let last = num_frames - 1;
    if kept != last && last as f64 / video_fps - kept as f64 / video_fps > TOLERANCE_S {
        frames.push(last);
    }
    frames
}

/// At most `max_frames` (2 or more) of them, evenly, the last one always kept.
fn thin(frames: Vec<u64>, max_frames: usize) -> Vec<u64> {
    if frames.len() <= max_frames {
        return frames;
    }
    let step = frames.len() as f64 / (max_frames - 1) as f64;
    let mut kept: Vec<u64> =
        (0..max_frames - 1).map(|index| frames[(index as f64 * step) as usize]).collect();
    kept.extend(frames.last());
    kept
}

#[cfg(test)]
mod tests;
