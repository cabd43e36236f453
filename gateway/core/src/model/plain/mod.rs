//! A second model for tests: bytes for tokens, a picture token a cell of 32 pixels, no thinking
//! and no calls. It shares nothing with the first but the trait.

use super::{
    GenerationDefaults, MediaKind, MediaPlan, ModelFacts, ModelFiles, ModelLoadError, ModelSpec,
    OutputOptions, PlaceholderPiece, SizeControls, ThinkingMode,
};
use crate::constraint::{Constraint, ConstraintSpec, OutputRules, ResponseFormat};
use crate::error::{RequestError, RequestErrorKind};
use crate::json::{Json, Object};
use crate::output::{OutputEvent, OutputParser, Stretch, TextClass};
use gateway_media::{ClipInfo, GridThw, ImageSize, PatchLayout, PixelNorm};
use serde_json::json;
use std::borrow::Cow;
use std::path::Path;

/// `model_type` of its config.json.
pub const MODEL_TYPE: &str = "plain";

const TURN: &str = "<|turn|>";
const END: &str = "<|end|>";
const PICTURE: &str = "<|picture|>";
const CLIP: &str = "<|clip|>";
const SPECIAL: [&str; 4] = [TURN, END, PICTURE, CLIP];
/// Ids below are bytes.
const FIRST_SPECIAL: u32 = 256;
const LAYOUT: PatchLayout = PatchLayout { patch_size: 16, temporal_patch_size: 2, merge_size: 2 };
const MAX_SIDE: u32 = 512;
const MAX_FRAMES: u64 = 8;
const TEMPLATE: &str = "{% for message in messages %}<|turn|>{{ message.role }}: \
    {% if message.content is string %}{{ message.content }}{% else %}\
    {% for part in message.content %}\
    {{ {'image': '<|picture|>', 'video': '<|clip|>'}[part.type] if part.type != 'text' else part.text }}\
    {% endfor %}{% endif %}<|end|>{% endfor %}\
    {% if add_generation_prompt %}<|turn|>assistant: {% endif %}";

/// The spec.
pub struct Plain {
    facts: ModelFacts,
    defaults: GenerationDefaults,
    stop_token_ids: [u32; 1],
}

/// Writes a checkpoint of this model, but for weights.
///
/// # Errors
/// The file system's own.
pub fn write_checkpoint(dir: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    std::fs::write(dir.join("config.json"), json!({"model_type": MODEL_TYPE}).to_string())?;
    std::fs::write(dir.join("chat_template.jinja"), TEMPLATE)?;
    std::fs::write(dir.join("tokenizer.json"), tokenizer().to_string())
}

/// Bytes in the alphabet of byte-level vocabularies, and the special tokens behind them.
fn tokenizer() -> serde_json::Value {
    let is_printable = |byte: u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut unprintable = 0x100..;
    let vocabulary: serde_json::Map<_, _> = (0..=255u8)
        .map(|byte| {
            let code =
                if is_printable(byte) { u32::from(byte) } else { unprintable.next().unwrap_or(0) };
            let letter = char::from_u32(code).unwrap_or_default();
            (letter.to_string(), json!(byte))
        })
        .collect();
    let added: Vec<_> = SPECIAL
        .iter()
        .zip(FIRST_SPECIAL..)
        .map(|(content, id)| {
            json!({"id": id, "content": content, "special": true, "normalized": false,
                "lstrip": false, "rstrip": false, "single_word": false})
        })
        .collect();
    let by_bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": by_bytes, "post_processor": null, "decoder": by_bytes,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "byte_fallback": false,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "ignore_merges": false, "vocab": vocabulary, "merges": []},
    })
}

impl Plain {
    /// Reads the spec from the checkpoint's files.
    ///
    /// # Errors
    /// A tokenizer without the special tokens.
    pub fn load(files: &ModelFiles) -> Result<Self, ModelLoadError> {
        let end = files.added_token(END)?.id;
        let facts = ModelFacts {
            model_type: MODEL_TYPE.to_owned(),
            vocab_size: FIRST_SPECIAL + SPECIAL.len() as u32,
            image_token_id: files.added_token(PICTURE)?.id,
            video_token_id: files.added_token(CLIP)?.id,
            eos_token_id: end,
            patch_size: LAYOUT.patch_size,
            temporal_patch_size: LAYOUT.temporal_patch_size,
            merge_size: LAYOUT.merge_size,
            max_position_embeddings: 8192,
        };
        let defaults = GenerationDefaults {
            temperature: 0.5,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
        };
        Ok(Self { facts, defaults, stop_token_ids: [end] })
    }

