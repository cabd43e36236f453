//! Which worker a request goes to, and which workers get none, over real HTTP and gRPC.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use gateway_core::routing::{ChainPrompt, page_keys};
use gateway_media::{PatchLayout, PixelNorm};
use serde_json::{Value, json};
use support::{Act, FakeWorker, Gateway, chat_body, eventually, proto, replace, saying, worker};
use tokio::sync::Notify;

fn workers(count: usize) -> Vec<FakeWorker> {
    let workers: Vec<_> = (0..count).map(|_| worker()).collect();
    workers.iter().for_each(|worker| worker.set_acts(saying("ok")));
    workers
}

async fn before(workers: &[FakeWorker], flags: &[&str]) -> Gateway {
    let list: Vec<_> = workers.iter().collect();
    Gateway::start(&list, &[flags, &["--set", "slow_start_s=0"]].concat()).await
}

fn asked(workers: &[FakeWorker]) -> Vec<usize> {
    workers.iter().map(|worker| worker.seen().len()).collect()
}

/// A conversation that fills several pages.
fn long_chat(more: &Value) -> Value {
    let text = "a long beginning that many requests share ".repeat(60);
    let mut body = json!({"messages": [
        {"role": "system", "content": text}, {"role": "user", "content": "Hi"},
    ]});
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

/// The keys of a request's pages, as the worker that got it would name them.
fn keys_of(header: &proto::GenerateHeader) -> Vec<u64> {
    let prompt = ChainPrompt {
        token_ids: &header.prompt_token_ids,
        media: &[],
        layout: PatchLayout { patch_size: 14, temporal_patch_size: 2, merge_size: 2 },
        norm: PixelNorm { mean: [0.0; 3], std: [1.0; 3] },
        tenant: &header.tenant,
        cache_salt: &header.cache_salt,
    };
    page_keys(&prompt, 128, 0).to_vec()
}

/// Pages as told, and as guessed from what was sent.
fn known_pages(gateway: &Gateway) -> (usize, usize) {
    gateway.app.workers.fleet().known_pages
}

#[tokio::test]
async fn a_prompt_goes_to_the_worker_that_says_it_holds_its_beginning() {
    let workers = workers(3);
    let gateway = before(&workers, &[]).await;
    assert_eq!(gateway.chat(long_chat(&json!({}))).await.status, 200);
    let first = asked(&workers).iter().position(|count| *count == 1).unwrap();
    let keys = keys_of(&workers[first].seen()[0].header);
    assert!(keys.len() >= 2, "{}", keys.len());

    let holder = (first + 1) % 3;
    for (place, worker) in workers.iter().enumerate() {
        let added = if place == holder { keys.clone() } else { Vec::new() };
        let events = proto::CacheEvents { is_restart: true, added, ..Default::default() };
        worker.tell_pages(events);
    }
    // whoever tells is guessed about no longer
    eventually("the pages are known", || known_pages(&gateway) == (keys.len(), 0)).await;
    for _ in 0..4 {
        assert_eq!(gateway.chat(long_chat(&json!({}))).await.status, 200);
    }
    assert_eq!(workers[holder].seen().len(), 4);

    // another salt: other pages, so nobody holds anything
    let before_salt = workers[holder].seen().len();
    for number in 0..3 {
        let salt = json!({"cache_salt": format!("{number}")});
        assert_eq!(gateway.chat(long_chat(&salt)).await.status, 200);
    }
    assert!(workers[holder].seen().len() < before_salt + 3);
    let page = gateway.get("/metrics").await.text;
    assert!(page.contains("m3stack_gateway_routing_choices_total{reason=\"cache\"} 4"), "{page}");
    gateway.assert_idle().await;
}

#[tokio::test]
async fn a_worker_that_tells_nothing_is_remembered_by_what_it_was_sent() {
    let workers = workers(4);
    let gateway = before(&workers, &[]).await;
    for _ in 0..6 {
        assert_eq!(gateway.chat(long_chat(&json!({}))).await.status, 200);
    }
    let mut counts = asked(&workers);
    counts.sort_unstable();
    assert_eq!(counts, [0, 0, 0, 6]);
}

#[tokio::test]
async fn requests_of_one_session_meet_on_one_worker() {
    let workers = workers(4);
    let gateway = before(&workers, &[]).await;
    let ask = async |session: &str| {
        let url = format!("{}/v1/chat/completions", gateway.url);
        let body = chat_body(json!({})).to_string();
        let request = gateway.client.post(url).header("x-session-affinity", session).body(body);
        assert_eq!(request.send().await.unwrap().status().as_u16(), 200);
    };
    let mut homes = std::collections::HashSet::new();
    for session in 0..12 {
        let earlier = asked(&workers);
        for _ in 0..3 {
            ask(&format!("session {session}")).await;
        }
        let later = asked(&workers);
        let gained: Vec<_> = later.iter().zip(&earlier).map(|(now, then)| now - then).collect();
        assert_eq!(gained.iter().filter(|count| **count == 3).count(), 1, "{gained:?}");
        homes.insert(gained);
    }
    assert!(homes.len() > 1, "all sessions on one worker");
    // the body's own field does the same
    let earlier = asked(&workers);
    for _ in 0..3 {
        gateway.chat(json!({"prompt_cache_key": "mine"})).await;
    }
    let later = asked(&workers);
    assert!(later.iter().zip(&earlier).any(|(now, then)| now - then == 3));
}

#[tokio::test]
async fn a_worker_that_accepts_and_makes_no_step_gets_nothing_new_until_it_does() {
    let workers = workers(2);
    let gateway = before(&workers, &["--set", "worker_stall_s=1"]).await;
    let load = |steps| proto::Load { running_requests: 1, steps, ..Default::default() };
    workers[0].set_load(load(5));
    let app = Arc::clone(&gateway.app);
    eventually("it is out", move || app.workers.count().stalled == 1).await;

    for _ in 0..4 {
        assert_eq!(gateway.chat(json!({})).await.status, 200);
    }
    assert_eq!(asked(&workers), [0, 4]);
    let ready = gateway.get("/ready").await;
    assert!(ready.text.contains("makes no step"), "{}", ready.text);

    workers[0].set_load(proto::Load { steps: 6, ..Default::default() });
    gateway.wait_ready(2).await;
}

#[tokio::test]
async fn no_number_of_bad_requests_takes_a_worker_out_but_failures_do() {
    let workers = workers(1);
    // no pause ends while this looks
    let gateway = before(&workers, &["--set", "breaker_pause_s=600"]).await;
    workers[0].set_acts(vec![Act::Fail(proto::ErrorKind::ContextTooLong, "too long")]);
    for _ in 0..20 {
        assert_eq!(gateway.chat(json!({})).await.status, 400);
    }
    workers[0].set_acts(saying("ok"));
    assert_eq!(gateway.chat(json!({})).await.status, 200);

    fail_often(&workers[0], &gateway).await;
    let left_alone = gateway.chat(json!({})).await;
    assert_eq!(left_alone.status, 503);
    assert!(left_alone.message().contains("left alone"), "{}", left_alone.text);
    assert!(left_alone.headers.contains_key("retry-after"));
    assert_eq!(gateway.app.workers.count().broken, 1);
    gateway.assert_idle().await;
}

/// Fails as many requests in a row as it takes to be left alone.
async fn fail_often(worker: &FakeWorker, gateway: &Gateway) {
    worker.set_acts(vec![Act::Fail(proto::ErrorKind::Internal, "crashed")]);
    for _ in 0..5 {
        assert_eq!(gateway.chat(json!({})).await.status, 500);
    }
}

#[tokio::test]
async fn a_worker_that_failed_is_tried_again_after_a_pause() {
    let workers = workers(1);
    let gateway = before(&workers, &["--set", "breaker_pause_s=1"]).await;
    fail_often(&workers[0], &gateway).await;

    workers[0].set_acts(saying("ok"));
    let app = Arc::clone(&gateway.app);
    eventually("it is tried again", move || app.workers.count().ready == 1).await;
    assert_eq!(gateway.chat(json!({})).await.status, 200);
    assert_eq!(gateway.app.workers.count().broken, 0);
    gateway.assert_idle().await;
}

#[tokio::test]
async fn a_fleet_with_too_much_to_do_sends_requests_away_and_says_for_how_long() {
    let workers = workers(2);
    let gateway = before(&workers, &["--set", "max_queue_wait_s=2"]).await;
    for worker in &workers {
        let load = proto::Load {
            waiting_prompt_tokens: 40_000,
            prompt_tokens_per_s: 1000.0,
            steps: 1,
            ..Default::default()
        };
        worker.set_load(load);
    }
    let app = Arc::clone(&gateway.app);
    eventually("the load is known", move || {
        app.workers.fleet().load.waiting_prompt_tokens == 80_000
    })
    .await;

    let reply = gateway.chat(json!({})).await;
    assert_eq!((reply.status, reply.error()["code"].clone()), (429, json!("overloaded")));
    assert_eq!(reply.headers["retry-after"], "40");
    assert_eq!(asked(&workers), [0, 0]);
    let page = gateway.get("/metrics").await.text;
    assert!(page.contains("m3stack_gateway_shed_requests_total 1"));
}

#[tokio::test]
async fn a_request_stays_with_a_silent_worker_while_the_others_are_too_busy() {
    let workers = workers(2);
    let speak = Arc::new(Notify::new());
    let mut acts = vec![Act::Start, Act::Wait(Arc::clone(&speak))];
    acts.extend(saying("after all"));
    workers.iter().for_each(|worker| worker.set_acts(acts.clone()));
    let gateway = before(&workers, &["--set", "max_queue_wait_s=2"]).await;
    let asking = tokio::spawn({
        let (client, url) = (gateway.client.clone(), gateway.url.clone());
        let body = chat_body(json!({})).to_string();
        async move {
            let sent = client.post(format!("{url}/v1/chat/completions")).body(body).send().await;
            support::read(sent.unwrap()).await
        }
    });
    eventually("a worker has it", || asked(&workers) != [0, 0]).await;
    let (holder, other) = match asked(&workers)[..] {
        [1, 0] => (&workers[0], &workers[1]),
        _ => (&workers[1], &workers[0]),
    };
    other.set_load(proto::Load {
        waiting_prompt_tokens: 40_000,
        prompt_tokens_per_s: 1000.0,
        steps: 1,
        ..Default::default()
    });
    let app = Arc::clone(&gateway.app);
    eventually("the load is known", move || {
        app.workers.fleet().load.waiting_prompt_tokens == 40_000
    })
    .await;

    holder.fall_silent();
    holder.wait_until(|record| record.watched == 2).await;
    speak.notify_one();

    let reply = asking.await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.text);
    assert_eq!(reply.json()["choices"][0]["message"]["content"], "after all");
    assert_eq!(other.seen().len(), 0);
    gateway.assert_idle().await;
}

