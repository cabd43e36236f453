//! What clients do wrong: the right status and form, others unharmed, nothing left behind.

#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use support::{Act, Gateway, MODEL, chat_body, eventually, ids, saying, worker};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Asks for something wrong while another client's stream runs, and checks that stream.
async fn beside_a_stream<F>(flags: &[&str], wrong: F)
where
    F: AsyncFnOnce(&Gateway),
{
    let worker = worker();
    let gate = std::sync::Arc::new(tokio::sync::Notify::new());
    let held = std::sync::Arc::clone(&gate);
    worker.set_script(move |header| {
        let mut acts = saying("steady");
        // only the stream beside asks for a seed of 99
        if header.sampling.as_ref().unwrap().seed == Some(99) {
            acts.insert(2, Act::Wait(std::sync::Arc::clone(&held)));
        }
        acts
    });
    let gateway = Gateway::start(&[&worker], flags).await;
    let body = chat_body(json!({"stream": true, "seed": 99})).to_string();
    let beside = gateway.send("/v1/chat/completions", body).await;
    worker.wait_until(|record| record.seen.len() == 1).await;

    wrong(&gateway).await;

    gate.notify_one();
    let text = beside.text().await.unwrap();
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    let good = gateway.chat(json!({})).await.json();
    assert_eq!(good["choices"][0]["message"]["content"], "steady");
    gateway.assert_idle().await;
}

async fn refusals(gateway: &Gateway, cases: &[(Value, u16, &str)]) {
    for (more, status, word) in cases {
        for stream in [false, true] {
            let mut body = chat_body(more.clone());
            body["stream"] = json!(stream);
            let reply = gateway.post("/v1/chat/completions", body.to_string()).await;
            assert_eq!(reply.status, *status, "{more}: {}", reply.text);
            let error = reply.error().to_string();
            assert!(error.contains(word), "{more}: {word} is not in {error}");
        }
    }
}

#[tokio::test]
async fn malformed_json_is_refused_with_its_position() {
    beside_a_stream(&[], async |gateway| {
        let broken = "{\"model\": \"x\",\n \"messages\": [}";
        for path in ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"] {
            let reply = gateway.post(path, broken).await;
            assert_eq!(reply.status, 400, "{path}");
            let message = reply.message();
            assert!(message.contains("line 2") && message.contains("column 15"), "{message}");
        }
        for body in ["", "[]", "7", "\u{feff}{}", "{\"a\":1}{\"b\":2}"] {
            assert_eq!(gateway.post("/v1/chat/completions", body).await.status, 400, "{body:?}");
        }
        let not_text = gateway.post("/v1/chat/completions", vec![0x7b, 0xff, 0xfe, 0x7d]).await;
        assert_eq!(not_text.status, 400);
        let deep = "[".repeat(100_000);
        assert_eq!(gateway.post("/v1/chat/completions", deep).await.status, 400);
    })
    .await;
}

#[tokio::test]
async fn wrong_fields_are_refused_by_name() {
    beside_a_stream(&[], async |gateway| {
        let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
        refusals(
            gateway,
            &[
                (json!({"model": "gpt-4"}), 404, "gpt-4"),
                (json!({"messages": []}), 400, "messages"),
                (json!({"messages": "hello"}), 400, "messages"),
                (json!({"messages": [7]}), 400, "messages[0]"),
                (json!({"messages": [{"role": "wizard", "content": "x"}]}), 400, "wizard"),
                (user(json!(7)), 400, "content"),
                (json!({"temperature": "hot"}), 400, "temperature"),
                (json!({"temperature": 3}), 400, "temperature"),
                (json!({"top_p": -0.1}), 400, "top_p"),
                (json!({"max_tokens": 0}), 400, "max_tokens"),
                (json!({"max_tokens": -1}), 400, "max_tokens"),
                (json!({"max_tokens": 10_000_000}), 400, "max_tokens"),
                (json!({"n": 0}), 400, "\"n\""),
                (json!({"stop": 5}), 400, "stop"),
                (json!({"tools": {}}), 400, "tools"),
                (json!({"top_logprobs": 21, "logprobs": true}), 400, "top_logprobs"),
                (json!({"response_format": {"type": "xml"}}), 400, "response_format.type"),
            ],
        )
        .await;
        let odd = gateway.chat(json!({"stream": "yes"})).await;
        assert_eq!((odd.status, odd.error()["param"].clone()), (400, json!("stream")));
    })
    .await;
}

