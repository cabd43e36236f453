//! MiniMax-M3: its marker strings, its thinking switch, and its spec from the checkpoint's files.

mod config;
mod constraint;
mod messages;
mod output;
mod vision;

use super::{
    GenerationDefaults, MediaKind, MediaPlan, ModelFacts, ModelFiles, ModelLoadError, ModelSpec,
    OutputOptions, PlaceholderPiece, SizeControls, ThinkingMode,
};
use crate::constraint::{Constraint, OutputRules};
use crate::error::RequestError;
use crate::json::{Json, Object};
use crate::output::OutputParser;
use constraint::MarkerIds;
use gateway_media::{ClipInfo, ImageSize, PatchLayout, PixelNorm};
use output::M3Parser;
use output::dialect::{self, Dialect};
use std::borrow::Cow;
use vision::VisionGeometry;

/// `model_type` of its config.json.
pub const MODEL_TYPE: &str = "minimax_m3_vl";

/// Stands for a picture in rendered text, and for each of its tokens in the prompt.
const IMAGE: &str = "]<]image[>[";
/// Stands for a clip in rendered text, and for each of its tokens in the prompt.
const VIDEO: &str = "]<]video[>[";
/// Stands before every tag of a tool call.
const NAMESPACE: &str = "]<]minimax[>[";
/// Opens thinking.
const THINK_OPEN: &str = "<mm:think>";
/// Closes thinking.
const THINK_CLOSE: &str = "</mm:think>";
/// Ends every message, and with it the reply.
const MESSAGE_END: &str = "[e~[";

const ASSISTANT_MARKERS: [&str; 2] = [THINK_OPEN, THINK_CLOSE];
const OUTPUT_MARKERS: [&str; 5] = [NAMESPACE, THINK_OPEN, THINK_CLOSE, "<think>", "</think>"];
/// Control tokens that the tokenizer file need not flag as special.
const CONTROL_TOKENS: [&str; 19] = [
    "]~!b[",
    "]~b]",
    MESSAGE_END,
    "]!p~[",
    "]!d~[",
    IMAGE,
    VIDEO,
    "]<]speech[>[",
    "]<]frame[>[",
    "]<]vision pad[>[",
    "]<]start of image[>[",
    "]<]end of image[>[",
    "]<]start of video[>[",
    "]<]end of video[>[",
    "]<]start of speech[>[",
    "]<]end of speech[>[",
    "]<]start of frame[>[",
    "]<]end of frame[>[",
    "<|content_altered_placeholder|>",
];

/// The spec of one M3 checkpoint.
pub struct MiniMaxM3 {
    facts: ModelFacts,
    vision: VisionGeometry,
    stop_token_ids: Vec<u32>,
    marker_ids: MarkerIds,
    dialect: &'static Dialect,
    defaults: GenerationDefaults,
}

impl MiniMaxM3 {
    /// Reads the spec from the checkpoint's files.
    ///
    /// # Errors
    /// The first value that is missing, malformed, or contradicts another file.
    pub fn load(files: &ModelFiles) -> Result<Self, ModelLoadError> {
        config::load(files)
    }

    /// M2's template knows no choice: it always opens the thinking.
    fn begins_with(&self, asked: ThinkingMode) -> ThinkingMode {
        match asked {
            ThinkingMode::Adaptive if self.dialect == &dialect::M2 => ThinkingMode::Enabled,
            asked => asked,
        }
    }
}

impl ModelSpec for MiniMaxM3 {
    fn facts(&self) -> &ModelFacts {
        &self.facts
    }

    fn patch_layout(&self) -> PatchLayout {
        self.vision.patch_layout()
    }

    fn pixel_norm(&self) -> PixelNorm {
        self.vision.pixel_norm()
    }

    fn plan_image(
        &self,
        size: ImageSize,
        controls: &SizeControls,
    ) -> Result<MediaPlan, RequestError> {
        self.vision.plan_image(size, controls)
    }

    fn plan_clip(
        &self,
        clip: &ClipInfo,
        controls: &SizeControls,
    ) -> Result<MediaPlan, RequestError> {
        self.vision.plan_clip(clip, controls)
    }

    fn media_marker(&self, kind: MediaKind) -> &'static str {
        match kind {
            MediaKind::Image => IMAGE,
            MediaKind::Video => VIDEO,
        }
    }

    fn placeholder(&self, plan: &MediaPlan) -> Vec<PlaceholderPiece> {
        self.vision.placeholder(plan)
    }

    fn assistant_markers(&self) -> &'static [&'static str] {
        &ASSISTANT_MARKERS
    }

    fn output_markers(&self) -> &'static [&'static str] {
        &OUTPUT_MARKERS
    }

    fn control_tokens(&self) -> &'static [&'static str] {
        &CONTROL_TOKENS
    }

    fn stop_token_ids(&self) -> &[u32] {
        &self.stop_token_ids
    }

    fn generation_defaults(&self) -> &GenerationDefaults {
        &self.defaults
    }

    fn arrange_messages<'a>(&self, messages: &'a [Json]) -> Cow<'a, [Json]> {
        messages::arrange(messages)
    }

    fn template_variables(&self, mode: ThinkingMode) -> Object {
        let mode = match mode {
            ThinkingMode::Enabled => "enabled",
            ThinkingMode::Disabled => "disabled",
            ThinkingMode::Adaptive => "adaptive",
        };
        Object::from([("thinking_mode".to_owned(), mode.into())])
    }

    fn constraint(&self, rules: &OutputRules) -> Result<Option<Constraint>, RequestError> {
        if self.dialect != &dialect::M3 && constraint::concerns_calls(rules) {
            let message = "this checkpoint's template writes calls in the form of M2, in which \
                           they cannot be forced";
            return Err(RequestError::invalid("tool_choice", message));
        }
        let rules = OutputRules { thinking: self.begins_with(rules.thinking), ..rules.clone() };
        constraint::constraint(&rules, self.marker_ids)
    }

    fn banned_token_ids(&self, rules: &OutputRules) -> Vec<u32> {
        constraint::banned(rules, self.marker_ids)
    }

    fn output_parser(&self, options: &OutputOptions) -> Box<dyn OutputParser> {
        let thinking = self.begins_with(options.thinking);
        let options = OutputOptions { thinking, tools: options.tools.clone() };
        Box::new(M3Parser::new(&options, self.dialect))
    }
}

#[cfg(test)]
mod tests;
