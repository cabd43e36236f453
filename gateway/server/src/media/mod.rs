//! Media from URL to patches: fetch, plan from the header alone, and make pixels when asked.

mod address;
mod data_url;
mod fetch;
pub mod ffmpeg;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use gateway_core::conversation::MediaRef;
use gateway_core::model::{MediaKind, MediaPlan, ModelSpec};
use gateway_media::decode::{DecodeLimits, decode_image, read_header};
use gateway_media::hash::{media_hash, sha256};
use gateway_media::patchify::{patchify_clip, patchify_still};
use gateway_media::resize::{Resizer, resize};
use gateway_media::{ImageSize, MediaError, MediaHash, PatchLayout, RgbFrame};

use address::AddressPolicy;
use fetch::Fetcher;
use ffmpeg::{ClipProbe, Ffmpeg, FfmpegLimits, MemoryFile};

use crate::admission::{Admission, ByteLease};
use crate::blocking::BlockingPool;
use crate::config::MediaConfig;
use crate::error::{ErrorKind, GatewayError};
use crate::telemetry::{MediaClass, Metrics};
use crate::workers::ItemUpload;

/// Items of one request that are fetched and probed at a time.
const ITEMS_AT_ONCE: usize = 8;
/// Changes whenever the same source and parameters give other pixels than before.
const PIXEL_REVISION: u32 = 1;

/// Does the media work of all requests, within fixed bounds.
pub struct MediaLoader {
    fetcher: Fetcher,
    ffmpeg: Ffmpeg,
    pool: BlockingPool,
    max_bytes: u64,
    limits: DecodeLimits,
    metrics: Arc<Metrics>,
}

/// One item, planned and not yet decoded.
#[derive(Debug)]
pub struct PlannedMedia {
    /// What will become of it.
    pub plan: MediaPlan,
    /// Names its source and every parameter that changes pixels.
    pub hash: MediaHash,
    /// Frames in one patch row.
    pub frames_per_patch: u32,
    source: Arc<Source>,
    param: String,
}

/// The bytes behind one URL and what their header says.
#[derive(Debug)]
struct Source {
    sha256: [u8; 32],
    content: Content,
    _lease: ByteLease,
}

#[derive(Debug)]
enum Content {
    Still { bytes: Bytes, size: ImageSize },
    Clip { file: MemoryFile, probe: ClipProbe },
}

impl MediaLoader {
    /// A loader with these bounds; FFmpeg is looked for in the directories of `PATH`.
    pub fn new(config: &MediaConfig, metrics: Arc<Metrics>) -> Self {
        let limits = DecodeLimits::default();
        let policy = AddressPolicy {
            allow_private: config.allow_private,
            allowed_hosts: config.allowed_hosts.clone(),
        };
        let ffmpeg_limits = FfmpegLimits {
            max_processes: config.max_video_processes,
            timeout: config.timeout,
            decode: limits,
        };
        let search_path = std::env::var_os("PATH");
        Self {
            fetcher: Fetcher::new(policy, config.max_bytes, config.timeout),
            ffmpeg: Ffmpeg::find(search_path.as_deref(), ffmpeg_limits, Arc::clone(&metrics)),
            pool: BlockingPool::new(config.threads),
            max_bytes: config.max_bytes,
            limits,
            metrics,
        }
    }

    /// Why clips cannot be read here, if they cannot.
    pub fn missing_for_video(&self) -> Option<&str> {
        self.ffmpeg.missing()
    }

    /// Fetches every item (each URL once) and plans it from its header.
    ///
    /// # Errors
    /// The first item that is refused, with its place in the request.
    pub async fn plan(
        &self,
        items: Vec<MediaRef>,
        spec: &dyn ModelSpec,
        admission: &Admission,
    ) -> Result<Vec<PlannedMedia>, GatewayError> {
        let mut places = HashMap::new();
        let mut unique = Vec::new();
        let mut place_of = Vec::with_capacity(items.len());
        for item in &items {
            let place = *places.entry((item.kind, item.url.as_str())).or_insert_with(|| {
                unique.push(item);
                unique.len() - 1
            });
            place_of.push(place);
        }
        let sources: Vec<Arc<Source>> = stream::iter(unique.into_iter().cloned())
            .map(|item| async move {
                let source = self.source(&item, admission).await;
                source.map(Arc::new).map_err(|error| error.at(&item.param))
            })
            .buffered(ITEMS_AT_ONCE)
            .try_collect()
            .await?;
        items
            .into_iter()
            .zip(place_of)
            .map(|(item, place)| planned(item, Arc::clone(&sources[place]), spec))
            .collect()
    }

    async fn source(&self, item: &MediaRef, admission: &Admission) -> Result<Source, GatewayError> {
        let begin = Instant::now();
        let mut lease = ByteLease::default();
        let bytes = if data_url::is_data_url(&item.url) {
            admission.grow(&mut lease, (item.url.len() as u64 / 4 * 3).min(self.max_bytes))?;
            let (url, max_bytes) = (item.url.clone(), self.max_bytes);
            Bytes::from(self.pool.run(move || data_url::decode(&url, max_bytes)).await??)
        } else {
            self.fetcher.fetch(&item.url, admission, &mut lease).await?
        };
        self.metrics.media_fetched(class(item.kind), bytes.len() as u64, begin.elapsed());
        let hashed = bytes.clone();
        let sha256 = self.pool.run(move || sha256(&hashed)).await?;
        let content = match item.kind {
            MediaKind::Image => self.still(bytes)?,
            MediaKind::Video => self.clip(bytes).await?,
        };
        Ok(Source { sha256, content, _lease: lease })
    }

