//! The endpoints as clients see them: real gateway, real HTTP, scripted worker.

#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use support::{Act, Gateway, MODEL, chat_body, events, ids, proto, saying, worker};

#[tokio::test]
async fn a_whole_chat_reply_has_the_form_of_the_api() {
    let worker = worker();
    worker.set_acts(saying("Hello, world!"));
    let gateway = Gateway::start(&[&worker], &[]).await;

    let response = gateway
        .client
        .post(format!("{}/v1/chat/completions", gateway.url))
        .header("x-request-id", "my-own-id")
        .body(chat_body(json!({})).to_string())
        .send()
        .await
        .unwrap();
    let reply = support::read(response).await;

    assert_eq!(reply.status, 200, "{}", reply.text);
    assert_eq!(reply.headers["x-request-id"], "my-own-id");
    assert_eq!(reply.headers["content-type"], "application/json");
    let body = reply.json();
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["model"], MODEL);
    let choice = &body["choices"][0];
    assert_eq!(choice["message"], json!({"role": "assistant", "content": "Hello, world!"}));
    assert_eq!(choice["finish_reason"], "stop");
    let seen = &worker.seen()[0];
    let usage = &body["usage"];
    assert_eq!(usage["prompt_tokens"], seen.header.prompt_token_ids.len());
    assert_eq!(usage["completion_tokens"], ids("Hello, world!").len());
    assert_eq!(
        usage["total_tokens"].as_u64(),
        Some(
            usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap()
        )
    );
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 3);
    assert_eq!(seen.trace_id.as_deref(), Some("my-own-id"));
    assert!(seen.has_deadline);
    assert!(seen.header.request_id.starts_with(body["id"].as_str().unwrap()));
    gateway.assert_idle().await;
}

#[tokio::test]
async fn every_sampling_field_is_on_the_wire_and_the_room_is_filled() {
    let worker = worker();
    let gateway = Gateway::start(&[&worker], &["--max-context-tokens", "1000"]).await;

    gateway.chat(json!({"temperature": 0, "seed": 7, "stop_token_ids": [5]})).await;

    let header = worker.seen()[0].header.clone();
    let sampling = header.sampling.unwrap();
    assert_eq!((sampling.temperature, sampling.seed), (Some(0.0), Some(7)));
    assert_eq!(sampling.max_tokens, Some(1000 - header.prompt_token_ids.len() as u32));
    let eos = support::model().spec.facts().eos_token_id;
    assert_eq!(sampling.stop_token_ids, [eos, 5]);
    assert!(sampling.top_p.is_some() && sampling.top_k.is_some() && sampling.min_p.is_some());
    assert!(sampling.min_tokens.is_some() && sampling.ignore_eos.is_some());
    assert!(sampling.repetition_penalty.is_some() && sampling.presence_penalty.is_some());
    assert!(sampling.frequency_penalty.is_some() && sampling.top_logprobs.is_some());
    assert_eq!(sampling.logprobs, Some(false));
    assert_eq!(header.fingerprint.as_ref(), support::model().spec.facts().fingerprint());

    // only what the caller names ends a reply then
    gateway.chat(json!({"ignore_eos": true, "stop_token_ids": [5]})).await;
    let sampling = worker.seen()[1].header.sampling.clone().unwrap();
    assert_eq!((sampling.ignore_eos, sampling.stop_token_ids), (Some(true), vec![5]));
}

#[tokio::test]
async fn a_stream_is_role_text_one_finish_and_one_done() {
    let worker = worker();
    worker.set_acts(saying("Hello, wörld! 🦀"));
    let gateway = Gateway::start(&[&worker], &[]).await;

    let events = gateway.chat_stream(json!({})).await;

    let (done, chunks) = events.split_last().unwrap();
    assert_eq!(done, "[DONE]");
    let chunks: Vec<Value> =
        chunks.iter().map(|chunk| serde_json::from_str(chunk).unwrap()).collect();
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let text: String = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(text, "Hello, wörld! 🦀");
    let reasons: Vec<_> =
        chunks.iter().map(|chunk| &chunk["choices"][0]["finish_reason"]).collect();
    assert!(reasons[..reasons.len() - 1].iter().all(|reason| reason.is_null()));
    assert_eq!(*reasons[reasons.len() - 1], "stop");
    assert!(chunks.iter().all(|chunk| chunk["object"] == "chat.completion.chunk"));
    assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"]));
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
}

