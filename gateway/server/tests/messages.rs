//! Anthropic's Messages protocol as its clients see it: real gateway, real HTTP, scripted worker.

#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use support::{Act, Gateway, MODEL, ids, media_directory, proto, saying, worker};

const NS: &str = "]<]minimax[>[";

fn body(more: Value) -> Value {
    let mut body = json!({
        "model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": "Hi"}],
    });
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

async fn create(gateway: &Gateway, more: Value) -> support::Reply {
    gateway.post("/v1/messages", body(more).to_string()).await
}

/// A streamed message: names and data of all events.
async fn stream(gateway: &Gateway, mut more: Value) -> Vec<(String, Value)> {
    more["stream"] = json!(true);
    let reply = create(gateway, more).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    let event = |text: &str| {
        let (name, data) = text.split_once("\ndata: ").expect("an event has a name and data");
        let data: Value = serde_json::from_str(data).unwrap();
        let name = name.strip_prefix("event: ").unwrap().to_owned();
        assert_eq!(data["type"], name.as_str());
        (name, data)
    };
    reply.text.split("\n\n").filter(|text| !text.is_empty()).map(event).collect()
}

/// The message that a client puts together from a stream.
fn folded(events: &[(String, Value)]) -> Value {
    let mut message = Value::Null;
    let mut input = String::new();
    for (name, data) in events {
        let place = data["index"].as_u64().unwrap_or(0) as usize;
        match name.as_str() {
            "message_start" => message = data["message"].clone(),
            "content_block_start" => {
                let content = message["content"].as_array_mut().unwrap();
                assert_eq!(content.len(), place);
                content.push(data["content_block"].clone());
                input.clear();
            }
            "content_block_delta" => {
                let delta = data["delta"].as_object().unwrap();
                let block = &mut message["content"][place];
                for key in ["text", "thinking", "signature"] {
                    if let Some(new) = delta.get(key) {
                        let old = block[key].as_str().unwrap();
                        block[key] = json!(format!("{old}{}", new.as_str().unwrap()));
                    }
                }
                if let Some(new) = delta.get("partial_json") {
                    input.push_str(new.as_str().unwrap());
                }
            }
            "content_block_stop" if !input.is_empty() => {
                message["content"][place]["input"] = serde_json::from_str(&input).unwrap();
                input.clear();
            }
            "message_delta" => {
                for key in ["stop_reason", "stop_sequence"] {
                    message[key] = data["delta"][key].clone();
                }
                message["usage"] = data["usage"].clone();
            }
            _ => {}
        }
    }
    message
}

fn tools() -> Value {
    let schema = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"},
    }});
    json!([{"name": "weather", "description": "tells", "input_schema": schema}])
}

/// Thinking, words, a call, words, another call.
fn busy_reply() -> String {
    let call = |city: &str| {
        format!(
            "{NS}<tool_call>\n{NS}<invoke name=\"weather\">{NS}<city>{city}{NS}</city>\
             {NS}<days>3{NS}</days>{NS}</invoke>\n{NS}</tool_call>"
        )
    };
    format!("Let me see.</mm:think>I look.{}Then{}", call("Köln"), call("Bonn"))
}

#[tokio::test]
async fn a_whole_message_has_the_form_of_the_api() {
    let worker = worker();
    worker.set_acts(saying("Hello, world!"));
    let gateway = Gateway::start(&[&worker], &[]).await;

    let response = gateway
        .client
        .post(format!("{}/v1/messages?beta=true", gateway.url))
        .header("x-api-key", "any")
        .header("anthropic-version", "2023-06-01")
        .header("x-request-id", "mine")
        .body(body(json!({"metadata": {"user_id": "u"}})).to_string())
        .send()
        .await
        .unwrap();
    let reply = support::read(response).await;

    assert_eq!(reply.status, 200, "{}", reply.text);
    assert_eq!(reply.headers["request-id"], "mine");
    let message = reply.json();
    let prompt = worker.seen()[0].header.prompt_token_ids.len();
    assert!(message["id"].as_str().unwrap().starts_with("msg_"));
    let mut rest = message.clone();
    rest.as_object_mut().unwrap().remove("id");
    assert_eq!(
        rest,
        json!({
            "type": "message", "role": "assistant", "model": MODEL,
            "content": [{"type": "text", "text": "Hello, world!"}],
            "stop_reason": "end_turn", "stop_sequence": null,
            "usage": {
                "input_tokens": prompt - 3, "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 3, "output_tokens": ids("Hello, world!").len(),
            },
        })
    );
    gateway.assert_idle().await;
}

