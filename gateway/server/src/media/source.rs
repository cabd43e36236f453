//! The bytes behind one URL, and what their header or container says; looked at once by content.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use bytes::Bytes;
use gateway_core::conversation::MediaRef;
use gateway_core::model::MediaKind;
use gateway_media::MediaError;
use gateway_media::decode::{ImageFormat, ImageHeader, read_header};
use gateway_media::hash::sha256;
use gateway_media::mp4::ReadAt;

use super::ffmpeg::{ClipProbe, MemoryFile};
use super::work::Share;
use super::{MediaLoader, class, data_url, local, media_refusal};
use crate::admission::{Admission, ByteLease};
use crate::error::{ErrorKind, GatewayError};

/// Longest text that is hashed on the spot: about 0.2 ms.
const INLINE_BYTES: usize = 1 << 20;

/// One item's bytes, held under the shared budget.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) sha256: [u8; 32],
    pub(super) content: Content,
    pub(super) len: u64,
    _lease: ByteLease,
}

#[derive(Debug)]
pub(super) enum Content {
    Still { data: Data, header: ImageHeader },
    Clip { data: ClipData, probe: Arc<ClipProbe> },
}

#[derive(Debug)]
pub(super) enum ClipData {
    /// As FFmpeg reads it.
    File(MemoryFile),
    /// Nothing had to be read yet.
    Unread(Data),
}

/// An item's bytes, or what they can be made of: of an item seen before they may never be needed.
#[derive(Clone, Debug)]
pub(super) enum Data {
    /// At hand.
    Here(Bytes),
    /// Still in the text of a `data:` URL.
    Text(Arc<MediaRef>),
}

/// What is remembered of content seen before.
#[derive(Clone, Debug)]
pub(super) enum Facts {
    Still(ImageHeader),
    Clip(ClipFacts),
    /// What the text of a `data:` URL holds.
    Text {
        sha256: [u8; 32],
        len: u64,
    },
}

/// Of a clip.
#[derive(Clone, Debug)]
pub(super) struct ClipFacts {
    pub(super) probe: Arc<ClipProbe>,
    /// Bytes of the file that FFmpeg reads: it need not be the one that was sent.
    pub(super) file_bytes: u64,
    /// Pixels that are decoded to make it.
    pub(super) rewritten_pixels: u64,
}

/// The shared budget, and what an item has of it.
pub(super) type Held<'a> = (&'a Admission, &'a mut ByteLease);

impl Facts {
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Still(_) | Self::Text { .. } => 128,
            Self::Clip(clip) => 128 + clip.probe.bytes(),
        }
    }
}

/// What facts are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum FactsKey {
    /// SHA-256 of content and what it was taken for: the same bytes can be a picture and a clip.
    Content([u8; 32], MediaKind),
    /// BLAKE3 of the text of a `data:` URL.
    Text([u8; 32]),
}

impl Source {
    /// Bytes that the shared budget knows of.
    #[cfg(test)]
    pub(super) fn held_bytes(&self) -> u64 {
        self._lease.bytes()
    }

    /// Bytes of working memory that turning a still into a frame takes at most.
    pub(super) fn still_memory(header: &ImageHeader) -> u64 {
        // see `DecodeLimits::max_pixels`
        let per_pixel = match header.format {
            // planes of 16 bits, twice as many pixels coded as shown, joined, and what they become
            ImageFormat::Avif => 36,
            ImageFormat::Tiff => 16,
            _ => 9,
        };
        header.size.pixels().saturating_mul(per_pixel)
    }
}