#[tokio::test]
async fn usage_is_one_last_chunk_without_choices_and_only_when_asked_for() {
    let worker = worker();
    worker.set_acts(saying("Hello"));
    let gateway = Gateway::start(&[&worker], &[]).await;

    let events = gateway.chat_stream(json!({"stream_options": {"include_usage": true}})).await;

    let with_usage: Vec<Value> = events[..events.len() - 1]
        .iter()
        .map(|event| serde_json::from_str(event).unwrap())
        .filter(|chunk: &Value| !chunk["usage"].is_null())
        .collect();
    assert_eq!(with_usage.len(), 1);
    assert_eq!(with_usage[0]["choices"], json!([]));
    assert_eq!(with_usage[0]["usage"]["completion_tokens"], ids("Hello").len());
}

#[tokio::test]
async fn thinking_and_calls_are_the_same_whole_and_streamed() {
    let worker = worker();
    let text = "<mm:think>Let me see.</mm:think>I look.]<]minimax[>[<tool_call>\n]<]minimax[>[\
                <invoke name=\"get_weather\">]<]minimax[>[<city>Köln]<]minimax[>[</city>\
                ]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>";
    worker.set_acts(saying(text));
    let gateway = Gateway::start(&[&worker], &[]).await;
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let function = json!({"name": "get_weather", "parameters": parameters});
    let wish = json!({"tools": [{"type": "function", "function": function}]});

    let whole = gateway.chat(wish.clone()).await.json();
    let streamed = gateway.chat_stream(wish).await;

    let message = &whole["choices"][0]["message"];
    assert_eq!(message["content"], "I look.");
    assert_eq!(message["reasoning_content"], "Let me see.");
    let call = &message["tool_calls"][0]["function"];
    assert_eq!(call["name"], "get_weather");
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({"city": "Köln"}));
    assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls");
    let details = &whole["usage"]["completion_tokens_details"];
    assert!((3..12).contains(&details["reasoning_tokens"].as_u64().unwrap()), "{details}");

    let mut joined = [String::new(), String::new(), String::new()];
    for event in &streamed[..streamed.len() - 1] {
        let chunk: Value = serde_json::from_str(event).unwrap();
        let delta = &chunk["choices"][0]["delta"];
        let parts = [
            &delta["content"],
            &delta["reasoning_content"],
            &delta["tool_calls"][0]["function"]["arguments"],
        ];
        let filled = parts.iter().filter(|part| part.as_str().is_some_and(|text| !text.is_empty()));
        assert!(filled.count() <= 1, "one kind a delta: {delta}");
        for (whole, part) in joined.iter_mut().zip(parts) {
            whole.push_str(part.as_str().unwrap_or(""));
        }
    }
    assert_eq!(joined, ["I look.", "Let me see.", call["arguments"].as_str().unwrap()]);
}

#[tokio::test]
async fn a_stop_string_ends_the_request_and_the_workers_call() {
    let worker = worker();
    let mut acts = saying("one two three END four five");
    acts.pop();
    acts.push(Act::Hang);
    worker.set_acts(acts);
    let gateway = Gateway::start(&[&worker], &[]).await;

    let reply = gateway.chat(json!({"stop": ["END"]})).await.json();

    assert_eq!(reply["choices"][0]["message"]["content"], "one two three ");
    assert_eq!(reply["choices"][0]["finish_reason"], "stop");
    let counted = reply["usage"]["completion_tokens"].as_u64().unwrap();
    assert!(counted >= ids("one two three END").len() as u64 - 1, "{counted}");
    worker.wait_until(|record| record.cancelled == 1).await;
    gateway.assert_idle().await;
}

#[tokio::test]
async fn each_answer_token_has_its_log_probability_once() {
    let worker = worker();
    let tokens: Vec<(u32, f32)> =
        ids("Hi there, you").into_iter().zip([-0.5, -1.0, -1.5, -2.0, -2.5, -3.0, -3.5]).collect();
    let count = tokens.len();
    worker.set_acts(vec![Act::Start, Act::Logprobs(tokens), Act::Stop]);
    let gateway = Gateway::start(&[&worker], &[]).await;

    let wish = json!({"logprobs": true, "top_logprobs": 1});
    let whole = gateway.chat(wish.clone()).await.json();
    let streamed = gateway.chat_stream(wish).await;

    let entries = whole["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(entries.len(), count);
    let text: String = entries.iter().map(|entry| entry["token"].as_str().unwrap()).collect();
    assert_eq!(text, "Hi there, you");
    assert_eq!(entries[0]["logprob"], -0.5);
    assert_eq!(entries[0]["top_logprobs"][0]["token"], entries[0]["token"]);
    let from_stream: Vec<Value> = streamed[..streamed.len() - 1]
        .iter()
        .map(|event| serde_json::from_str::<Value>(event).unwrap())
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array().cloned())
        .flatten()
        .collect();
    assert_eq!(from_stream, entries);
}

