//! The one door to a model's own facts. A second model is one new folder and one line in `load`.

mod files;
pub mod minimax_m3;
#[cfg(any(test, feature = "second-model"))]
pub mod plain;

pub use files::{ModelFiles, ModelLoadError};

use crate::constraint::{Constraint, OutputRules};
use crate::error::RequestError;
use crate::json::{Json, Object};
use crate::output::OutputParser;
use gateway_media::{ClipInfo, GridThw, ImageSize, PatchLayout, PixelNorm};
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use std::sync::Arc;

/// Picture or clip.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MediaKind {
    /// A still.
    Image,
    /// Frames over time.
    Video,
}

/// The client's wishes about size and frame rate; `None` where nothing was said.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SizeControls {
    /// `low`, `default`, `high`, `auto`.
    pub detail: Option<String>,
    /// Longest side in pixels after resizing.
    pub max_long_side_pixel: Option<i64>,
    /// Frames to take per second of a clip.
    pub fps: Option<f64>,
}

/// What will become of one media item, known from its header alone.
#[derive(Clone, Debug, PartialEq)]
pub struct MediaPlan {
    /// Picture or clip.
    pub kind: MediaKind,
    /// Size every frame is resized to.
    pub target: ImageSize,
    /// Patch grid at that size.
    pub grid: GridThw,
    /// Frame numbers to decode, ascending; empty for a still.
    pub frames: Vec<u64>,
    /// Seconds at which each temporal patch begins, one a temporal patch; empty for a still.
    pub patch_times_s: Vec<f64>,
    /// Tokens of the merged patches (placeholder ids in the prompt).
    pub num_tokens: u64,
}

/// A piece of the text that stands for one media item in the prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlaceholderPiece {
    /// Ordinary text for the tokenizer (no added token is matched in it).
    Text(String),
    /// One added token, by its content.
    Marker(&'static str),
    /// `count` copies of the kind's placeholder id: one span of the item.
    Pads {
        /// Copies.
        count: u32,
    },
}

/// Whether and how the model shall think before it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum ThinkingMode {
    /// Always.
    Enabled,
    /// Never.
    Disabled,
    /// The model decides.
    #[default]
    Adaptive,
}

/// A declared tool, as far as its calls need it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ToolSchema {
    /// Function name.
    pub name: String,
    /// JSON schema of its parameters (an object), key order kept; `None` if undeclared.
    pub parameters: Option<Json>,
    /// Calls must fit the schema.
    pub strict: bool,
    /// Where the schema stands in the request.
    pub param: String,
}

/// What a parser must know of the request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OutputOptions {
    /// Decides the start state; never guessed from the prompt.
    pub thinking: ThinkingMode,
    /// Declared tools.
    pub tools: Arc<[ToolSchema]>,
}

/// Everything gateway and worker must agree on; same names and order as the proto's `ModelFacts`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFacts {
    /// `model_type` of config.json.
    pub model_type: String,
    /// Rows of the embedding table.
    pub vocab_size: u32,
    /// Placeholder id of stills.
    pub image_token_id: u32,
    /// Placeholder id of clips.
    pub video_token_id: u32,
    /// The id that ends a reply.
    pub eos_token_id: u32,
    /// Side of a patch in pixels.
    pub patch_size: u32,
    /// Frames in a temporal patch.
    pub temporal_patch_size: u32,
    /// Side of the merged square, in patches.
    pub merge_size: u32,
    /// Longest context in tokens.
    pub max_position_embeddings: u32,
}

