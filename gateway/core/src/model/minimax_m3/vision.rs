//! Geometry of M3's pictures and clips: target sizes, frames, grids, times, placeholder text.

mod config;
mod size;

pub use config::VisionConfigError;

use crate::error::{RequestError, RequestErrorKind};
use crate::json::Json;
use crate::model::{MediaKind, MediaPlan, PlaceholderPiece, SizeControls};
use gateway_media::sampling::choose_frames;
use gateway_media::{ClipInfo, GridThw, ImageSize, PatchLayout, PixelNorm};
use size::{AreaRule, LongSideRule};

/// Opens each block of placeholders; clips use the same one, not the video markers.
/// Source: `MiniMaxM3VLProcessor` of transformers 5.24.
const BLOCK_START: &str = "]<]start of image[>[";
/// Closes each block of placeholders.
const BLOCK_END: &str = "]<]end of image[>[";
/// Frames a second that a request may ask for. Source: MiniMax's provider contract.
const FPS_RANGE: std::ops::RangeInclusive<f64> = 0.2..=5.0;
/// Pixels of all frames together where a request controls the size. Source: the same.
const MAX_CLIP_PIXELS: u64 = 301_056_000;
/// Longest clip that is planned, 92 hours at 30 frames a second: a header can claim any length.
const MAX_CLIP_FRAMES: u64 = 10_000_000;

/// What a checkpoint's processor files say, and the plans that follow from it.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionGeometry {
    layout: PatchLayout,
    norm: PixelNorm,
    image: AreaRule,
    frame: AreaRule,
    default_fps: f64,
    max_frames: usize,
}

impl VisionGeometry {
    /// Reads `preprocessor_config.json` and `video_preprocessor_config.json`; what they leave out
    /// has the reference's defaults.
    ///
    /// # Errors
    /// A value that is malformed, out of range, or asks for processing that is not built.
    pub fn from_files(
        preprocessor: Option<&Json>,
        video_preprocessor: Option<&Json>,
    ) -> Result<Self, VisionConfigError> {
        config::read(preprocessor, video_preprocessor)
    }

    /// How frames become patch rows.
    pub fn patch_layout(&self) -> PatchLayout {
        self.layout
    }

    /// Normalisation by the worker.
    pub fn pixel_norm(&self) -> PixelNorm {
        self.norm
    }

    /// Plan of a still.
    ///
    /// # Errors
    /// `MediaRejected` for a shape that the model does not take, `InvalidRequest` for a control out
    /// of range; `param` is left empty.
    pub fn plan_image(
        &self,
        size: ImageSize,
        controls: &SizeControls,
    ) -> Result<MediaPlan, RequestError> {
        let target = match self.long_side_rule(controls)? {
            Some(rule) => rule.target(size)?,
            None => self.image.target(size)?,
        };
        let grid = self.grid(target, 1);
        Ok(MediaPlan {
            kind: MediaKind::Image,
            target,
            grid,
            frames: Vec::new(),
            patch_times_s: Vec::new(),
            num_tokens: self.tokens(grid),
        })
    }

    /// Plan of a clip.
    ///
    /// # Errors
    /// As [`VisionGeometry::plan_image`], and for too many frames or pixels.
    pub fn plan_clip(
        &self,
        clip: &ClipInfo,
        controls: &SizeControls,
    ) -> Result<MediaPlan, RequestError> {
        let fps = match controls.fps {
            None => self.default_fps,
            Some(fps) if FPS_RANGE.contains(&fps) => fps,
            Some(fps) => {
                let (least, most) = (FPS_RANGE.start(), FPS_RANGE.end());
                return Err(invalid(format!("fps must be from {least} to {most}, got {fps}")));
            }
        };
        let long_side = self.long_side_rule(controls)?;
        let target = match long_side {
            Some(rule) => rule.target(clip.size)?,
            None => self.frame.target(clip.size)?,
        };
        let frames = self.frames(clip, fps)?;
        let pixels = target.pixels() * frames.len() as u64;
        if long_side.is_some() && pixels > MAX_CLIP_PIXELS {
            return Err(refused(format!(
                "the video has {pixels} pixels ({} frames of {}x{}), the limit is \
                 {MAX_CLIP_PIXELS}; ask for a lower fps, detail or max_long_side_pixel",
                frames.len(),
                target.width,
                target.height,
            )));
        }
        let per_patch = self.layout.temporal_patch_size as usize;
        let patch_times_s =
            frames.iter().step_by(per_patch).map(|&frame| frame as f64 / clip.fps).collect();
        let grid = self.grid(target, frames.len().div_ceil(per_patch) as u32);
        let num_tokens = self.tokens(grid);
        Ok(MediaPlan { kind: MediaKind::Video, target, grid, frames, patch_times_s, num_tokens })
    }

