//! Content blocks that carry words, pictures and clips.

use crate::conversation::MediaRef;
use crate::conversation::fields::{Fields, wrong_type};
use crate::conversation::media::controls;
use crate::conversation::turns::Part;
use crate::error::RequestError;
use crate::json::Json;
use crate::model::MediaKind;

/// The blocks at `path`; a lone string is one text block.
pub(super) fn list<'a>(
    content: Option<&'a Json>,
    path: &str,
) -> Result<Vec<(Option<Fields<'a>>, &'a str)>, RequestError> {
    match content {
        None => Ok(Vec::new()),
        Some(Json::String(text)) => Ok(vec![(None, text)]),
        Some(Json::Array(items)) => items
            .iter()
            .enumerate()
            .map(|(index, item)| match item {
                Json::String(text) => Ok((None, text.as_str())),
                other => Ok((Some(Fields::of(other, format!("{path}[{index}]"))?), "")),
            })
            .collect(),
        Some(other) => Err(wrong_type(path.to_owned(), "a string or a list of blocks", other)),
    }
}

/// The type of a block.
pub(super) fn kind<'a>(block: &Fields<'a>) -> Result<&'a str, RequestError> {
    block.string("type")?.ok_or_else(|| missing(block, "type"))
}

/// Appends what a block of words, a picture or a clip adds to a message.
pub(super) fn part(
    block: &Fields,
    parts: &mut Vec<Part>,
    media: &mut Vec<MediaRef>,
) -> Result<(), RequestError> {
    match kind(block)? {
        "text" => parts.push(Part::Text(text(block)?.to_owned())),
        "image" => parts.push(medium(block, MediaKind::Image, media)?),
        "video" => parts.push(medium(block, MediaKind::Video, media)?),
        "document" => document(block, parts, media)?,
        other => {
            let path = block.path("type");
            let message = format!(
                "{path} is {other:?}; blocks here are text, image, video and document with text"
            );
            return Err(RequestError::invalid(path, message));
        }
    }
    Ok(())
}

/// The words of a text block.
pub(super) fn text<'a>(block: &Fields<'a>) -> Result<&'a str, RequestError> {
    block.string("text")?.ok_or_else(|| missing(block, "text"))
}

pub(super) fn missing(block: &Fields, key: &str) -> RequestError {
    let path = block.path(key);
    RequestError::invalid(path.clone(), format!("{path} is missing"))
}

fn medium(
    block: &Fields,
    kind: MediaKind,
    media: &mut Vec<MediaRef>,
) -> Result<Part, RequestError> {
    let source = block.object("source")?.ok_or_else(|| missing(block, "source"))?;
    let (url, key) = match source.string("type")? {
        Some("url") => {
            (source.string("url")?.ok_or_else(|| missing(&source, "url"))?.to_owned(), "url")
        }
        Some("base64") => (data_url(&source)?, "data"),
        other => {
            let path = source.path("type");
            let found = other.map_or("missing".to_owned(), |word| format!("{word:?}"));
            let message = format!("{path} is {found}; use base64 or url");
            return Err(RequestError::invalid(path, message));
        }
    };
    media.push(MediaRef { kind, url, controls: controls(block)?, param: source.path(key) });
    Ok(Part::Media(kind))
}

fn data_url(source: &Fields) -> Result<String, RequestError> {
    let kind = source.string("media_type")?.ok_or_else(|| missing(source, "media_type"))?;
    // whatever else a data URL may hold between its scheme and its comma is not for clients
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/+.-".contains(&byte);
    if !kind.bytes().all(is_plain) {
        let path = source.path("media_type");
        let message = format!("{path} is {kind:?}, which is no media type");
        return Err(RequestError::invalid(path, message));
    }
    let data = source.string("data")?.ok_or_else(|| missing(source, "data"))?;
    Ok(format!("data:{kind};base64,{data}"))
}

fn document(
    block: &Fields,
    parts: &mut Vec<Part>,
    media: &mut Vec<MediaRef>,
) -> Result<(), RequestError> {
    let source = block.object("source")?.ok_or_else(|| missing(block, "source"))?;
    match source.string("type")? {
        Some("text") => {
            let data = source.string("data")?.ok_or_else(|| missing(&source, "data"))?;
            parts.push(Part::Text(data.to_owned()));
        }
        Some("content") => {
            for (inner, words) in list(source.get("content"), &source.path("content"))? {
                match inner {
                    Some(inner) if kind(&inner)? == "document" => {
                        let path = inner.path("type");
                        let message = format!("{path} is a document within a document");
                        return Err(RequestError::invalid(path, message));
                    }
                    Some(inner) => part(&inner, parts, media)?,
                    None => parts.push(Part::Text(words.to_owned())),
                }
            }
        }
        other => {
            let path = source.path("type");
            let found = other.map_or("missing".to_owned(), |word| format!("{word:?}"));
            let message = format!("{path} is {found}; documents are read as text or content only");
            return Err(RequestError::invalid(path, message));
        }
    }
    Ok(())
}
