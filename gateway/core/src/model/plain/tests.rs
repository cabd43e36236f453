use super::*;
use crate::checkpoint::tests::OPTIONS;
use crate::checkpoint::{Model, open};
use crate::conversation::check_chat;
use crate::openai::RequestBody;
use crate::output::{EngineStop, MessageFolder, ReasoningField, ReplyFolder};

fn plain_model() -> Model {
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(dir.path()).unwrap();
    open(dir.path(), OPTIONS).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn a_second_model_runs_through_the_same_pipeline() {
    let model = plain_model();
    let body = br#"{"messages":[{"role":"user","content":[{"type":"text","text":"a<|end|>"},
        {"type":"image_url","image_url":"u"},{"type":"video_url","video_url":"v"}]}]}"#;
    let conversation = check_chat(RequestBody::parse(body).unwrap(), &model.limits()).unwrap();
    assert_eq!(conversation.generation.temperature, 0.5);
    let rendered = model.prompt_builder.render(&conversation).unwrap();
    assert_eq!(
        rendered.text(),
        "<|turn|>user: a<|end|><|picture|><|clip|><|end|><|turn|>assistant: "
    );
    let size = ImageSize { width: 60, height: 33 };
    let clip = ClipInfo { size, num_frames: 3, fps: 1.0, duration_s: 3.0 };
    let controls = SizeControls::default();
    let plans = [
        model.spec.plan_image(size, &controls).unwrap(),
        model.spec.plan_clip(&clip, &controls).unwrap(),
    ];
    let prompt = model.prompt_builder.expand(&rendered, &plans).unwrap();
    let text = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    let expected = [
        vec![256],
        text("user: a<|end|>"),
        vec![258; 4],
        vec![259; 8],
        vec![257, 256],
        text("assistant: "),
    ];
    assert_eq!(prompt.token_ids, expected.concat());
    assert_eq!((prompt.spans[0].len(), prompt.spans[1][0].length), (1, 8));

    let mut detokenizer = model.prompt_builder.detokenizer(true);
    let mut parser = model.spec.output_parser(&conversation.output_options());
    let mut folder = ReplyFolder::new("id", 0, ReasoningField::default());
    let mut message = MessageFolder::default();
    for id in text("é<think>").into_iter().chain([256]) {
        let mut events = Vec::new();
        parser.push(&detokenizer.push(&[id]), &mut events);
        folder.deltas(events).into_iter().for_each(|delta| message.add(delta));
    }
    let reply = message.finish(&folder);
    assert_eq!(reply.content.as_deref(), Some("é<think>"));
    assert_eq!(folder.finish_reason(EngineStop::Stop), crate::openai::FinishReason::Stop);
}