impl ModelFacts {
    /// SHA-256 over the fields as UTF-8 lines `name=value\n`, in order of the proto's fields.
    pub fn fingerprint(&self) -> [u8; 32] {
        let numbers = [
            ("vocab_size", self.vocab_size),
            ("image_token_id", self.image_token_id),
            ("video_token_id", self.video_token_id),
            ("eos_token_id", self.eos_token_id),
            ("patch_size", self.patch_size),
            ("temporal_patch_size", self.temporal_patch_size),
            ("merge_size", self.merge_size),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        let mut lines = format!("model_type={}\n", self.model_type);
        for (name, value) in numbers {
            lines.push_str(&format!("{name}={value}\n"));
        }
        Sha256::digest(lines.as_bytes()).into()
    }
}

/// What holds where a request says nothing about sampling.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationDefaults {
    /// 0 to 2; 0 is greedy.
    pub temperature: f32,
    /// Above 0 to 1; 1 keeps all.
    pub top_p: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// 0 to 1; 0 keeps all.
    pub min_p: f32,
    /// Above 0; 1 changes nothing.
    pub repetition_penalty: f32,
}

/// What the pipeline asks of a model. Geometry in, numbers out; never bytes.
pub trait ModelSpec: Send + Sync {
    /// The agreed facts, read from the checkpoint.
    fn facts(&self) -> &ModelFacts;

    /// How frames become patch rows.
    fn patch_layout(&self) -> PatchLayout;

    /// Normalisation the worker shall apply.
    fn pixel_norm(&self) -> PixelNorm;

    /// Plan of a still of that size.
    ///
    /// # Errors
    /// `MediaRejected` or `InvalidRequest` with the figure and the limit; `param` is left empty.
    fn plan_image(
        &self,
        size: ImageSize,
        controls: &SizeControls,
    ) -> Result<MediaPlan, RequestError>;

    /// Plan of a clip.
    ///
    /// # Errors
    /// As [`ModelSpec::plan_image`].
    fn plan_clip(
        &self,
        clip: &ClipInfo,
        controls: &SizeControls,
    ) -> Result<MediaPlan, RequestError>;

    /// The added token that the chat template prints for one item of that kind.
    fn media_marker(&self, kind: MediaKind) -> &'static str;

    /// What replaces that marker in the prompt.
    fn placeholder(&self, plan: &MediaPlan) -> Vec<PlaceholderPiece>;

    /// Added tokens that keep their meaning inside assistant history (thinking tags).
    fn assistant_markers(&self) -> &'static [&'static str];

    /// Added tokens that the output parser reads, so that they must stay in decoded text.
    fn output_markers(&self) -> &'static [&'static str];

    /// Added tokens that never belong in text shown to a user, whatever the tokenizer file says.
    fn control_tokens(&self) -> &'static [&'static str];

    /// Ids that end a reply.
    fn stop_token_ids(&self) -> &[u32];

    /// Sampling where a request is silent.
    fn generation_defaults(&self) -> &GenerationDefaults;

    /// Puts checked messages into the roles and order that the chat template can show, so that no
    /// text is lost.
    fn arrange_messages<'a>(&self, messages: &'a [Json]) -> Cow<'a, [Json]>;

    /// Template variables that select a thinking mode.
    fn template_variables(&self, mode: ThinkingMode) -> Object;

    /// The language that output under these rules belongs to; `None` if all output will do.
    ///
    /// # Errors
    /// `InvalidRequest` naming what no language can express.
    fn constraint(&self, rules: &OutputRules) -> Result<Option<Constraint>, RequestError>;

    /// Ids that must not be generated under these rules.
    fn banned_token_ids(&self, rules: &OutputRules) -> Vec<u32>;

    /// A fresh reader of the model's output.
    fn output_parser(&self, options: &OutputOptions) -> Box<dyn OutputParser>;
}

/// Reads the spec of the model whose files these are.
///
/// # Errors
/// A model type that no folder here knows, or files that are missing or contradict each other.
pub fn load(files: &ModelFiles) -> Result<Arc<dyn ModelSpec>, ModelLoadError> {
    match files.model_type()? {
        minimax_m3::MODEL_TYPE => Ok(Arc::new(minimax_m3::MiniMaxM3::load(files)?)),
        #[cfg(any(test, feature = "second-model"))]
        plain::MODEL_TYPE => Ok(Arc::new(plain::Plain::load(files)?)),
        other => Err(ModelLoadError::UnknownModel {
            model_type: other.to_owned(),
            known: minimax_m3::MODEL_TYPE,
        }),
    }
}
