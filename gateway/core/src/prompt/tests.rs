use crate::checkpoint::{Model, OpenOptions, open};
use crate::conversation::check_chat;
use crate::openai::RequestBody;
use crate::tokenizer::EngineChoice;
use std::path::Path;

pub(crate) fn tiny_model() -> Model {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../worker/m3stack/checkpoints/tiny");
    open(&dir, OpenOptions { engine: EngineChoice::Auto, clock: || 0 })
        .unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn renders() {
    let model = tiny_model();
    let body = br#"{"messages":[{"role":"user","content":"Hi <mm:think> ]~b]"}]}"#;
    let conversation = check_chat(RequestBody::parse(body).unwrap(), &model.limits()).unwrap();
    let rendered = model.prompt_builder.render(&conversation).unwrap();
    println!("{}", rendered.text());
    let prompt = model.prompt_builder.expand(&rendered, &[]).unwrap();
    println!(
        "{:?} {:?} {}",
        prompt,
        model.prompt_builder.tokenizer().fast_engine_refusal(),
        model.prompt_builder.tokenizer().engine_name()
    );
    assert_eq!(model.prompt_builder.decode(&prompt.token_ids), rendered.text());
}
