//! The processor files of a checkpoint, read into a `VisionGeometry`.

use super::VisionGeometry;
use super::size::AreaRule;
use crate::json::Json;
use gateway_media::{PatchLayout, PixelNorm};

const IMAGE_FILE: &str = "preprocessor_config.json";
const VIDEO_FILE: &str = "video_preprocessor_config.json";

/// Defaults of `MiniMaxM3VLImageProcessor` and `MiniMaxM3VLVideoProcessor` in transformers 5.24.
mod defaults {
    pub(super) const PATCH_SIZE: u64 = 14;
    pub(super) const TEMPORAL_PATCH_SIZE: u64 = 2;
    pub(super) const MERGE_SIZE: u64 = 2;
    pub(super) const MIN_PIXELS: u64 = 3_136;
    pub(super) const MAX_IMAGE_PIXELS: u64 = 451_584;
    pub(super) const MAX_FRAME_PIXELS: u64 = 602_112;
    pub(super) const MAX_FRAMES: u64 = 768;
    pub(super) const FPS: f64 = 1.0;
    pub(super) const MEAN: [f64; 3] = [0.48145466, 0.4578275, 0.40821073];
    pub(super) const STD: [f64; 3] = [0.26862954, 0.26130258, 0.27577711];
    pub(super) const BICUBIC: u64 = 3;
}

/// Why the processor files cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}: {message}")]
pub struct VisionConfigError {
    /// Name of the file.
    pub file: &'static str,
    /// What is wrong, with the value and what was expected.
    pub message: String,
}

pub(super) fn read(
    image: Option<&Json>,
    video: Option<&Json>,
) -> Result<VisionGeometry, VisionConfigError> {
    let image = Section { file: IMAGE_FILE, json: image };
    let video = Section { file: VIDEO_FILE, json: video };
    let (layout, norm) = (image.layout()?, image.norm()?);
    video.expect_same("patch layout", &video.layout()?, &layout)?;
    video.expect_same("normalisation", &video.norm()?, &norm)?;
    image.check_steps(&["do_convert_rgb", "do_resize", "do_rescale", "do_normalize"])?;
    // the reference's own processor turns resizing of clips off and leaves it to the loader: to us
    video.check_steps(&["do_convert_rgb", "do_rescale", "do_normalize"])?;
    let factor = layout.factor();
    let (min_pixels, max_pixels) = image.area()?;
    let frame_min = video.integer("min_pixels", defaults::MIN_PIXELS)?;
    let frame_max = video.integer("max_pixels", defaults::MAX_FRAME_PIXELS)?;
    let max_frames = video.integer("max_frames", defaults::MAX_FRAMES)?;
    Ok(VisionGeometry {
        layout,
        norm,
        image: image.area_rule(factor, min_pixels, max_pixels)?,
        frame: video.area_rule(factor, frame_min, frame_max)?,
        default_fps: video.positive("fps", defaults::FPS)?,
        max_frames: video.within("max_frames", max_frames, 2..=65_536)? as usize,
    })
}

/// One of the files; an absent file says nothing.
#[derive(Clone, Copy)]
struct Section<'a> {
    file: &'static str,
    json: Option<&'a Json>,
}

impl<'a> Section<'a> {
    fn error(&self, message: String) -> VisionConfigError {
        VisionConfigError { file: self.file, message }
    }