#[tokio::test]
async fn a_prompt_that_is_too_long_says_by_how_much() {
    beside_a_stream(&["--max-context-tokens", "1200"], async |gateway| {
        let long = "word ".repeat(3000);
        let reply = gateway.chat(json!({"messages": [{"role": "user", "content": long}]})).await;
        assert_eq!(reply.status, 400);
        assert_eq!(reply.error()["code"], "context_length_exceeded");
        let counted =
            chat_body(json!({"messages": [{"role": "user", "content": "word ".repeat(3000)}]}));
        let tokens =
            gateway.post("/tokenize", counted.to_string()).await.json()["count"].as_u64().unwrap();
        let message = reply.message();
        for figure in [tokens, tokens + 1 - 1200, 1200] {
            assert!(message.contains(&figure.to_string()), "{figure} is not in {message}");
        }

        let fits = gateway.chat(json!({"max_tokens": 100})).await;
        assert_eq!(fits.status, 200);
        let prompt = fits.json()["usage"]["prompt_tokens"].as_u64().unwrap();
        let exact = gateway.chat(json!({"max_tokens": 1200 - prompt})).await;
        assert_eq!(exact.status, 200);
        let beyond = gateway.chat(json!({"max_tokens": 1200 - prompt + 1})).await;
        assert_eq!(
            (beyond.status, beyond.error()["code"].clone()),
            (400, json!("context_length_exceeded"))
        );
        assert!(beyond.message().contains("1 more"), "{}", beyond.message());
    })
    .await;
}

#[tokio::test]
async fn markers_typed_by_a_user_stay_text() {
    let worker = worker();
    worker.set_acts(saying("ok"));
    let gateway = Gateway::start(&[&worker], &[]).await;
    let typed = "a ]<]image[>[ b ]<]video[>[ c [e~[ d ]~b]system e <mm:think> f ]~!b[";

    let reply = gateway.chat(json!({"messages": [{"role": "user", "content": typed}]})).await;

    assert_eq!(reply.status, 200, "{}", reply.text);
    let header = worker.seen()[0].header.clone();
    assert!(header.media.is_empty());
    let plain = gateway.chat(json!({"messages": [{"role": "user", "content": "plain"}]})).await;
    assert_eq!(plain.status, 200);
    let reference = worker.seen()[1].header.clone();
    for marker in ["]<]image[>[", "]<]video[>[", "[e~[", "]~b]", "<mm:think>", "]~!b["] {
        let id = ids_of_marker(marker);
        let count = |header: &support::proto::GenerateHeader| {
            header.prompt_token_ids.iter().filter(|token| **token == id).count()
        };
        assert_eq!(count(&header), count(&reference), "{marker}");
    }
}

fn ids_of_marker(marker: &str) -> u32 {
    let model = support::model();
    model.prompt_builder.tokenizer().added().by_content(marker).unwrap().id
}

#[tokio::test]
async fn a_text_completion_cannot_smuggle_media() {
    beside_a_stream(&[], async |gateway| {
        for prompt in [json!("a ]<]image[>[ b"), json!([1, ids_of_marker("]<]video[>[")])] {
            let body = json!({"model": MODEL, "prompt": prompt}).to_string();
            assert_eq!(gateway.post("/v1/completions", body).await.status, 400);
        }
        let beyond = json!({"model": MODEL, "prompt": [999_999]}).to_string();
        assert_eq!(gateway.post("/v1/completions", beyond).await.status, 400);
    })
    .await;
}

#[tokio::test]
async fn a_body_above_the_limit_is_413_whether_announced_or_not() {
    beside_a_stream(&["--max-request-bytes", "100000"], async |gateway| {
        let large = chat_body(json!({"pad": "x".repeat(200_000)})).to_string();
        let announced = gateway.post("/v1/chat/completions", large.clone()).await;
        assert_eq!(announced.status, 413);
        assert!(announced.message().contains("100000"), "{}", announced.message());

        let pieces = large.into_bytes().chunks(10_000).map(<[u8]>::to_vec).collect::<Vec<_>>();
        let stream = futures::stream::iter(pieces.into_iter().map(Ok::<_, std::io::Error>));
        let chunked =
            gateway.post("/v1/chat/completions", reqwest::Body::wrap_stream(stream)).await;
        assert_eq!(chunked.status, 413);
        chunked.error();
    })
    .await;
}

