//! The two rules by which a size becomes a multiple of the merged patch.

use super::{invalid, refused};
use crate::error::RequestError;
use gateway_media::ImageSize;

/// Longer sides may be at most this many times the shorter one.
/// Source: `smart_resize` of `minimax_m3_vl` in transformers 5.24, as the rule below.
const MAX_ASPECT_RATIO: f64 = 200.0;
/// A shorter side is scaled up to this where a request controls the size.
/// Source: MiniMax's provider contract (`min_short_side_pixel`).
const MIN_SHORT_SIDE: f64 = 112.0;
/// Longest sides that a request may ask for. Source: the same.
const LONG_SIDE_RANGE: std::ops::RangeInclusive<u32> = 150..=3584;

/// The checkpoint's own rule: keep the shape, stay within an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AreaRule {
    /// Sides become multiples of this.
    pub(super) factor: u32,
    /// Least pixels of the result.
    pub(super) min_pixels: u64,
    /// Most pixels of the result, but for sides of one factor that cannot shrink.
    pub(super) max_pixels: u64,
}

impl AreaRule {
    /// The size that a picture of `size` is resized to. All arithmetic is in doubles and rounds
    /// halves to even, as the reference's does; a side that rounds to 0 is caught by the lower limit.
    pub(super) fn target(self, size: ImageSize) -> Result<ImageSize, RequestError> {
        check_shape(size)?;
        let factor = f64::from(self.factor);
        let (height, width) = (f64::from(size.height), f64::from(size.width));
        let nearest = |side: f64| (side / factor).round_ties_even() * factor;
        let area = nearest(height) * nearest(width);
        let (height, width) = if area > self.max_pixels as f64 {
            let shrink = (height * width / self.max_pixels as f64).sqrt();
            let fitted = |side: f64| ((side / shrink / factor).floor() * factor).max(factor);
            (fitted(height), fitted(width))
        } else if area < self.min_pixels as f64 {
            let grow = (self.min_pixels as f64 / (height * width)).sqrt();
            let fitted = |side: f64| (side * grow / factor).ceil() * factor;
            (fitted(height), fitted(width))
        } else {
            (nearest(height), nearest(width))
        };
        Ok(ImageSize { width: width as u32, height: height as u32 })
    }
}

/// The rule of the provider contract for requests that control the size: no area limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LongSideRule {
    max_pixels: u32,
    factor: u32,
}

impl LongSideRule {
    /// Longest side for `detail: low`; the contract's tiers for `max_long_side_pixel`.
    pub(super) const LOW: u32 = 504;
    /// Longest side for `detail: high`.
    pub(super) const HIGH: u32 = 2016;

    /// Longest side `max_pixels`, sides multiples of `factor`.
    pub(super) fn new(asked: i64, factor: u32) -> Result<Self, RequestError> {
        let is_fit =
            |pixels: &u32| LONG_SIDE_RANGE.contains(pixels) && pixels.is_multiple_of(factor);
        let Some(max_pixels) = u32::try_from(asked).ok().filter(is_fit) else {
            let least = LONG_SIDE_RANGE.start().next_multiple_of(factor);
            let most = LONG_SIDE_RANGE.end() / factor * factor;
            return Err(invalid(format!(
                "max_long_side_pixel must be a multiple of {factor} from {least} to {most}, \
                 got {asked}"
            )));
        };
        Ok(Self { max_pixels, factor })
    }

    /// The size that a picture of `size` is resized to: a longer side is brought down to the limit,
    /// else a shorter side under 112 is brought up to that, then both go to the nearest multiple.
    pub(super) fn target(self, size: ImageSize) -> Result<ImageSize, RequestError> {
        check_shape(size)?;
        let (height, width) = (f64::from(size.height), f64::from(size.width));
        let (long, short) = (height.max(width), height.min(width));
        let limit = f64::from(self.max_pixels);
        let scale = if long > limit {
            limit / long
        } else if short < MIN_SHORT_SIDE {
            MIN_SHORT_SIDE / short
        } else {
            1.0
        };
        let factor = f64::from(self.factor);
        let fitted =
            |side: f64| ((side * scale / factor).round_ties_even() * factor).max(factor) as u32;
        Ok(ImageSize { width: fitted(width), height: fitted(height) })
    }
}

fn check_shape(size: ImageSize) -> Result<(), RequestError> {
    let (height, width) = (f64::from(size.height), f64::from(size.width));
    if size.pixels() == 0 {
        return Err(refused(format!("the picture is empty ({}x{})", size.width, size.height)));
    }
    let ratio = height.max(width) / height.min(width);
    if ratio > MAX_ASPECT_RATIO {
        return Err(refused(format!(
            "the picture is {}x{}: one side is {ratio:.1} times the other, the limit is \
             {MAX_ASPECT_RATIO}",
            size.width, size.height
        )));
    }
    Ok(())
}
