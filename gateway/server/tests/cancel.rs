//! Clients that leave, workers that die, gateways that stop: every request ends once, and
//! nothing is left behind.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use serde_json::{Value, json};
use support::{Act, Gateway, Holds, chat_body, events, eventually, ids, proto, saying, worker};
use tokio::sync::Notify;

#[tokio::test]
async fn a_client_that_leaves_a_stream_ends_the_workers_call() {
    let worker = worker();
    worker.set_acts(vec![Act::Start, Act::Tokens(ids("Hello there")), Act::Hang]);
    let gateway = Gateway::start(&[&worker], &[]).await;
    let body = chat_body(json!({"stream": true})).to_string();
    let mut response = gateway.send("/v1/chat/completions", body).await;
    assert!(response.chunk().await.unwrap().is_some());

    drop(response);

    worker.wait_until(|record| record.cancelled == 1).await;
    gateway.assert_idle().await;
    let left = "m3stack_gateway_http_requests_total{route=\"/v1/chat/completions\",code=\"499\"} 1";
    assert!(gateway.get("/metrics").await.text.contains(left));
}

#[tokio::test]
async fn a_client_that_leaves_before_a_whole_reply_ends_the_workers_call() {
    let worker = worker();
    worker.set_acts(vec![Act::Start, Act::Hang]);
    let gateway = Gateway::start(&[&worker], &[]).await;
    let request = gateway
        .client
        .post(format!("{}/v1/chat/completions", gateway.url))
        .body(chat_body(json!({})).to_string())
        .send();
    let asking = tokio::spawn(request);
    worker.wait_until(|record| record.seen.len() == 1).await;

    asking.abort();

    worker.wait_until(|record| record.cancelled == 1).await;
    gateway.assert_idle().await;
}

#[tokio::test]
async fn a_client_that_leaves_while_a_clip_is_decoded_ends_the_child() {
    let worker = worker();
    worker.set_holds(Holds::Nothing);
    let gateway = Gateway::start(&[&worker], &[]).await;
    let clip = std::fs::read(support::media_directory().join("vid_long_10min_30fps.mp4")).unwrap();
    let url = format!("data:video/mp4;base64,{}", base64(&clip));
    let part = json!({"type": "video_url", "video_url": {"url": url, "fps": 1}});
    let body = chat_body(json!({"messages": [{"role": "user", "content": [part]}]})).to_string();
    let request =
        gateway.client.post(format!("{}/v1/chat/completions", gateway.url)).body(body).send();
    let asking = tokio::spawn(request);
    worker.wait_until(|record| record.seen.len() == 1).await;
    let app = Arc::clone(&gateway.app);
    eventually("the clip is being decoded", move || app.metrics.video_processes_now() == 1).await;

    asking.abort();

    worker.wait_until(|record| record.cancelled == 1).await;
    gateway.assert_idle().await;
    eventually("no process is left", || children() == 0).await;
}

#[tokio::test]
async fn a_worker_that_dies_after_its_first_token_is_one_error_event() {
    let worker = worker();
    worker.set_acts(vec![Act::Start, Act::Tokens(ids("Hello there")), Act::Hang]);
    let gateway = Gateway::start(&[&worker], &[]).await;
    let body = chat_body(json!({"stream": true})).to_string();
    let mut response = gateway.send("/v1/chat/completions", body).await;
    let mut text = String::from_utf8(response.chunk().await.unwrap().unwrap().to_vec()).unwrap();

    worker.kill();

    text.push_str(&response.text().await.unwrap());
    let events = events(&text);
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "worker_unavailable");
    assert_eq!(events.iter().filter(|event| event.contains("\"error\"")).count(), 1);
    assert!(!text.contains("[DONE]"));
    gateway.assert_idle().await;
    assert_eq!(gateway.chat(json!({})).await.status, 503);
}

#[tokio::test]
async fn a_worker_that_dies_before_its_first_token_is_replaced_once() {
    let (first, second) = (worker(), worker());
    for worker in [&first, &second] {
        worker.set_acts(vec![Act::Start, Act::Hang]);
    }
    let gateway = Gateway::start(&[&first, &second], &[]).await;
    let asking = tokio::spawn({
        let (client, url) = (gateway.client.clone(), gateway.url.clone());
        let body = chat_body(json!({"seed": 5})).to_string();
        async move {
            let sent = client.post(format!("{url}/v1/chat/completions")).body(body).send().await;
            support::read(sent.unwrap()).await
        }
    });
    eventually("a worker has it", || first.seen().len() + second.seen().len() == 1).await;
    let (holder, other) = if first.seen().is_empty() { (second, first) } else { (first, second) };
    other.set_acts(saying("from the other"));

    holder.kill();

    let reply = asking.await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.text);
    assert_eq!(reply.json()["choices"][0]["message"]["content"], "from the other");
    assert_eq!(other.seen()[0].header.sampling.as_ref().unwrap().seed, Some(5));
    assert!(gateway.get("/metrics").await.text.contains("m3stack_gateway_worker_retries_total 1"));
    gateway.assert_idle().await;
}

