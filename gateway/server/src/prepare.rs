//! The gateway's first half alone: a chat request in, a worker's header and patches out. For
//! callers that talk to a worker themselves; no port is opened and no worker is followed.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use gateway_core::conversation::check_chat;
use gateway_core::model::{MediaKind, MediaPlan, SizeControls};
use gateway_core::openai::RequestBody;
use gateway_media::decode::{DecodeLimits, ImageFormat, ImageHeader, read_header};
use gateway_media::patchify::{patch_bytes, patchify_clip};
use gateway_media::picture::{PictureJob, fill_frame_patches, fill_patches};
use gateway_media::resize::Resizer;
use gateway_media::{ClipInfo, GridThw, ImageSize, MediaError, PatchLayout, Patches, RgbFrame};
use rand::RngCore;
use tokio::runtime::Runtime;

use crate::app::App;
use crate::config::{ConfigError, GatewayConfig};
use crate::error::{ErrorKind, GatewayError};
use crate::workers::{gather, header_bytes};
use crate::{StartError, pipeline};

/// Why a preparer could not be made.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// A setting of the environment cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The checkpoint cannot be used.
    #[error(transparent)]
    Start(#[from] StartError),
}

/// A request as a worker takes it.
#[derive(Debug)]
pub struct Prepared {
    /// Serialized `m3stack.worker.v1.GenerateHeader`, without a request id.
    pub header: Vec<u8>,
    /// Patch bytes of each media item in pieces, in the header's order.
    pub patches: Vec<Vec<Bytes>>,
}

/// A still's way, known before any pixel is.
#[derive(Clone, Copy, Debug)]
pub struct StillPlan {
    source: ImageSize,
    format: ImageFormat,
    target: ImageSize,
    /// Bytes of all its patch rows.
    pub num_bytes: usize,
}

/// Prepares requests for one checkpoint, with the gateway's own settings from the environment.
pub struct Preparer {
    app: Arc<App>,
    runtime: Runtime,
}

impl Preparer {
    /// Opens the checkpoint's small files; weights are not needed.
    ///
    /// # Errors
    /// [`PrepareError`] naming what cannot be used.
    pub fn open(model_path: &Path) -> Result<Self, PrepareError> {
        let flags = ["m3stack-gateway".into(), "--model-path".into(), OsString::from(model_path)];
        let mut config = GatewayConfig::from_arguments(flags)?;
        config.workers.clear();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .map_err(StartError::System)?;
        let app = {
            let _context = runtime.enter();
            App::start(config)?
        };
        Ok(Self { app, runtime })
    }

    /// Prepares the body of a chat completion request; its `model` is not looked at.
    ///
    /// # Errors
    /// As the gateway refuses the request.
    pub fn chat(&self, body: &[u8]) -> Result<Prepared, GatewayError> {
        self.runtime.block_on(self.chat_async(body))
    }

    async fn chat_async(&self, body: &[u8]) -> Result<Prepared, GatewayError> {
        let app = &self.app;
        let request = RequestBody::parse(body)?;
        let conversation = check_chat(request, &app.limits)?;
        let mut job = pipeline::prepare(app, conversation, true).await?;
        let (sender, gathering) = gather();
        let layout = job.header.layout;
        let sending = async move {
            for (index, item) in job.media.iter().enumerate() {
                let place = u32::try_from(index).unwrap_or(u32::MAX);
                let total = job.header.items[index].patch_bytes(layout);
                app.media.send(item, layout, sender.item(place, total)).await?;
            }
            let seed = job.header.generation.seed.take();
            let seed = seed.unwrap_or_else(|| rand::rng().next_u64());
            Ok::<_, GatewayError>(header_bytes(&job.header, "", seed))
        };
        let (header, items) = tokio::join!(sending, gathering);
        Ok(Prepared { header: header?, patches: items.into_values().collect() })
    }

    /// Ids of a text, control tokens in it meant as such.
    ///
    /// # Errors
    /// Text that stands for media.
    pub fn tokenize(&self, text: &str) -> Result<Vec<u32>, GatewayError> {
        Ok(self.app.model.prompt_builder.encode_text(text, false)?)
    }

    /// Text of ids, control tokens shown.
    pub fn detokenize(&self, ids: &[u32]) -> String {
        self.app.model.prompt_builder.decode(ids)
    }

