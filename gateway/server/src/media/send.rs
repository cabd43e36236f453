//! Pixels on demand: decoded, resized, cut into patches and sent, or taken from the cache.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use bytes::Bytes;
use gateway_media::decode::{DecodeLimits, ImageFormat, ImageHeader};
use gateway_media::hash::{RunningSha256, sha256};
use gateway_media::patchify::TemporalPatch;
use gateway_media::picture::{PictureJob, frame_patches, picture_patches};
use gateway_media::resize::Resizer;
use gateway_media::{ImageSize, MediaError, MediaHash, PatchLayout, RgbFrame};
use tokio::sync::OwnedMutexGuard;

use super::ffmpeg::{ClipProbe, MemoryFile};
use super::source::{ClipData, Content, Data, Source};
use super::work::Left;
use super::{MediaLoader, PlannedMedia, class, media_refusal};
use crate::error::GatewayError;
use crate::workers::ItemUpload;

/// Decoded frames of a clip that are in memory at one time: being read, resized, waiting.
const FRAMES_IN_MEMORY: u64 = 4;
/// Bytes of a decoded pixel.
const CHANNELS: u64 = 3;

/// Patch rows of one item.
#[derive(Clone, Debug)]
pub(super) struct Patches {
    /// One piece a still, one a temporal patch of a clip.
    pieces: Arc<[Bytes]>,
    /// Of all of them; it goes to the worker with the last.
    sha256: [u8; 32],
}

impl Patches {
    fn of_still(rows: Vec<u8>) -> Self {
        let sha256 = sha256(&rows);
        Self { pieces: Arc::from([Bytes::from(rows)]), sha256 }
    }

    fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len() as u64).sum()
    }

    async fn push(&self, upload: ItemUpload) -> Result<ItemUpload, GatewayError> {
        let mut upload = upload.with_sha256(self.sha256);
        for piece in self.pieces.iter() {
            upload.push(piece.clone()).await?;
        }
        Ok(upload)
    }
}

/// A clip's patch rows as they are made, one temporal patch after the other, and their hash.
struct Pieces {
    target: ImageSize,
    layout: PatchLayout,
    open: Option<TemporalPatch>,
    sha256: RunningSha256,
}

impl Pieces {
    fn new(target: ImageSize, layout: PatchLayout) -> Self {
        Self { target, layout, open: None, sha256: RunningSha256::default() }
    }

    /// Takes in the next frame; gives the rows of the temporal patch that it fills.
    fn add(&mut self, frame: &RgbFrame, resizer: &Resizer) -> Option<Bytes> {
        let num_frames = self.layout.temporal_patch_size;
        let fresh = || TemporalPatch::new(self.target, self.layout, num_frames);
        let open = self.open.get_or_insert_with(fresh);
        open.add(frame, resizer);
        if open.is_full() { self.finish() } else { None }
    }

    /// The rows of a temporal patch that is not full.
    fn finish(&mut self) -> Option<Bytes> {
        let rows = self.open.take()?.finish();
        self.sha256.add(&rows);
        Some(Bytes::from(rows))
    }
}

/// Who decodes a clip that others want too, so that they can take it from the cache.
#[derive(Debug, Default)]
pub(super) struct Turns(Mutex<HashMap<MediaHash, Weak<tokio::sync::Mutex<()>>>>);

impl Turns {
    async fn take(&self, hash: MediaHash) -> OwnedMutexGuard<()> {
        let turn = {
            // nothing panics while it is held
            let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let running = turns.get(&hash).and_then(Weak::upgrade);
            running.unwrap_or_else(|| {
                turns.retain(|_, turn| turn.strong_count() > 0);
                let fresh = Arc::new(tokio::sync::Mutex::new(()));
                turns.insert(hash, Arc::downgrade(&fresh));
                fresh
            })
        };
        turn.lock_owned().await
    }
}

impl MediaLoader {
    /// Makes one item's patches, unless they are at hand, and sends them.
    ///
    /// # Errors
    /// `MediaRejected` if the item breaks while it is decoded; what the upload meets.
    pub async fn send(
        &self,
        item: &PlannedMedia,
        layout: PatchLayout,
        upload: ItemUpload,
    ) -> Result<(), GatewayError> {
        let begin = Instant::now();
        let sent = match &item.source.content {
            Content::Still { data, header } => {
                self.send_still(item, (data, header), layout, upload).await
            }
            Content::Clip { data, probe } => {
                self.send_clip(item, (data, probe), layout, upload).await
            }
        };
        let upload = sent.map_err(|error| error.at(&item.param))?;
        self.metrics.media_sent(class(item.plan.kind), upload.sent_bytes(), begin.elapsed());
        upload.finish()
    }

    async fn send_still(
        &self,
        item: &PlannedMedia,
        (data, header): (&Data, &ImageHeader),
        layout: PatchLayout,
        upload: ItemUpload,
    ) -> Result<ItemUpload, GatewayError> {
        let make = || self.make_still(item, data, header, layout);
        let cached = || self.patches.get_or_make(item.hash, Patches::bytes, make);
        let patches = match &item.twin {
            // another item of this request is the same: made once even if nothing is cached
            Some(twin) => twin.get_or_try_init(cached).await?.clone(),
            None => cached().await?,
        };
        patches.push(upload).await
    }

