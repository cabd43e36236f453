use super::*;
use crate::checkpoint::tests::{OPTIONS, tiny_dir, tiny_model};
use crate::checkpoint::{Model, with_spec};
use crate::conversation::check_chat;
use crate::json::Json;
use crate::model::{ModelFiles, SizeControls};
use crate::openai::RequestBody;
use crate::tokenizer::tests::{reference, texts};
use gateway_media::{ClipInfo, ImageSize};
use proptest::prelude::*;

mod cases;
mod examples;
mod injection;

fn conversation(body: &str) -> Result<Conversation, RequestError> {
    check_chat(RequestBody::parse(body.as_bytes())?, &tiny_model().limits())
}

fn render(body: &str) -> Result<Rendered, RequestError> {
    tiny_model().prompt_builder.render(&conversation(body)?)
}

fn prompt(body: &str) -> Prompt {
    let builder = &tiny_model().prompt_builder;
    builder.expand(&render(body).unwrap(), &[]).unwrap()
}

fn reference_ids(text: &str) -> Vec<u32> {
    reference().encode_fast(text, false).unwrap().get_ids().to_vec()
}

fn id(content: &str) -> u32 {
    tiny_model().prompt_builder.tokenizer().added().by_content(content).unwrap().id
}

fn message(role: &str, content: &str) -> String {
    Json::object([("role", role.into()), ("content", content.into())]).to_compact()
}

const PICTURE: &str = r#"{"type":"image_url","image_url":{"url":"data:image/png;base64,AA"}}"#;
const CLIP: &str = r#"{"type":"video_url","video_url":{"url":"data:video/mp4;base64,AA"}}"#;

#[test]
fn pictures_become_spans_between_their_markers() {
    let body = format!(
        r#"{{"messages":[{{"role":"user","content":[{{"type":"text","text":"A"}},{PICTURE},
            {{"type":"text","text":"B"}},{PICTURE}]}}]}}"#
    );
    let rendered = render(&body).unwrap();
    assert!(rendered.text().ends_with("user\nA]<]image[>[B]<]image[>[[e~[\n]~b]ai\n"));
    let spec = &tiny_model().spec;
    let plans = [(50, 90), (600, 300)].map(|(height, width)| {
        spec.plan_image(ImageSize { width, height }, &SizeControls::default()).unwrap()
    });
    let prompt = tiny_model().prompt_builder.expand(&rendered, &plans).unwrap();
    assert_eq!(prompt.spans.len(), 2);
    let pad = id("]<]image[>[");
    for (spans, plan) in prompt.spans.iter().zip(&plans) {
        let [span] = spans.as_slice() else { panic!("{spans:?}") };
        assert_eq!(u64::from(span.length), plan.num_tokens);
        let (from, to) = (span.offset as usize, (span.offset + span.length) as usize);
        assert!(prompt.token_ids[from..to].iter().all(|&id| id == pad));
        assert_eq!(prompt.token_ids[from - 1], id("]<]start of image[>["));
        assert_eq!(prompt.token_ids[to], id("]<]end of image[>["));
    }
    let num_pads = prompt.token_ids.iter().filter(|&&id| id == pad).count() as u64;
    assert_eq!(num_pads, plans.iter().map(|plan| plan.num_tokens).sum::<u64>());
    let expanded = |plan: &MediaPlan| {
        let pads = "]<]image[>[".repeat(plan.num_tokens as usize);
        format!("]<]start of image[>[{pads}]<]end of image[>[")
    };
    let [first, second] = plans.each_ref().map(expanded);
    let text =
        rendered.text().replacen("A]<]image[>[B]<]image[>[", &format!("A{first}B{second}"), 1);
    assert_eq!(prompt.token_ids, reference_ids(&text));
}

#[test]
fn clips_become_a_span_a_slice_with_the_time_as_text() {
    let body = format!(
        r#"{{"messages":[{{"role":"user","content":[{{"type":"text","text":"See: ]<"}},{CLIP},
            {{"type":"text","text":"]?"}}]}}]}}"#
    );
    let rendered = render(&body).unwrap();
    let clip = ClipInfo {
        size: ImageSize { width: 90, height: 50 },
        num_frames: 264,
        fps: 24.0,
        duration_s: 11.0,
    };
    let plan = tiny_model().spec.plan_clip(&clip, &SizeControls::default()).unwrap();
    let prompt =
        tiny_model().prompt_builder.expand(&rendered, std::slice::from_ref(&plan)).unwrap();
    assert_eq!(prompt.spans[0].len(), plan.grid.t as usize);
    let a_slice = plan.num_tokens / u64::from(plan.grid.t);
    assert!(prompt.spans[0].iter().all(|span| u64::from(span.length) == a_slice));
    let pads = "]<]video[>[".repeat(a_slice as usize);
    let expanded: String = plan
        .patch_times_s
        .iter()
        .map(|time| format!("]<]{time:.1} seconds[>[]<]start of image[>[{pads}]<]end of image[>["))
        .collect();
    // the time joins with the text before it, as it does for the reference
    let text = rendered.text().replacen("]<]video[>[", &expanded, 1);
    assert_eq!(prompt.token_ids, reference_ids(&text));
}

