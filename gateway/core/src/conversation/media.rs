//! Content parts that stand for pictures and clips, whatever a client calls them.

use super::fields::{Fields, wrong_type};
use crate::error::RequestError;
use crate::json::Json;
use crate::model::{MediaKind, SizeControls};

/// A picture or clip to be fetched.
#[derive(Clone, Debug, PartialEq)]
pub struct MediaRef {
    /// Picture or clip.
    pub kind: MediaKind,
    /// `data:`, `http:` or `https:` URL.
    pub url: String,
    /// What the client wishes about size and frame rate.
    pub controls: SizeControls,
    /// JSON path of the URL, for messages.
    pub param: String,
}

/// Reads a media part: `image_url`, `video_url`, `input_image`, `input_video`, `image`, `video`.
/// The URL may be a string, or stand in an object with the controls beside it.
pub(super) fn read(part: &Fields, kind: MediaKind) -> Result<MediaRef, RequestError> {
    let names: &[&str] = match kind {
        MediaKind::Image => &["image_url", "image", "url"],
        MediaKind::Video => &["video_url", "video", "url"],
    };
    let Some(&name) = names.iter().find(|name| part.get(name).is_some()) else {
        return Err(RequestError::invalid(
            part.path(names[0]),
            format!("{} is missing", part.path(names[0])),
        ));
    };
    match part.get(name) {
        Some(Json::String(url)) => Ok(MediaRef {
            kind,
            url: url.clone(),
            controls: controls(part)?,
            param: part.path(name),
        }),
        Some(value @ Json::Object(_)) => {
            let inner = Fields::of(value, part.path(name))?;
            let Some(url) = inner.string("url")? else {
                return Err(RequestError::invalid(
                    inner.path("url"),
                    format!("{} is missing", inner.path("url")),
                ));
            };
            let mut controls = controls(&inner)?;
            if controls.detail.is_none() {
                controls.detail = part.string("detail")?.map(str::to_owned);
            }
            Ok(MediaRef { kind, url: url.to_owned(), controls, param: inner.path("url") })
        }
        Some(other) => Err(wrong_type(part.path(name), "a string or an object", other)),
        None => Err(RequestError::invalid(part.path(name), "a URL is missing".to_owned())),
    }
}

/// What a part says about size and frame rate; which of it will do is the model's to say.
pub(crate) fn controls(fields: &Fields) -> Result<SizeControls, RequestError> {
    Ok(SizeControls {
        detail: fields.string("detail")?.map(str::to_owned),
        max_long_side_pixel: fields.whole("max_long_side_pixel")?,
        fps: fields.double("fps")?,
    })
}
