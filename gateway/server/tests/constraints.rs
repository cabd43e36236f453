//! What a request demands of its output: how it reaches the worker, and what ends the reply.

#![allow(clippy::unwrap_used)]

mod support;

use proto::constraint::Spec;
use serde_json::{Value, json};
use support::{Act, Gateway, MODEL, events, ids, proto, saying, worker};

const NS: &str = "]<]minimax[>[";

fn tool(strict: bool) -> Value {
    json!([{"type": "function", "function": {
        "name": "weather", "strict": strict, "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        },
    }}])
}

fn call(city: &str) -> String {
    format!("{NS}<invoke name=\"weather\">{NS}<city>{city}{NS}</city>{NS}</invoke>\n")
}

fn lark(header: &proto::GenerateHeader) -> &str {
    match header.constraint.as_ref().and_then(|constraint| constraint.spec.as_ref()) {
        Some(Spec::Lark(grammar)) => grammar,
        other => panic!("no grammar but {other:?}"),
    }
}

#[tokio::test]
async fn demands_reach_the_worker_in_every_protocol() {
    let worker = worker();
    worker.set_acts(saying("ok"));
    let gateway = Gateway::start(&[&worker], &[]).await;
    let schema = json!({"type": "object", "properties": {"b": {}, "a": {}}});
    let user = json!([{"role": "user", "content": "Hi"}]);
    let named = json!({"name": "x", "schema": schema, "strict": true});
    let requests = [
        (
            "/v1/chat/completions",
            json!({"messages": user, "thinking": {"type": "enabled"},
            "response_format": {"type": "json_schema", "json_schema": named}}),
        ),
        (
            "/v1/messages",
            json!({"messages": user, "max_tokens": 9,
            "output_config": {"format": {"type": "json_schema", "schema": schema}}}),
        ),
        (
            "/v1/responses",
            json!({"input": "Hi", "reasoning": {"effort": "none"},
            "text": {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": true}}}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "Hi",
            "response_format": {"type": "json_schema", "json_schema": named}}),
        ),
    ];
    for (path, mut request) in requests.clone() {
        request["model"] = json!(MODEL);
        let reply = gateway.post(path, request.to_string()).await;
        assert_eq!(reply.status, 200, "{path}: {}", reply.text);
    }
    let seen = worker.seen();
    for (place, (path, _)) in requests.iter().enumerate() {
        let constraint = seen[place].header.constraint.clone().unwrap();
        // key order is the client's
        assert_eq!(constraint.spec, Some(Spec::JsonSchema(schema.to_string())), "{path}");
        assert_eq!(constraint.after_token_id.is_some(), place == 0, "{path}");
        assert_eq!(constraint.param, "response_format");
    }
}

#[tokio::test]
async fn forced_and_strict_calls_are_grammars_and_unwanted_ones_are_banned() {
    let worker = worker();
    worker.set_acts(saying(&format!("{NS}<tool_call>\n{}{NS}</tool_call>", call("Köln"))));
    let gateway = Gateway::start(&[&worker], &[]).await;
    let off = json!({"type": "disabled"});
    for wish in [
        json!({"tools": tool(false), "tool_choice": "required", "thinking": off}),
        json!({"tools": tool(true), "thinking": off}),
        json!({"tools": tool(false), "tool_choice": "none", "thinking": off}),
        json!({"tools": tool(false), "thinking": off}),
    ] {
        let reply = gateway.chat(wish).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
    }
    let seen = worker.seen();
    assert!(lark(&seen[0].header).contains("<invoke name=\\\"weather\\\">"));
    assert!(lark(&seen[1].header).contains("<city>"));
    let params = |place: usize| seen[place].header.constraint.as_ref().unwrap().param.clone();
    assert_eq!([params(0), params(1)], ["tool_choice", "tools[0].function.parameters"]);
    let banned = |place: usize| &seen[place].header.sampling.as_ref().unwrap().banned_token_ids;
    assert_eq!(*banned(2), ids(NS));
    assert!(seen[2].header.constraint.is_none() && seen[3].header.constraint.is_none());
    assert!(banned(3).is_empty());
}

#[tokio::test]
async fn a_refusal_of_the_worker_names_the_field_in_the_protocols_own_words() {
    let worker = worker();
    let message = "response_format cannot be compiled: allOf of two";
    worker.set_acts(vec![Act::Refuse("response_format", message)]);
    let gateway = Gateway::start(&[&worker], &[]).await;
    let form = json!({"type": "json_schema", "schema": {"allOf": []}, "name": "x", "strict": true});
    for stream in [false, true] {
        let chat = gateway
            .chat(json!({"stream": stream, "response_format":
            {"type": "json_schema", "json_schema": form}}))
            .await;
        assert_eq!((chat.status, &chat.error()["param"]), (400, &json!("response_format")));
        assert_eq!(chat.message(), message);
        let request =
            json!({"model": MODEL, "input": "Hi", "stream": stream, "text": {"format": form}});
        let responses = gateway.post("/v1/responses", request.to_string()).await;
        assert_eq!((responses.status, &responses.error()["param"]), (400, &json!("text.format")));
        assert_eq!(responses.message(), "text.format cannot be compiled: allOf of two");
        let request = json!({"model": MODEL, "max_tokens": 9, "stream": stream,
            "messages": [{"role": "user", "content": "Hi"}], "output_config": {"format": form}});
        let messages = gateway.post("/v1/messages", request.to_string()).await;
        assert_eq!(messages.status, 400);
        let text = messages.json()["error"]["message"].as_str().unwrap().to_owned();
        assert_eq!(text, "output_config.format cannot be compiled: allOf of two");
    }
    gateway.assert_idle().await;
}

#[tokio::test]
async fn a_reply_that_may_hold_one_call_ends_with_it() {
    let worker = worker();
    let text = format!("{NS}<tool_call>\n{}{}{NS}</tool_call>", call("Bonn"), call("Köln"));
    let mut acts = vec![Act::Start];
    acts.extend(ids(&text).into_iter().map(|id| Act::Tokens(vec![id])));
    acts.push(Act::Hang);
    worker.set_acts(acts);
    let gateway = Gateway::start(&[&worker], &[]).await;
    let off = json!({"type": "disabled"});
    let wish = json!({"tools": tool(false), "parallel_tool_calls": false, "thinking": off});
    let reply = gateway.chat(wish.clone()).await.json();
    let choice = &reply["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["tool_calls"].as_array().unwrap().len(), 1);
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["arguments"], r#"{"city":"Bonn"}"#);
    let counted = reply["usage"]["completion_tokens"].as_u64().unwrap();
    assert!(counted < ids(&text).len() as u64, "{counted}");
    let chunks = gateway.chat_stream(wish).await;
    assert_eq!(chunks.last().map(String::as_str), Some("[DONE]"));
    assert!(!chunks.concat().contains("Köln"));
    worker.wait_until(|record| record.cancelled == 2).await;
    gateway.assert_idle().await;
}

#[tokio::test]
async fn urgency_and_salt_reach_the_worker() {
    let worker = worker();
    worker.set_acts(saying("ok"));
    let gateway = Gateway::start(&[&worker], &[]).await;
    gateway
        .chat(json!({"priority": 4, "cache_salt": "mine", "allowed_token_ids": [9, 7, 9],
        "banned_token_ids": [3]}))
        .await;
    gateway.chat(json!({"service_tier": "flex"})).await;
    let seen = worker.seen();
    let header = &seen[0].header;
    assert_eq!((header.priority, header.cache_salt.as_str()), (4, "mine"));
    let sampling = header.sampling.as_ref().unwrap();
    assert_eq!((&sampling.allowed_token_ids, &sampling.banned_token_ids), (&vec![7, 9], &vec![3]));
    assert_eq!((seen[1].header.priority, seen[1].header.cache_salt.as_str()), (-5, ""));
}

fn contents(chunks: &[String]) -> Vec<String> {
    let contents = chunks.iter().filter(|chunk| *chunk != "[DONE]").filter_map(|chunk| {
        let chunk: Value = serde_json::from_str(chunk).unwrap();
        let delta = &chunk["choices"][0]["delta"];
        assert!(delta.get("content").is_none() || delta.get("reasoning_content").is_none());
        delta["content"].as_str().filter(|text| !text.is_empty()).map(str::to_owned)
    });
    contents.collect()
}

#[tokio::test]
async fn streamed_text_keeps_a_pace_unless_told_otherwise() {
    let worker = worker();
    let text = "a b c d e f g h i j k l m n o p ".repeat(20);
    let mut acts = vec![Act::Start];
    acts.extend(ids(&text).into_iter().map(|id| Act::Tokens(vec![id])));
    acts.push(Act::Stop);
    worker.set_acts(acts);
    let paced = Gateway::start(&[&worker], &["--set", "stream_hold_ms=60000"]).await;
    let off = json!({"thinking": {"type": "disabled"}});
    let chunks = contents(&paced.chat_stream(off.clone()).await);
    assert_eq!(chunks.concat(), text);
    assert!(chunks.len() > 10);
    // the first and the last may be short
    let lengths: Vec<usize> = chunks.iter().map(|chunk| chunk.chars().count()).collect();
    assert!(lengths[0] < 5, "{lengths:?}");
    assert!(lengths[1..lengths.len() - 1].iter().all(|length| (5..=200).contains(length)));

    let wish = json!({"thinking": {"type": "disabled"}, "stream_options": {"coalesce": false}});
    let every = contents(&paced.chat_stream(wish).await);
    let fast = Gateway::start(&[&worker], &["--set", "stream_hold_ms=0"]).await;
    let all = contents(&fast.chat_stream(off).await);
    assert_eq!((every.len(), all.len()), (ids(&text).len(), ids(&text).len()));
}

#[tokio::test]
async fn text_that_waits_goes_out_in_time_and_before_a_failure() {
    let worker = worker();
    let go_on = std::sync::Arc::new(tokio::sync::Notify::new());
    let token = |text: &str| Act::Tokens(ids(text));
    worker.set_acts(vec![
        Act::Start,
        token("Hello"),
        token("x"),
        Act::Wait(go_on.clone()),
        token("y"),
        Act::Fail(proto::ErrorKind::Internal, "broken"),
    ]);
    let gateway = Gateway::start(&[&worker], &["--set", "stream_hold_ms=50"]).await;
    let body = support::chat_body(json!({"stream": true, "thinking": {"type": "disabled"}}));
    let mut response = gateway.send("/v1/chat/completions", body.to_string()).await;
    let mut text = String::new();
    while !text.contains("\"x\"") {
        let piece = response.chunk().await.unwrap().expect("the stream goes on");
        text.push_str(std::str::from_utf8(&piece).unwrap());
    }
    go_on.notify_one();
    while let Some(piece) = response.chunk().await.unwrap() {
        text.push_str(std::str::from_utf8(&piece).unwrap());
    }
    let all = events(&text);
    assert_eq!(contents(&all[..all.len() - 1]), ["Hello", "x", "y"]);
    assert!(all.last().unwrap().contains("\"error\""), "{text}");
}

#[tokio::test]
async fn every_reply_says_where_its_time_went() {
    let worker = worker();
    worker.set_acts(saying("ok"));
    let gateway = Gateway::start(&[&worker], &[]).await;
    for body in [json!({}), json!({"stream": true})] {
        let reply = gateway.chat(body).await;
        let timing = reply.headers["server-timing"].to_str().unwrap();
        // the scripted worker says that it queued for a millisecond
        assert!(timing.starts_with("queue;dur=1.0, media;dur=0.0, prefill;dur="), "{timing}");
        assert!(timing.contains(", first_token;dur="), "{timing}");
    }
}