#[tokio::test]
async fn what_a_tenant_may_have_is_held_to_and_given_back() {
    let file = tempfile::NamedTempFile::new().unwrap().into_temp_path();
    std::fs::write(&file, "[default]\nmax_concurrent_requests = 1\ntokens_per_minute = 600\n")
        .unwrap();
    let workers = workers(1);
    let gateway = before(&workers, &["--tenant-limits", file.to_str().unwrap()]).await;
    drop(file);
    workers[0].set_acts(vec![Act::Start, Act::Hang]);
    let body = chat_body(json!({"stream": true})).to_string();
    let url = format!("{}/v1/chat/completions", gateway.url);
    let first = tokio::spawn(gateway.client.post(url).body(body).send());
    workers[0].wait_until(|record| record.seen.len() == 1).await;

    let second = gateway.chat(json!({})).await;
    assert_eq!(
        (second.status, second.error()["code"].clone()),
        (429, json!("rate_limit_exceeded"))
    );
    assert_eq!(second.headers["x-ratelimit-remaining-requests"], "0");
    assert_eq!(second.headers["x-ratelimit-limit-tokens"], "600");
    first.abort();
    gateway.assert_idle().await;

    // a prompt longer than the minute's tokens is served, and then paid off
    workers[0].set_acts(saying("ok"));
    let debt = "words ".repeat(7000);
    let messages = json!({"messages": [{"role": "user", "content": debt}]});
    assert_eq!(gateway.chat(messages).await.status, 200);
    let third = gateway.chat(json!({})).await;
    assert_eq!(third.status, 429);
    assert!(third.message().contains("600 tokens a minute"), "{}", third.text);
    let wait: u32 = third.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!(wait > 1, "{wait}");
}

