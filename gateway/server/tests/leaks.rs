//! What requests leave behind in the process: a file of its own, so that nobody else opens
//! anything while this counts.

#![allow(clippy::unwrap_used)]

mod support;

use base64::Engine;
use serde_json::json;
use support::{Act, Gateway, chat_body, eventually, ids, proto, saying, worker};

#[tokio::test]
async fn a_hundred_ends_of_every_sort_leave_no_permit_and_no_descriptor() {
    let worker = worker();
    let gateway = Gateway::start(&[&worker], &[]).await;
    let image = std::fs::read(support::media_directory().join("img_truncated.png")).unwrap();
    let image = format!(
        "data:image/png;base64,{}",
        base64::engine::general_purpose::STANDARD.encode(&image)
    );
    let part = json!({"type": "image_url", "image_url": {"url": image}});
    let bad_picture = json!({"messages": [{"role": "user", "content": [part]}]});
    let round = async || {
        worker.set_acts(saying("fine"));
        assert_eq!(gateway.chat(json!({})).await.status, 200);
        assert_eq!(gateway.chat(bad_picture.clone()).await.status, 400);
        assert_eq!(gateway.chat(json!({"messages": []})).await.status, 400);
        worker.set_acts(vec![Act::Start, Act::Fail(proto::ErrorKind::Internal, "x")]);
        assert_eq!(gateway.chat(json!({})).await.status, 500);
        worker.set_acts(vec![Act::Start, Act::Tokens(ids("Hello")), Act::Hang]);
        let body = chat_body(json!({"stream": true})).to_string();
        let mut response = gateway.send("/v1/chat/completions", body).await;
        response.chunk().await.unwrap();
        drop(response);
        gateway.assert_idle().await;
    };
    round().await;
    let before = descriptors();
    for _ in 0..20 {
        round().await;
    }
    eventually("descriptors are closed", || descriptors() <= before).await;
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}