    async fn make_still(
        &self,
        item: &PlannedMedia,
        data: &Data,
        header: &ImageHeader,
        layout: PatchLayout,
    ) -> Result<Patches, GatewayError> {
        let _memory = self.rooms.memory(&item.share, Source::still_memory(header)).await;
        let bytes = self.bytes(data, &item.share).await?;
        let (resizers, size, target) = (self.resizers.clone(), header.size, item.plan.target);
        let limits = DecodeLimits { max_pixels: self.limits.max_image_pixels };
        let cost = header.size.pixels();
        if header.format == ImageFormat::Avif {
            let frame = self.avif(&bytes, cost, &item.share).await?;
            let work = self.rooms.run(&item.share, cost, move |_| {
                let resizer = &*resizers.get(size, target);
                Patches::of_still(frame_patches(&frame, resizer, layout).bytes)
            });
            return work.await;
        }
        let work = self.rooms.run(&item.share, cost, move |watch| {
            let (limits, resizer) = (&limits, &*resizers.get(size, target));
            let is_wanted = &mut || watch.check() != Err(Left);
            let made = picture_patches(&bytes, PictureJob { limits, resizer, layout, is_wanted })?;
            let rows = made.map(|patches| patches.bytes).unwrap_or_default();
            Ok::<_, MediaError>(Patches::of_still(rows))
        });
        work.await?.map_err(media_refusal)
    }

    async fn send_clip(
        &self,
        item: &PlannedMedia,
        (data, probe): (&ClipData, &ClipProbe),
        layout: PatchLayout,
        mut upload: ItemUpload,
    ) -> Result<ItemUpload, GatewayError> {
        let is_kept = self.patches.takes(item.patch_bytes(layout));
        let turn = if is_kept { Some(self.clip_turn(item.hash).await) } else { None };
        if is_kept && let Some(patches) = self.patches.get(&item.hash) {
            drop(turn);
            return patches.push(upload).await;
        }
        let made;
        let file = match data {
            ClipData::File(file) => file,
            ClipData::Unread(data) => {
                let bytes = self.bytes(data, &item.share).await?;
                let form = self.clip_form(&bytes, &item.share).await?;
                made = self.clip_file(bytes, form, &item.share).await?;
                &made
            }
        };
        let mut kept = is_kept.then(Vec::new);
        upload = upload.hashed_by_caller();
        self.stream_clip(item, (file, probe), layout, (&mut upload, &mut kept)).await?;
        if let Some((pieces, sha256)) = kept.zip(upload.sha256()) {
            let patches = Patches { pieces: pieces.into(), sha256 };
            self.patches.put(item.hash, patches, item.patch_bytes(layout));
        }
        Ok(upload)
    }

    /// One after the other; a clip that hangs at a slow worker does not hold up others for ever.
    async fn clip_turn(&self, hash: MediaHash) -> Option<OwnedMutexGuard<()>> {
        tokio::time::timeout(self.timeout, self.turns.take(hash)).await.ok()
    }

    /// One temporal patch after the other: never more than a few frames are held.
    async fn stream_clip(
        &self,
        item: &PlannedMedia,
        (file, probe): (&MemoryFile, &ClipProbe),
        layout: PatchLayout,
        (upload, kept): (&mut ItemUpload, &mut Option<Vec<Bytes>>),
    ) -> Result<(), GatewayError> {
        let pixels = probe.info.size.pixels();
        let memory = pixels.saturating_mul(CHANNELS * FRAMES_IN_MEMORY);
        let _memory = self.rooms.memory(&item.share, memory).await;
        let resizer = self.resizers.get(probe.info.size, item.plan.target);
        let processes = &item.share.processes;
        let mut stream = self.ffmpeg.frames(file, probe, &item.plan.frames, processes).await?;
        let target = item.plan.target;
        let mut pieces = Pieces::new(target, layout);
        let mut next = stream.next().await?;
        while let Some(frame) = next {
            let resizer = Arc::clone(&resizer);
            let adding = self.rooms.run(&item.share, pixels, move |_| {
                let made = pieces.add(&frame, &resizer);
                (pieces, made)
            });
            // the child decodes the next frame meanwhile
            let (added, following) = tokio::join!(adding, stream.next());
            let mut made;
            (pieces, made) = added?;
            next = following?;
            if next.is_none() && made.is_none() {
                let finishing = self.rooms.run(&item.share, pixels, move |_| {
                    let made = pieces.finish();
                    (pieces, made)
                });
                (pieces, made) = finishing.await?;
            }
            if next.is_none() {
                upload.set_sha256(pieces.sha256.value());
            }
            if let Some(patches) = made {
                if let Some(kept) = kept {
                    kept.push(patches.clone());
                }
                upload.push(patches).await?;
            }
        }
        Ok(())
    }

    /// One item was not sent because the worker still held it.
    pub fn count_held(&self, item: &PlannedMedia) {
        self.metrics.media_held(class(item.plan.kind));
    }
}
