use super::*;
use crate::conversation::tests::{chat, limits, refusal};
use crate::conversation::{MediaRef, check_chat};
use crate::model::SizeControls;
use crate::openai::{Delta, FinishReason, FunctionDelta, ToolCallDelta};
use proptest::prelude::*;

fn task(body: &str) -> Result<MessagesTask, RequestError> {
    check_messages(RequestBody::parse(body.as_bytes())?, &limits())
}

fn talk(members: &str) -> Result<Conversation, RequestError> {
    task(&format!(r#"{{"max_tokens":9,{members}}}"#)).map(|task| task.conversation)
}

const HI: &str = r#""messages":[{"role":"user","content":"Hi"}]"#;

/// The same request in both protocols.
fn same(messages: &str, as_chat: &str) {
    let ours = talk(messages).unwrap();
    let theirs = chat(&format!(r#"{{"max_tokens":9,"thinking":{{"type":"disabled"}},{as_chat}}}"#));
    let mut theirs = theirs.unwrap();
    theirs.generation.fit_context = true;
    theirs.media.clone_from(&ours.media);
    for (mine, their) in ours.tool_schemas.iter().zip(theirs.tool_schemas.iter()) {
        assert_eq!((&mine.name, &mine.parameters), (&their.name, &their.parameters));
    }
    // where they stand, and what each protocol says beside them
    theirs.tool_schemas = ours.tool_schemas.clone();
    assert_eq!(ours, theirs);
}

#[test]
fn a_whole_tool_turn_becomes_the_conversation_of_a_chat() {
    same(
        r#""system":"Be terse.","temperature":0.5,"top_p":0.5,"top_k":3,"stop_sequences":["x"],
        "tools":[{"name":"f","description":"d","input_schema":{"type":"object","properties":
            {"b":{"type":"integer"},"a":{}}},"cache_control":{"type":"ephemeral"}}],
        "messages":[{"role":"user","content":"Go"},
          {"role":"assistant","content":[{"type":"thinking","thinking":"hm","signature":"s"},
            {"type":"text","text":"So"},
            {"type":"tool_use","id":"t1","name":"f","input":{"b":1.50}},
            {"type":"tool_use","id":"t2","name":"f","input":{}}]},
          {"role":"user","content":[
            {"type":"tool_result","tool_use_id":"t2","content":"two"},
            {"type":"tool_result","tool_use_id":"t1","content":[{"type":"text","text":"one"}]},
            {"type":"text","text":"And?"}]}]"#,
        r#""temperature":0.5,"top_p":0.5,"top_k":3,"stop":["x"],
        "tools":[{"type":"function","function":{"name":"f","description":"d","parameters":
            {"type":"object","properties":{"b":{"type":"integer"},"a":{}}}}}],
        "messages":[{"role":"system","content":"Be terse."},{"role":"user","content":"Go"},
          {"role":"assistant","content":"So","reasoning_content":"hm","tool_calls":[
            {"id":"t1","type":"function","function":{"name":"f","arguments":"{\"b\":1.50}"}},
            {"id":"t2","type":"function","function":{"name":"f","arguments":"{}"}}]},
          {"role":"tool","tool_call_id":"t1","content":"one"},
          {"role":"tool","tool_call_id":"t2","content":"two"},
          {"role":"user","content":"And?"}]"#,
    );
}

#[test]
fn a_turn_of_calls_alone_and_a_late_system_message_keep_their_places() {
    same(
        r#""messages":[{"role":"user","content":"Go"},
          {"role":"assistant","content":[{"type":"tool_use","id":"t","name":"f","input":{}}]},
          {"role":"user","content":[{"type":"tool_result","tool_use_id":"t"}]},
          {"role":"system","content":"Hurry."}]"#,
        r#""messages":[{"role":"user","content":"Go"},
          {"role":"assistant","tool_calls":[{"id":"t","function":{"name":"f"}}]},
          {"role":"tool","tool_call_id":"t","content":""},
          {"role":"system","content":"Hurry."}]"#,
    );
}

#[test]
fn results_spread_over_turns_stand_behind_their_calls_and_the_words_between_are_kept() {
    same(
        r#""messages":[{"role":"user","content":"Go"},
          {"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":{}},
            {"type":"tool_use","id":"b","name":"f","input":{}}]},
          {"role":"user","content":[{"type":"tool_result","tool_use_id":"b","content":"B"},
            {"type":"text","text":"wait"}]},
          {"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":"A"}]}]"#,
        r#""messages":[{"role":"user","content":"Go"},
          {"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f"}},
            {"id":"b","function":{"name":"f"}}]},
          {"role":"tool","tool_call_id":"a","content":"A"},
          {"role":"tool","tool_call_id":"b","content":"B"},
          {"role":"user","content":"wait"}]"#,
    );
}