#[tokio::test]
async fn the_stream_is_the_whole_message_in_the_order_of_the_api() {
    let worker = worker();
    worker.set_acts(saying(&busy_reply()));
    let gateway = Gateway::start(&[&worker], &[]).await;
    let wish = json!({"tools": tools(), "thinking": {"type": "enabled", "budget_tokens": 1024}});

    let whole = create(&gateway, wish.clone()).await.json();
    let events = stream(&gateway, wish).await;

    let mut streamed = folded(&events);
    assert_ne!(streamed["id"], whole["id"]);
    let ids_of = |message: &Value| -> Vec<String> {
        let content = message["content"].as_array().unwrap();
        content.iter().filter_map(|block| block["id"].as_str().map(str::to_owned)).collect()
    };
    assert!(ids_of(&whole).iter().all(|id| id.starts_with("toolu_")));
    for place in [2, 4] {
        streamed["content"][place]["id"] = whole["content"][place]["id"].clone();
    }
    streamed["id"] = whole["id"].clone();
    assert_eq!(streamed, whole);
    let kinds: Vec<_> = whole["content"].as_array().unwrap().iter().map(|b| &b["type"]).collect();
    assert_eq!(kinds, ["thinking", "text", "tool_use", "text", "tool_use"]);
    assert_eq!(whole["content"][0]["thinking"], "Let me see.");
    assert_eq!(whole["content"][2]["input"], json!({"city": "Köln", "days": 3}));
    assert_eq!(whole["stop_reason"], "tool_use");

    let names: Vec<_> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names[..2], ["message_start", "ping"]);
    assert_eq!(names[names.len() - 2..], ["message_delta", "message_stop"]);
    let signature = events
        .iter()
        .position(|(_, data)| data["delta"]["type"] == "signature_delta")
        .expect("thinking is signed");
    assert_eq!(names[signature + 1], "content_block_stop");
    let pieces = events.iter().filter(|(_, data)| data["delta"]["type"] == "input_json_delta");
    assert!(pieces.count() > 2, "input comes while it is made");
}

#[tokio::test]
async fn every_end_has_its_reason() {
    let worker = worker();
    let gateway = Gateway::start(&[&worker], &["--max-context-tokens", "500"]).await;
    let mut cut = saying("Hel");
    cut.pop();
    cut.push(Act::Length);
    let made = ids("Hel").len();

    worker.set_acts(cut.clone());
    let message = create(&gateway, json!({"max_tokens": made})).await.json();
    assert_eq!(message["stop_reason"], "max_tokens");

    worker.set_acts(cut);
    let message = create(&gateway, json!({"max_tokens": 32_000})).await.json();
    assert_eq!(message["stop_reason"], "model_context_window_exceeded");
    let header = worker.seen().last().unwrap().header.clone();
    let room = 500 - header.prompt_token_ids.len() as u32;
    assert_eq!(header.sampling.unwrap().max_tokens, Some(room));

    worker.set_acts(saying("one two three"));
    let wish = json!({"stop_sequences": ["zzz", " two"]});
    let message = create(&gateway, wish.clone()).await.json();
    assert_eq!(message["stop_reason"], "stop_sequence");
    assert_eq!(message["stop_sequence"], " two");
    assert_eq!(message["content"], json!([{"type": "text", "text": "one"}]));
    worker.set_acts(saying("one two three"));
    let streamed = folded(&stream(&gateway, wish).await);
    assert_eq!(streamed["stop_sequence"], " two");
    gateway.assert_idle().await;
}

#[tokio::test]
async fn a_cut_call_ends_by_length_and_is_not_in_the_whole_message() {
    let worker = worker();
    let text = format!("{NS}<tool_call>\n{NS}<invoke name=\"weather\">{NS}<city>Kö");
    let mut acts = saying(&text);
    acts.pop();
    acts.push(Act::Length);
    worker.set_acts(acts);
    let gateway = Gateway::start(&[&worker], &[]).await;

    let wish = json!({"tools": tools(), "max_tokens": ids(&text).len()});
    let message = create(&gateway, wish).await.json();

    assert_eq!(message["stop_reason"], "max_tokens");
    assert_eq!(message["content"], json!([]));
}