impl MediaLoader {
    /// Gets one item's bytes and looks at them.
    ///
    /// # Errors
    /// What the URL, the origin, a limit or the content refuses.
    pub(super) async fn source(
        &self,
        item: &Arc<MediaRef>,
        admission: &Admission,
        share: &Share,
    ) -> Result<Source, GatewayError> {
        let begin = Instant::now();
        let mut lease = ByteLease::default();
        let (data, sha256, len) = if data_url::is_data_url(&item.url) {
            let length = data_url::most_bytes(&item.url).min(self.max_bytes);
            admission.grow(&mut lease, length)?;
            self.data_url(item, share).await?
        } else {
            let bytes = match self.local.as_ref().filter(|_| local::is_file_url(&item.url)) {
                Some(files) => {
                    files.read(&item.url, self.max_bytes, (admission, &mut lease)).await?
                }
                None => self.fetcher.fetch(&item.url, admission, &mut lease).await?,
            };
            let hashed = bytes.clone();
            let length = bytes.len() as u64;
            let sha256 = self.rooms.run(share, length, move |_| sha256(&hashed)).await?;
            (Data::Here(bytes), sha256, length)
        };
        self.metrics.media_fetched(class(item.kind), len, begin.elapsed());
        let held = Some((admission, &mut lease));
        let content = self.content((item.kind, data, sha256), share, held).await?;
        Ok(Source { sha256, content, len, _lease: lease })
    }

    /// Looks at bytes that the caller holds.
    ///
    /// # Errors
    /// What the content refuses.
    pub(super) async fn source_of(
        &self,
        bytes: Bytes,
        kind: MediaKind,
        share: &Share,
    ) -> Result<Source, GatewayError> {
        let (hashed, len) = (bytes.clone(), bytes.len() as u64);
        let sha256 = self.rooms.run(share, len, move |_| sha256(&hashed)).await?;
        let content = self.content((kind, Data::Here(bytes), sha256), share, None).await?;
        Ok(Source { sha256, content, len, _lease: ByteLease::default() })
    }

    async fn content(
        &self,
        (kind, data, sha256): (MediaKind, Data, [u8; 32]),
        share: &Share,
        held: Option<Held<'_>>,
    ) -> Result<Content, GatewayError> {
        match kind {
            MediaKind::Image => self.still(data, sha256, share).await,
            MediaKind::Video => self.clip((data, sha256), share, held).await,
        }
    }

    /// What a `data:` URL holds; a text seen before is neither decoded nor hashed again.
    async fn data_url(
        &self,
        item: &Arc<MediaRef>,
        share: &Share,
    ) -> Result<(Data, [u8; 32], u64), GatewayError> {
        let length = item.url.len() as u64;
        let name = if item.url.len() <= INLINE_BYTES {
            blake3::hash(item.url.as_bytes())
        } else {
            let item = Arc::clone(item);
            let hash = move |_: &_| blake3::hash(item.url.as_bytes());
            self.rooms.run(share, length, hash).await?
        };
        let key = FactsKey::Text(name.into());
        if let Some(Facts::Text { sha256, len }) = self.facts.get(&key) {
            return Ok((Data::Text(Arc::clone(item)), sha256, len));
        }
        let (text, max_bytes) = (Arc::clone(item), self.max_bytes);
        let decode = move |_: &_| {
            let bytes = data_url::decode(&text.url, max_bytes)?;
            let digest = sha256(&bytes);
            Ok::<_, GatewayError>((Bytes::from(bytes), digest))
        };
        let (bytes, sha256) = self.rooms.run(share, length, decode).await??;
        let len = bytes.len() as u64;
        let facts = Facts::Text { sha256, len };
        let size = facts.bytes();
        self.facts.put(key, facts, size);
        Ok((Data::Here(bytes), sha256, len))
    }

    /// An item's bytes, decoded now if they were not yet.
    ///
    /// # Errors
    /// `Internal` if a thread died.
    pub(super) async fn bytes(&self, data: &Data, share: &Share) -> Result<Bytes, GatewayError> {
        match data {
            Data::Here(bytes) => Ok(bytes.clone()),
            Data::Text(item) => {
                let (item, max_bytes) = (Arc::clone(item), self.max_bytes);
                let length = item.url.len() as u64;
                let decode = move |_: &_| data_url::decode(&item.url, max_bytes);
                Ok(Bytes::from(self.rooms.run(share, length, decode).await??))
            }
        }
    }