    fn plan(&self, kind: MediaKind, size: ImageSize, frames: Vec<u64>, fps: f64) -> MediaPlan {
        let cells = |side: u32| side.min(MAX_SIDE).div_ceil(LAYOUT.factor());
        let (columns, rows) = (cells(size.width), cells(size.height));
        let per_patch = LAYOUT.temporal_patch_size as usize;
        let slices = (frames.len().div_ceil(per_patch) as u32).max(1);
        let merge = LAYOUT.merge_size;
        MediaPlan {
            kind,
            target: ImageSize { width: columns * LAYOUT.factor(), height: rows * LAYOUT.factor() },
            grid: GridThw { t: slices, h: rows * merge, w: columns * merge },
            patch_times_s: frames.iter().step_by(per_patch).map(|&at| at as f64 / fps).collect(),
            frames,
            num_tokens: u64::from(slices) * u64::from(columns) * u64::from(rows),
        }
    }
}

impl ModelSpec for Plain {
    fn facts(&self) -> &ModelFacts {
        &self.facts
    }

    fn patch_layout(&self) -> PatchLayout {
        LAYOUT
    }

    fn pixel_norm(&self) -> PixelNorm {
        PixelNorm { mean: [0.5; 3], std: [0.5; 3] }
    }

    fn plan_image(&self, size: ImageSize, _: &SizeControls) -> Result<MediaPlan, RequestError> {
        if size.pixels() == 0 {
            let kind = RequestErrorKind::MediaRejected;
            return Err(RequestError::new(kind, "media_rejected", "", "the picture is empty"));
        }
        Ok(self.plan(MediaKind::Image, size, Vec::new(), 1.0))
    }

    fn plan_clip(&self, clip: &ClipInfo, _: &SizeControls) -> Result<MediaPlan, RequestError> {
        let step = (clip.num_frames / MAX_FRAMES).max(1);
        let frames = (0..clip.num_frames).step_by(step as usize).take(MAX_FRAMES as usize);
        Ok(self.plan(MediaKind::Video, clip.size, frames.collect(), clip.fps))
    }

    fn media_marker(&self, kind: MediaKind) -> &'static str {
        match kind {
            MediaKind::Image => PICTURE,
            MediaKind::Video => CLIP,
        }
    }

    fn placeholder(&self, plan: &MediaPlan) -> Vec<PlaceholderPiece> {
        vec![PlaceholderPiece::Pads { count: plan.num_tokens as u32 }]
    }

    fn assistant_markers(&self) -> &'static [&'static str] {
        &[]
    }

    fn output_markers(&self) -> &'static [&'static str] {
        &[]
    }

    fn control_tokens(&self) -> &'static [&'static str] {
        &[]
    }

    fn stop_token_ids(&self) -> &[u32] {
        &self.stop_token_ids
    }

    fn generation_defaults(&self) -> &GenerationDefaults {
        &self.defaults
    }

    fn arrange_messages<'a>(&self, messages: &'a [Json]) -> Cow<'a, [Json]> {
        Cow::Borrowed(messages)
    }

    fn template_variables(&self, _: ThinkingMode) -> Object {
        Object::new()
    }

    fn constraint(&self, rules: &OutputRules) -> Result<Option<Constraint>, RequestError> {
        match (&rules.format, rules.choice.is_forced()) {
            (ResponseFormat::Text, false) => Ok(None),
            (ResponseFormat::Regex(pattern), false) => Ok(Some(Constraint {
                spec: ConstraintSpec::Regex(pattern.clone()),
                after_token_id: None,
                param: "response_format".to_owned(),
            })),
            _ => Err(RequestError::invalid("tool_choice", "this model knows no calls")),
        }
    }

    fn banned_token_ids(&self, _: &OutputRules) -> Vec<u32> {
        Vec::new()
    }

    fn output_parser(&self, _: &OutputOptions) -> Box<dyn OutputParser> {
        Box::new(AllAnswer(Vec::new()))
    }
}

/// Everything is answer.
struct AllAnswer(Vec<Stretch>);

impl OutputParser for AllAnswer {
    fn push(&mut self, text: &str, events: &mut Vec<OutputEvent>) {
        if !text.is_empty() {
            self.0.push(Stretch { class: TextClass::Content, num_bytes: text.len() });
            events.push(OutputEvent::Content(text.to_owned()));
        }
    }

    fn finish(&mut self, _: &mut Vec<OutputEvent>) {}

    fn take_account(&mut self) -> Vec<Stretch> {
        std::mem::take(&mut self.0)
    }
}

#[cfg(test)]
mod tests;