#[tokio::test]
async fn several_samples_have_their_own_seeds_and_one_worker() {
    let (first, second) = (worker(), worker());
    for worker in [&first, &second] {
        worker.set_script(|header| {
            let seed = header.sampling.as_ref().unwrap().seed.unwrap();
            saying(if seed == 11 { "first" } else { "other" })
        });
    }
    let gateway = Gateway::start(&[&first, &second], &[]).await;

    let reply = gateway.chat(json!({"n": 4, "seed": 11})).await.json();

    let choices = reply["choices"].as_array().unwrap();
    let texts: Vec<_> =
        choices.iter().map(|choice| choice["message"]["content"].as_str().unwrap()).collect();
    assert_eq!(texts, ["first", "other", "other", "other"]);
    let indices: Vec<_> = choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    let (one, two) = (first.seen(), second.seen());
    assert!(one.len() + two.len() == 4 && (one.is_empty() || two.is_empty()));
    let all: std::collections::HashSet<_> = one
        .iter()
        .chain(&two)
        .map(|seen| (seen.header.request_id.clone(), seen.header.sampling.as_ref().unwrap().seed))
        .collect();
    assert_eq!(all.len(), 4);

    let events = gateway.chat_stream(json!({"n": 3})).await;
    let finishes = events.iter().filter(|event| event.contains("\"finish_reason\":\"stop\""));
    assert_eq!(finishes.count(), 3);
}