    /// What becomes of a still, from the header of its file.
    ///
    /// # Errors
    /// `MediaRejected` as the gateway refuses the picture.
    pub fn plan_still(
        &self,
        bytes: &[u8],
        controls: &SizeControls,
    ) -> Result<StillPlan, GatewayError> {
        let spec = &*self.app.model.spec;
        let ImageHeader { size: source, format } = read_header(bytes).map_err(refusal)?;
        let target = spec.plan_image(source, controls)?.target;
        let num_bytes = patch_bytes(target, spec.patch_layout(), 1);
        Ok(StillPlan { source, format, target, num_bytes })
    }

    /// Writes its patch rows where the caller wants them, and gives their grid.
    ///
    /// # Errors
    /// As [`Preparer::plan_still`].
    ///
    /// # Panics
    /// When the plan is of another file or `rows` has another length than it says.
    pub fn fill_still(
        &self,
        bytes: &[u8],
        plan: &StillPlan,
        rows: &mut [u8],
    ) -> Result<GridThw, GatewayError> {
        let resizer = self.app.media.resizer(plan.source, plan.target);
        let (limits, layout) = (&DecodeLimits::default(), self.patch_layout());
        if plan.format == ImageFormat::Avif {
            let frame = self.app.media.avif_frame(Bytes::copy_from_slice(bytes), plan.source);
            let frame = self.runtime.block_on(frame)?;
            return Ok(fill_frame_patches(&frame, &resizer, layout, rows));
        }
        let job = PictureJob { limits, resizer: &resizer, layout, is_wanted: &mut || true };
        let grid = fill_patches(bytes, job, rows).map_err(refusal)?;
        grid.ok_or_else(|| GatewayError::internal("a picture was given up, which nobody asked"))
    }

    /// Patch rows of a clip from its file's bytes, in pieces, and what was planned of it.
    ///
    /// # Errors
    /// As the gateway refuses the clip.
    pub fn clip(
        &self,
        bytes: Bytes,
        controls: SizeControls,
    ) -> Result<(Vec<Bytes>, MediaPlan), GatewayError> {
        self.runtime.block_on(async {
            let (media, spec) = (&self.app.media, &*self.app.model.spec);
            let wishes = (MediaKind::Video, controls);
            let item = media.plan_bytes(bytes, wishes, spec).await?;
            let layout = spec.patch_layout();
            let (sender, gathering) = gather();
            let upload = sender.item(0, item.patch_bytes(layout));
            drop(sender);
            let (sent, items) = tokio::join!(media.send(&item, layout, upload), gathering);
            sent?;
            Ok((items.into_values().next().unwrap_or_default(), item.plan))
        })
    }

    /// How frames are cut into patch rows.
    pub fn patch_layout(&self) -> PatchLayout {
        self.app.model.spec.patch_layout()
    }

    /// Patch rows of frames that were chosen already, all of them, in order.
    ///
    /// # Errors
    /// `MediaRejected` for no frame, for frames of another length than their size tells, or as
    /// the gateway refuses a clip of that size.
    pub fn frames(&self, frames: Vec<Vec<u8>>, size: ImageSize) -> Result<Patches, GatewayError> {
        let expected = usize::try_from(size.pixels() * 3).unwrap_or(usize::MAX);
        if let Some((place, frame)) =
            frames.iter().enumerate().find(|(_, frame)| frame.len() != expected)
        {
            let message = format!(
                "frame {place} has {} bytes; {}x{} in RGB takes {expected}",
                frame.len(),
                size.width,
                size.height
            );
            return Err(GatewayError::new(ErrorKind::MediaRejected, message));
        }
        if frames.is_empty() {
            return Err(GatewayError::new(ErrorKind::MediaRejected, "a clip needs a frame"));
        }
        let spec = &*self.app.model.spec;
        let num_frames = frames.len() as u64;
        let clip = ClipInfo { size, num_frames, fps: 1.0, duration_s: num_frames as f64 };
        let target = spec.plan_clip(&clip, &SizeControls::default())?.target;
        let resizer = Resizer::new(size, target);
        let resized: Vec<RgbFrame> =
            frames.into_iter().map(|pixels| resizer.resize(&RgbFrame { size, pixels })).collect();
        Ok(patchify_clip(&resized, spec.patch_layout()))
    }
}

fn refusal(error: MediaError) -> GatewayError {
    GatewayError::new(ErrorKind::MediaRejected, error.to_string())
}