#[tokio::test]
async fn a_refused_body_is_read_to_its_end_behind_the_refusal() {
    let worker = worker();
    worker.set_acts(saying("Hi"));
    let gateway = Gateway::start(&[&worker], &["--max-request-bytes", "1000"]).await;
    let mut client = connect(&gateway).await;

    // not a byte of the body is there when the refusal comes
    client.write_all(head(2000).as_bytes()).await.unwrap();
    let refusal = response(&mut client).await;
    assert!(refusal.starts_with("HTTP/1.1 413 "), "{refusal}");

    client.write_all(&[b' '; 2000]).await.unwrap();
    assert_serves_on(client).await;
    gateway.assert_idle().await;
}

#[tokio::test]
async fn a_body_that_had_leave_to_come_is_read_to_its_end_too() {
    let worker = worker();
    worker.set_acts(saying("Hi"));
    let gateway = Gateway::start(&[&worker], &["--max-request-bytes", "1000"]).await;
    let mut client = connect(&gateway).await;
    let asking = "POST /tokenize HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\n\
        transfer-encoding: chunked\r\n\r\n";
    client.write_all(asking.as_bytes()).await.unwrap();
    let mut leave = [0; b"HTTP/1.1 100 Continue\r\n\r\n".len()];
    client.read_exact(&mut leave).await.unwrap();
    assert!(leave.starts_with(b"HTTP/1.1 100 "));

    client.write_all(format!("7d0\r\n{}\r\n", " ".repeat(2000)).as_bytes()).await.unwrap();
    let refusal = response(&mut client).await;
    assert!(refusal.starts_with("HTTP/1.1 413 "), "{refusal}");
    client.write_all(b"1\r\n \r\n0\r\n\r\n").await.unwrap();

    assert_serves_on(client).await;
    gateway.assert_idle().await;
}

#[tokio::test]
async fn a_broken_body_is_the_clients_mistake_and_told() {
    let worker = worker();
    let gateway = Gateway::start(&[&worker], &[]).await;
    let chunked = "POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n";
    for sent in [chunked.to_owned(), head(100) + "{"] {
        let mut client = connect(&gateway).await;
        client.write_all(sent.as_bytes()).await.unwrap();
        client.shutdown().await.unwrap();
        let answer = response(&mut client).await;
        assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("body"), "{answer}");
    }
    let post = gateway.client.post(format!("{}/tokenize", gateway.url));
    let packed = post.header("content-encoding", "gzip").body("\u{1f}").send().await.unwrap();
    let packed = support::read(packed).await;
    assert_eq!((packed.status, packed.message().contains("gzip")), (415, true));
    gateway.assert_idle().await;
}

/// The connection is whole: its next request is answered.
async fn assert_serves_on(mut client: tokio::net::TcpStream) {
    let body = chat_body(json!({})).to_string();
    client.write_all(head(body.len()).as_bytes()).await.unwrap();
    client.write_all(body.as_bytes()).await.unwrap();
    let answer = response(&mut client).await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
}

fn head(length: usize) -> String {
    format!("POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n\r\n")
}

async fn connect(gateway: &Gateway) -> tokio::net::TcpStream {
    let address = gateway.url.trim_start_matches("http://");
    tokio::net::TcpStream::connect(address).await.unwrap()
}

/// The next response, its body told by its length.
async fn response(client: &mut tokio::net::TcpStream) -> String {
    let mut bytes = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.to_lowercase();
            let length = length.lines().find_map(|line| line.strip_prefix("content-length: "));
            if body.len() >= length.unwrap().parse().unwrap() {
                return text;
            }
        }
        let read = tokio::time::timeout(support::PATIENCE, client.read_buf(&mut bytes)).await;
        assert!(read.unwrap().unwrap() > 0, "no more than {text}");
    }
}

