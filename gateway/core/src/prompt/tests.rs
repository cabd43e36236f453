use crate::checkpoint::tests::tiny_model;
use crate::conversation::check_chat;
use crate::openai::RequestBody;

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
