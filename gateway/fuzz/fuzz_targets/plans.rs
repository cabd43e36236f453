//! Any size, length and rate of a picture or a clip, and any wish about it: a plan that fits itself,
//! or a refusal with words.
#![no_main]

use std::path::Path;
use std::sync::{Arc, LazyLock};

use gateway_core::RequestError;
use gateway_core::model::{
    self, MediaKind, MediaPlan, ModelFiles, ModelSpec, PlaceholderPiece, SizeControls,
};
use gateway_media::{ClipInfo, ImageSize};
use libfuzzer_sys::fuzz_target;

static SPEC: LazyLock<Arc<dyn ModelSpec>> = LazyLock::new(|| {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../worker/m3stack/checkpoints/tiny");
    let files = ModelFiles::read(Path::new(folder)).expect("the built-in checkpoint");
    model::load(&files).expect("the built-in checkpoint")
});
/// Longest clip that the gateway may be configured to take.
const MAX_DURATION_S: f64 = 1e6;

/// Takes the next number of 4 bytes.
fn word(rest: &mut &[u8]) -> Option<u32> {
    let (first, after) = rest.split_first_chunk::<4>()?;
    *rest = after;
    Some(u32::from_le_bytes(*first))
}

fn controls(rest: &mut &[u8]) -> Option<SizeControls> {
    let kinds = word(rest)?;
    let details = [None, Some("low"), Some("default"), Some("high"), Some("auto"), Some("other")];
    let detail = details[kinds as usize % details.len()].map(str::to_owned);
    let (side, rate) = (word(rest)?, word(rest)?);
    let fps = match kinds >> 8 & 7 {
        0..=2 => None,
        3 => Some(f64::from(f32::from_bits(rate))),
        _ => Some(f64::from(rate % 8192) / 1000.0),
    };
    let max_long_side_pixel = (kinds >> 16 & 1 == 1).then_some(i64::from(side) - 16);
    Some(SizeControls { detail, max_long_side_pixel, fps })
}

fn check(plan: Result<MediaPlan, RequestError>, num_frames: u64) -> Option<MediaPlan> {
    let plan = match plan {
        Ok(plan) => plan,
        Err(refusal) => {
            assert!(!refusal.message.is_empty() && refusal.code.is_some(), "{refusal:?}");
            return None;
        }
    };
    let layout = SPEC.patch_layout();
    let (grid, target) = (plan.grid, plan.target);
    assert!(target.width % layout.factor() == 0 && target.height % layout.factor() == 0);
    assert_eq!(
        (grid.w * layout.patch_size, grid.h * layout.patch_size),
        (target.width, target.height)
    );
    assert!(grid.patches() > 0);
    assert_eq!(plan.num_tokens * u64::from(layout.merge_size).pow(2), grid.patches());
    assert!(plan.frames.windows(2).all(|pair| pair[0] < pair[1]), "{:?}", plan.frames);
    assert!(plan.frames.last().is_none_or(|last| *last < num_frames));
    let mut pads = 0;
    for piece in SPEC.placeholder(&plan) {
        match piece {
            PlaceholderPiece::Pads { count } => pads += u64::from(count),
            PlaceholderPiece::Text(text) => assert!(!text.is_empty() && text.len() < 64, "{text}"),
            PlaceholderPiece::Marker(_) => {}
        }
    }
    assert_eq!(pads, plan.num_tokens);
    Some(plan)
}

fuzz_target!(|bytes: &[u8]| {
    let rest = &mut { bytes };
    let numbers = (|| {
        let controls = controls(rest)?;
        let size = ImageSize { width: word(rest)?, height: word(rest)? };
        Some((controls, size, word(rest)?, word(rest)?))
    })();
    let Some((controls, size, count, rate)) = numbers else { return };
    // a decoder never gives an empty frame
    if size.width == 0 || size.height == 0 {
        return;
    }
    if let Some(plan) = check(SPEC.plan_image(size, &controls), 0) {
        assert_eq!((plan.kind, plan.grid.t), (MediaKind::Image, 1));
        assert!(plan.frames.is_empty() && plan.patch_times_s.is_empty());
    }
    let fps = f64::from(rate) / 1000.0;
    let num_frames = u64::from(count);
    let duration_s = num_frames as f64 / fps;
    if duration_s > MAX_DURATION_S {
        return;
    }
    let clip = ClipInfo { size, num_frames, fps, duration_s };
    if let Some(plan) = check(SPEC.plan_clip(&clip, &controls), num_frames) {
        assert_eq!(plan.kind, MediaKind::Video);
        assert!(!plan.frames.is_empty());
        let per_patch = SPEC.patch_layout().temporal_patch_size as usize;
        assert_eq!(plan.grid.t as usize, plan.frames.len().div_ceil(per_patch));
        assert_eq!(plan.patch_times_s.len(), plan.grid.t as usize);
        assert!(plan.patch_times_s.windows(2).all(|pair| pair[0] < pair[1]));
    }
});
