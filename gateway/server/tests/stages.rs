//! Fleets that divide the work: who is asked for what, in which order, and what if one fails.

#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use support::proto::{Purpose, WorkerRole};
use support::{Act, FakeWorker, Gateway, Holds, media_directory, proto, saying, worker};

/// An encoder, one that computes prompts, and one that answers.
struct Fleet {
    encode: FakeWorker,
    prefill: FakeWorker,
    decode: FakeWorker,
}

fn of_role(role: WorkerRole, acts: Vec<Act>) -> FakeWorker {
    let worker = worker();
    worker.set_role(role);
    worker.set_acts(acts);
    worker
}

fn fleet() -> Fleet {
    let helped = vec![Act::Start, Act::Stop];
    Fleet {
        encode: of_role(WorkerRole::Encode, helped.clone()),
        prefill: of_role(WorkerRole::Prefill, helped),
        decode: of_role(WorkerRole::Decode, saying("ok")),
    }
}

impl Fleet {
    async fn gateway(&self) -> Gateway {
        Gateway::start(&[&self.encode, &self.prefill, &self.decode], &[]).await
    }
}

fn long_chat() -> Value {
    let text = "a long beginning that many requests share ".repeat(60);
    json!({"messages": [{"role": "user", "content": text}]})
}

fn picture_chat() -> Value {
    use base64::Engine;
    let bytes = std::fs::read(media_directory().join("img_shape_28x28.png")).unwrap();
    let picture = base64::engine::general_purpose::STANDARD.encode(bytes);
    let text = "a long beginning that many requests share ".repeat(60);
    json!({"messages": [{"role": "user", "content": [
        {"type": "text", "text": text},
        {"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{picture}")}},
    ]}]})
}

/// Header of the only request a worker has seen.
fn only(worker: &FakeWorker) -> proto::GenerateHeader {
    let seen = worker.seen();
    assert_eq!(seen.len(), 1);
    seen[0].header.clone()
}

fn address(source: Option<proto::Source>) -> Option<String> {
    source.map(|source| source.address)
}

#[tokio::test]
async fn a_long_prompt_is_computed_by_one_worker_and_answered_by_another() {
    let fleet = fleet();
    let gateway = fleet.gateway().await;
    let body = json!({"max_completion_tokens": 50, "temperature": 0.5, "logprobs": true});
    let mut chat = long_chat();
    body.as_object().unwrap().iter().for_each(|(key, value)| chat[key] = value.clone());
    let reply = gateway.chat(chat).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    assert_eq!(reply.json()["choices"][0]["message"]["content"], "ok");

    let computed = only(&fleet.prefill);
    assert_eq!(computed.purpose(), Purpose::Prefill);
    assert_eq!(computed.sampling.unwrap().max_tokens, Some(1));
    assert_eq!((address(computed.pages_source), computed.features_source), (None, None));
    let answered = only(&fleet.decode);
    assert_eq!(answered.purpose(), Purpose::Unspecified);
    assert_eq!(answered.sampling.unwrap().max_tokens, Some(50));
    assert_eq!(address(answered.pages_source), Some(fleet.prefill.address.to_string()));
    assert_eq!(answered.prompt_token_ids, computed.prompt_token_ids);
    assert!(answered.request_id != computed.request_id);
    // nothing had to be encoded
    assert!(fleet.encode.seen().is_empty());
    gateway.assert_idle().await;
}

#[tokio::test]
async fn a_short_prompt_is_computed_where_it_is_answered() {
    let fleet = fleet();
    let gateway = fleet.gateway().await;
    assert_eq!(gateway.chat(json!({})).await.status, 200);
    assert!(fleet.prefill.seen().is_empty());
    assert_eq!(address(only(&fleet.decode).pages_source), None);
}

#[tokio::test]
async fn a_picture_is_encoded_first_and_sent_to_nobody_else() {
    let fleet = fleet();
    // they fetch its features
    fleet.prefill.set_holds(Holds::Everything);
    fleet.decode.set_holds(Holds::Everything);
    let gateway = fleet.gateway().await;
    let reply = gateway.chat(picture_chat()).await;
    assert_eq!(reply.status, 200, "{}", reply.text);

    assert_eq!(only(&fleet.encode).purpose(), Purpose::Encode);
    let encoder = Some(fleet.encode.address.to_string());
    assert_eq!(fleet.encode.seen()[0].patches.len(), 1);
    for helped in [&fleet.prefill, &fleet.decode] {
        assert_eq!(address(only(helped).features_source), encoder);
        assert!(helped.seen()[0].patches.is_empty());
    }
    gateway.assert_idle().await;
}

#[tokio::test]
async fn what_one_that_helps_cannot_do_is_left_to_the_one_that_answers() {
    let failures = [
        Act::Fail(proto::ErrorKind::Overloaded, "full"),
        Act::Fail(proto::ErrorKind::Internal, "broken"),
        Act::Fail(proto::ErrorKind::ContextTooLong, "too small"),
        Act::Break(tonic::Code::Unavailable),
    ];
    for failure in failures {
        let fleet = fleet();
        fleet.encode.set_acts(vec![failure.clone()]);
        fleet.prefill.set_acts(vec![Act::Start, failure]);
        let gateway = fleet.gateway().await;
        let reply = gateway.chat(picture_chat()).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        assert_eq!(reply.json()["choices"][0]["message"]["content"], "ok");
        let answered = only(&fleet.decode);
        assert_eq!((answered.pages_source, answered.features_source), (None, None));
        // it was given the picture itself
        assert_eq!(fleet.decode.seen()[0].patches.len(), 1);
        let page = gateway.get("/metrics").await.text;
        for stage in ["prefill", "encode"] {
            let skipped = format!("stage=\"{stage}\",outcome=\"skipped\"");
            assert!(
                page.contains(&format!("m3stack_gateway_stages_total{{{skipped}}} 1")),
                "{page}"
            );
        }
        gateway.assert_idle().await;
    }
}

