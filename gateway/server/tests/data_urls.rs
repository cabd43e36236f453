//! Data URLs through the whole gateway, in every spelling: those of the handed set and our own.

#![allow(clippy::unwrap_used)]

mod support;

use std::collections::HashMap;

use serde_json::{Value, json};
use support::{Gateway, saying, worker};

fn cases(path: &str) -> Vec<Value> {
    let text = std::fs::read(support::media_directory().join(path)).unwrap();
    serde_json::from_slice(&text).unwrap()
}

/// Asks for each; gives how many were served. A case that names another must hold what that holds.
async fn check(cases: &[Value]) -> usize {
    let worker = worker();
    worker.set_acts(saying("seen"));
    let gateway = Gateway::start(&[&worker], &[]).await;
    let mut hashes = HashMap::new();
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let part = format!("{}_url", case["kind"].as_str().unwrap_or("image"));
        let content = json!([{"type": &part, &part: {"url": case["url"]}}]);
        let messages = json!([{"role": "user", "content": content}]);
        let reply = gateway.chat(json!({"messages": messages})).await;

        match case["expect"].as_str().unwrap() {
            "ok" => assert_eq!(reply.status, 200, "{name}: {}", reply.text),
            "error_400" => assert_eq!(reply.status, 400, "{name}: {}", reply.text),
            _ => assert!(matches!(reply.status, 200 | 400), "{name}: {}", reply.text),
        }
        if reply.status == 200 {
            let seen = worker.seen().pop().unwrap();
            let item = &seen.header.media[0];
            let grid = item.grid.unwrap();
            assert_eq!((grid.w * 14, grid.h * 14), (112, 84), "{name}");
            if let Some(other) = case["same_as"].as_str() {
                assert_eq!(item.media_hash, hashes[other], "{name} is not {other}");
            }
            hashes.insert(name.to_owned(), item.media_hash.clone());
        } else {
            let error = reply.error();
            assert_eq!(error["param"], format!("messages[0].content[0].{part}.url"), "{name}");
            if let Some(code) = case["code"].as_str() {
                assert_eq!(error["code"], code, "{name}: {}", reply.text);
            }
        }
    }
    gateway.assert_idle().await;
    hashes.len()
}

#[tokio::test]
async fn every_data_url_of_the_set_gives_what_is_expected() {
    assert!(check(&cases("data_urls.json")).await >= 13);
}

#[tokio::test]
async fn every_data_url_of_our_own_gives_what_is_expected() {
    let (handed, own) = (cases("data_urls.json"), cases("../media_own/data_urls.json"));
    assert!(own.len() >= handed.len(), "{} of {}", own.len(), handed.len());
    let expected = own.iter().filter(|case| case["expect"] == "ok").count();
    assert_eq!(check(&own).await, expected);
}
