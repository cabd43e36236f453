use super::*;
use crate::error::RequestErrorKind;
use crate::model::MediaKind;
use crate::openai::RequestBody;
use proptest::prelude::*;

mod completion;
mod messages;

pub(crate) fn limits() -> Limits {
    let defaults = GenerationDefaults {
        temperature: 1.0,
        top_p: 0.95,
        top_k: 40,
        min_p: 0.0,
        repetition_penalty: 1.0,
    };
    Limits { max_images: 3, max_videos: 1, ..Limits::new(320, 4096, defaults) }
}

pub(crate) fn chat(body: &str) -> Result<Conversation, RequestError> {
    check_chat(RequestBody::parse(body.as_bytes())?, &limits())
}

/// A chat request with one message and these further members.
fn with(members: &str) -> Result<Conversation, RequestError> {
    let comma = if members.is_empty() { "" } else { "," };
    chat(&format!(r#"{{"messages":[{{"role":"user","content":"Hi"}}]{comma}{members}}}"#))
}

pub(crate) fn refusal(result: Result<Conversation, RequestError>) -> (String, String) {
    let error = result.unwrap_err();
    assert_eq!(error.kind, RequestErrorKind::InvalidRequest);
    (error.param.unwrap_or_default(), error.message)
}

#[test]
fn what_is_left_open_is_filled_in() {
    let conversation = with("").unwrap();
    let generation = &conversation.generation;
    assert_eq!((generation.temperature, generation.top_p, generation.top_k), (1.0, 0.95, 40));
    assert_eq!((generation.max_tokens, generation.seed, generation.num_samples), (None, None, 1));
    assert!(generation.skip_special_tokens && !generation.ignore_eos);
    assert!(conversation.add_generation_prompt && !conversation.continue_final_message);
    assert_eq!(conversation.thinking, None);
    assert_eq!(conversation.tool_choice, ToolChoice::Auto);
    assert!(!conversation.stream.stream);
}

#[test]
fn what_is_said_is_taken() {
    let conversation = with(
        r#""model":"m3","temperature":0,"top_p":0.5,"top_k":-1,"min_p":0.1,"seed":-1,"n":2,
        "max_tokens":7,"max_completion_tokens":9,"min_tokens":2,"ignore_eos":true,
        "presence_penalty":-2,"frequency_penalty":2.0,"repetition_penalty":1.5,"logprobs":true,
        "top_logprobs":20,"stop":["a","","b"],"stop_token_ids":[5],"logit_bias":{"7":-100,"8":1.5},
        "include_stop_str_in_output":true,"skip_special_tokens":false,"stream":true,
        "stream_options":{"include_usage":true,"continuous_usage_stats":true},
        "parallel_tool_calls":false,"user":"x","metadata":{"any":1},"unknown":[1]"#,
    )
    .unwrap();
    assert_eq!(conversation.model.as_deref(), Some("m3"));
    let expected = Generation {
        temperature: 0.0,
        top_p: 0.5,
        top_k: 0,
        min_p: 0.1,
        seed: Some(u64::MAX),
        fit_context: false,
        max_tokens: Some(9),
        min_tokens: 2,
        ignore_eos: true,
        repetition_penalty: 1.5,
        presence_penalty: -2.0,
        frequency_penalty: 2.0,
        logprobs: LogprobsWish { wanted: true, top: 20 },
        stop_token_ids: vec![5],
        logit_bias: vec![(7, -100.0), (8, 1.5)],
        allowed_token_ids: vec![],
        banned_token_ids: vec![],
        stop: vec!["a".to_owned(), "b".to_owned()],
        include_stop: true,
        num_samples: 2,
        skip_special_tokens: false,
    };
    assert_eq!(conversation.generation, expected);
    let stream =
        StreamWish { stream: true, include_usage: true, continuous_usage: true, coalesce: true };
    assert_eq!(conversation.stream, stream);
    assert!(!conversation.parallel_tool_calls);
}

#[test]
fn null_counts_as_absent() {
    let members = r#""temperature":null,"stop":null,"tools":null,"tool_choice":null,"n":null,
        "stream_options":null,"logit_bias":null,"response_format":null,"thinking":null"#;
    assert_eq!(with(members).unwrap(), with("").unwrap());
}

#[test]
fn a_wrong_value_is_named_with_its_limit() {
    for (members, param, message) in [
        (r#""temperature":2.5"#, "temperature", "temperature is 2.5; it must be from 0 to 2"),
        (r#""temperature":"1""#, "temperature", "temperature must be a number, not a string"),
        (r#""top_p":-0.1"#, "top_p", "top_p is -0.1; it must be from 0 to 1"),
        (r#""top_p":1.01"#, "top_p", "top_p is 1.01; it must be from 0 to 1"),
        (r#""top_k":1.5"#, "top_k", "top_k must be an integer, not 1.5"),
        (r#""top_k":-2"#, "top_k", "top_k is -2; it must be from -1 to 4294967295"),
        (r#""min_p":-0.1"#, "min_p", "min_p is -0.1; it must be from 0 to 1"),
        (r#""n":0"#, "n", "n is 0; it must be from 1 to 16"),
        (r#""n":true"#, "n", "n must be a number, not a boolean"),
        (r#""max_tokens":0"#, "max_tokens", "max_tokens is 0; it must be from 1 to 4096"),
        (r#""max_tokens":-5"#, "max_tokens", "max_tokens is -5; it must be from 1 to 4096"),
        (
            r#""max_completion_tokens":99999999999999999999"#,
            "max_completion_tokens",
            "max_completion_tokens is 99999999999999999999; it must be from 1 to 4096",
        ),
        (
            r#""presence_penalty":3"#,
            "presence_penalty",
            "presence_penalty is 3; it must be from -2 to 2",
        ),
        (
            r#""repetition_penalty":0"#,
            "repetition_penalty",
            "repetition_penalty is 0; it must be above 0 and at most 10",
        ),
        (
            r#""logprobs":true,"top_logprobs":21"#,
            "top_logprobs",
            "top_logprobs is 21; it must be from 0 to 20",
        ),
        (
            r#""top_logprobs":2"#,
            "top_logprobs",
            "top_logprobs is 2, which needs logprobs to be true",
        ),
        (r#""logprobs":5"#, "logprobs", "logprobs must be a boolean, not a number"),
        (r#""stop":5"#, "stop", "stop must be a string or a list, not a number"),
        (r#""stop":["a",{}]"#, "stop[1]", "stop[1] must be a string, not an object"),
        (
            r#""stop_token_ids":[1,320]"#,
            "stop_token_ids[1]",
            "stop_token_ids[1] is 320; token ids are integers from 0 to 319",
        ),
        (
            r#""logit_bias":{"x":1}"#,
            "logit_bias.x",
            "logit_bias has the key \"x\"; keys are token ids from 0 to 319",
        ),
        (
            r#""logit_bias":{"5":101}"#,
            "logit_bias.5",
            "logit_bias.5 is 101; it must be from -100 to 100",
        ),
        (r#""stream":"yes""#, "stream", "stream must be a boolean, not a string"),
        (
            r#""stream_options":[]"#,
            "stream_options",
            "stream_options must be an object, not a list",
        ),
        (r#""seed":1.5"#, "seed", "seed must be an integer, not 1.5"),
        (r#""model":5"#, "model", "model must be a string, not a number"),
        (
            r#""chat_template_kwargs":{"tools":[]}"#,
            "chat_template_kwargs.tools",
            "chat_template_kwargs.tools is set by the server and cannot be given",
        ),
        (
            r#""chat_template_kwargs":{"thinking_mode":"xyz"}"#,
            "chat_template_kwargs.thinking_mode",
            "chat_template_kwargs.thinking_mode is \"xyz\"; use enabled, disabled or adaptive",
        ),
        (
            r#""thinking":{"type":"on"}"#,
            "thinking.type",
            "thinking.type is \"on\"; use enabled, disabled or adaptive",
        ),
        (
            r#""thinking":{}"#,
            "thinking.type",
            "thinking.type is missing; use enabled, disabled or adaptive",
        ),
        (
            r#""response_format":{"type":"xml"}"#,
            "response_format.type",
            "response_format.type is \"xml\"; use text, json_object or json_schema",
        ),
    ] {
        assert_eq!(refusal(with(members)), (param.to_owned(), message.to_owned()));
    }
    let many = format!(r#""stop":[{}]"#, vec!["\"a\""; 17].join(","));
    assert_eq!(refusal(with(&many)).1, "stop has 17 strings; at most 16 are allowed");
    let long = format!(r#""stop":"{}""#, "a".repeat(1025));
    assert_eq!(refusal(with(&long)).1, "stop[0] has 1025 bytes; at most 1024 are allowed");
}

#[test]
fn a_body_that_is_no_json_object_is_refused_with_its_place() {
    for (body, message) in [
        (
            "",
            "the request body is not valid JSON: expected a value, found the end of the text at line 1, column 1",
        ),
        (
            "{\"a\":1",
            "the request body is not valid JSON: expected ',' or '}', found the end of the text at line 1, column 7",
        ),
        ("[1]", "the request body must be a JSON object, not a list"),
    ] {
        let error = RequestBody::parse(body.as_bytes()).unwrap_err();
        assert_eq!((error.message.as_str(), error.code), (message, Some("invalid_json")));
    }
}

#[test]
fn the_first_word_on_thinking_decides() {
    use ThinkingMode::{Adaptive, Disabled, Enabled};
    let kwargs = r#""chat_template_kwargs":{"thinking_mode":"disabled"}"#;
    let effort = r#""reasoning_effort":"high""#;
    let thinking = r#""thinking":{"type":"adaptive","budget_tokens":5}"#;
    for (members, expected) in [
        (String::new(), None),
        (kwargs.to_owned(), Some(Disabled)),
        (effort.to_owned(), Some(Enabled)),
        (thinking.to_owned(), Some(Adaptive)),
        (format!("{effort},{thinking}"), Some(Adaptive)),
        (format!("{effort},{thinking},{kwargs}"), Some(Disabled)),
        (r#""chat_template_kwargs":{"enable_thinking":false}"#.to_owned(), Some(Disabled)),
        (r#""chat_template_kwargs":{"enable_thinking":true}"#.to_owned(), Some(Enabled)),
        (r#""reasoning_effort":"none""#.to_owned(), Some(Disabled)),
        (r#""reasoning_effort":"minimal""#.to_owned(), Some(Adaptive)),
        (r#""reasoning_effort":"something new""#.to_owned(), None),
    ] {
        let conversation = with(&members).unwrap();
        assert_eq!(conversation.thinking, expected, "{members}");
        let start = expected.unwrap_or(Adaptive);
        assert_eq!(conversation.output_options().thinking, start);
    }
    // the mode is the spec's to hand to the template, the rest goes through
    let conversation =
        with(r#""chat_template_kwargs":{"thinking_mode":"enabled","x":[1]}"#).unwrap();
    assert_eq!(conversation.template_variables.keys().collect::<Vec<_>>(), ["x"]);
}

#[test]
fn tools_keep_their_order_and_digits() {
    let parameters =
        r#"{"type":"object","properties":{"z":{"maximum":18446744073709551616},"a":{}}}"#;
    let tool =
        format!(r#"{{"name":"f","description":"d","parameters":{parameters},"strict":true}}"#);
    let wrapped = format!(r#""tools":[{{"type":"function","function":{tool}}}]"#);
    let bare = format!(r#""tools":[{tool}]"#);
    let legacy = format!(r#""functions":[{tool}]"#);
    for members in [wrapped, bare, legacy] {
        let conversation = with(&members).unwrap();
        let expected = format!(r#"{{"type":"function","function":{tool}}}"#);
        assert_eq!(conversation.tools[0].to_compact(), expected);
        assert_eq!(conversation.tool_schemas[0].name, "f");
        let schema = conversation.tool_schemas[0].parameters.as_ref().unwrap();
        assert_eq!(schema.to_compact(), parameters);
    }
}

#[test]
fn tool_choices_are_checked_against_the_tools() {
    let tools = r#""tools":[{"type":"function","function":{"name":"f"}}]"#;
    let choice = |choice: &str| with(&format!(r#"{tools},"tool_choice":{choice}"#));
    for (text, expected) in [
        (r#""auto""#, ToolChoice::Auto),
        (r#""required""#, ToolChoice::Required),
        (r#"{"type":"function","function":{"name":"f"}}"#, ToolChoice::Named("f".into())),
        (r#"{"type":"tool","name":"f"}"#, ToolChoice::Named("f".into())),
    ] {
        let conversation = choice(text).unwrap();
        assert_eq!(conversation.tool_choice, expected);
        assert_eq!(conversation.tools.len(), 1);
    }
    // without calls the model is shown no tools, but a call of one is still read by its schema
    let none = choice(r#""none""#).unwrap();
    assert_eq!((none.tools.len(), none.tool_schemas.len()), (0, 1));
    let (param, message) = refusal(choice(r#"{"type":"function","function":{"name":"g"}}"#));
    assert_eq!(param, "tool_choice");
    assert!(message.contains("\"g\", which tools does not declare"), "{message}");
    assert!(refusal(choice(r#""any""#)).1.contains("use none, auto, required"));
    assert!(refusal(with(r#""tool_choice":"required""#)).1.contains("tools is empty"));
    for (tools, param) in [
        (r#"[{"type":"function"}]"#, "tools[0].function"),
        (r#"[{"type":"function","function":{}}]"#, "tools[0].function.name"),
        (r#"[{"function":{"name":"f","parameters":[]}}]"#, "tools[0].function.parameters"),
        (r#"[5]"#, "tools[0]"),
    ] {
        assert_eq!(refusal(with(&format!(r#""tools":{tools}"#))).0, param);
    }
}

#[test]
fn response_formats_are_read() {
    let format = |text: &str| with(&format!(r#""response_format":{text}"#));
    assert_eq!(format(r#"{"type":"text"}"#).unwrap().response_format, ResponseFormat::Text);
    let found = format(r#"{"type":"json_object"}"#).unwrap().response_format;
    assert_eq!(found, ResponseFormat::JsonObject);
    let schema = r#"{"type":"json_schema","json_schema":{"name":"n","strict":true,"schema":{"type":"object"}}}"#;
    let expected = ResponseFormat::JsonSchema {
        name: "n".to_owned(),
        schema: Json::object([("type", "object".into())]),
        strict: true,
    };
    assert_eq!(format(schema).unwrap().response_format, expected);
    assert_eq!(refusal(format(r#"{"type":"json_schema"}"#)).0, "response_format.json_schema");
    assert_eq!(refusal(format(r#"{"schema":{}}"#)).0, "response_format.type");
}

#[test]
fn only_an_open_reply_can_be_continued() {
    let body = |last: &str, more: &str| {
        chat(&format!(
            r#"{{"messages":[{{"role":"user","content":"Hi"}},{last}],"continue_final_message":true{more}}}"#
        ))
    };
    let open = r#"{"role":"assistant","content":"partial"}"#;
    assert!(body(open, "").is_ok());
    assert!(body(open, r#","add_generation_prompt":true"#).is_err());
    for last in [
        r#"{"role":"user","content":"x"}"#,
        r#"{"role":"assistant","content":""}"#,
        r#"{"role":"assistant","content":null}"#,
    ] {
        assert_eq!(refusal(body(last, "")).0, "continue_final_message");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// A request with members of any type: it is taken, or refused by name; never a panic.
    #[test]
    fn wrong_types_are_refused_by_name(
        name in prop::sample::select(vec![
            "messages", "model", "temperature", "top_p", "top_k", "min_p", "n", "stop", "seed",
            "max_tokens", "max_completion_tokens", "logit_bias", "logprobs", "top_logprobs", "tools",
            "functions", "tool_choice", "stream", "stream_options", "response_format", "thinking",
            "reasoning_effort", "chat_template_kwargs", "stop_token_ids", "parallel_tool_calls",
            "continue_final_message", "add_generation_prompt", "ignore_eos", "presence_penalty",
        ]),
        value in prop::sample::select(vec![
            "null", "true", "0", "-1", "1.5", "1e999", "99999999999999999999", "\"\"", "\"x\"", "[]",
            "[null]", "[[]]", "[{}]", "{}", r#"{"a":1}"#, r#"{"type":[]}"#, r#"[{"role":5}]"#,
            r#"[{"role":"user","content":{"a":1}}]"#, r#"[{"role":"user","content":[[]]}]"#,
            r#"[{"role":"assistant","tool_calls":{}}]"#, r#"[{"role":"tool"}]"#,
        ]),
    ) {
        let messages = if name == "messages" { String::new() } else {
            r#""messages":[{"role":"user","content":"Hi"}],"#.to_owned()
        };
        if let Err(error) = chat(&format!(r#"{{{messages}"{name}":{value}}}"#)) {
            let param = error.param.unwrap();
            prop_assert!(param.starts_with(name), "{}: {}", param, error.message);
            prop_assert!(error.message.contains(name), "{}", error.message);
        }
    }
}

#[test]
fn a_choice_of_tools_is_read_in_every_spelling() {
    let tools = r#""tools":[{"type":"function","function":{"name":"f","strict":true}},
        {"type":"function","function":{"name":"g"}}]"#;
    let chosen = |choice: &str| with(&format!("{tools},{choice}")).unwrap().tool_choice;
    let only_g = |required| ToolChoice::Allowed { names: vec!["g".to_owned()], required };
    for (choice, expected) in [
        (r#""function_call":{"name":"g"}"#, ToolChoice::Named("g".to_owned())),
        (r#""function_call":"none""#, ToolChoice::None),
        (
            r#""tool_choice":{"type":"function","function":{"name":"g"}}"#,
            ToolChoice::Named("g".to_owned()),
        ),
        (
            r#""tool_choice":{"type":"allowed_tools","allowed_tools":{"mode":"required",
            "tools":[{"type":"function","function":{"name":"g"}}]}}"#,
            only_g(true),
        ),
        (
            r#""tool_choice":{"type":"allowed_tools","mode":"auto","tools":[{"type":"function","name":"g"}]}"#,
            only_g(false),
        ),
    ] {
        assert_eq!(chosen(choice), expected, "{choice}");
    }
    let limited = with(&format!(
        "{tools},\"tool_choice\":{{\"type\":\"allowed_tools\",\"tools\":[{{\"name\":\"g\"}}]}}"
    ));
    // the prompt keeps all of them, so that its beginning stays the same
    assert_eq!(limited.unwrap().tools.len(), 2);
    for (choice, word) in [
        (r#""tool_choice":{"type":"allowed_tools","tools":[]}"#, "is empty"),
        (r#""tool_choice":{"type":"allowed_tools","tools":[{"name":"h"}]}"#, "\"h\""),
        (
            r#""tool_choice":{"type":"allowed_tools","mode":"any","tools":[{"name":"g"}]}"#,
            "\"any\"",
        ),
        (r#""function_call":{"name":"h"}"#, "\"h\""),
    ] {
        let error = with(&format!("{tools},{choice}")).unwrap_err();
        assert!(error.message.contains(word), "{choice}: {}", error.message);
    }
    let schemas = with(tools).unwrap().tool_schemas;
    assert_eq!(schemas.iter().map(|schema| schema.strict).collect::<Vec<_>>(), [true, false]);
    assert_eq!(schemas[0].param, "tools[0].function.parameters");
}

#[test]
fn forms_of_the_answer_are_read_from_either_place() {
    let form = |members: &str| with(members).map(|conversation| conversation.response_format);
    let texts = vec!["yes".to_owned(), "no".to_owned()];
    for (members, expected) in [
        (r#""structured_outputs":{"choice":["yes","no"]}"#, ResponseFormat::Choice(texts)),
        (r#""structured_outputs":{"regex":"a+"}"#, ResponseFormat::Regex("a+".to_owned())),
        (r#""structured_outputs":{"json_object":true}"#, ResponseFormat::JsonObject),
        (
            r#""structured_outputs":{"grammar":"start: \"a\""}"#,
            ResponseFormat::Grammar("start: \"a\"".to_owned()),
        ),
        (r#""structured_outputs":{}"#, ResponseFormat::Text),
        (r#""guided_regex":"a+","guided_json":null"#, ResponseFormat::Regex("a+".to_owned())),
        (r#""guided_choice":["yes"]"#, ResponseFormat::Choice(vec!["yes".to_owned()])),
        (r#""guided_json_object":true"#, ResponseFormat::JsonObject),
        (r#""response_format":{"type":"text"}"#, ResponseFormat::Text),
    ] {
        assert_eq!(form(members), Ok(expected), "{members}");
    }
    for (members, param) in [
        (r#""structured_outputs":{"regex":"a","choice":["b"]}"#, "structured_outputs"),
        (r#""structured_outputs":{"choice":[]}"#, "structured_outputs"),
        (r#""structured_outputs":{"choice":[1]}"#, "structured_outputs.choice"),
        (r#""structured_outputs":{"json":"{}"}"#, "structured_outputs.json"),
        (r#""structured_outputs":{"unheard":1}"#, "structured_outputs"),
        (r#""guided_choice":[1]"#, "guided_choice"),
        (r#""guided_json":"{}""#, "guided_json"),
        (r#""guided_regex":"a","structured_outputs":{"regex":"a"}"#, "guided_regex"),
        (
            r#""structured_outputs":{"regex":"a"},"response_format":{"type":"json_object"}"#,
            "structured_outputs",
        ),
    ] {
        assert_eq!(form(members).unwrap_err().param.as_deref(), Some(param), "{members}");
    }
}

#[test]
fn urgency_salt_and_key_are_read_and_bounded() {
    let standing = |members: &str| with(members).map(|conversation| conversation.standing);
    let full =
        standing(r#""priority":-3,"cache_salt":"s","prompt_cache_key":"k","service_tier":"flex""#);
    let expected =
        Standing { priority: -3, cache_salt: "s".to_owned(), affinity: Some("k".to_owned()) };
    assert_eq!(full, Ok(expected));
    for (tier, priority) in [("flex", -5), ("priority", 5), ("auto", 0), ("unheard", 0)] {
        let read = standing(&format!(r#""service_tier":"{tier}""#)).unwrap();
        assert_eq!(read.priority, priority, "{tier}");
    }
    let long = format!(r#""cache_salt":"{}""#, "s".repeat(129));
    for (members, param) in [(r#""priority":11"#, "priority"), (&*long, "cache_salt")] {
        assert_eq!(standing(members).unwrap_err().param.as_deref(), Some(param));
    }
}

#[test]
fn a_continued_answer_has_no_form_of_its_own() {
    let conversation = chat(
        r#"{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"{"}],
        "continue_final_message":true,"response_format":{"type":"json_object"}}"#,
    );
    let error = conversation.unwrap().output_rules().unwrap_err();
    assert_eq!(error.param.as_deref(), Some("response_format"));
}
