//! Messages and media.

use super::*;

fn messages(items: &str) -> Result<Conversation, RequestError> {
    chat(&format!(r#"{{"messages":[{items}]}}"#))
}

/// The normalised messages.
fn normal(items: &str) -> Vec<String> {
    messages(items).unwrap().messages.iter().map(Json::to_compact).collect()
}

fn call(id: &str, name: &str) -> String {
    format!(
        r#"{{"id":"{id}","type":"function","function":{{"name":"{name}","arguments":"{{}}"}}}}"#
    )
}

fn assistant(calls: &[String]) -> String {
    format!(r#"{{"role":"assistant","content":null,"tool_calls":[{}]}}"#, calls.join(","))
}

fn result(id: &str, content: &str) -> String {
    format!(r#"{{"role":"tool","tool_call_id":"{id}","content":"{content}"}}"#)
}

#[test]
fn content_is_a_string_wherever_it_is_all_text() {
    for content in [
        r#""ab""#,
        r#"["a","b"]"#,
        r#"[{"type":"text","text":"a"},{"type":"input_text","text":"b"}]"#,
        r#"[{"text":"ab"}]"#,
        r#"[{"type":"output_text","text":"a"},{"type":"refusal","refusal":"b"}]"#,
    ] {
        let found = normal(&format!(r#"{{"role":"user","content":{content}}}"#));
        assert_eq!(found, [r#"{"role":"user","content":"ab"}"#], "{content}");
    }
    for empty in [r#""content":null"#, r#""content":[]"#, r#""content":"""#, r#""x":1"#] {
        let found = normal(&format!(r#"{{"role":"user",{empty}}}"#));
        assert_eq!(found, [r#"{"role":"user","content":""}"#], "{empty}");
    }
}

#[test]
fn every_role_is_taken_and_others_are_named() {
    for role in ["root", "system", "developer", "user", "assistant"] {
        let found = normal(&format!(r#"{{"role":"{role}","content":"x","name":"n"}}"#));
        assert_eq!(found, [format!(r#"{{"role":"{role}","content":"x","name":"n"}}"#)]);
    }
    let (param, message) = refusal(messages(r#"{"role":"wizard","content":"x"}"#));
    assert_eq!(param, "messages[0].role");
    assert!(message.contains("\"wizard\"") && message.contains("root, system"), "{message}");
    assert_eq!(refusal(messages(r#"{"content":"x"}"#)).0, "messages[0].role");
    assert_eq!(refusal(messages("")).1, "messages is empty; send at least one");
    assert_eq!(refusal(chat("{}")).1, "messages is missing");
}

#[test]
fn media_parts_of_every_name_are_listed_in_order() {
    let found = messages(
        r#"{"role":"user","content":[
            {"type":"image_url","image_url":{"url":"u0","detail":"low","max_long_side_pixel":252}},
            {"type":"text","text":"t"},
            {"type":"video_url","video_url":{"url":"u1","fps":2,"detail":"high"}},
            {"type":"input_image","image_url":"u2","detail":"auto"},
            {"type":"image","image":"u3"}]}"#,
    )
    .unwrap();
    let media: Vec<(MediaKind, &str, &str)> = found
        .media
        .iter()
        .map(|item| (item.kind, item.url.as_str(), item.param.as_str()))
        .collect();
    assert_eq!(
        media,
        [
            (MediaKind::Image, "u0", "messages[0].content[0].image_url.url"),
            (MediaKind::Video, "u1", "messages[0].content[2].video_url.url"),
            (MediaKind::Image, "u2", "messages[0].content[3].image_url"),
            (MediaKind::Image, "u3", "messages[0].content[4].image"),
        ]
    );
    assert_eq!(found.media[0].controls.max_long_side_pixel, Some(252));
    assert_eq!(found.media[0].controls.detail.as_deref(), Some("low"));
    assert_eq!(found.media[1].controls.fps, Some(2.0));
    assert_eq!(found.media[2].controls.detail.as_deref(), Some("auto"));
    assert_eq!(
        found.messages[0].get("content").unwrap().to_compact(),
        r#"[{"type":"image"},{"type":"text","text":"t"},{"type":"video"},{"type":"image"},{"type":"image"}]"#
    );
}

#[test]
fn wrong_parts_are_named() {
    for (part, param) in [
        (r#"{"type":"input_audio"}"#, "messages[0].content[0].type"),
        (r#"{"image_url":"u"}"#, "messages[0].content[0].type"),
        (r#"{"type":"text"}"#, "messages[0].content[0].text"),
        (r#"{"type":"text","text":5}"#, "messages[0].content[0].text"),
        (r#"{"type":"image_url"}"#, "messages[0].content[0].image_url"),
        (r#"{"type":"image_url","image_url":{}}"#, "messages[0].content[0].image_url.url"),
        (r#"{"type":"image_url","image_url":5}"#, "messages[0].content[0].image_url"),
        (
            r#"{"type":"video_url","video_url":{"url":"u","fps":"2"}}"#,
            "messages[0].content[0].video_url.fps",
        ),
        ("5", "messages[0].content[0]"),
    ] {
        let found = messages(&format!(r#"{{"role":"user","content":[{part}]}}"#));
        assert_eq!(refusal(found).0, param, "{part}");
    }
    let object = messages(r#"{"role":"user","content":{"type":"text"}}"#);
    assert_eq!(refusal(object).0, "messages[0].content");
    let picture = r#"{"role":"assistant","content":[{"type":"image_url","image_url":"u"}]}"#;
    assert!(refusal(messages(picture)).1.contains("assistant messages cannot hold"));
}

#[test]
fn too_many_media_are_counted() {
    let parts = |part: &str, count| vec![part; count].join(",");
    let user = |parts: String| messages(&format!(r#"{{"role":"user","content":[{parts}]}}"#));
    let image = r#"{"type":"image_url","image_url":"u"}"#;
    assert!(user(parts(image, 3)).is_ok());
    assert_eq!(
        refusal(user(parts(image, 4))).1,
        "the number of images is 4, larger than the limit: 3"
    );
    let video = r#"{"type":"video_url","video_url":"u"}"#;
    assert_eq!(
        refusal(user(parts(video, 2))).1,
        "the number of videos is 2, larger than the limit: 1"
    );
}

#[test]
fn thinking_comes_in_under_either_name() {
    for member in ["reasoning_content", "reasoning"] {
        let found = normal(&format!(r#"{{"role":"assistant","content":"a","{member}":"hm"}}"#));
        assert_eq!(found, [r#"{"role":"assistant","content":"a","reasoning_content":"hm"}"#]);
    }
    let other = r#"{"role":"assistant","content":"a","reasoning":{"effort":"low"}}"#;
    assert_eq!(normal(other), [r#"{"role":"assistant","content":"a"}"#]);
}

#[test]
fn arguments_become_objects_with_their_digits() {
    for (arguments, expected) in [
        (
            r#""{\"b\": 1.50, \"a\": 123456789012345678901}""#,
            r#"{"b":1.50,"a":123456789012345678901}"#,
        ),
        (r#"{"b":1,"a":[]}"#, r#"{"b":1,"a":[]}"#),
        (r#""""#, "{}"),
        (r#"" ""#, "{}"),
        ("null", "{}"),
    ] {
        let call = format!(r#"{{"id":"1","function":{{"name":"f","arguments":{arguments}}}}}"#);
        let found = normal(&format!("{},{}", assistant(&[call]), result("1", "x")));
        assert!(found[0].contains(&format!(r#""arguments":{expected}"#)), "{}", found[0]);
    }
    for arguments in [r#""{\"a\": ""#, r#""[1]""#, r#""null""#, "5"] {
        let call = format!(r#"{{"id":"1","function":{{"name":"f","arguments":{arguments}}}}}"#);
        let found = messages(&format!("{},{}", assistant(&[call]), result("1", "x")));
        assert_eq!(refusal(found).0, "messages[0].tool_calls[0].function.arguments");
    }
}

#[test]
fn results_stand_in_the_order_of_their_calls() {
    let calls = assistant(&[call("a", "f"), call("b", "g"), call("c", "h")]);
    let picture =
        r#"{"role":"tool","tool_call_id":"b","content":[{"type":"image_url","image_url":"ub"}]}"#;
    let other =
        r#"{"role":"tool","tool_call_id":"a","content":[{"type":"image_url","image_url":"ua"}]}"#;
    let found = messages(&format!("{calls},{},{picture},{other}", result("c", "three"))).unwrap();
    let ids: Vec<&str> = found.messages[1..]
        .iter()
        .map(|message| message.get("tool_call_id").and_then(Json::as_str).unwrap())
        .collect();
    assert_eq!(ids, ["a", "b", "c"]);
    let urls: Vec<&str> = found.media.iter().map(|item| item.url.as_str()).collect();
    assert_eq!(urls, ["ua", "ub"]);
}

#[test]
fn results_without_ids_answer_in_order() {
    let calls = assistant(&[call("a", "f"), call("b", "g")]);
    let bare = r#"{"role":"tool","content":"x"}"#;
    assert!(messages(&format!("{calls},{bare},{bare}")).is_ok());
    let legacy = r#"{"role":"assistant","content":"","function_call":{"name":"f","arguments":"{}"}},
        {"role":"function","name":"f","content":"x"}"#;
    let found = normal(legacy);
    assert_eq!(found[1], r#"{"role":"tool","content":"x","name":"f"}"#);
}

#[test]
fn calls_and_results_must_match() {
    let calls = assistant(&[call("a", "f"), call("b", "g")]);
    let user = r#"{"role":"user","content":"u"}"#;
    let (a, b, z) = (result("a", "1"), result("b", "2"), result("z", "3"));
    for (items, param, part) in [
        (a.clone(), "messages[0].tool_call_id", "no unanswered call"),
        (format!("{calls},{a},{z}"), "messages[2].tool_call_id", "\"z\""),
        (format!("{calls},{a},{a},{b}"), "messages[2].tool_call_id", "\"a\""),
        (format!("{calls},{a}"), "messages[0].tool_calls", "answers them: b"),
        (calls.clone(), "messages[0].tool_calls", "answers them: a, b"),
        (format!("{calls},{a},{calls}"), "messages[0].tool_calls", "answers them: b"),
        (
            r#"{"role":"tool","content":"x"}"#.to_owned(),
            "messages[0].tool_call_id",
            "answers no tool call",
        ),
        (
            r#"{"role":"assistant","tool_calls":[{"id":"1","function":{}}]}"#.to_owned(),
            "messages[0].tool_calls[0].function.name",
            "is missing",
        ),
    ] {
        let (found, message) = refusal(messages(&items));
        assert_eq!(found, param, "{items}");
        assert!(message.contains(part), "{message}");
    }
    // a user's word between calls and results is tolerated
    assert!(messages(&format!("{calls},{a},{user},{b}")).is_ok());
    let object =
        format!("{calls},{a},{}", r#"{"role":"tool","tool_call_id":"b","content":{"k":1}}"#);
    assert_eq!(refusal(messages(&object)).0, "messages[2].content");
    for empty in [r#""""#, "null", "[]"] {
        let empty = format!(r#"{{"role":"tool","tool_call_id":"b","content":{empty}}}"#);
        assert!(messages(&format!("{calls},{a},{empty}")).is_ok());
    }
}