#[tokio::test]
async fn a_full_gateway_answers_429_and_has_room_again_afterwards() {
    let worker = worker();
    worker.set_acts(vec![Act::Start, Act::Tokens(ids("a")), Act::Hang]);
    let gateway = Gateway::start(&[&worker], &["--max-concurrent-requests", "2"]).await;
    let body = chat_body(json!({"stream": true})).to_string();
    let first = gateway.send("/v1/chat/completions", body.clone()).await;
    let second = gateway.send("/v1/chat/completions", body).await;

    let third = gateway.chat(json!({})).await;

    assert_eq!(third.status, 429);
    assert_eq!(third.headers["retry-after"], "1");
    assert_eq!(third.error()["type"], "rate_limit_error");
    // a mistake of the client's own is told even to one who comes at a bad time
    assert_eq!(gateway.chat(json!({"messages": []})).await.status, 400);
    drop((first, second));
    gateway.assert_idle().await;
    worker.set_acts(saying("room"));
    assert_eq!(gateway.chat(json!({})).await.status, 200);
}

#[tokio::test]
async fn bodies_of_all_requests_share_one_budget() {
    let worker = worker();
    worker.set_acts(vec![Act::Start, Act::Tokens(ids("a")), Act::Hang]);
    let flags = ["--max-request-bytes", "300000", "--set", "max_buffered_bytes=400000"];
    let gateway = Gateway::start(&[&worker], &flags).await;
    let large = chat_body(json!({"stream": true, "pad": "x".repeat(250_000)})).to_string();
    let first = gateway.send("/v1/chat/completions", large.clone()).await;

    let second = gateway.post("/v1/chat/completions", large.clone()).await;

    assert_eq!(second.status, 429, "{}", second.text);
    drop(first);
    gateway.assert_idle().await;
    let third = gateway.send("/v1/chat/completions", large).await;
    assert_eq!(third.status().as_u16(), 200);
}

#[tokio::test]
async fn without_a_worker_every_request_is_503_and_says_what_is_missing() {
    let nobody = "127.0.0.1:1".to_owned();
    let gateway = Gateway::start_before(std::slice::from_ref(&nobody), &[]).await;
    let app = std::sync::Arc::clone(&gateway.app);
    eventually("the worker was tried", move || {
        app.workers.what_is_missing()[0].contains("refused")
    })
    .await;

    let reply = gateway.chat(json!({})).await;
    assert_eq!(reply.status, 503);
    assert!(reply.headers.contains_key("retry-after"));
    assert!(reply.message().contains(&nobody), "{}", reply.message());
    let ready = gateway.get("/ready").await;
    assert_eq!(ready.status, 503);
    assert!(ready.json()["missing"][0].as_str().unwrap().contains(&nobody), "{}", ready.text);
    assert_eq!(gateway.get("/health").await.status, 200);
    assert_eq!(gateway.get("/v1/models").await.status, 200);
    gateway.assert_idle().await;
}

#[tokio::test]
async fn a_worker_with_another_model_is_refused_and_named() {
    let model = support::model();
    let mut facts = support::wire_facts(model.spec.facts());
    facts.vocab_size += 64;
    let stranger = support::FakeWorker::start(facts, [7; 32], None);
    let gateway = Gateway::start_before(&[stranger.address.to_string()], &[]).await;
    let app = std::sync::Arc::clone(&gateway.app);
    eventually("the worker was refused", move || app.workers.count().refused == 1).await;

    let ready = gateway.get("/ready").await;
    assert_eq!(ready.status, 503);
    let missing = ready.json()["missing"][0].as_str().unwrap().to_owned();
    assert!(missing.contains("vocab_size"), "{missing}");
    assert_eq!(gateway.chat(json!({})).await.status, 503);
    assert!(stranger.seen().is_empty());
}

#[tokio::test]
async fn a_request_that_lives_too_long_is_504() {
    let worker = worker();
    worker.set_acts(vec![Act::Start, Act::Hang]);
    let gateway = Gateway::start(&[&worker], &["--request-timeout-s", "1"]).await;

    for stream in [false, true] {
        let reply = gateway.chat(json!({"stream": stream})).await;
        assert_eq!(
            (reply.status, reply.error()["code"].clone()),
            (504, json!("deadline_exceeded"))
        );
    }
    // the second may be too late for the worker to see
    worker.wait_until(|record| record.cancelled >= record.seen.len()).await;
    gateway.assert_idle().await;
}
