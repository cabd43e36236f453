use super::*;
use crate::checkpoint::tests::tiny_model;

fn roles_and_texts(messages: &[(&str, &str)]) -> Vec<(String, String)> {
    let messages = messages
        .iter()
        .map(|&(role, text)| Json::object([("role", role.into()), ("content", text.into())]));
    let messages: Vec<Json> = messages.collect();
    let arranged = messages::arrange(&messages);
    let text = |message: &Json, key: &str| {
        message.get(key).and_then(Json::as_str).unwrap_or_default().to_owned()
    };
    arranged.iter().map(|message| (text(message, "role"), text(message, "content"))).collect()
}

#[test]
fn instructions_stand_where_the_template_shows_them() {
    for (messages, expected) in [
        (vec![("user", "u")], vec![("user", "u")]),
        (vec![("system", "a"), ("user", "u")], vec![("system", "a"), ("user", "u")]),
        (vec![("system", "a"), ("developer", "b")], vec![("system", "a\n\nb")]),
        (
            vec![("root", "r"), ("system", "a"), ("system", "b")],
            vec![("root", "r"), ("system", "a\n\nb")],
        ),
        (
            vec![("root", "r"), ("root", "s"), ("user", "u")],
            vec![("root", "r\n\ns"), ("user", "u")],
        ),
        // a root behind other instructions joins them
        (vec![("system", "a"), ("root", "r")], vec![("system", "a\n\nr")]),
        (vec![("system", ""), ("system", "b")], vec![("system", "b")]),
        (
            vec![("user", "u"), ("system", "a"), ("assistant", "x"), ("root", "r")],
            vec![("user", "u"), ("user", "a"), ("assistant", "x"), ("user", "r")],
        ),
    ] {
        let found = roles_and_texts(&messages);
        let found: Vec<(&str, &str)> =
            found.iter().map(|(role, text)| (role.as_str(), text.as_str())).collect();
        assert_eq!(found, expected);
    }
}

#[test]
fn instructions_with_pictures_are_joined_part_by_part() {
    let parts = Json::parse(br#"[{"type":"image"},{"type":"text","text":"p"}]"#).unwrap();
    let messages = [
        Json::object([("role", "system".into()), ("content", "a".into())]),
        Json::object([("role", "developer".into()), ("content", parts)]),
    ];
    let arranged = messages::arrange(&messages);
    assert_eq!(
        arranged[0].get("content").unwrap().to_compact(),
        r#"[{"type":"text","text":"a"},{"type":"text","text":"\n\n"},{"type":"image"},{"type":"text","text":"p"}]"#
    );
}

#[test]
fn every_mode_has_its_word() {
    let word = |mode| tiny_model().spec.template_variables(mode)["thinking_mode"].clone();
    assert_eq!(word(ThinkingMode::Enabled), "enabled".into());
    assert_eq!(word(ThinkingMode::Disabled), "disabled".into());
    assert_eq!(word(ThinkingMode::Adaptive), "adaptive".into());
}

#[test]
fn the_reply_ends_with_the_message() {
    let model = tiny_model();
    let end = model.prompt_builder.tokenizer().added().by_content(MESSAGE_END).unwrap().id;
    assert_eq!(model.spec.stop_token_ids(), [end]);
    assert_eq!(model.spec.facts().eos_token_id, end);
}

#[test]
fn what_the_parser_reads_is_never_hidden() {
    for marker in OUTPUT_MARKERS {
        assert!(!CONTROL_TOKENS.contains(&marker));
    }
}
