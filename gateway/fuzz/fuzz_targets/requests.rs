//! Any body of any protocol: it is refused by name or becomes a prompt, and what a client types
//! never becomes a control token.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use gateway_core::anthropic::check_messages;
use gateway_core::checkpoint::{Model, OpenOptions, open};
use gateway_core::conversation::{
    Conversation, Limits, check_chat, check_completion, check_detokenize, check_tokenize,
};
use gateway_core::json::Json;
use gateway_core::openai::RequestBody;
use gateway_core::responses::check_responses;
use gateway_core::tokenizer::EngineChoice;
use libfuzzer_sys::fuzz_target;

/// The model, how far requests may go, and what the tokens of a harmless conversation are.
struct Subject {
    model: Model,
    limits: Limits,
    harmless: Vec<u32>,
}

static SUBJECT: LazyLock<Subject> = LazyLock::new(|| {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../worker/m3stack/checkpoints/tiny");
    let options = OpenOptions { engine: EngineChoice::Fast, clock: || 1_700_000_000 };
    let model = open(Path::new(folder), options).expect("the built-in checkpoint");
    let limits = model.limits();
    let mut subject = Subject { model, limits, harmless: Vec::new() };
    subject.harmless = tokens_of(&subject, "x");
    subject
});

/// Control tokens of a prompt whose every place for a client's words holds these; the assistant's
/// own may hold some.
fn tokens_of(subject: &Subject, words: &str) -> Vec<u32> {
    let text = Json::from(words).to_compact();
    let body = format!(
        r#"{{"messages":[{{"role":"system","content":{text}}},{{"role":"user","content":[
        {{"type":"text","text":{text}}},{{"type":"text","text":{text}}}]}},
        {{"role":"assistant","content":"x","reasoning_content":{text},"tool_calls":[{{"id":"1",
        "function":{{"name":"f","arguments":{{"k":{text},"l":[{text}]}}}}}}]}},
        {{"role":"tool","tool_call_id":"1","content":{text}}},{{"role":"user","content":{text}}}],
        "tools":[{{"function":{{"name":"f","description":{text},
        "parameters":{{"properties":{{"k":{{"description":{text},"enum":[{text}]}}}}}}}}}}],
        "chat_template_kwargs":{{"other":{text}}}}}"#
    );
    let body = RequestBody::parse(body.as_bytes()).expect("a body of ours");
    let chat = check_chat(body, &subject.limits).expect("a conversation of ours");
    let rendered = subject.model.prompt_builder.render(&chat).expect("a prompt of ours");
    let builder = &subject.model.prompt_builder;
    let prompt = builder.expand(&rendered, &[]).expect("a prompt without media");
    let added = builder.tokenizer().added();
    prompt.token_ids.into_iter().filter(|id| added.by_id(*id).is_some()).collect()
}

/// Goes as far with a conversation as can be gone without its media and a worker.
fn prepare(subject: &Subject, conversation: &Conversation) {
    if let Ok(rules) = conversation.output_rules() {
        let _ = subject.model.spec.constraint(&rules);
        subject.model.spec.banned_token_ids(&rules);
    }
    let builder = &subject.model.prompt_builder;
    if let Ok(rendered) = builder.render(conversation)
        && conversation.media.is_empty()
    {
        let prompt = builder.expand(&rendered, &[]).expect("a prompt without media");
        assert!(prompt.spans.is_empty());
    }
}

fuzz_target!(|bytes: &[u8]| {
    let subject = &*SUBJECT;
    let [kind, rest @ ..] = bytes else { return };
    if kind % 8 == 7 {
        // the language has names for control tokens only: none may come of a client's words
        let words = String::from_utf8_lossy(rest);
        if !words.is_empty() {
            assert_eq!(tokens_of(subject, &words), subject.harmless, "{words:?}");
        }
        return;
    }
    let Ok(body) = RequestBody::parse(rest) else { return };
    let limits = &subject.limits;
    let conversation = match kind % 8 {
        0 | 1 | 2 => check_chat(body, limits),
        3 => check_messages(body, limits).map(|task| task.conversation),
        4 => check_responses(body, limits).map(|task| task.conversation),
        5 => {
            let _ = check_completion(body, limits);
            return;
        }
        _ => {
            let _ = check_tokenize(body.clone(), limits);
            let _ = check_detokenize(body, limits);
            return;
        }
    };
    match conversation {
        Ok(conversation) => prepare(subject, &conversation),
        Err(refusal) => assert!(!refusal.message.is_empty()),
    }
});