    async fn still(
        &self,
        data: Data,
        sha256: [u8; 32],
        share: &Share,
    ) -> Result<Content, GatewayError> {
        let key = FactsKey::Content(sha256, MediaKind::Image);
        let made = OnceLock::new();
        let look = || async {
            let bytes = self.bytes(&data, share).await?;
            let header = if is_long_to_read(&bytes) {
                let (file, length) = (bytes.clone(), bytes.len() as u64);
                self.rooms.run(share, length, move |_| read_header(&file)).await?
            } else {
                read_header(&bytes)
            };
            // whoever has decoded the text once need not do so again
            let _ = made.set(bytes);
            header.map(Facts::Still).map_err(media_refusal)
        };
        let Facts::Still(header) = self.facts.get_or_make(key, Facts::bytes, look).await? else {
            return Err(GatewayError::internal("a still's facts are those of something else"));
        };
        let limit = self.limits.max_image_pixels;
        if header.size.pixels() > limit {
            return Err(media_refusal(MediaError::TooManyPixels { size: header.size, limit }));
        }
        Ok(Content::Still { data: made.into_inner().map_or(data, Data::Here), header })
    }

    async fn clip(
        &self,
        (data, sha256): (Data, [u8; 32]),
        share: &Share,
        mut held: Option<Held<'_>>,
    ) -> Result<Content, GatewayError> {
        if let Some(missing) = self.ffmpeg.missing() {
            return Err(GatewayError::new(
                ErrorKind::MediaUnavailable,
                format!("clips cannot be read: {missing}"),
            ));
        }
        let file = OnceLock::new();
        let (text, kept, now) = (&data, &file, &mut held);
        let look = || async move {
            let bytes = self.bytes(text, share).await?;
            let form = self.clip_form(&bytes, share).await?;
            share.rewrite(form.pixels(), &self.limits)?;
            let made = self.clip_file(bytes, form, share).await?;
            let (file_bytes, rewritten_pixels) = (made.length(), form.pixels());
            hold(now, file_bytes)?;
            let made = kept.get_or_init(|| made);
            let probe = Arc::new(self.ffmpeg.probe(made, &share.processes).await?);
            Ok::<_, GatewayError>(Facts::Clip(ClipFacts { probe, file_bytes, rewritten_pixels }))
        };
        let key = FactsKey::Content(sha256, MediaKind::Video);
        let Facts::Clip(facts) = self.facts.get_or_make(key, Facts::bytes, look).await? else {
            return Err(GatewayError::internal("a clip's facts are those of something else"));
        };
        hold(&mut held, facts.file_bytes)?;
        let data = match file.into_inner() {
            Some(file) => ClipData::File(file),
            None => {
                // it may yet have to be made, for this request as well
                share.rewrite(facts.rewritten_pixels, &self.limits)?;
                ClipData::Unread(data)
            }
        };
        Ok(Content::Clip { data, probe: facts.probe })
    }
}

/// Sees to it that the budget knows of so many bytes, if there is one.
fn hold(held: &mut Option<Held<'_>>, bytes: u64) -> Result<(), GatewayError> {
    held.as_mut().map_or(Ok(()), |(admission, lease)| admission.grow(lease, bytes))
}

/// Whether the header takes more than a look: the boxes of AVIF refer to each other all over it.
fn is_long_to_read(bytes: &[u8]) -> bool {
    bytes.len() > INLINE_BYTES || ImageFormat::of(bytes) == Ok(ImageFormat::Avif)
}

/// The system gave no memory file.
pub(super) fn memory_failure(error: &std::io::Error) -> GatewayError {
    GatewayError::internal(format!("memory file: {error}"))
}