    fn still(&self, bytes: Bytes) -> Result<Content, GatewayError> {
        let header = read_header(&bytes).map_err(media_refusal)?;
        if header.size.pixels() > self.limits.max_pixels {
            let limit = self.limits.max_pixels;
            return Err(media_refusal(MediaError::TooManyPixels { size: header.size, limit }));
        }
        Ok(Content::Still { bytes, size: header.size })
    }

    async fn clip(&self, bytes: Bytes) -> Result<Content, GatewayError> {
        if let Some(missing) = self.ffmpeg.missing() {
            return Err(GatewayError::new(
                ErrorKind::MediaUnavailable,
                format!("clips cannot be read: {missing}"),
            ));
        }
        let file = self.pool.run(move || MemoryFile::new(&bytes)).await?;
        let file = file.map_err(|error| GatewayError::internal(format!("memory file: {error}")))?;
        let probe = self.ffmpeg.probe(&file).await?;
        Ok(Content::Clip { file, probe })
    }

    /// Makes one item's patches and sends them.
    ///
    /// # Errors
    /// `MediaRejected` if the item breaks while it is decoded; what the upload meets.
    pub async fn send(
        &self,
        item: &PlannedMedia,
        layout: PatchLayout,
        mut upload: ItemUpload,
    ) -> Result<(), GatewayError> {
        let begin = Instant::now();
        let sent = match &item.source.content {
            Content::Still { bytes, .. } => self.send_still(item, bytes, layout, &mut upload).await,
            Content::Clip { file, probe } => {
                self.send_clip(item, (file, probe), layout, &mut upload).await
            }
        };
        sent.map_err(|error| error.at(&item.param))?;
        self.metrics.media_sent(class(item.plan.kind), upload.sent_bytes(), begin.elapsed());
        upload.finish()
    }

    async fn send_still(
        &self,
        item: &PlannedMedia,
        bytes: &Bytes,
        layout: PatchLayout,
        upload: &mut ItemUpload,
    ) -> Result<(), GatewayError> {
        let (bytes, target, limits) = (bytes.clone(), item.plan.target, self.limits);
        let work = move || {
            let frame = decode_image(&bytes, &limits)?;
            Ok::<_, MediaError>(patchify_still(&resize(&frame, target), layout))
        };
        let patches = self.pool.run(work).await?.map_err(media_refusal)?;
        upload.push(Bytes::from(patches.bytes)).await
    }

    /// One temporal patch after the other: never more than a few frames are held.
    async fn send_clip(
        &self,
        item: &PlannedMedia,
        (file, probe): (&MemoryFile, &ClipProbe),
        layout: PatchLayout,
        upload: &mut ItemUpload,
    ) -> Result<(), GatewayError> {
        let resizer = Arc::new(Resizer::new(probe.info.size, item.plan.target));
        let mut stream = self.ffmpeg.frames(file, probe, &item.plan.frames).await?;
        let mut slice: Vec<RgbFrame> = Vec::new();
        let mut next = stream.next().await?;
        while let Some(frame) = next {
            let resizer = Arc::clone(&resizer);
            // the child decodes the next frame meanwhile
            let resized = self.pool.run(move || resizer.resize(&frame));
            let (resized, following) = tokio::join!(resized, stream.next());
            slice.push(resized?);
            next = following?;
            if slice.len() == layout.temporal_patch_size as usize || next.is_none() {
                let frames = std::mem::take(&mut slice);
                let patches = self.pool.run(move || patchify_clip(&frames, layout)).await?;
                upload.push(Bytes::from(patches.bytes)).await?;
            }
        }
        Ok(())
    }

    /// One item was not sent because the worker still held it.
    pub fn count_held(&self, item: &PlannedMedia) {
        self.metrics.media_held(class(item.plan.kind));
    }
}

fn planned(
    item: MediaRef,
    source: Arc<Source>,
    spec: &dyn ModelSpec,
) -> Result<PlannedMedia, GatewayError> {
    let layout = spec.patch_layout();
    let (plan, frames_per_patch) = match &source.content {
        Content::Still { size, .. } => (spec.plan_image(*size, &item.controls), 1),
        Content::Clip { probe, .. } => {
            (spec.plan_clip(&probe.info, &item.controls), layout.temporal_patch_size)
        }
    };
    let plan = plan.map_err(|error| GatewayError::from(error).at(&item.param))?;
    let hash = media_hash(&source.sha256, &pixel_parameters(&plan, layout));
    Ok(PlannedMedia { plan, hash, frames_per_patch, source, param: item.param })
}

/// Every parameter that changes pixels or their order, as text.
fn pixel_parameters(plan: &MediaPlan, layout: PatchLayout) -> String {
    let kind = match plan.kind {
        MediaKind::Image => "image",
        MediaKind::Video => "video",
    };
    let PatchLayout { patch_size, temporal_patch_size, merge_size } = layout;
    format!(
        "revision={PIXEL_REVISION} kind={kind} size={}x{} patch={patch_size} \
         temporal={temporal_patch_size} merge={merge_size} frames={:?}",
        plan.target.width, plan.target.height, plan.frames
    )
}

fn class(kind: MediaKind) -> MediaClass {
    match kind {
        MediaKind::Image => MediaClass::Image,
        MediaKind::Video => MediaClass::Video,
    }
}

fn media_refusal(error: MediaError) -> GatewayError {
    GatewayError::new(ErrorKind::MediaRejected, error.to_string())
}