#[tokio::test]
async fn a_request_leaves_a_silent_worker_before_that_is_given_up() {
    let (first, second) = (worker(), worker());
    for worker in [&first, &second] {
        worker.set_acts(vec![Act::Start, Act::Hang]);
    }
    let gateway = Gateway::start(&[&first, &second], &[]).await;
    let asking = tokio::spawn({
        let (client, url) = (gateway.client.clone(), gateway.url.clone());
        let body = chat_body(json!({})).to_string();
        async move {
            let sent = client.post(format!("{url}/v1/chat/completions")).body(body).send().await;
            support::read(sent.unwrap()).await
        }
    });
    eventually("a worker has it", || first.seen().len() + second.seen().len() == 1).await;
    let (holder, other) = if first.seen().is_empty() { (second, first) } else { (first, second) };
    other.set_acts(saying("from the other"));

    // asked again it speaks once, so that it never counts as lost
    holder.fall_silent();

    let reply = asking.await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.text);
    assert_eq!(reply.json()["choices"][0]["message"]["content"], "from the other");
    holder.wait_until(|record| record.cancelled == 1).await;
    gateway.assert_idle().await;
}

#[tokio::test]
async fn whoever_lost_its_worker_hears_that_the_others_are_full() {
    let (first, second) = (worker(), worker());
    for worker in [&first, &second] {
        worker.set_acts(vec![Act::Start, Act::Hang]);
    }
    let gateway = Gateway::start(&[&first, &second], &["--set", "max_queue_wait_s=2"]).await;
    let asking = tokio::spawn({
        let (client, url) = (gateway.client.clone(), gateway.url.clone());
        let body = chat_body(json!({})).to_string();
        async move {
            let sent = client.post(format!("{url}/v1/chat/completions")).body(body).send().await;
            support::read(sent.unwrap()).await
        }
    });
    eventually("a worker has it", || first.seen().len() + second.seen().len() == 1).await;
    let (holder, other) = if first.seen().is_empty() { (second, first) } else { (first, second) };
    let full = proto::Load { waiting_prompt_tokens: 1 << 40, ..proto::Load::default() };
    other.set_load(full);
    let app = Arc::clone(&gateway.app);
    eventually("it is seen", move || app.workers.fleet().load.waiting_prompt_tokens > 0).await;

    holder.kill();

    let reply = asking.await.unwrap();
    assert_eq!(reply.status, 429, "{}", reply.text);
    assert!(reply.headers.contains_key("retry-after"));
    assert!(other.seen().is_empty());
    gateway.assert_idle().await;
}

#[tokio::test]
async fn a_request_stays_with_a_silent_worker_if_there_is_no_other() {
    let worker = worker();
    let speak = Arc::new(Notify::new());
    let mut acts = vec![Act::Start, Act::Wait(Arc::clone(&speak))];
    acts.extend(saying("after all"));
    worker.set_acts(acts);
    let gateway = Gateway::start(&[&worker], &[]).await;
    let asking = tokio::spawn({
        let (client, url) = (gateway.client.clone(), gateway.url.clone());
        let body = chat_body(json!({})).to_string();
        async move {
            let sent = client.post(format!("{url}/v1/chat/completions")).body(body).send().await;
            support::read(sent.unwrap()).await
        }
    });
    eventually("the worker has it", || worker.seen().len() == 1).await;

    worker.fall_silent();
    worker.wait_until(|record| record.watched == 2).await;
    speak.notify_one();

    let reply = asking.await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.text);
    assert_eq!(reply.json()["choices"][0]["message"]["content"], "after all");
    gateway.assert_idle().await;
}

