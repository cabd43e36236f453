//! The bytes behind one URL, and what their header or container says; looked at once by content.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use bytes::Bytes;
use gateway_core::conversation::MediaRef;
use gateway_core::model::MediaKind;
use gateway_media::MediaError;
use gateway_media::decode::{ImageFormat, ImageHeader, read_header};
use gateway_media::hash::sha256;

use super::ffmpeg::{ClipProbe, MemoryFile};
use super::work::Share;
use super::{MediaLoader, class, data_url, media_refusal};
use crate::admission::{Admission, ByteLease};
use crate::error::{ErrorKind, GatewayError};

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
    Still { bytes: Bytes, header: ImageHeader },
    Clip { data: ClipData, probe: Arc<ClipProbe> },
}

#[derive(Debug)]
pub(super) enum ClipData {
    /// As FFmpeg reads it.
    File(MemoryFile),
    /// Nothing had to be read yet.
    Bytes(Bytes),
}

/// What is remembered of content seen before.
#[derive(Clone, Debug)]
pub(super) enum Facts {
    Still(ImageHeader),
    Clip(Arc<ClipProbe>),
}

impl Facts {
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Still(_) => 128,
            Self::Clip(probe) => 128 + probe.bytes(),
        }
    }
}

/// Content and what it was taken for: the same bytes can be a picture and a clip.
pub(super) type FactsKey = ([u8; 32], MediaKind);

impl Source {
    /// Bytes of working memory that turning a still into a frame takes at most.
    pub(super) fn still_memory(header: &ImageHeader) -> u64 {
        // see `DecodeLimits::max_pixels`
        let per_pixel = if header.format == ImageFormat::Tiff { 16 } else { 9 };
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
        let (bytes, sha256) = if data_url::is_data_url(&item.url) {
            let max_bytes = self.max_bytes;
            let length = (item.url.len() as u64 / 4 * 3).min(max_bytes);
            admission.grow(&mut lease, length)?;
            let item = Arc::clone(item);
            let decode = move |_: &_| {
                let bytes = data_url::decode(&item.url, max_bytes)?;
                let digest = sha256(&bytes);
                Ok::<_, GatewayError>((Bytes::from(bytes), digest))
            };
            self.rooms.run(share, length, decode).await??
        } else {
            let bytes = self.fetcher.fetch(&item.url, admission, &mut lease).await?;
            let hashed = bytes.clone();
            let length = bytes.len() as u64;
            (bytes, self.rooms.run(share, length, move |_| sha256(&hashed)).await?)
        };
        let len = bytes.len() as u64;
        self.metrics.media_fetched(class(item.kind), len, begin.elapsed());
        let content = match item.kind {
            MediaKind::Image => self.still(bytes, sha256).await?,
            MediaKind::Video => self.clip(bytes, sha256, share).await?,
        };
        Ok(Source { sha256, content, len, _lease: lease })
    }

    async fn still(&self, bytes: Bytes, sha256: [u8; 32]) -> Result<Content, GatewayError> {
        let key = (sha256, MediaKind::Image);
        let look = || async { read_header(&bytes).map(Facts::Still).map_err(media_refusal) };
        let Facts::Still(header) = self.facts.get_or_make(key, Facts::bytes, look).await? else {
            return Err(GatewayError::internal("a still's facts are those of a clip"));
        };
        let limit = self.limits.max_image_pixels;
        if header.size.pixels() > limit {
            return Err(media_refusal(MediaError::TooManyPixels { size: header.size, limit }));
        }
        Ok(Content::Still { bytes, header })
    }

    async fn clip(
        &self,
        bytes: Bytes,
        sha256: [u8; 32],
        share: &Share,
    ) -> Result<Content, GatewayError> {
        if let Some(missing) = self.ffmpeg.missing() {
            return Err(GatewayError::new(
                ErrorKind::MediaUnavailable,
                format!("clips cannot be read: {missing}"),
            ));
        }
        let file = OnceLock::new();
        let look = || async {
            let made = file.get_or_init(|| MemoryFile::new(&bytes));
            let made = made.as_ref().map_err(memory_failure)?;
            let probe = self.ffmpeg.probe(made, &share.processes).await?;
            Ok::<_, GatewayError>(Facts::Clip(Arc::new(probe)))
        };
        let key = (sha256, MediaKind::Video);
        let Facts::Clip(probe) = self.facts.get_or_make(key, Facts::bytes, look).await? else {
            return Err(GatewayError::internal("a clip's facts are those of a still"));
        };
        let data = match file.into_inner() {
            Some(Ok(file)) => ClipData::File(file),
            _ => ClipData::Bytes(bytes),
        };
        Ok(Content::Clip { data, probe })
    }
}

/// The system gave no memory file.
pub(super) fn memory_failure(error: &std::io::Error) -> GatewayError {
    GatewayError::internal(format!("memory file: {error}"))
}
