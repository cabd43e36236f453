//! The one door to a model's own facts. A second model is one new folder and one line in `load`.

use crate::error::RequestError;
use crate::output::OutputParser;
use gateway_media::{ClipInfo, GridThw, ImageSize, PatchLayout, PixelNorm};

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
    pub max_long_side_pixel: Option<u32>,
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

/// A declared tool, as far as reading its calls needs it.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolSchema {
    /// Function name.
    pub name: String,
    /// JSON schema of its parameters (an object), key order kept; `None` if undeclared.
    pub parameters: Option<serde_json::Value>,
}

/// What a parser must know of the request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OutputOptions {
    /// Decides the start state; never guessed from the prompt.
    pub thinking: ThinkingMode,
    /// Declared tools.
    pub tools: Vec<ToolSchema>,
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

    /// Template variables that select a thinking mode.
    fn template_variables(&self, mode: ThinkingMode) -> serde_json::Map<String, serde_json::Value>;

    /// A fresh reader of the model's output.
    fn output_parser(&self, options: &OutputOptions) -> Box<dyn OutputParser>;
}