#[tokio::test]
async fn only_a_lost_worker_is_worth_a_second_try() {
    let (first, second) = (worker(), worker());
    let gateway = Gateway::start(&[&first, &second], &[]).await;
    let asked = || first.seen().len() + second.seen().len();
    for (kind, status, calls) in [
        (proto::ErrorKind::Internal, 500, 1),
        (proto::ErrorKind::InvalidRequest, 400, 1),
        (proto::ErrorKind::Overloaded, 429, 1),
        (proto::ErrorKind::WorkerUnavailable, 503, 2),
    ] {
        for worker in [&first, &second] {
            worker.set_acts(vec![Act::Start, Act::Fail(kind, "no")]);
        }
        let before = asked();
        assert_eq!(gateway.chat(json!({})).await.status, status);
        assert_eq!(asked() - before, calls, "{kind:?}");
    }
    // never after a token: it would be said twice
    for worker in [&first, &second] {
        let fail = Act::Fail(proto::ErrorKind::WorkerUnavailable, "no");
        worker.set_acts(vec![Act::Start, Act::Tokens(ids("Hello")), fail]);
    }
    let before = asked();
    assert_eq!(gateway.chat(json!({})).await.status, 503);
    assert_eq!(asked() - before, 1);
    gateway.assert_idle().await;
}

#[tokio::test]
async fn a_worker_that_comes_back_is_used_again() {
    let first = worker();
    let gateway = Gateway::start(&[&first], &[]).await;
    let address = first.kill();
    let app = Arc::clone(&gateway.app);
    eventually("it is missed", move || app.workers.count().unreachable == 1).await;

    let second = support::worker_at(Some(address));
    second.set_acts(saying("back"));
    gateway.wait_ready(1).await;

    let reply = gateway.chat(json!({})).await;
    assert_eq!(reply.json()["choices"][0]["message"]["content"], "back");
}

#[tokio::test]
async fn a_draining_worker_gets_nothing_new() {
    let (first, second) = (worker(), worker());
    for worker in [&first, &second] {
        worker.set_acts(saying("ok"));
    }
    let gateway = Gateway::start(&[&first, &second], &[]).await;
    first.set_state(proto::WorkerState::Draining);
    let app = Arc::clone(&gateway.app);
    eventually("it is seen", move || app.workers.count().draining == 1).await;

    for _ in 0..6 {
        assert_eq!(gateway.chat(json!({})).await.status, 200);
    }

    assert_eq!((first.seen().len(), second.seen().len()), (0, 6));
}

#[tokio::test]
async fn a_stopping_gateway_lets_streams_end_and_takes_nothing_new() {
    let worker = worker();
    let gate = Arc::new(Notify::new());
    let mut acts = saying("to the end");
    acts.insert(2, Act::Wait(Arc::clone(&gate)));
    worker.set_acts(acts);
    let mut gateway = Gateway::start(&[&worker], &["--drain-timeout-s", "20"]).await;
    let body = chat_body(json!({"stream": true})).to_string();
    let response = gateway.send("/v1/chat/completions", body).await;

    let stopping = gateway.begin_stop();
    let app = Arc::clone(&gateway.app);
    eventually("the door is closed", move || app.admission.is_closed()).await;
    let refused = gateway
        .client
        .post(format!("{}/v1/chat/completions", gateway.url))
        .body(chat_body(json!({})).to_string())
        .send()
        .await;
    assert!(refused.is_err() || refused.is_ok_and(|reply| reply.status().as_u16() == 503));
    gate.notify_one();

    assert!(response.text().await.unwrap().ends_with("data: [DONE]\n\n"));
    stopping.await.unwrap();
}

#[tokio::test]
async fn a_stream_that_outlives_the_drain_is_told_so() {
    let worker = worker();
    worker.set_acts(vec![Act::Start, Act::Tokens(ids("Hello")), Act::Hang]);
    let mut gateway = Gateway::start(&[&worker], &["--drain-timeout-s", "0"]).await;
    let body = chat_body(json!({"stream": true})).to_string();
    let response = gateway.send("/v1/chat/completions", body).await;

    let stopping = gateway.begin_stop();

    let text = response.text().await.unwrap();
    let last: Value = serde_json::from_str(events(&text).last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "shutting_down");
    assert!(!text.contains("[DONE]"));
    stopping.await.unwrap();
    worker.wait_until(|record| record.cancelled == 1).await;
}

/// FFmpeg processes of ours that are not zombies.
fn children() -> usize {
    let own = std::process::id().to_string();
    let is_child = |stat: String| {
        let Some((name, rest)) = stat.split_once('(').and_then(|(_, rest)| rest.rsplit_once(')'))
        else {
            return false;
        };
        let mut fields = rest.split_whitespace();
        let state = fields.next();
        name.starts_with("ff") && state != Some("Z") && fields.next() == Some(own.as_str())
    };
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| std::fs::read_to_string(entry.ok()?.path().join("stat")).ok())
        .filter(|stat| is_child(stat.clone()))
        .count()
}

fn base64(bytes: &[u8]) -> String {
    use base64::Engine;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}
