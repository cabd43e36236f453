//! Media from URL to patches: fetch, plan from the header alone, and make pixels when asked.

mod address;
mod allowance;
mod avif;
mod cache;
mod clip_file;
mod data_url;
pub(crate) mod fair;
mod fetch;
mod fetch_cache;
pub mod ffmpeg;
mod limits;
mod local;
mod resizers;
mod send;
mod source;
mod work;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use gateway_core::conversation::MediaRef;
use gateway_core::model::{MediaKind, MediaPlan, ModelSpec, SizeControls};
use gateway_media::hash::media_hash;
use gateway_media::{MediaError, MediaHash, PatchLayout};
use tokio::sync::OnceCell;

use address::AddressPolicy;
pub use allowance::MediaAllowance;
use allowance::{Accounts, Amounts};
use cache::ByteCache;
use fetch::Fetcher;
use ffmpeg::{Ffmpeg, FfmpegLimits};
use local::LocalFiles;
use resizers::Resizers;
use send::{Patches, Turns};
use source::{Content, Facts, FactsKey, Source};
use work::{Share, WorkRooms};

use crate::admission::Admission;
use crate::config::{MediaConfig, MediaLimits};
use crate::error::{ErrorKind, GatewayError};
use crate::telemetry::{CacheClass, MediaClass, Metrics};

/// Items of one request that are fetched and probed at a time.
const ITEMS_AT_ONCE: usize = 8;
/// Changes whenever the same source and parameters give other pixels than before.
const PIXEL_REVISION: u32 = 2;

/// Bytes of a pixel in a patch row.
const CHANNELS: u64 = 3;

/// Does the media work of all requests, within fixed bounds.
pub struct MediaLoader {
    fetcher: Fetcher,
    local: Option<LocalFiles>,
    ffmpeg: Ffmpeg,
    rooms: WorkRooms,
    facts: ByteCache<FactsKey, Facts>,
    patches: ByteCache<MediaHash, Patches>,
    turns: Turns,
    accounts: Arc<Accounts>,
    resizers: Resizers,
    max_bytes: u64,
    timeout: Duration,
    limits: MediaLimits,
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
    share: Arc<Share>,
    /// Where the patches go if another item of the request has the same.
    twin: Option<Arc<OnceCell<Patches>>>,
}

impl PlannedMedia {
    /// Pixels that must be decoded for it.
    fn decoded_pixels(&self) -> u64 {
        match &self.source.content {
            Content::Still { header, .. } => header.size.pixels(),
            Content::Clip { probe, .. } => probe.decoded_pixels(&self.plan.frames),
        }
    }

    /// Bytes of all its patch rows.
    pub fn patch_bytes(&self, layout: PatchLayout) -> u64 {
        let pixels = u64::from(layout.patch_size).pow(2) * u64::from(self.frames_per_patch);
        self.plan.grid.patches() * CHANNELS * pixels
    }
}

impl MediaLoader {
    /// A loader with these bounds; FFmpeg is looked for in the directories of `PATH`.
    ///
    /// # Errors
    /// What the system said about threads for pixels, or the directory of files.
    pub fn new(config: &MediaConfig, metrics: Arc<Metrics>) -> std::io::Result<Self> {
        let policy = AddressPolicy {
            allow_private: config.allow_private,
            allowed_hosts: config.allowed_hosts.clone(),
        };
        let ffmpeg_limits = FfmpegLimits {
            max_processes: config.max_video_processes,
            timeout: config.timeout,
            max_frame_pixels: config.limits.max_image_pixels,
            max_decoded_pixels: config.limits.max_decoded_pixels,
            max_duration: config.limits.max_video_duration,
        };
        let search_path = std::env::var_os("PATH");
        let local = config.root.as_deref().map(|root| LocalFiles::open(root, config.timeout));
        // patches spare the most work a byte; facts are small
        let (facts, fetched) = (config.cache_bytes / 16, config.cache_bytes / 16 * 7);
        let patches = config.cache_bytes - facts - fetched;
        let stored = ByteCache::new(CacheClass::Fetched, fetched, Arc::clone(&metrics));
        let bounds = fetch::Bounds { max_bytes: config.max_bytes, timeout: config.timeout };
        Ok(Self {
            fetcher: Fetcher::new(policy, config.proxy.as_deref().cloned(), stored, bounds),
            local: local.transpose()?,
            ffmpeg: Ffmpeg::find(search_path.as_deref(), ffmpeg_limits, Arc::clone(&metrics)),
            rooms: WorkRooms::new(config.threads, config.work_bytes)?,
            facts: ByteCache::new(CacheClass::Facts, facts, Arc::clone(&metrics)),
            patches: ByteCache::new(CacheClass::Patches, patches, Arc::clone(&metrics)),
            turns: Turns::default(),
            accounts: Arc::default(),
            resizers: Resizers::default(),
            max_bytes: config.max_bytes,
            timeout: config.timeout,
            limits: config.limits,
            metrics,
        })
    }

    /// Why clips cannot be read here, if they cannot.
    pub fn missing_for_video(&self) -> Option<&str> {
        self.ffmpeg.missing()
    }

