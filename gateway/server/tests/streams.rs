//! The shared cases of streams: what a worker says, piece by piece, and what a client sees of it,
//! streamed and whole, however the tokens are put into messages.

#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Map, Value, json};
use support::{Act, FakeWorker, Gateway, Reply, chat_body, ids, worker};

const CASES: &str = include_str!("../../../tests/data/parser/streams.json");
/// What a case says to its reader, or what [`check`] asks of every case.
const PROSE: [&str; 8] = [
    "also",
    "note",
    "rule",
    "then",
    "no_hang",
    "closes",
    "worker_sees_abort_within_ms",
    "tokens_made_after_disconnect_at_most",
];

/// How the tokens of a piece are put into messages.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Cut {
    /// A piece a message.
    Pieces,
    /// A token a message.
    Tokens,
    /// Everything in one.
    Whole,
}

#[tokio::test]
async fn every_case_of_a_stream_is_shown_as_it_must_be() {
    let cases: Value = serde_json::from_str(CASES).unwrap();
    let cases = cases["cases"].as_array().unwrap();
    assert!(cases.len() >= 17, "{} cases", cases.len());
    for case in cases {
        // a worker that fails in one case would be left alone in those behind it
        let worker = worker();
        let gateway = Gateway::start(&[&worker], &[]).await;
        for cut in [Cut::Pieces, Cut::Tokens, Cut::Whole] {
            play(&gateway, &worker, case, cut).await;
        }
        gateway.assert_idle().await;
    }
}

async fn play(gateway: &Gateway, worker: &FakeWorker, case: &Value, cut: Cut) {
    let name = format!("{} with {cut:?}", case["id"]);
    let mut request = request(&case["request"]);
    let expected = case["expected"].as_object().unwrap();
    let pieces = case["worker_pieces"].as_array().unwrap();
    let limit = request["max_tokens"].as_u64().map(|limit| limit as usize);
    let num_said = limit.unwrap_or(usize::MAX).min(pieces.len());
    let has_logprobs = request["logprobs"] == true;
    let (mut acts, count) = acts(&pieces[..num_said], cut, has_logprobs);
    acts.push(if limit == Some(num_said) { Act::Length } else { Act::Stop });
    worker.set_acts(acts);
    if request.as_object_mut().unwrap().remove("disconnect_after_chunks").is_some() {
        return leave(gateway, worker, request).await;
    }
    let mut seen = Vec::new();
    for is_streamed in [true, false] {
        request["stream"] = json!(is_streamed);
        if !is_streamed {
            request.as_object_mut().unwrap().remove("stream_options");
        }
        let reply = gateway.chat(request.clone()).await;
        let fails_whole = !is_streamed && expected.contains_key("no_success_finish");
        if fails_whole || expected.contains_key("http_status") {
            let status = expected.get("http_status").map_or(503, |status| status.as_u64().unwrap());
            assert_eq!(u64::from(reply.status), status, "{name}: {}", reply.text);
            assert!(
                reply.headers["content-type"].to_str().unwrap().starts_with("application/json")
            );
            reply.error();
            continue;
        }
        assert_eq!(reply.status, 200, "{name}: {}", reply.text);
        let shown = if is_streamed { streamed(&reply) } else { whole(&reply) };
        check(&name, expected, &shown, &count);
        seen.push(shown);
    }
    if let [one, other] = &seen[..] {
        assert_eq!(one.message(), other.message(), "{name}");
        if let Some(usage) = &one.usage {
            assert_eq!(Some(usage), other.usage.as_ref(), "{name}");
        }
    }
}

/// A client that goes away after the first text ends the worker's call.
async fn leave(gateway: &Gateway, worker: &FakeWorker, mut request: Value) {
    // of what would be said for ever, the second word waits for a call that never comes
    worker.set_acts(vec![Act::Start, Act::Tokens(ids("x")), Act::Hang]);
    request["stream"] = json!(true);
    let body = chat_body(request).to_string();
    let mut response = gateway.send("/v1/chat/completions", body).await;
    assert!(response.chunk().await.unwrap().is_some());
    drop(response);
    // this call hangs, and like every other one it is over
    worker.wait_until(|record| record.cancelled + record.ended == record.seen.len()).await;
    gateway.assert_idle().await;
}