#[tokio::test]
async fn a_count_is_what_the_request_uses_pictures_tools_and_system_included() {
    let worker = worker();
    worker.set_acts(saying("ok"));
    let gateway = Gateway::start(&[&worker], &[]).await;
    let picture = media_directory().join("img_gray8.png");
    let data = base64(&std::fs::read(picture).unwrap());
    let source = json!({"type": "base64", "media_type": "image/png", "data": data});
    let image = json!({"type": "image", "source": source});
    let call = json!({"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "K"}});
    let result = json!({"type": "tool_result", "tool_use_id": "t", "content": [image]});
    let wish = json!({
        "system": [{"type": "text", "text": "Be terse."}], "tools": tools(),
        "messages": [
            {"role": "user", "content": [image, {"type": "text", "text": "What?"}]},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
    });

    let mut counted = body(wish.clone());
    counted.as_object_mut().unwrap().remove("max_tokens");
    let count = gateway.post("/v1/messages/count_tokens?beta=true", counted.to_string()).await;
    let usage = create(&gateway, wish.clone()).await.json()["usage"].clone();
    let mut without = body(wish);
    without["messages"][2]["content"][0]["content"] = json!("");
    let less = gateway.post("/v1/messages/count_tokens", without.to_string()).await;

    let number = |value: &Value| value.as_u64().unwrap();
    let used = number(&usage["input_tokens"]) + number(&usage["cache_read_input_tokens"]);
    assert_eq!(count.json(), json!({"input_tokens": used}));
    assert_eq!(used, worker.seen()[0].header.prompt_token_ids.len() as u64);
    assert!(used > number(&less.json()["input_tokens"]));
    assert!(count.headers.contains_key("request-id"));
}

fn base64(bytes: &[u8]) -> String {
    use ::base64::Engine;
    ::base64::engine::general_purpose::STANDARD.encode(bytes)
}

#[tokio::test]
async fn errors_have_the_form_of_the_api() {
    let worker = worker();
    let gateway = Gateway::start(&[&worker], &["--max-context-tokens", "300"]).await;
    let words = "word ".repeat(400);
    let cases = [
        (json!({"max_tokens": null}), 400, "invalid_request_error", "max_tokens is missing"),
        (json!({"model": "other"}), 404, "not_found_error", "\"other\""),
        (json!({"system": words}), 400, "invalid_request_error", "prompt is too long: "),
        (
            json!({"tools": [], "tool_choice": {"type": "any"}}),
            400,
            "invalid_request_error",
            "tool_choice",
        ),
        (
            json!({"output_config": {"format": {"type": "json_schema"}}}),
            400,
            "invalid_request_error",
            "output_config.format",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image", "source":
                {"type": "base64", "media_type": "image/png", "data": "AAAA"}}]}]}),
            400,
            "invalid_request_error",
            "messages[0].content[0].source.data",
        ),
    ];
    for (wish, status, kind, words) in cases {
        let reply = create(&gateway, wish).await;
        let body = reply.json();
        assert_eq!((reply.status, &body["type"]), (status, &json!("error")), "{body}");
        assert_eq!(body["error"]["type"], kind);
        assert!(body["error"]["message"].as_str().unwrap().contains(words), "{body}");
        assert_eq!(body["request_id"], reply.headers["request-id"].to_str().unwrap());
        assert_eq!(body.as_object().unwrap().len(), 3);
    }
    // the clients send the conversation whole once they have read this
    let kept = create(&gateway, json!({"thread": {"type": "create"}})).await.json();
    let details = json!({"error_code": "thread_unsupported_request", "unsupported": ["thread"]});
    assert_eq!(kept["error"]["details"], details);
    let wrong = gateway.get("/v1/messages").await;
    assert_eq!((wrong.status, &wrong.json()["type"]), (405, &json!("error")));
    gateway.assert_idle().await;
}

#[tokio::test]
async fn a_gateway_without_workers_is_overloaded() {
    let gateway = Gateway::start_before(&["127.0.0.1:1".to_owned()], &[]).await;
    let reply = create(&gateway, json!({})).await;
    assert_eq!((reply.status, &reply.json()["error"]["type"]), (529, &json!("overloaded_error")));
    assert!(reply.headers.contains_key("retry-after"));
}

#[tokio::test]
async fn a_stream_that_fails_ends_in_one_error_event() {
    let worker = worker();
    worker.set_acts(vec![
        Act::Start,
        Act::Tokens(ids("Hello")),
        Act::Fail(proto::ErrorKind::Internal, "broken"),
    ]);
    let gateway = Gateway::start(&[&worker], &[]).await;

    let events = stream(&gateway, json!({})).await;

    let (name, data) = events.last().unwrap();
    assert_eq!((name.as_str(), &data["error"]["type"]), ("error", &json!("api_error")));
    assert!(data["request_id"].is_string());
    assert!(events.iter().all(|(name, _)| name != "message_stop" && name != "message_delta"));
    assert_eq!(folded(&events)["content"][0]["text"], "Hello");
    gateway.assert_idle().await;
}