#[tokio::test]
async fn text_completions_take_text_ids_and_lists_and_can_echo() {
    let worker = worker();
    worker.set_acts(saying(" world"));
    let gateway = Gateway::start(&[&worker], &[]).await;
    let ask = async |body: Value| {
        let mut body = body;
        body["model"] = json!(MODEL);
        gateway.post("/v1/completions", body.to_string()).await
    };

    let plain = ask(json!({"prompt": "Hello", "max_tokens": 5})).await.json();
    assert_eq!(plain["object"], "text_completion");
    assert_eq!(plain["choices"][0]["text"], " world");
    assert_eq!(plain["choices"][0]["finish_reason"], "stop");
    assert_eq!(worker.seen()[0].header.prompt_token_ids, ids("Hello"));

    let both = ask(json!({"prompt": ["Hello", ids("Bye")], "n": 2, "echo": true})).await.json();
    let texts: Vec<_> =
        both["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["Hello world", "Hello world", "Bye world", "Bye world"]);
    let usage = &both["usage"];
    assert_eq!(usage["prompt_tokens"], ids("Hello").len() + ids("Bye").len());
    assert_eq!(usage["completion_tokens"], 4 * ids(" world").len());

    let streamed = ask(json!({"prompt": "Hello", "stream": true})).await;
    let events = events(&streamed.text);
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    let text: String = events[..events.len() - 1]
        .iter()
        .map(|event| serde_json::from_str::<Value>(event).unwrap())
        .map(|chunk| chunk["choices"][0]["text"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(text, " world");
}

#[tokio::test]
async fn the_tokenizer_endpoints_agree_with_what_a_worker_gets() {
    let worker = worker();
    let gateway = Gateway::start(&[&worker], &[]).await;

    gateway.chat(json!({})).await;
    let chat = gateway.post("/tokenize", chat_body(json!({})).to_string()).await.json();
    assert_eq!(chat["tokens"], json!(worker.seen()[0].header.prompt_token_ids));
    assert_eq!(chat["count"], chat["tokens"].as_array().unwrap().len());

    let text = gateway.post("/v1/tokenize", json!({"prompt": "naïve 🦀"}).to_string()).await.json();
    let back = gateway.post("/detokenize", json!({"tokens": text["tokens"]}).to_string()).await;
    assert_eq!(back.json()["prompt"], "naïve 🦀");
    let again = gateway.post("/v1/detokenize", json!({"tokens": text["tokens"]}).to_string()).await;
    assert_eq!(again.text, back.text);
}

#[tokio::test]
async fn operators_can_ask_for_models_health_version_and_numbers() {
    let worker = worker();
    worker.set_acts(saying("Hi"));
    let gateway = Gateway::start(&[&worker], &[]).await;
    gateway.chat(json!({})).await;

    let models = gateway.get("/v1/models").await.json();
    assert_eq!(models["data"][0]["id"], MODEL);
    assert_eq!(gateway.get(&format!("/v1/models/{MODEL}")).await.json(), models["data"][0]);
    assert_eq!(gateway.get("/v1/models/other/name").await.error()["code"], "model_not_found");
    assert_eq!(gateway.get("/health").await.status, 200);
    assert_eq!(gateway.get("/ready").await.json()["ready"], true);
    assert_eq!(gateway.get("/version").await.json()["model"], MODEL);

    gateway.assert_idle().await;
    let page = gateway.get("/metrics").await;
    assert!(page.headers["content-type"].to_str().unwrap().starts_with("text/plain"));
    for line in [
        "m3stack_gateway_http_requests_total{route=\"/v1/chat/completions\",code=\"200\"} 1",
        "m3stack_gateway_tokens_total{kind=\"completion\"} ",
        "m3stack_gateway_time_to_first_token_seconds_count 1",
        "m3stack_gateway_running_requests 0",
        "m3stack_gateway_workers{state=\"ready\"} 1",
    ] {
        assert!(page.text.contains(line), "{line} is not in\n{}", page.text);
    }
    // every sample belongs to a metric that was announced
    for line in page.text.lines().filter(|line| !line.starts_with('#')) {
        let name = line.split(['{', ' ']).next().unwrap();
        let base = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|suffix| name.strip_suffix(suffix))
            .unwrap_or(name);
        let is_announced = page.text.contains(&format!("# TYPE {base} "))
            || page.text.contains(&format!("# TYPE {name} "));
        assert!(is_announced, "{line}");
    }
}

#[tokio::test]
async fn unknown_routes_and_methods_are_errors_of_the_api() {
    let worker = worker();
    let gateway = Gateway::start(&[&worker], &[]).await;

    let route = gateway.post("/v2/chat", "{}").await;
    assert_eq!((route.status, route.error()["type"].clone()), (404, json!("not_found_error")));
    let method = gateway.get("/v1/chat/completions").await;
    assert_eq!((method.status, method.error()["code"].clone()), (405, json!("method_not_allowed")));
    assert!(route.headers.contains_key("x-request-id"));
}

#[tokio::test]
async fn what_a_worker_refuses_is_shown_by_its_kind() {
    use proto::ErrorKind as Kind;
    let worker = worker();
    let gateway = Gateway::start(&[&worker], &[]).await;

    for (kind, status, openai_type) in [
        (Kind::InvalidRequest, 400, "invalid_request_error"),
        (Kind::ContextTooLong, 400, "invalid_request_error"),
        (Kind::MediaRejected, 400, "invalid_request_error"),
        (Kind::Overloaded, 429, "rate_limit_error"),
        (Kind::WorkerUnavailable, 503, "server_error"),
        (Kind::DeadlineExceeded, 504, "server_error"),
        (Kind::Internal, 500, "server_error"),
    ] {
        for stream in [false, true] {
            worker.set_acts(vec![Act::Start, Act::Fail(kind, "the worker's own words")]);
            let reply = gateway.chat(json!({"stream": stream})).await;

            assert_eq!(reply.status, status, "{kind:?}");
            let error = reply.error();
            assert_eq!(error["type"], openai_type, "{kind:?}");
            let shows_words = error["message"] == "the worker's own words";
            assert_eq!(shows_words, kind != Kind::Internal, "{error}");
            let retry_after = reply.headers.contains_key("retry-after");
            assert_eq!(retry_after, matches!(status, 429 | 503), "{kind:?}");
        }
    }
    gateway.assert_idle().await;
}

#[tokio::test]
async fn a_failure_after_the_first_token_is_one_error_event_and_no_done() {
    let worker = worker();
    let gateway = Gateway::start(&[&worker], &[]).await;
    for act in [
        Act::Fail(proto::ErrorKind::Internal, "secret detail"),
        Act::Break(tonic::Code::Unavailable),
    ] {
        worker.set_acts(vec![Act::Start, Act::Tokens(ids("Hello there")), act]);

        let events = gateway.chat_stream(json!({})).await;

        let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
        assert_eq!(last["error"]["type"], "server_error");
        assert!(!last.to_string().contains("secret"));
        assert_eq!(events.iter().filter(|event| event.contains("\"error\"")).count(), 1);
        assert!(!events.iter().any(|event| event == "[DONE]"));
        assert!(!events.iter().any(|event| event.contains("\"finish_reason\":\"stop\"")));
    }
    gateway.assert_idle().await;
}