/// The case's request in the API's own fields.
fn request(case: &Value) -> Value {
    let mut request = case.clone();
    let fields = request.as_object_mut().unwrap();
    if let Some(mode) = fields.remove("thinking_mode") {
        fields.insert("chat_template_kwargs".into(), json!({"thinking_mode": mode}));
    }
    if let Some(Value::Array(names)) = fields.remove("tools") {
        let tools = names.iter().map(|name| {
            let members = match name.as_str().unwrap() {
                "bash" => json!({"command": {"type": "string"}, "description": {"type": "string"}}),
                _ => json!({"city": {"type": "string"}, "days": {"type": "integer"}}),
            };
            let parameters = json!({"type": "object", "properties": members});
            json!({"type": "function", "function": {"name": name, "parameters": parameters}})
        });
        fields.insert("tools".into(), tools.collect());
    }
    request
}

/// What the worker does, and how many tokens the first so many pieces are.
fn acts(pieces: &[Value], cut: Cut, has_logprobs: bool) -> (Vec<Act>, Vec<usize>) {
    let said = |tokens: Vec<u32>| match has_logprobs {
        true => Act::Logprobs(tokens.into_iter().map(|id| (id, -0.5)).collect()),
        false => Act::Tokens(tokens),
    };
    let (mut acts, mut count, mut waiting) = (vec![Act::Start], vec![0], Vec::new());
    for piece in pieces {
        let Some(text) = piece.as_str() else {
            acts.extend((!waiting.is_empty()).then(|| said(std::mem::take(&mut waiting))));
            acts.push(Act::Break(tonic::Code::Unavailable));
            continue;
        };
        let tokens = match text.strip_prefix("hex:") {
            Some(hex) => bytes_as_ids(hex),
            None => ids(text),
        };
        count.push(count.last().unwrap() + tokens.len());
        match cut {
            Cut::Pieces => acts.push(said(tokens)),
            Cut::Tokens => acts.extend(tokens.into_iter().map(|id| said(vec![id]))),
            Cut::Whole => waiting.extend(tokens),
        }
    }
    acts.extend((!waiting.is_empty()).then(|| said(waiting)));
    (acts, count)
}

/// Tokens of single bytes, written in hexadecimal.
fn bytes_as_ids(hex: &str) -> Vec<u32> {
    let model = support::model();
    let table = model.prompt_builder.tokenizer().bytes();
    let bytes =
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap());
    bytes.map(|byte| (0..table.len() as u32).find(|&id| table.get(id) == [byte]).unwrap()).collect()
}

/// What a client has seen.
#[derive(Debug, Default)]
struct Shown {
    content: String,
    reasoning: String,
    /// Tokens of the log-probabilities of the content.
    logprobs: Vec<String>,
    finish: Vec<String>,
    usage: Option<Value>,
    /// Kinds of events in order, neighbours of a kind joined.
    order: Vec<&'static str>,
    chunks: Vec<Value>,
    /// Parts of calls, or calls.
    calls: Vec<Value>,
}

impl Shown {
    fn message(&self) -> (&str, &str, &[String], String, &[String]) {
        (&self.content, &self.reasoning, &self.logprobs, self.arguments(), &self.finish)
    }

    fn arguments(&self) -> String {
        self.calls.iter().map(|call| call["function"]["arguments"].as_str().unwrap()).collect()
    }

    fn saw(&mut self, kind: &'static str) {
        if self.order.last() != Some(&kind) {
            self.order.push(kind);
        }
    }

    fn take(&mut self, choice: &Value, part: &str) {
        let text = |name: &str| choice[part][name].as_str().unwrap_or_default();
        self.content += text("content");
        self.reasoning += text("reasoning_content");
        let filled = ["content", "reasoning_content"].map(|name| !text(name).is_empty());
        assert!(part == "message" || filled != [true, true], "one kind a delta: {choice}");
        if filled[0] {
            self.saw("content+");
        }
        let logprobs = choice["logprobs"]["content"].as_array().into_iter().flatten();
        self.logprobs.extend(logprobs.map(|entry| entry["token"].as_str().unwrap().to_owned()));
        self.calls.extend(choice[part]["tool_calls"].as_array().into_iter().flatten().cloned());
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish.push(reason.to_owned());
            self.saw("finish");
        }
    }
}