    /// Plans one item whose bytes are at hand.
    ///
    /// # Errors
    /// As [`MediaLoader::plan`].
    pub async fn plan_bytes(
        &self,
        bytes: Bytes,
        (kind, controls): (MediaKind, SizeControls),
        spec: &dyn ModelSpec,
    ) -> Result<PlannedMedia, GatewayError> {
        let share = Arc::new(Share::default());
        let source = Arc::new(self.source_of(bytes, kind, &share).await?);
        let param = "data".to_owned();
        let item = MediaRef { kind, url: String::new(), controls, param };
        let planned = planned(&item, source, &share, spec)?;
        limits::check(std::slice::from_ref(&planned), &self.limits)?;
        Ok(planned)
    }

    /// Fetches every item (each network URL once), plans it from its header and holds the sum to
    /// the limits of a request and of its tenant.
    ///
    /// # Errors
    /// The first item that is refused, with its place in the request.
    pub async fn plan(
        &self,
        items: Vec<MediaRef>,
        spec: &dyn ModelSpec,
        (admission, tenant): (&Admission, &str),
    ) -> Result<Vec<PlannedMedia>, GatewayError> {
        let items: Vec<Arc<MediaRef>> = items.into_iter().map(Arc::new).collect();
        let (unique, place_of) = distinct(&items);
        let share = Arc::new(Share::default());
        let (total, share_ref) = (&AtomicU64::new(0), &*share);
        let sources: Vec<Arc<Source>> = stream::iter(unique)
            .map(|item| async move {
                let source = self.source(&item, admission, share_ref).await;
                let checked = source.and_then(|source| {
                    let bytes = total.fetch_add(source.len, Ordering::Relaxed) + source.len;
                    limits::check_bytes(bytes, &self.limits).map(|()| Arc::new(source))
                });
                checked.map_err(|error| error.at(&item.param))
            })
            .buffered(ITEMS_AT_ONCE)
            .try_collect()
            .await?;
        let mut planned = items
            .iter()
            .zip(place_of)
            .map(|(item, place)| planned(item, Arc::clone(&sources[place]), &share, spec))
            .collect::<Result<Vec<_>, _>>()?;
        limits::check(&planned, &self.limits)?;
        let allowance = admission.tenants().media(tenant);
        share.hold(self.accounts.take(tenant, &allowance, amounts(&planned))?);
        mark_twins(&mut planned);
        Ok(planned)
    }
}

/// What a request's media come to.
fn amounts(items: &[PlannedMedia]) -> Amounts {
    let mut sums = [0_u64; 7];
    let mut video_s = 0.0;
    for item in items {
        let (images, videos) = match &item.source.content {
            Content::Still { .. } => (1, 0),
            Content::Clip { probe, .. } => {
                video_s += probe.info.duration_s;
                (0, 1)
            }
        };
        let PlannedMedia { plan, source, .. } = item;
        let frames = plan.frames.len() as u64;
        let more = [images, videos, source.len, plan.num_tokens, frames, item.decoded_pixels(), 0];
        for (sum, more) in sums.iter_mut().zip(more) {
            *sum = sum.saturating_add(more);
        }
    }
    sums[6] = f64::ceil(video_s) as u64;
    Amounts(sums)
}

/// The items to fetch, and which of them each item is. Texts of data: URLs are not compared: they
/// are long, and what they hold is compared by its hash anyway.
fn distinct(items: &[Arc<MediaRef>]) -> (Vec<Arc<MediaRef>>, Vec<usize>) {
    let mut places = HashMap::new();
    let mut unique = Vec::new();
    let place_of = items.iter().map(|item| {
        let fresh = unique.len();
        let place = if data_url::is_data_url(&item.url) {
            fresh
        } else {
            *places.entry((item.kind, item.url.as_str())).or_insert(fresh)
        };
        if place == fresh {
            unique.push(Arc::clone(item));
        }
        place
    });
    let place_of = place_of.collect();
    (unique, place_of)
}

/// Gives items that are the same one place for their patches.
fn mark_twins(planned: &mut [PlannedMedia]) {
    let mut counts: HashMap<MediaHash, usize> = HashMap::new();
    for item in planned.iter() {
        *counts.entry(item.hash).or_default() += 1;
    }
    let mut cells: HashMap<MediaHash, Arc<OnceCell<Patches>>> = HashMap::new();
    for item in planned.iter_mut().filter(|item| counts[&item.hash] > 1) {
        item.twin = Some(Arc::clone(cells.entry(item.hash).or_default()));
    }
}

fn planned(
    item: &MediaRef,
    source: Arc<Source>,
    share: &Arc<Share>,
    spec: &dyn ModelSpec,
) -> Result<PlannedMedia, GatewayError> {
    let layout = spec.patch_layout();
    let (plan, frames_per_patch) = match &source.content {
        Content::Still { header, .. } => (spec.plan_image(header.size, &item.controls), 1),
        Content::Clip { probe, .. } => {
            (spec.plan_clip(&probe.info, &item.controls), layout.temporal_patch_size)
        }
    };
    let plan = plan.map_err(|error| GatewayError::from(error).at(&item.param))?;
    let hash = media_hash(&source.sha256, &pixel_parameters(&plan, layout));
    Ok(PlannedMedia {
        plan,
        hash,
        frames_per_patch,
        source,
        param: item.param.clone(),
        share: Arc::clone(share),
        twin: None,
    })
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
