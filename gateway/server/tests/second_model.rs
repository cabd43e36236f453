//! A second model runs through the unmodified pipeline: other markers, another patch layout,
//! another template, another output grammar, none of which the server knows. It also panics on
//! demand, to show that a panic is one request's trouble.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use gateway_core::checkpoint::{Model, OpenOptions, with_spec};
use gateway_core::constraint::{Constraint, OutputRules};
use gateway_core::error::RequestError;
use gateway_core::json::{Json, Object};
use gateway_core::model::{
    GenerationDefaults, MediaKind, MediaPlan, ModelFacts, ModelFiles, ModelSpec, OutputOptions,
    PlaceholderPiece, SizeControls, ThinkingMode,
};
use gateway_core::output::{OutputEvent, OutputParser, Stretch, TextClass};
use gateway_core::tokenizer::EngineChoice;
use gateway_media::{ClipInfo, GridThw, ImageSize, PatchLayout, PixelNorm};
use serde_json::{Value, json};
use support::{FakeWorker, Gateway, saying};

const PICTURE: &str = "]<]frame[>[";
const CLIP: &str = "]<]speech[>[";
const TEMPLATE: &str = "{% for message in messages %}{{ message.role }}: {% if message.content is \
    string %}{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == \
    'text' %}{{ part.text }}{% elif part.type == 'image' %}]<]frame[>[{% else %}]<]speech[>[{% \
    endif %}{% endfor %}{% endif %}\n{% endfor %}reply: ";

/// Eight-pixel patches, no merging, one frame a patch; its replies shout when they think.
struct Toy {
    facts: ModelFacts,
    defaults: GenerationDefaults,
    stops: [u32; 1],
}

impl ModelSpec for Toy {
    fn facts(&self) -> &ModelFacts {
        &self.facts
    }

    fn patch_layout(&self) -> PatchLayout {
        PatchLayout { patch_size: 8, temporal_patch_size: 1, merge_size: 1 }
    }

    fn pixel_norm(&self) -> PixelNorm {
        PixelNorm { mean: [0.5; 3], std: [0.25; 3] }
    }

    fn plan_image(&self, size: ImageSize, _: &SizeControls) -> Result<MediaPlan, RequestError> {
        assert_ne!(size.width, 200, "a plan that panics");
        Ok(MediaPlan {
            kind: MediaKind::Image,
            target: ImageSize { width: 24, height: 16 },
            grid: GridThw { t: 1, h: 2, w: 3 },
            frames: Vec::new(),
            patch_times_s: Vec::new(),
            num_tokens: 6,
        })
    }

    fn plan_clip(&self, clip: &ClipInfo, _: &SizeControls) -> Result<MediaPlan, RequestError> {
        Ok(MediaPlan {
            kind: MediaKind::Video,
            target: ImageSize { width: 8, height: 8 },
            grid: GridThw { t: 2, h: 1, w: 1 },
            frames: vec![0, clip.num_frames - 1],
            patch_times_s: vec![0.0, clip.duration_s],
            num_tokens: 2,
        })
    }

    fn media_marker(&self, kind: MediaKind) -> &'static str {
        match kind {
            MediaKind::Image => PICTURE,
            MediaKind::Video => CLIP,
        }
    }

    fn placeholder(&self, plan: &MediaPlan) -> Vec<PlaceholderPiece> {
        let count = u32::try_from(plan.num_tokens).unwrap();
        vec![PlaceholderPiece::Text("<".into()), PlaceholderPiece::Pads { count }]
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
        &self.stops
    }

    fn generation_defaults(&self) -> &GenerationDefaults {
        &self.defaults
    }

    fn arrange_messages<'a>(&self, messages: &'a [Json]) -> std::borrow::Cow<'a, [Json]> {
        std::borrow::Cow::Borrowed(messages)
    }

    fn template_variables(&self, _: ThinkingMode) -> Object {
        Object::new()
    }

    fn constraint(&self, _: &OutputRules) -> Result<Option<Constraint>, RequestError> {
        Ok(None)
    }

    fn banned_token_ids(&self, _: &OutputRules) -> Vec<u32> {
        Vec::new()
    }

    fn output_parser(&self, _: &OutputOptions) -> Box<dyn OutputParser> {
        Box::new(Shouting::default())
    }
}

/// Capitals are thinking, everything else is the answer.
#[derive(Default)]
struct Shouting {
    account: Vec<Stretch>,
}

impl OutputParser for Shouting {
    fn push(&mut self, text: &str, events: &mut Vec<OutputEvent>) {
        assert!(!text.contains('!'), "a parser that panics");
        for letter in text.chars() {
            let (class, event) = if letter.is_uppercase() {
                (TextClass::Reasoning, OutputEvent::Reasoning(letter.into()))
            } else {
                (TextClass::Content, OutputEvent::Content(letter.into()))
            };
            self.account.push(Stretch { class, num_bytes: letter.len_utf8() });
            events.push(event);
        }
    }

    fn finish(&mut self, _: &mut Vec<OutputEvent>) {}

    fn take_account(&mut self) -> Vec<Stretch> {
        std::mem::take(&mut self.account)
    }
}