#[test]
fn a_last_assistant_message_is_continued() {
    same(
        r#""messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"I am"}]"#,
        r#""continue_final_message":true,
        "messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"I am"}]"#,
    );
    let empty = talk(r#""messages":[{"role":"user","content":"Hi"},{"role":"assistant"}]"#);
    assert_eq!(refusal(empty).0, "messages");
}

#[test]
fn pictures_and_clips_are_media_wherever_they_stand() {
    let conversation = talk(
        r#""messages":[{"role":"user","content":[
            {"type":"image","source":{"type":"base64","media_type":"image/png","data":"AAAA"}},
            {"type":"text","text":"?"},
            {"type":"video","fps":2,"source":{"type":"url","url":"https://v/1.mp4"}}]},
          {"role":"assistant","content":[{"type":"tool_use","id":"t","name":"f","input":{}}]},
          {"role":"user","content":[
            {"type":"text","text":"see"},{"type":"image","source":{"type":"url","url":"https://p/2"}},
            {"type":"tool_result","tool_use_id":"t","content":[
              {"type":"image","detail":"low","source":{"type":"url","url":"https://p/1"}}]}]}]"#,
    )
    .unwrap();
    let item = |kind, url: &str, param: &str, controls| MediaRef {
        kind,
        url: url.to_owned(),
        controls,
        param: param.to_owned(),
    };
    use crate::model::MediaKind::{Image, Video};
    let plain = SizeControls::default();
    let low = SizeControls { detail: Some("low".to_owned()), ..plain.clone() };
    let fast = SizeControls { fps: Some(2.0), ..plain.clone() };
    let at = |turn: u32, place: &str| format!("messages[{turn}].content[{place}");
    assert_eq!(
        conversation.media,
        [
            item(Image, "data:image/png;base64,AAAA", &at(0, "0].source.data"), plain.clone()),
            item(Video, "https://v/1.mp4", &at(0, "2].source.url"), fast),
            item(Image, "https://p/1", &at(2, "2].content[0].source.url"), low),
            item(Image, "https://p/2", &at(2, "1].source.url"), plain),
        ]
    );
    assert_eq!(conversation.messages.len(), 4);
    assert_eq!(
        conversation.messages[2].get("content").unwrap().to_compact(),
        r#"[{"type":"image"}]"#
    );
}

#[test]
fn system_blocks_are_texts_of_their_own_without_what_is_for_accounting() {
    let conversation = talk(&format!(
        r#""system":[{{"type":"text","text":"x-anthropic-billing-header: n=7;"}},
        {{"type":"text","text":"One.","cache_control":{{"type":"ephemeral"}}}},
        {{"type":"text","text":"Two."}}],{HI}"#
    ));
    let messages = conversation.unwrap().messages;
    assert_eq!(messages[0].get("content").and_then(Json::as_str), Some("One.\n\nTwo."));
}

