//! OpenAI's Responses protocol as its clients see it: real gateway, real HTTP, scripted worker.

#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use support::{Act, Gateway, MODEL, ids, proto, saying, worker};

const NS: &str = "]<]minimax[>[";

fn body(more: Value) -> Value {
    let mut body = json!({"model": MODEL, "input": "Hi"});
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

async fn create(gateway: &Gateway, more: Value) -> support::Reply {
    gateway.post("/v1/responses", body(more).to_string()).await
}

async fn stream(gateway: &Gateway, mut more: Value) -> Vec<Value> {
    more["stream"] = json!(true);
    let reply = create(gateway, more).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    let event = |text: &str| {
        let (name, data) = text.split_once("\ndata: ").expect("an event has a name and data");
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name.strip_prefix("event: ").unwrap());
        data
    };
    reply.text.split("\n\n").filter(|text| !text.is_empty()).map(event).collect()
}

fn wish() -> Value {
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"},
    }});
    json!({
        "reasoning": {"effort": "high"},
        "tools": [{"type": "function", "name": "weather", "parameters": parameters}],
    })
}

#[tokio::test]
async fn the_whole_response_is_what_the_stream_ends_with() {
    let worker = worker();
    worker.set_acts(saying(&format!(
        "Let me see.</mm:think>I look.{NS}<tool_call>\n{NS}<invoke name=\"weather\">\
         {NS}<city>Köln{NS}</city>{NS}<days>3{NS}</days>{NS}</invoke>\n{NS}</tool_call>"
    )));
    let gateway = Gateway::start(&[&worker], &[]).await;

    let whole = create(&gateway, wish()).await.json();
    let events = stream(&gateway, wish()).await;

    let kinds: Vec<_> =
        whole["output"].as_array().unwrap().iter().map(|item| &item["type"]).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!(whole["output"][0]["content"][0]["text"], "Let me see.");
    assert_eq!(whole["output"][1]["content"][0]["text"], "I look.");
    assert_eq!(whole["output"][2]["arguments"], r#"{"city":"Köln","days":3}"#);
    assert_eq!((&whole["status"], &whole["object"]), (&json!("completed"), &json!("response")));
    let prompt = worker.seen()[0].header.prompt_token_ids.len();
    assert_eq!(whole["usage"]["input_tokens"], prompt);
    assert_eq!(whole["usage"]["input_tokens_details"]["cached_tokens"], 3);
    assert!(whole["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64() > Some(0));

    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.completed");
    let mut streamed = last["response"].clone();
    streamed["id"] = whole["id"].clone();
    streamed["created_at"] = whole["created_at"].clone();
    for place in 0..3 {
        streamed["output"][place]["id"] = whole["output"][place]["id"].clone();
    }
    streamed["output"][2]["call_id"] = whole["output"][2]["call_id"].clone();
    assert_eq!(streamed, whole);
    assert_eq!(events[0]["type"], "response.created");
    let pieces = events
        .iter()
        .filter(|event| event["type"] == "response.function_call_arguments.delta")
        .count();
    assert!(pieces > 2, "arguments come while they are made");
    gateway.assert_idle().await;
}

#[tokio::test]
async fn a_cut_response_says_so() {
    let worker = worker();
    let mut acts = saying("Hel");
    acts.pop();
    acts.push(Act::Length);
    worker.set_acts(acts);
    let gateway = Gateway::start(&[&worker], &[]).await;
    let made = ids("Hel").len();

    let response = create(&gateway, json!({"max_output_tokens": made})).await.json();

    assert_eq!(response["status"], "incomplete");
    assert_eq!(response["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(response["usage"]["output_tokens"], made);
}

#[tokio::test]
async fn a_stream_that_fails_ends_in_one_failed_response() {
    let worker = worker();
    let fail = Act::Fail(proto::ErrorKind::Internal, "broken");
    worker.set_acts(vec![Act::Start, Act::Tokens(ids("Hello")), fail]);
    let gateway = Gateway::start(&[&worker], &[]).await;

    let events = stream(&gateway, json!({})).await;

    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.failed");
    assert_eq!(last["response"]["status"], "failed");
    assert!(last["response"]["error"]["code"].is_string());
    assert!(events.iter().all(|event| event["type"] != "response.completed"));
    gateway.assert_idle().await;
}

#[tokio::test]
async fn what_is_not_kept_or_not_known_is_refused_by_name() {
    let worker = worker();
    let gateway = Gateway::start(&[&worker], &[]).await;
    for (wish, param) in [
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"store": true}), "store"),
        (json!({"text": {"format": {"type": "xml"}}}), "text.format.type"),
    ] {
        let reply = create(&gateway, wish).await;
        assert_eq!((reply.status, &reply.error()["param"]), (400, &json!(param)));
    }
    assert!(worker.seen().is_empty());
}