#[tokio::test]
async fn media_that_an_encoder_rejects_is_the_clients_error_at_once() {
    let fleet = fleet();
    fleet.encode.set_acts(vec![Act::Fail(proto::ErrorKind::MediaRejected, "no picture")]);
    let gateway = fleet.gateway().await;
    let reply = gateway.chat(picture_chat()).await;
    assert_eq!((reply.status, reply.message()), (400, "no picture".to_owned()));
    assert!(fleet.decode.seen().is_empty() && fleet.prefill.seen().is_empty());
    gateway.assert_idle().await;
}

#[tokio::test]
async fn a_lost_helper_is_replaced_by_another() {
    let fleet = fleet();
    fleet.prefill.set_acts(vec![Act::Break(tonic::Code::Unavailable)]);
    let other = of_role(WorkerRole::Prefill, vec![Act::Break(tonic::Code::Unavailable)]);
    let list = [&fleet.prefill, &other, &fleet.decode];
    let gateway = Gateway::start(&list, &[]).await;
    assert_eq!(gateway.chat(long_chat()).await.status, 200);
    assert_eq!((fleet.prefill.seen().len(), other.seen().len()), (1, 1));
    other.set_acts(vec![Act::Start, Act::Stop]);
    for salt in ["a", "b"] {
        // what was sent to a worker before is thought to be there still
        let mut chat = long_chat();
        chat["cache_salt"] = json!(salt);
        assert_eq!(gateway.chat(chat).await.status, 200);
    }
    let answered = fleet.decode.seen().last().unwrap().header.clone();
    assert_eq!(address(answered.pages_source), Some(other.address.to_string()));
    gateway.assert_idle().await;
}

#[tokio::test]
async fn an_answerer_lost_before_its_first_token_is_replaced_and_the_prompt_is_not_computed_again()
{
    let fleet = fleet();
    fleet.decode.set_acts(vec![Act::Start, Act::Break(tonic::Code::Unavailable)]);
    let other = of_role(WorkerRole::Decode, vec![Act::Start, Act::Break(tonic::Code::Unavailable)]);
    let list = [&fleet.prefill, &fleet.decode, &other];
    let gateway = Gateway::start(&list, &[]).await;
    assert_eq!(gateway.chat(long_chat()).await.status, 503);
    assert_eq!(fleet.prefill.seen().len(), 1);
    let source = Some(fleet.prefill.address.to_string());
    for answerer in [&fleet.decode, &other] {
        assert_eq!(address(only(answerer).pages_source), source);
    }
    gateway.assert_idle().await;
}

#[tokio::test]
async fn a_client_that_leaves_while_others_compute_ends_their_work() {
    let fleet = fleet();
    fleet.prefill.set_acts(vec![Act::Start, Act::Hang]);
    let gateway = fleet.gateway().await;
    let chat = gateway.chat(long_chat());
    tokio::select! {
        reply = chat => panic!("answered: {reply:?}"),
        () = fleet.prefill.wait_until(|record| !record.seen.is_empty()) => {}
    }
    fleet.prefill.wait_until(|record| record.cancelled == 1).await;
    assert!(fleet.decode.seen().is_empty());
    gateway.assert_idle().await;
}

#[tokio::test]
async fn samples_of_one_prompt_have_it_computed_once() {
    let fleet = fleet();
    let gateway = fleet.gateway().await;
    let mut chat = long_chat();
    chat["n"] = json!(3);
    let reply = gateway.chat(chat).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    assert_eq!(fleet.prefill.seen().len(), 1);
    let asked = fleet.decode.seen();
    assert_eq!(asked.len(), 3);
    let with_source = asked.iter().filter(|seen| seen.header.pages_source.is_some());
    assert_eq!(with_source.count(), 1);
    gateway.assert_idle().await;
}

#[tokio::test]
async fn a_fleet_without_one_that_answers_is_not_ready_and_says_why() {
    let fleet = fleet();
    let gateway = Gateway::start(&[&fleet.encode, &fleet.prefill], &[]).await;
    let reply = gateway.chat(json!({})).await;
    assert_eq!(reply.status, 503);
    let message = reply.message();
    for (worker, does) in [
        (&fleet.encode, "only encodes media"),
        (&fleet.prefill, "only computes prompts for others"),
    ] {
        assert!(message.contains(&format!("{} {does}", worker.address)), "{message}");
    }
    let ready = gateway.get("/ready").await;
    assert_eq!(ready.status, 503);
    assert!(ready.text.contains("only encodes media"), "{}", ready.text);
}

#[tokio::test]
async fn nobody_waits_for_a_helper_that_makes_no_step() {
    let fleet = fleet();
    fleet.prefill.set_acts(vec![Act::Start, Act::Hang]);
    let list = [&fleet.prefill, &fleet.decode];
    let gateway = Gateway::start(&list, &["--set", "worker_stall_s=1"]).await;
    // busy, and the count of its steps stands still
    fleet.prefill.set_load(proto::Load {
        running_requests: 1,
        steps: 7,
        total_pages: 100,
        ..Default::default()
    });
    let reply = gateway.chat(long_chat()).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    assert_eq!(address(only(&fleet.decode).pages_source), None);
    fleet.prefill.wait_until(|record| record.cancelled == record.seen.len()).await;
    gateway.assert_idle().await;
}