    /// The value of a key that is there and not null.
    fn get(&self, key: &str) -> Option<&'a Json> {
        self.json?.get(key).filter(|value| !value.is_null())
    }

    fn integer(&self, key: &str, default: u64) -> Result<u64, VisionConfigError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        as_u64(value).ok_or_else(|| {
            self.error(format!("{key} must be a whole number, got {}", value.to_compact()))
        })
    }

    fn positive(&self, key: &str, default: f64) -> Result<f64, VisionConfigError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        as_f64(value).filter(|number| number.is_finite() && *number > 0.0).ok_or_else(|| {
            self.error(format!("{key} must be a number above 0, got {}", value.to_compact()))
        })
    }

    fn within(
        &self,
        key: &str,
        value: u64,
        range: std::ops::RangeInclusive<u64>,
    ) -> Result<u64, VisionConfigError> {
        if range.contains(&value) {
            return Ok(value);
        }
        let (least, most) = (range.start(), range.end());
        Err(self.error(format!("{key} must be from {least} to {most}, got {value}")))
    }

    fn layout(&self) -> Result<PatchLayout, VisionConfigError> {
        let side = |key: &str, default: u64| -> Result<u32, VisionConfigError> {
            Ok(self.within(key, self.integer(key, default)?, 1..=256)? as u32)
        };
        Ok(PatchLayout {
            patch_size: side("patch_size", defaults::PATCH_SIZE)?,
            temporal_patch_size: side("temporal_patch_size", defaults::TEMPORAL_PATCH_SIZE)?,
            merge_size: side("merge_size", defaults::MERGE_SIZE)?,
        })
    }

    fn norm(&self) -> Result<PixelNorm, VisionConfigError> {
        Ok(PixelNorm {
            mean: self.per_channel("image_mean", defaults::MEAN)?,
            std: self.per_channel("image_std", defaults::STD)?,
        })
    }

    fn per_channel(&self, key: &str, default: [f64; 3]) -> Result<[f32; 3], VisionConfigError> {
        let Some(value) = self.get(key) else { return Ok(default.map(|number| number as f32)) };
        let numbers: Option<Vec<f64>> =
            value.as_array().and_then(|entries| entries.iter().map(as_f64).collect());
        let is_sane = |number: &f64| number.is_finite() && *number > 0.0;
        match numbers.as_deref() {
            Some(&[r, g, b]) if [r, g, b].iter().all(is_sane) => Ok([r, g, b].map(|n| n as f32)),
            _ => Err(self
                .error(format!("{key} must be three numbers above 0, got {}", value.to_compact()))),
        }
    }

    /// Least and most pixels of a still. The released file's `size` is the list `[672, 672]`, which
    /// the reference replaces by its defaults and older processors multiply: the same area.
    fn area(&self) -> Result<(u64, u64), VisionConfigError> {
        let (mut least, mut most) = (defaults::MIN_PIXELS, defaults::MAX_IMAGE_PIXELS);
        if let Some(size) = self.get("size") {
            let side = |key: &str| size.get(key).and_then(as_u64);
            let listed = size.as_array().map(|sides| sides.iter().map(as_u64).collect::<Vec<_>>());
            match (side("shortest_edge"), side("longest_edge"), side("height"), side("width")) {
                (Some(shortest), Some(longest), _, _) => (least, most) = (shortest, longest),
                (_, _, Some(height), Some(width)) => most = height.saturating_mul(width),
                _ => match listed.as_deref() {
                    Some(&[Some(height), Some(width)]) => most = height.saturating_mul(width),
                    _ => {
                        return Err(self.error(format!(
                            "size must give shortest_edge and longest_edge, or height and width, \
                             got {}",
                            size.to_compact()
                        )));
                    }
                },
            }
        }
        Ok((self.integer("min_pixels", least)?, self.integer("max_pixels", most)?))
    }

    fn area_rule(
        &self,
        factor: u32,
        min_pixels: u64,
        max_pixels: u64,
    ) -> Result<AreaRule, VisionConfigError> {
        let cell = u64::from(factor).pow(2);
        if min_pixels > max_pixels || max_pixels < cell || max_pixels > 1 << 40 {
            return Err(self.error(format!(
                "pixels from {min_pixels} to {max_pixels} leave no size for patches of {factor}"
            )));
        }
        Ok(AreaRule { factor, min_pixels, max_pixels })
    }

    /// Refuses files that leave out or change a step that we always take.
    fn check_steps(&self, steps: &[&str]) -> Result<(), VisionConfigError> {
        for step in steps {
            if self.get(step).is_some_and(|value| *value != Json::Bool(true)) {
                return Err(self.error(format!("{step} must be true")));
            }
        }
        let resample = self.integer("resample", defaults::BICUBIC)?;
        self.within("resample", resample, defaults::BICUBIC..=defaults::BICUBIC)?;
        let scale = self.positive("rescale_factor", 1.0 / 255.0)?;
        if (scale * 255.0 - 1.0).abs() > 1e-9 {
            return Err(self.error(format!("rescale_factor must be 1/255, got {scale}")));
        }
        Ok(())
    }

    fn expect_same<T: PartialEq + std::fmt::Debug>(
        &self,
        what: &str,
        found: &T,
        wanted: &T,
    ) -> Result<(), VisionConfigError> {
        if found == wanted {
            return Ok(());
        }
        Err(self.error(format!("{what} differs from {IMAGE_FILE}: {found:?}, not {wanted:?}")))
    }
}

fn as_u64(value: &Json) -> Option<u64> {
    match value {
        Json::Number(number) => number.as_u64(),
        _ => None,
    }
}

fn as_f64(value: &Json) -> Option<f64> {
    match value {
        Json::Number(number) => Some(number.as_f64()),
        _ => None,
    }
}
