use super::*;
use crate::conversation::tests::{chat, limits, refusal};
use crate::openai::{Delta, FinishReason, FunctionDelta, ToolCallDelta, Usage};
use proptest::prelude::*;

fn task(members: &str) -> Result<ResponsesTask, RequestError> {
    let body = RequestBody::parse(format!("{{{members}}}").as_bytes())?;
    check_responses(body, &limits())
}

fn same(members: &str, as_chat: &str) {
    let ours = task(members).unwrap().conversation;
    let mut theirs = chat(&format!("{{{as_chat}}}")).unwrap();
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
        r#""instructions":"Be terse.","temperature":0.5,"max_output_tokens":7,
        "tools":[{"type":"function","name":"f","description":"d","strict":true,
            "parameters":{"type":"object","properties":{"b":{"type":"integer"},"a":{}}}}],
        "input":[{"role":"user","content":[{"type":"input_text","text":"Go"}]},
          {"type":"reasoning","id":"rs","summary":[],
            "content":[{"type":"reasoning_text","text":"hm"}]},
          {"type":"message","role":"assistant","content":[{"type":"output_text","text":"So"}]},
          {"type":"function_call","call_id":"c1","name":"f","arguments":"{\"b\":1.50}"},
          {"type":"function_call","call_id":"c2","name":"f","arguments":"{}"},
          {"type":"function_call_output","call_id":"c2","output":"two"},
          {"role":"developer","content":"Hurry."},
          {"type":"function_call_output","call_id":"c1","output":"one"}]"#,
        r#""temperature":0.5,"max_tokens":7,
        "tools":[{"type":"function","function":{"name":"f","description":"d","parameters":
            {"type":"object","properties":{"b":{"type":"integer"},"a":{}}}}}],
        "messages":[{"role":"system","content":"Be terse."},{"role":"user","content":"Go"},
          {"role":"assistant","content":"So","reasoning_content":"hm","tool_calls":[
            {"id":"c1","type":"function","function":{"name":"f","arguments":"{\"b\":1.50}"}},
            {"id":"c2","type":"function","function":{"name":"f","arguments":"{}"}}]},
          {"role":"tool","tool_call_id":"c1","content":"one"},
          {"role":"tool","tool_call_id":"c2","content":"two"},
          {"role":"developer","content":"Hurry."}]"#,
    );
}