#[tokio::test]
async fn the_list_of_workers_is_read_again_when_its_file_changes() {
    let file = tempfile::NamedTempFile::new().unwrap().into_temp_path();
    let workers = workers(2);
    let write = |worker: &FakeWorker| {
        replace(&file, &format!("# one\n{}\n", worker.address));
    };
    write(&workers[0]);
    let source = format!("file://{}", file.display());
    let gateway = Gateway::start_before(&[source], &[]).await;
    gateway.wait_ready(1).await;
    workers[0].set_acts(vec![Act::Start, Act::Tokens(support::ids("Hello")), Act::Hang]);
    let body = chat_body(json!({"stream": true})).to_string();
    let mut running = gateway.send("/v1/chat/completions", body).await;
    assert!(running.chunk().await.unwrap().is_some());

    write(&workers[1]);
    let (app, new) = (Arc::clone(&gateway.app), workers[1].address.to_string());
    eventually("the new worker is ready", move || {
        let views = app.workers.snapshot();
        views.len() == 1 && views[0].address.ends_with(&new) && app.workers.count().ready == 1
    })
    .await;
    assert_eq!(gateway.chat(json!({})).await.status, 200);
    assert_eq!(asked(&workers), [1, 1]);
    // what ran on the old one runs on
    assert_eq!(workers[0].num_cancelled(), 0);
    drop(running);
    workers[0].wait_until(|record| record.cancelled == 1).await;

    // a file that is broken or empty for a while takes nobody away
    replace(&file, "not an address\n");
    gateway.app.discovery.refresh();
    replace(&file, "");
    gateway.app.discovery.refresh();
    file.close().unwrap();
    gateway.app.discovery.refresh();
    assert_eq!(gateway.chat(json!({})).await.status, 200);
    gateway.assert_idle().await;
}

