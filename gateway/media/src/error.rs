//! Why bytes sent as a picture cannot be used, in words fit for the person who sent them.

use crate::types::ImageSize;

/// What is wrong with the bytes of one picture.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MediaError {
    /// No bytes at all.
    #[error("the image is empty (0 bytes)")]
    Empty,
    /// The first bytes belong to no format we read.
    #[error(
        "the image is not one of JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF: it looks like {found}"
    )]
    UnsupportedFormat {
        /// What the bytes look like.
        found: &'static str,
    },
    /// A format we read, in a variant that we do not.
    #[error("this {format} image uses a feature that is not supported: {feature}")]
    UnsupportedFeature {
        /// Name of the format.
        format: &'static str,
        /// The variant, from the decoder.
        feature: String,
    },
    /// The header declares more pixels than the limit; nothing was decoded.
    #[error("the image has {} pixels ({}x{}), the limit is {limit}", .size.pixels(), .size.width, .size.height)]
    TooManyPixels {
        /// Declared size.
        size: ImageSize,
        /// Most pixels accepted.
        limit: u64,
    },
    /// The data ends before the picture does.
    #[error("the {format} image is truncated: {reason}")]
    Truncated {
        /// Name of the format.
        format: &'static str,
        /// Which part is missing.
        reason: String,
    },
    /// The data contradicts its format or its own header.
    #[error("the {format} image cannot be decoded: {reason}")]
    Unreadable {
        /// Name of the format.
        format: &'static str,
        /// What the decoder met.
        reason: String,
    },
}