#[test]
fn a_string_is_one_user_message_and_pictures_are_media() {
    same(r#""input":"Hi""#, r#""messages":[{"role":"user","content":"Hi"}]"#);
    let with_picture = task(
        r#""input":[{"role":"user","content":[{"type":"input_image","image_url":"https://p/1"}]}]"#,
    );
    let media = with_picture.unwrap().conversation.media;
    assert_eq!(
        (media[0].url.as_str(), media[0].param.as_str()),
        ("https://p/1", "input[0].content[0].image_url")
    );
}

#[test]
fn mistakes_and_wishes_for_state_name_their_place() {
    let at = |members: &str| refusal(task(members).map(|task| task.conversation)).0;
    assert_eq!(at(r#""model":"m""#), "input");
    assert_eq!(at(r#""input":[]"#), "input");
    for key in ["store", "background"] {
        assert_eq!(at(&format!(r#""input":"Hi","{key}":true"#)), key);
    }
    assert_eq!(at(r#""input":"Hi","previous_response_id":"resp_1""#), "previous_response_id");
    assert_eq!(at(r#""input":[{"type":"item_reference","id":"x"}]"#), "input[0].type");
    assert_eq!(
        at(r#""input":[{"type":"function_call_output","call_id":"c","output":""}]"#),
        "input[0].call_id"
    );
    let open = r#"{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}"#;
    assert_eq!(at(&format!(r#""input":[{open}]"#)), "input[0]");
    assert_eq!(at(&format!(r#""input":[{open},{{"role":"user","content":"x"}}]"#)), "input[0]");
    assert_eq!(at(r#""input":"Hi","tools":[{"type":"web_search"}]"#), "tools[0].type");
    let search = r#"{"type":"namespace","name":"n","tools":[{"type":"custom","name":"c"}]}"#;
    assert_eq!(at(&format!(r#""input":"Hi","tools":[{search}]"#)), "tools[0].tools[0].type");
    assert_eq!(at(r#""input":"Hi","tools":[{"type":"namespace"}]"#), "tools[0].name");
    assert_eq!(at(r#""input":"Hi","max_output_tokens":0"#), "max_output_tokens");
    assert_eq!(at(r#""input":"Hi","text":{"format":{"type":"xml"}}"#), "text.format.type");
}

#[test]
fn functions_of_a_namespace_are_known_by_both_names_and_called_by_each() {
    let inner = r#"{"type":"function","name":"spawn","parameters":{"type":"object"}}"#;
    let tools =
        format!(r#"[{{"type":"namespace","name":"crew","description":"d","tools":[{inner}]}}]"#);
    let task = task(&format!(
        r#""tools":{tools},"input":[{{"role":"user","content":"Go"}},
        {{"type":"function_call","call_id":"c","namespace":"crew","name":"spawn","arguments":"{{}}"}},
        {{"type":"function_call_output","call_id":"c","output":"ok"}}]"#
    ))
    .unwrap();
    let conversation = &task.conversation;
    assert_eq!(conversation.tool_schemas[0].name, "crew.spawn");
    assert_eq!(conversation.tool_schemas[0].param, "tools[0].tools[0].parameters");
    let history = conversation.messages[1].to_compact();
    assert!(history.contains(r#""name":"crew.spawn""#), "{history}");

    let mut folder = ResponseFolder::new("resp_1", 0, "m", task.echo);
    let deltas = vec![call(0, Some("crew.spawn"), "{}"), call(1, Some("crewless"), "{}")];
    folder.add(deltas);
    let ending = Ending { reason: FinishReason::ToolCalls, usage: Usage::default() };
    let last = folder.end(&ending).pop().unwrap();
    let calls = &last["response"]["output"];
    assert_eq!((&calls[0]["namespace"], &calls[0]["name"]), (&json!("crew"), &json!("spawn")));
    assert_eq!((calls[1].get("namespace"), &calls[1]["name"]), (None, &json!("crewless")));
}

#[test]
fn functions_of_namespaces_are_told_apart() {
    let function = |name: &str| format!(r#"{{"type":"function","name":"{name}"}}"#);
    let space = |name: &str, inner: &str| {
        format!(r#"{{"type":"namespace","name":"{name}","tools":[{}]}}"#, function(inner))
    };
    // one namespace begins as another does, and so does a plain function
    let tools = [space("a", "x"), space("a.b", "c"), function("a.y")].join(",");
    let asked = |choice: &str| task(&format!(r#""input":"Go","tools":[{tools}]{choice}"#));
    let mut folder = ResponseFolder::new("resp_1", 0, "m", asked("").unwrap().echo);
    let names = ["a.x", "a.b.c", "a.y"];
    folder.add((0..3).map(|at| call(at, Some(names[at]), "{}")).collect());
    let ending = Ending { reason: FinishReason::ToolCalls, usage: Usage::default() };
    let last = folder.end(&ending).pop().unwrap();
    let found = [0, 1, 2].map(|at| {
        let call = &last["response"]["output"][at];
        (call["namespace"].as_str(), call["name"].as_str().unwrap())
    });
    assert_eq!(found, [(Some("a"), "x"), (Some("a.b"), "c"), (None, "a.y")]);

    // one of them can be forced, or alone allowed
    let one = r#"{"type":"function","namespace":"a.b","name":"c"}"#;
    let forced = asked(&format!(r#","tool_choice":{one}"#)).unwrap().conversation.tool_choice;
    assert_eq!(forced, ToolChoice::Named("a.b.c".into()));
    let allowed = format!(r#","tool_choice":{{"type":"allowed_tools","tools":[{one}]}}"#);
    let allowed = asked(&allowed).unwrap().conversation.tool_choice;
    assert_eq!(allowed, ToolChoice::Allowed { names: vec!["a.b.c".into()], required: false });

    // what could not be told apart is refused
    let double = [space("a", "b.c"), space("a.b", "c")].join(",");
    let refused =
        refusal(task(&format!(r#""input":"Go","tools":[{double}]"#)).map(|task| task.conversation));
    assert_eq!(refused.0, "tools[1].tools[0].name");
}

#[test]
fn the_parameters_in_force_are_repeated() {
    let echo = task(r#""input":"Hi","instructions":"x","temperature":0.5"#).unwrap().echo;
    assert_eq!((&echo["instructions"], &echo["temperature"]), (&json!("x"), &json!(0.5)));
    assert_eq!((&echo["store"], &echo["tool_choice"]), (&json!(false), &json!("auto")));
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

fn events(deltas: Vec<Delta>, reason: FinishReason) -> Vec<Value> {
    let mut folder = ResponseFolder::new("resp_1", 7, "m3", json!({"store": false}));
    let mut events = folder.begin();
    deltas.into_iter().for_each(|delta| events.extend(folder.add(vec![delta])));
    events.extend(folder.end(&Ending { reason, usage: Usage::default() }));
    events
}

#[test]
fn events_come_in_the_order_of_the_api() {
    let deltas = vec![
        reasoning("hm"),
        content("a"),
        content("b"),
        call(0, Some("f"), "{"),
        call(0, None, "}"),
    ];
    let events = events(deltas, FinishReason::ToolCalls);
    let kinds: Vec<_> = events
        .iter()
        .map(|event| event["type"].as_str().unwrap().strip_prefix("response.").unwrap())
        .collect();
    assert_eq!(
        kinds,
        [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        ]
    );
    let numbers = events.iter().map(|event| event["sequence_number"].as_u64().unwrap());
    assert!(numbers.eq(0..events.len() as u64));
    let response = &events.last().unwrap()["response"];
    assert_eq!(response["output"][1]["content"][0]["text"], "ab");
    assert_eq!(response["output"][2]["arguments"], "{}");
    assert_eq!(response["output"][2]["call_id"], "call_0");
}

#[test]
fn a_cut_response_is_incomplete_and_so_is_its_last_item() {
    let events = events(vec![content("a"), call(0, Some("f"), "{\"x\":")], FinishReason::Length);
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.incomplete");
    let response = &last["response"];
    assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(response["output"][0]["status"], "completed");
    assert_eq!(response["output"][1]["status"], "incomplete");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_word_is_lost_and_items_close_in_order(
        pieces in proptest::collection::vec(("[a-z]{0,3}", any::<bool>()), 0..12)
    ) {
        let words: String = pieces.iter().map(|(text, _)| text.as_str()).collect();
        let deltas = pieces
            .iter()
            .map(|(text, thinks)| if *thinks { reasoning(text) } else { content(text) });
        let events = events(deltas.collect(), FinishReason::Stop);
        let told: String = events
            .iter()
            .filter(|event| event["type"].as_str().is_some_and(|kind| kind.ends_with(".delta")))
            .map(|event| event["delta"].as_str().unwrap())
            .collect();
        prop_assert_eq!(&told, &words);
        let (mut open, mut next) = (None, 0);
        for event in &events {
            let place = event["output_index"].as_u64();
            match event["type"].as_str().unwrap() {
                "response.output_item.added" => {
                    prop_assert_eq!((open, place), (None, Some(next)));
                    open = place;
                    next += 1;
                }
                "response.output_item.done" => prop_assert_eq!(open.take(), place),
                _ => prop_assert!(place.is_none() || place == open),
            }
        }
        let output = events.last().unwrap()["response"]["output"].as_array().unwrap().clone();
        prop_assert_eq!(output.len() as u64, next);
    }
}