#[tokio::test]
async fn a_name_is_asked_for_its_addresses() {
    let workers = workers(1);
    let source = format!("dns://localhost:{}", workers[0].address.port());
    let gateway = Gateway::start_before(&[source], &[]).await;
    gateway.wait_ready(1).await;
    assert_eq!(gateway.chat(json!({})).await.status, 200);
}

#[tokio::test]
async fn operators_have_a_listener_of_their_own() {
    let workers = workers(1);
    let gateway = before(&workers, &["--admin-listen", "127.0.0.1:0", "--vllm-metrics"]).await;
    for path in ["/metrics", "/admin/workers"] {
        assert_eq!(gateway.get(path).await.status, 404, "{path}");
    }
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let gone = tokio_util::sync::CancellationToken::new();
    let admin = gateway_server::http::serve_admin(Arc::clone(&gateway.app), listener, gone.clone());
    let admin = tokio::spawn(admin);
    let get = async |path: &str| {
        support::read(gateway.client.get(format!("{url}{path}")).send().await.unwrap()).await
    };

    let page = get("/metrics").await.text;
    assert!(page.contains("m3stack_gateway_workers{state=\"ready\"} 1"));
    assert!(page.contains("vllm:num_requests_waiting{model_name=\"tiny-m3\"} 0"), "{page}");
    let shown = get("/admin/workers").await.json();
    assert_eq!(shown["workers"][0]["state"], "ready");
    assert!(shown["workers"][0]["address"].as_str().unwrap().starts_with("http://127.0.0.1:"));
    assert_eq!(get("/v1/models").await.status, 404);
    let drain = gateway.client.post(format!("{url}/admin/drain")).send().await.unwrap();
    assert_eq!(drain.status().as_u16(), 200);
    assert!(gateway.app.leave.is_cancelled());

    gone.cancel();
    admin.await.unwrap();
}