    /// What replaces the item's marker in the prompt: one block a temporal patch, in a clip each
    /// after the time at which it begins, which is ordinary text.
    pub fn placeholder(&self, plan: &MediaPlan) -> Vec<PlaceholderPiece> {
        let slice = GridThw { t: 1, ..plan.grid };
        let count = self.tokens(slice) as u32;
        let block = || {
            [
                PlaceholderPiece::Marker(BLOCK_START),
                PlaceholderPiece::Pads { count },
                PlaceholderPiece::Marker(BLOCK_END),
            ]
        };
        match plan.kind {
            MediaKind::Image => block().into(),
            MediaKind::Video => plan
                .patch_times_s
                .iter()
                .flat_map(|time| {
                    let text = format!("]<]{time:.1} seconds[>[");
                    std::iter::once(PlaceholderPiece::Text(text)).chain(block())
                })
                .collect(),
        }
    }

    fn frames(&self, clip: &ClipInfo, fps: f64) -> Result<Vec<u64>, RequestError> {
        if clip.num_frames == 0 || !(clip.fps.is_finite() && clip.fps > 0.0) {
            return Err(refused(format!(
                "the video has no frames to choose from ({} frames, {} a second)",
                clip.num_frames, clip.fps
            )));
        }
        if clip.num_frames > MAX_CLIP_FRAMES {
            return Err(refused(format!(
                "the video has {} frames, the limit is {MAX_CLIP_FRAMES}",
                clip.num_frames
            )));
        }
        Ok(choose_frames(clip.num_frames, clip.fps, fps, self.max_frames))
    }

    /// The rule that takes the place of the area limits, if the request asks for a size.
    fn long_side_rule(
        &self,
        controls: &SizeControls,
    ) -> Result<Option<LongSideRule>, RequestError> {
        let tier = match controls.detail.as_deref() {
            None | Some("default" | "auto") => None,
            Some("low") => Some(LongSideRule::LOW),
            Some("high") => Some(LongSideRule::HIGH),
            Some(other) => {
                return Err(invalid(format!(
                    "detail must be one of low, default, high, auto; got {other:?}"
                )));
            }
        };
        let factor = self.layout.factor();
        match controls.max_long_side_pixel {
            Some(pixels) => LongSideRule::new(pixels, factor).map(Some),
            None => tier.map(|pixels| LongSideRule::new(pixels.into(), factor)).transpose(),
        }
    }

    fn grid(&self, target: ImageSize, t: u32) -> GridThw {
        let patch = self.layout.patch_size;
        GridThw { t, h: target.height / patch, w: target.width / patch }
    }

    fn tokens(&self, grid: GridThw) -> u64 {
        grid.patches() / u64::from(self.layout.merge_size).pow(2)
    }
}

/// The picture or clip cannot be shown to the model.
fn refused(message: String) -> RequestError {
    let kind = RequestErrorKind::MediaRejected;
    RequestError { kind, message, param: None, code: Some("media_rejected") }
}

/// A control of the request is wrong.
fn invalid(message: String) -> RequestError {
    let kind = RequestErrorKind::InvalidRequest;
    RequestError { kind, message, param: None, code: Some("invalid_media_control") }
}

#[cfg(test)]
mod tests;
