//! What one request may ask of the gateway's media rooms, judged by plans alone: before any decode.

use gateway_media::animation::WebpAnimation;

use super::PlannedMedia;
use crate::config::MediaLimits;
use crate::error::{ErrorKind, GatewayError};

/// Refuses the first item with which the request passes a limit.
///
/// # Errors
/// `MediaRejected` at that item, with the sum so far and the limit.
pub fn check(items: &[PlannedMedia], limits: &MediaLimits) -> Result<(), GatewayError> {
    let mut sums = Sums::default();
    for item in items {
        sums.add(item);
        sums.check(limits).map_err(|message| {
            let mut error = GatewayError::new(ErrorKind::MediaRejected, message);
            error.code = "media_limit_exceeded";
            error.at(&item.param)
        })?;
    }
    Ok(())
}

/// Refuses a request whose sources add up to too much.
///
/// # Errors
/// `TooLarge` with the sum so far and the limit.
pub fn check_bytes(bytes: u64, limits: &MediaLimits) -> Result<(), GatewayError> {
    let limit = limits.max_bytes;
    if bytes > limit {
        let message = format!(
            "the request's media up to this item have {bytes} bytes; at most {limit} are allowed"
        );
        return Err(GatewayError::new(ErrorKind::TooLarge, message));
    }
    Ok(())
}

/// Refuses an animation that is too large, or too long, to be read at all.
///
/// # Errors
/// `MediaRejected` with the figure and the limit.
pub fn check_animation(animation: WebpAnimation, limits: &MediaLimits) -> Result<(), GatewayError> {
    let figures = [
        (animation.size.pixels(), limits.max_image_pixels, "the clip's frames have"),
        (animation.pixels(), limits.max_decoded_pixels, "all frames of the clip have"),
    ];
    match figures.iter().find(|(pixels, limit, _)| pixels > limit) {
        None => Ok(()),
        Some((pixels, limit, what)) => {
            let message = format!("{what} {pixels} pixels; the limit is {limit}");
            Err(GatewayError::new(ErrorKind::MediaRejected, message))
        }
    }
}

/// Refuses a request whose animations come to too many pixels.
///
/// # Errors
/// `MediaRejected` with the sum so far and the limit.
pub fn check_rewritten(pixels: u64, limits: &MediaLimits) -> Result<(), GatewayError> {
    let limit = limits.max_decoded_pixels;
    if pixels <= limit {
        return Ok(());
    }
    let message = format!(
        "the request's animations up to this item have {pixels} pixels; at most {limit} are allowed"
    );
    let mut error = GatewayError::new(ErrorKind::MediaRejected, message);
    error.code = "media_limit_exceeded";
    Err(error)
}

#[derive(Debug, Default)]
struct Sums {
    tokens: u64,
    frames: u64,
    decoded_pixels: u64,
}

impl Sums {
    fn add(&mut self, item: &PlannedMedia) {
        self.tokens = self.tokens.saturating_add(item.plan.num_tokens);
        self.frames = self.frames.saturating_add(item.plan.frames.len() as u64);
        self.decoded_pixels = self.decoded_pixels.saturating_add(item.decoded_pixels());
    }

    fn check(&self, limits: &MediaLimits) -> Result<(), String> {
        let figures = [
            (self.tokens, limits.max_tokens.unwrap_or(u64::MAX), "take", "tokens"),
            (self.frames, limits.max_frames, "give", "video frames"),
            (self.decoded_pixels, limits.max_decoded_pixels, "need", "decoded pixels"),
        ];
        match figures.iter().find(|(figure, limit, ..)| figure > limit) {
            None => Ok(()),
            Some((figure, limit, verb, unit)) => Err(format!(
                "the request's media up to this item {verb} {figure} {unit}; at most {limit} are \
                 allowed"
            )),
        }
    }
}