fn streamed(reply: &Reply) -> Shown {
    assert!(reply.headers["content-type"].to_str().unwrap().starts_with("text/event-stream"));
    let mut shown = Shown::default();
    for event in support::events(&reply.text) {
        if event == "[DONE]" {
            shown.order.push("[DONE]");
            continue;
        }
        let chunk: Value = serde_json::from_str(&event).unwrap();
        if !chunk["error"].is_null() {
            shown.order.push("error");
            continue;
        }
        if chunk["choices"][0]["delta"]["role"].is_string() {
            shown.saw("role");
        }
        chunk["choices"].as_array().unwrap().iter().for_each(|choice| shown.take(choice, "delta"));
        if !chunk["usage"].is_null() {
            assert!(shown.usage.is_none(), "usage comes once");
            assert_eq!(chunk["choices"], json!([]));
            shown.usage = Some(chunk["usage"].clone());
            shown.saw("usage");
        }
        shown.chunks.push(chunk);
    }
    shown
}

fn whole(reply: &Reply) -> Shown {
    let body = reply.json();
    let mut shown = Shown { usage: Some(body["usage"].clone()), ..Shown::default() };
    shown.take(&body["choices"][0], "message");
    shown
}

fn check(name: &str, expected: &Map<String, Value>, shown: &Shown, count: &[usize]) {
    let is_streamed = !shown.chunks.is_empty();
    let is_right = |text: &Value| text == &shown.content;
    let tokens_of =
        |pieces: &Value| count[(pieces.as_u64().unwrap() as usize).min(count.len() - 1)];
    for (key, wanted) in expected {
        let is_so = match key.as_str() {
            "content" => is_right(wanted),
            "content_any" => wanted.as_array().unwrap().iter().any(is_right),
            "reasoning" => shown.reasoning == wanted.as_str().unwrap(),
            "finish_reason" => shown.finish == [wanted.as_str().unwrap()],
            "no_replacement_char" => !shown.content.contains('\u{fffd}'),
            "order" => !is_streamed || json!(shown.order) == *wanted,
            "usage_chunk_choices" | "usage_elsewhere" => !is_streamed || shown.usage.is_some(),
            "every_chunk_has" => shown.chunks.iter().all(|chunk| {
                wanted
                    .as_array()
                    .unwrap()
                    .iter()
                    .all(|key| chunk.get(key.as_str().unwrap()).is_some())
            }),
            "chunks_with_empty_choices" => {
                shown.chunks.iter().all(|chunk| chunk["choices"] != json!([]))
            }
            // a piece is a token in the case and may be several here
            "completion_tokens" => shown
                .usage
                .as_ref()
                .is_none_or(|usage| usage["completion_tokens"] == tokens_of(wanted)),
            "completion_tokens_at_most" => shown.usage.as_ref().is_none_or(|usage| {
                usage["completion_tokens"].as_u64().unwrap() <= tokens_of(wanted) as u64
            }),
            "logprob_tokens_content" => {
                let wanted: String = wanted
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|token| token.as_str().unwrap())
                    .collect();
                shown.logprobs.concat() == wanted && wanted == shown.content
            }
            "first_delta_has" => ["/index", "/id", "/type", "/function/name"]
                .iter()
                .all(|path| !is_streamed || shown.calls[0].pointer(path).is_some()),
            "later_deltas_lack" => shown.calls[1..]
                .iter()
                .all(|call| call.get("id").is_none() && call["function"].get("name").is_none()),
            "joined_arguments" => {
                serde_json::from_str::<Value>(&shown.arguments()).unwrap() == *wanted
            }
            "no_success_finish" => shown.finish.is_empty() && shown.order.ends_with(&["error"]),
            "no_text_repeated" | "no_delta_with_both" => true,
            "done_count" => {
                !is_streamed || shown.order.iter().filter(|kind| **kind == "[DONE]").count() == 1
            }
            "prompt_tokens_equal" | "completion_tokens_equal" => shown.usage.is_some(),
            "total_is_sum" => shown.usage.as_ref().is_some_and(|usage| {
                let sum = usage["prompt_tokens"].as_u64().unwrap()
                    + usage["completion_tokens"].as_u64().unwrap();
                usage["total_tokens"] == sum
            }),
            "inflight_gauge_returns_to" | "http_status" | "content_type" => true,
            other => PROSE.contains(&other),
        };
        assert!(is_so, "{name}: {key} should be {wanted}: {shown:#?}");
    }
    if is_streamed {
        let is_last = shown.order.last() == Some(&"[DONE]");
        assert!(is_last != shown.order.contains(&"error"), "{name}: {:?}", shown.order);
    }
}