#[test]
fn a_run_of_spaces_too_long_for_the_engine_is_no_fault_of_ours() {
    let text = " ".repeat(12_000_000);
    match tiny_model().prompt_builder.encode_text(&text, false) {
        Ok(ids) => assert!(tiny_model().prompt_builder.decode(&ids) == text),
        Err(error) => assert_ne!(error.code, Some(crate::error::INTERNAL), "{error}"),
    }
}

#[test]
fn plans_that_do_not_belong_to_the_text_are_a_fault_of_ours() {
    let body = format!(r#"{{"messages":[{{"role":"user","content":[{PICTURE}]}}]}}"#);
    let rendered = render(&body).unwrap();
    let builder = &tiny_model().prompt_builder;
    let spec = &tiny_model().spec;
    let size = ImageSize { width: 56, height: 56 };
    let plan = spec.plan_image(size, &SizeControls::default()).unwrap();
    let as_clip = MediaPlan { kind: MediaKind::Video, ..plan.clone() };
    for plans in [vec![], vec![as_clip], vec![plan.clone(), plan.clone()]] {
        assert_eq!(
            builder.expand(&rendered, &plans).unwrap_err().code,
            Some(crate::error::INTERNAL)
        );
    }
    let wrong = MediaPlan { num_tokens: plan.num_tokens + 1, ..plan };
    assert_eq!(builder.expand(&rendered, &[wrong]).unwrap_err().code, Some(crate::error::INTERNAL));
}

/// The built-in model with another template.
fn with_template(source: &str) -> Model {
    let mut files = ModelFiles::read(&tiny_dir()).unwrap();
    files.chat_template = source.to_owned();
    with_spec(&files, tiny_model().spec.clone(), OPTIONS).unwrap()
}

#[test]
fn media_that_the_template_does_not_show_are_refused() {
    let model =
        with_template("{% for m in messages %}{{ m.content if m.content is string }}{% endfor %}");
    let body = format!(r#"{{"messages":[{{"role":"user","content":[{PICTURE},{CLIP}]}}]}}"#);
    let error = model.prompt_builder.render(&conversation(&body).unwrap()).unwrap_err();
    assert_eq!(error.kind, RequestErrorKind::InvalidRequest);
    assert!(error.message.contains("hold 2 pictures and clips"), "{error}");
    assert!(error.message.contains("template shows 0"), "{error}");
    // the right number in the wrong order is wrong as well
    let swapped = "{% for m in messages %}]<]video[>[]<]image[>[{% endfor %}";
    assert!(with_template(swapped).prompt_builder.render(&conversation(&body).unwrap()).is_err());
}

#[test]
fn a_refusal_of_the_template_is_shown_to_the_client() {
    let model = with_template("{{ raise_exception('roles must alternate') }}");
    let body = r#"{"messages":[{"role":"user","content":"Hi"}]}"#;
    let error = model.prompt_builder.render(&conversation(body).unwrap()).unwrap_err();
    assert_eq!(error.message, "roles must alternate");
    assert_eq!(error.param.as_deref(), Some("messages"));
}

#[test]
fn a_continued_message_is_left_open() {
    let body = format!(
        r#"{{"messages":[{},{}],"continue_final_message":true}}"#,
        message("user", "Hi"),
        message("assistant", "partial [e~["),
    );
    let rendered = render(&body).unwrap();
    assert!(rendered.text().ends_with("]~b]ai\n</mm:think>partial [e~["), "{}", rendered.text());
    let parsed = conversation(&body).unwrap();
    assert_eq!(parsed.output_options().thinking, crate::model::ThinkingMode::Disabled);
}

#[test]
fn control_tokens_of_a_text_completion_are_meant_as_such_but_media_are_not() {
    let builder = &tiny_model().prompt_builder;
    let text = "]~!b[]~b]user\nHi[e~[\n]~b]ai\n";
    let ids = builder.encode_text(text, false).unwrap();
    assert_eq!(ids, reference_ids(text));
    assert_eq!(ids[0], id("]~!b["));
    assert_eq!(builder.decode(&ids), text);
    let error = builder.encode_text("a ]<]image[>[", false).unwrap_err();
    assert!(error.message.contains("stands for media"), "{error}");
    assert!(builder.refuse_media_ids(&[5, id("]<]video[>[")]).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn plain_requests_get_the_ids_of_the_reference(
        user in "[ -;=?-Z\\\\^-~\n]{0,40}|[^\\]\\[<>]{0,40}",
        system in "[^\\]\\[<>]{0,40}",
        key in "[a-z]{1,6}",
        number in any::<f32>().prop_filter("finite", |n| n.is_finite()),
    ) {
        let body = format!(
            r#"{{"messages":[{},{}],"tools":[{{"type":"function","function":{{"name":"{key}",
                "parameters":{{"type":"object","properties":{{"{key}":{{"maximum":{number}}}}}}}}}}}]}}"#,
            message("system", &system),
            message("user", &user),
        );
        let rendered = render(&body).unwrap();
        prop_assert_eq!(prompt(&body).token_ids, reference_ids(rendered.text()));
    }
}
