//! Whatever a client writes, and wherever, the control tokens of its prompt are the template's.

use super::*;

/// A conversation with a place for every kind of client text; `reply` is the assistant's.
fn body(texts: &[String], reply: &str) -> String {
    let reply = Json::from(reply).to_compact();
    let slot = |at: usize| Json::from(texts[at % texts.len()].as_str()).to_compact();
    // names of one object must differ from each other
    let other = |at: usize| Json::from(format!("{at}{}", texts[at % texts.len()])).to_compact();
    let message =
        |role: &str, content: String| format!(r#"{{"role":"{role}","content":{content}}}"#);
    let text = |at| format!(r#"{{"type":"text","text":{}}}"#, slot(at));
    let call = format!(
        r#"{{"role":"assistant","content":{reply},"reasoning_content":{},"tool_calls":[{{"id":{},
        "function":{{"name":{},"arguments":{{{}:{},{}:[{},{{{}:{}}}]}}}}}}]}}"#,
        slot(5),
        slot(6),
        slot(7),
        slot(19),
        slot(8),
        other(20),
        slot(9),
        slot(21),
        slot(10),
    );
    let messages = [
        message("root", slot(0)),
        message("system", slot(1)),
        message("user", format!("[{},{PICTURE},{},{CLIP}]", text(3), text(4))),
        call,
        format!(
            r#"{{"role":"tool","tool_call_id":{},"content":[{},{PICTURE}]}}"#,
            slot(6),
            text(11)
        ),
        message("system", slot(12)),
        message("user", slot(13)),
    ];
    format!(
        r#"{{"messages":[{}],"tools":[{{"function":{{"name":"n","description":{},"extra":{},
        "parameters":{{"properties":{{{}:{{"description":{},"enum":[{}]}}}}}}}}}}],
        "chat_template_kwargs":{{"other":{}}}}}"#,
        messages.join(","),
        slot(14),
        slot(15),
        slot(22),
        slot(16),
        slot(17),
        slot(18),
    )
}

/// The added tokens of a prompt, in order, and its text.
fn tokens_of(body: &str) -> (Vec<u32>, String) {
    let rendered = render(body).unwrap();
    let tokens = rendered.pieces.iter().filter_map(|piece| match piece {
        Piece::Token(id) => Some(*id),
        Piece::Media { kind, .. } => Some(id(tiny_model().spec.media_marker(*kind))),
        Piece::Text(_) => None,
    });
    (tokens.collect(), rendered.text().to_owned())
}

fn client_text() -> impl Strategy<Value = String> {
    texts().prop_map(|text| if text.is_empty() { "x".to_owned() } else { text })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn typed_text_never_becomes_a_token(
        texts in proptest::collection::vec(client_text(), 1..24),
    ) {
        let (found, text) = tokens_of(&body(&texts, "x"));
        let harmless: Vec<String> = texts.iter().map(|_| "x".to_owned()).collect();
        let (wanted, _) = tokens_of(&body(&harmless, "x"));
        prop_assert_eq!(found, wanted);
        // no sentinel is left: what is in the text came from the client
        for sentinel in ['\u{fdd0}', '\u{fdd1}', '\u{fdd2}'] {
            let is_typed = texts.iter().any(|text| text.contains(sentinel));
            prop_assert!(is_typed || !text.contains(sentinel));
        }
    }

    #[test]
    fn protection_leaves_the_text_as_the_template_writes_it(
        texts in proptest::collection::vec(client_text(), 1..24),
        reply in texts(),
    ) {
        let model = tiny_model();
        let conversation = conversation(&body(&texts, &reply)).unwrap();
        let messages = model.spec.arrange_messages(&conversation.messages);
        let builder = &model.prompt_builder;
        let markers = model.spec.assistant_markers();
        let protected = Protected::new(builder.tokenizer(), markers, &messages, &conversation).unwrap();
        let bare = builder.render_protected(&protected.bare(), &conversation).unwrap();
        let rendered = builder.render(&conversation).unwrap();
        prop_assert_eq!(rendered.text(), bare);
    }
}

#[test]
fn a_token_cannot_be_put_together_from_pieces() {
    // the template prints `<` before a key and `>` behind it, and `[e~[` behind a message
    let call = r#"{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"",
        "tool_calls":[{"id":"1","function":{"name":"f","arguments":{"think":"</think"}}}]},
        {"role":"tool","tool_call_id":"1","content":"x"}]}"#;
    let before_end = r#"{"messages":[{"role":"user","content":"]<]image[>"}]}"#;
    for (body, content) in [(call, "<think>"), (before_end, "]<]image[>[")] {
        let (tokens, text) = tokens_of(body);
        assert!(text.contains(content), "{text}");
        assert!(!tokens.contains(&id(content)), "{text}");
    }
}

#[test]
fn every_character_a_sentinel_could_be_may_be_typed() {
    let noncharacters: String = ('\u{fdd0}'..='\u{fdef}').collect();
    let text = format!("{noncharacters}[e~[\u{fffe}\u{ffff}");
    let (tokens, rendered) = tokens_of(&format!(r#"{{"messages":[{}]}}"#, message("user", &text)));
    assert!(rendered.contains(&text));
    assert_eq!(tokens.iter().filter(|&&token| token == id("[e~[")).count(), 3);
}