/// The tiny tokenizer with this model's own template.
fn toy_files() -> ModelFiles {
    let directory = tempfile::tempdir().unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(support::checkpoint().join(name), directory.path().join(name)).unwrap();
    }
    std::fs::write(directory.path().join("chat_template.jinja"), TEMPLATE).unwrap();
    ModelFiles::read(directory.path()).unwrap()
}

fn toy() -> Model {
    let files = toy_files();
    let id_of = |content: &str| files.added_token(content).unwrap().id;
    let facts = ModelFacts {
        model_type: "toy".into(),
        vocab_size: 2464,
        image_token_id: id_of(PICTURE),
        video_token_id: id_of(CLIP),
        eos_token_id: id_of("]!d~["),
        patch_size: 8,
        temporal_patch_size: 1,
        merge_size: 1,
        max_position_embeddings: 4096,
    };
    let defaults = GenerationDefaults {
        temperature: 0.5,
        top_p: 1.0,
        top_k: 0,
        min_p: 0.0,
        repetition_penalty: 1.0,
    };
    let spec = Arc::new(Toy { stops: [facts.eos_token_id], facts, defaults });
    let options =
        OpenOptions { engine: EngineChoice::Reference, clock: gateway_server::app::unix_now };
    with_spec(&files, spec, options).unwrap()
}

async fn setup() -> (FakeWorker, Gateway) {
    let model = toy();
    let facts = model.spec.facts();
    let worker = FakeWorker::start(support::wire_facts(facts), facts.fingerprint(), None);
    let config = support::config(&[worker.address.to_string()], &[]);
    let gateway = Gateway::with(config, Some(model)).await;
    gateway.wait_ready(1).await;
    (worker, gateway)
}

fn url(name: &str) -> String {
    use base64::Engine;
    let bytes = std::fs::read(support::media_directory().join(name)).unwrap();
    format!("data:;base64,{}", base64::engine::general_purpose::STANDARD.encode(bytes))
}

#[tokio::test]
async fn text_pictures_and_clips_follow_the_second_models_own_rules() {
    let (worker, gateway) = setup().await;
    worker.set_acts(saying("HMMok then"));
    let parts = json!([
        {"type": "text", "text": "look "},
        {"type": "image_url", "image_url": {"url": url("pair_red_112.png")}},
        {"type": "video_url", "video_url": {"url": url("vid_cfr_h264.mp4")}},
    ]);

    let reply = gateway.chat(json!({"messages": [{"role": "user", "content": parts}]})).await;

    assert_eq!(reply.status, 200, "{}", reply.text);
    let body = reply.json();
    let message = &body["choices"][0]["message"];
    assert_eq!(
        (&message["reasoning_content"], &message["content"]),
        (&json!("HMM"), &json!("ok then"))
    );
    let seen = &worker.seen()[0];
    let sampling = seen.header.sampling.clone().unwrap();
    let facts = gateway.app.model.spec.facts().clone();
    assert_eq!(
        (sampling.temperature, sampling.stop_token_ids),
        (Some(0.5), vec![facts.eos_token_id])
    );
    let format = seen.header.patch_format.clone().unwrap();
    assert_eq!((format.patch_size, format.temporal_patch_size, format.merge_size), (8, 1, 1));
    assert_eq!((format.mean, format.std), (vec![0.5; 3], vec![0.25; 3]));
    assert_eq!(seen.patches[&0].len(), 24 * 16 * 3);
    assert_eq!(seen.patches[&1].len(), 2 * 8 * 8 * 3);
    let prompt = gateway.app.model.prompt_builder.decode(&seen.header.prompt_token_ids);
    let expected = format!("user: look <{}<{}reply: ", PICTURE.repeat(6), CLIP.repeat(2));
    assert_eq!(prompt, expected);
}

#[tokio::test]
async fn a_panic_is_one_requests_500_and_harms_no_other() {
    let (worker, gateway) = setup().await;
    worker.set_acts(saying("fine"));
    let wide = json!([{"type": "image_url", "image_url": {"url": url("img_shape_200x1.png")}}]);

    let reply = gateway.chat(json!({"messages": [{"role": "user", "content": wide}]})).await;

    assert_eq!((reply.status, reply.error()["code"].clone()), (500, json!("internal_error")));
    assert!(!reply.text.contains("panic"), "{}", reply.text);
    assert_eq!(gateway.chat(json!({})).await.status, 200);
    gateway.assert_idle().await;
}

#[tokio::test]
async fn a_panic_in_the_middle_of_a_stream_is_an_error_event() {
    let (worker, gateway) = setup().await;
    let gate = Arc::new(tokio::sync::Notify::new());
    let mut acts = vec![support::Act::Start, support::Act::Tokens(support::ids("ab"))];
    acts.push(support::Act::Wait(Arc::clone(&gate)));
    acts.extend(saying("c!"));
    worker.set_acts(acts);
    let body = support::chat_body(json!({"stream": true})).to_string();
    let mut response = gateway.send("/v1/chat/completions", body).await;
    let first = response.chunk().await.unwrap().unwrap();
    gate.notify_one();

    let text = String::from_utf8(first.to_vec()).unwrap() + &response.text().await.unwrap();

    let last: Value = serde_json::from_str(support::events(&text).last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "internal_error", "{text}");
    assert!(!text.contains("[DONE]"));
    gateway.assert_idle().await;
}