#[test]
fn thinking_is_off_unless_asked_for() {
    let mode = |members: &str| talk(&format!("{members}{HI}")).unwrap().thinking.unwrap();
    assert_eq!(mode(""), ThinkingMode::Disabled);
    assert_eq!(mode(r#""thinking":{"type":"disabled"},"#), ThinkingMode::Disabled);
    let enabled = r#""thinking":{"type":"enabled","budget_tokens":1024},"#;
    assert_eq!(mode(enabled), ThinkingMode::Enabled);
    assert_eq!(mode(r#""thinking":{"type":"adaptive"},"#), ThinkingMode::Adaptive);
    let hidden =
        format!(r#"{{"max_tokens":1,"thinking":{{"type":"adaptive","display":"omitted"}},{HI}}}"#);
    assert!(task(&hidden).unwrap().hides_thinking);
}

#[test]
fn choices_of_tools_have_their_meaning() {
    let choice = |choice: &str| {
        talk(&format!(
            r#""tools":[{{"name":"f","input_schema":{{}}}}],"tool_choice":{choice},{HI}"#
        ))
    };
    let auto = choice(r#"{"type":"auto","disable_parallel_tool_use":true}"#).unwrap();
    assert_eq!((auto.tool_choice, auto.parallel_tool_calls), (ToolChoice::Auto, false));
    assert_eq!(choice(r#"{"type":"any"}"#).unwrap().tool_choice, ToolChoice::Required);
    let named = choice(r#"{"type":"tool","name":"f"}"#).unwrap().tool_choice;
    assert_eq!(named, ToolChoice::Named("f".to_owned()));
    let none = choice(r#"{"type":"none"}"#).unwrap();
    assert!(none.tools.is_empty() && none.tool_choice == ToolChoice::None);
    assert!(refusal(choice(r#"{"type":"tool","name":"g"}"#)).1.contains("\"g\""));
}

#[test]
fn a_length_beyond_the_context_is_no_mistake() {
    let generation = task(&format!(r#"{{"max_tokens":999999,"n":3,{HI}}}"#));
    let generation = generation.unwrap().conversation.generation;
    assert_eq!((generation.max_tokens, generation.num_samples), (Some(999_999), 1));
    assert!(generation.fit_context);
}

#[test]
fn mistakes_name_their_place_in_the_clients_own_body() {
    let at = |members: &str| refusal(talk(members)).0;
    let user = |block: &str| at(&format!(r#""messages":[{{"role":"user","content":[{block}]}}]"#));
    assert_eq!(refusal(task(&format!("{{{HI}}}")).map(|task| task.conversation)).0, "max_tokens");
    assert_eq!(at(r#""messages":[]"#), "messages");
    assert_eq!(at(r#""messages":[{"role":"tool","content":""}]"#), "messages[0].role");
    assert_eq!(user(r#"{"type":"sound"}"#), "messages[0].content[0].type");
    assert_eq!(user(r#"{"type":"image"}"#), "messages[0].content[0].source");
    let file = r#"{"type":"image","source":{"type":"file","file_id":"f"}}"#;
    assert_eq!(user(file), "messages[0].content[0].source.type");
    let sly = r#"{"type":"image","source":{"type":"base64","media_type":"a,b","data":""}}"#;
    assert_eq!(user(sly), "messages[0].content[0].source.media_type");
    let stray = r#"{"type":"tool_result","tool_use_id":"q","content":""}"#;
    assert_eq!(user(stray), "messages[0].content[0].tool_use_id");
    let open =
        r#"{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"f","input":{}}]}"#;
    assert_eq!(at(&format!(r#""messages":[{open}]"#)), "messages[0].content");
    let later = r#"{"role":"user","content":"well"}"#;
    assert_eq!(at(&format!(r#""messages":[{open},{later}]"#)), "messages[0].content");
    let with = |members: &str| at(&format!("{members},{HI}"));
    assert_eq!(with(r#""temperature":3"#), "temperature");
    assert_eq!(with(r#""stop_sequences":"x","max_tokens":"y""#), "max_tokens");
    assert_eq!(with(r#""stop_sequences":[1]"#), "stop_sequences[0]");
    assert_eq!(with(r#""thinking":{"type":"deep"}"#), "thinking.type");
    assert_eq!(with(r#""mcp_servers":[{}]"#), "mcp_servers");
    assert_eq!(with(r#""thread":{"type":"create"}"#), "thread");
    assert_eq!(with(r#""tools":[{"type":"web_search_1","name":"w"}]"#), "tools[0].type");
    assert_eq!(with(r#""tools":[{"name":"w"}]"#), "tools[0].input_schema");
}

#[test]
fn a_count_needs_no_length() {
    let body = RequestBody::parse(format!("{{{HI}}}").as_bytes()).unwrap();
    let chat = check_chat(body.clone(), &limits()).unwrap();
    assert_eq!(check_count(body, &limits()).unwrap().messages, chat.messages);
}

fn call(index: usize, name: Option<&str>, arguments: &str) -> Delta {
    let function = FunctionDelta { name: name.map(str::to_owned), arguments: arguments.to_owned() };
    let id = name.map(|_| format!("call_{index}"));
    Delta {
        tool_calls: vec![ToolCallDelta { index, id, kind: None, function }],
        ..Delta::default()
    }
}

fn content(text: &str) -> Delta {
    Delta { content: Some(text.to_owned()), ..Delta::default() }
}

fn reasoning(text: &str) -> Delta {
    Delta { reasoning_content: Some(text.to_owned()), ..Delta::default() }
}

fn fold(deltas: Vec<Delta>, hides_thinking: bool) -> Vec<Event> {
    let (mut folder, mut events) = (BlockFolder::new(hides_thinking), Vec::new());
    deltas.into_iter().for_each(|delta| folder.add(vec![delta], &mut events));
    folder.finish(&mut events);
    events
}

fn shown(events: &[Event]) -> Vec<String> {
    events.iter().map(|event| serde_json::to_string(event).unwrap()).collect()
}

#[test]
fn words_after_a_call_open_a_block_of_their_own() {
    let events = fold(
        vec![call(0, Some("f"), ""), call(0, None, "{\"a\""), call(0, None, ":1}"), content("ok")],
        false,
    );
    assert_eq!(
        shown(&events),
        [
            r#"{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"toolu_0","name":"f","input":{}}}"#,
            r#"{"type":"content_block_delta","index":0,"delta":{"type":"input_json_delta","partial_json":"{\"a\""}}"#,
            r#"{"type":"content_block_delta","index":0,"delta":{"type":"input_json_delta","partial_json":":1}"}}"#,
            r#"{"type":"content_block_stop","index":0}"#,
            r#"{"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}"#,
            r#"{"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"ok"}}"#,
            r#"{"type":"content_block_stop","index":1}"#,
        ]
    );
}

#[test]
fn hidden_thinking_leaves_its_signature() {
    let folded = |hides| {
        let mut whole = MessageFolder::default();
        let events = fold(vec![reasoning("h"), reasoning("m"), content("So")], hides);
        events.into_iter().for_each(|event| whole.add(event));
        serde_json::to_value(whole.finish()).unwrap()
    };
    let (open, hidden) = (folded(false), folded(true));
    assert_eq!((&open[0]["thinking"], &hidden[0]["thinking"]), (&"hm".into(), &"".into()));
    assert_eq!(open[0]["signature"], hidden[0]["signature"]);
    assert_eq!(open[0]["signature"].as_str().unwrap().len(), 64);
    assert_eq!(open[1], hidden[1]);
}

#[test]
fn a_call_that_was_cut_is_not_in_the_whole_message() {
    let mut whole = MessageFolder::default();
    let deltas = vec![call(0, Some("f"), "{\"z\":1.0,\"a\":2}"), call(1, Some("g"), "{\"a\":")];
    fold(deltas, false).into_iter().for_each(|event| whole.add(event));
    assert_eq!(
        serde_json::to_string(&whole.finish()).unwrap(),
        r#"[{"type":"tool_use","id":"toolu_0","name":"f","input":{"z":1.0,"a":2}}]"#
    );
}

#[test]
fn the_reason_of_the_end_is_told_in_their_words() {
    let reason = |reason, text, made| stop_reason(reason, text, (Some(5), made));
    assert_eq!(reason(FinishReason::Stop, None, 3), StopReason::EndTurn);
    assert_eq!(reason(FinishReason::Stop, Some("x"), 3), StopReason::StopSequence);
    assert_eq!(reason(FinishReason::ToolCalls, None, 3), StopReason::ToolUse);
    assert_eq!(reason(FinishReason::Length, None, 5), StopReason::MaxTokens);
    assert_eq!(reason(FinishReason::Length, None, 4), StopReason::ModelContextWindowExceeded);
}

fn any_delta() -> impl Strategy<Value = Vec<Delta>> {
    let piece = prop_oneof![
        "[a-z]{0,3}".prop_map(|text| vec![content(&text)]),
        "[a-z]{0,3}".prop_map(|text| vec![reasoning(&text)]),
        "[a-z]{0,3}".prop_map(|text| {
            vec![call(0, Some("f"), "{\"a\":\""), call(0, None, &text), call(0, None, "\"}")]
        }),
    ];
    proptest::collection::vec(piece, 0..12).prop_map(|pieces| {
        let mut calls = 0;
        let mut deltas: Vec<Delta> = pieces.into_iter().flatten().collect();
        for delta in &mut deltas {
            for part in &mut delta.tool_calls {
                calls += usize::from(part.id.is_some());
                part.index = calls - 1;
                part.id = part.id.as_ref().map(|_| format!("call_{}", calls - 1));
            }
        }
        deltas
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_block_opens_grows_and_closes_once_in_order(deltas in any_delta()) {
        let (mut open, mut next) = (None, 0);
        for event in fold(deltas, false) {
            match event {
                Event::ContentBlockStart { index, .. } => {
                    prop_assert_eq!((open, index), (None, next));
                    open = Some(index);
                    next += 1;
                }
                Event::ContentBlockDelta { index, .. } => prop_assert_eq!(open, Some(index)),
                Event::ContentBlockStop { index } => {
                    prop_assert_eq!(open.take(), Some(index));
                }
                other => prop_assert!(false, "unexpected {}", other.name()),
            }
        }
        prop_assert_eq!(open, None);
    }

    #[test]
    fn no_word_is_lost(deltas in any_delta()) {
        let words: String = deltas
            .iter()
            .flat_map(|delta| [&delta.content, &delta.reasoning_content])
            .flatten()
            .cloned()
            .collect();
        let calls = deltas.iter().filter(|d| d.tool_calls.iter().any(|c| c.id.is_some())).count();
        let mut whole = MessageFolder::default();
        fold(deltas, false).into_iter().for_each(|event| whole.add(event));
        let (mut told, mut made) = (String::new(), 0);
        for block in whole.finish() {
            match block {
                Block::Text { text } => told.push_str(&text),
                Block::Thinking { thinking, .. } => told.push_str(&thinking),
                Block::ToolUse { .. } => made += 1,
            }
        }
        prop_assert_eq!((told, made), (words, calls));
    }
}
