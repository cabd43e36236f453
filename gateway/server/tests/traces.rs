//! Traces of requests, sent to a scripted collector.

#![allow(clippy::unwrap_used)]

mod support;

use std::convert::Infallible;

use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use support::{Gateway, chat_body, saying, worker};
use tokio::sync::mpsc;

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

/// A collector that gives every span it is sent, with the name of its service.
async fn collector() -> (String, mpsc::UnboundedReceiver<(String, Value)>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (sender, spans) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let sender = sender.clone();
            let service = hyper::service::service_fn(
                move |request: hyper::Request<hyper::body::Incoming>| {
                    let sender = sender.clone();
                    async move {
                        assert_eq!(request.uri().path(), "/v1/traces");
                        let body = request.into_body().collect().await.unwrap().to_bytes();
                        let body: Value = serde_json::from_slice(&body).unwrap();
                        for resource in body["resourceSpans"].as_array().unwrap() {
                            let service = &resource["resource"]["attributes"][0]["value"];
                            let service = service["stringValue"].as_str().unwrap().to_owned();
                            for span in resource["scopeSpans"][0]["spans"].as_array().unwrap() {
                                let _ = sender.send((service.clone(), span.clone()));
                            }
                        }
                        Ok::<_, Infallible>(hyper::Response::new(Full::<bytes::Bytes>::default()))
                    }
                },
            );
            let stream = hyper_util::rt::TokioIo::new(stream);
            tokio::spawn(async move {
                let builder = hyper::server::conn::http1::Builder::new();
                let _ = builder.serve_connection(stream, service).await;
            });
        }
    });
    (url, spans)
}

async fn ask(gateway: &Gateway, flags: &str) -> u16 {
    let url = format!("{}/v1/chat/completions", gateway.url);
    let traceparent = format!("00-{TRACE}-b7ad6b7169203331-{flags}");
    let request = gateway.client.post(url).header("traceparent", traceparent);
    let request = request.body(chat_body(json!({})).to_string());
    request.send().await.unwrap().status().as_u16()
}

#[tokio::test]
async fn a_request_is_one_trace_with_a_span_a_phase() {
    let (url, mut spans) = collector().await;
    let worker = worker();
    worker.set_acts(saying("traced"));
    let mut gateway = Gateway::start(&[&worker], &["--otlp-endpoint", &url]).await;
    // whoever began the trace does not want it kept
    assert_eq!(ask(&gateway, "00").await, 200);
    assert_eq!(ask(&gateway, "01").await, 200);

    // what waits is sent before the gateway ends
    gateway.begin_stop().await.unwrap();

    let mut found = Vec::new();
    while let Ok((service, span)) = spans.try_recv() {
        assert_eq!((service.as_str(), span["traceId"].as_str()), ("m3stack-gateway", Some(TRACE)));
        found.push(span);
    }
    let names: Vec<_> = found.iter().map(|span| span["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["/v1/chat/completions", "receive", "prepare", "worker"]);
    let root = &found[0];
    assert_eq!(root["parentSpanId"], "b7ad6b7169203331");
    assert!(found[1..].iter().all(|span| span["parentSpanId"] == root["spanId"]));
    let at = |span: &Value, key: &str| span[key].as_str().unwrap().parse::<u128>().unwrap();
    for span in &found {
        let (began, ended) = (at(span, "startTimeUnixNano"), at(span, "endTimeUnixNano"));
        assert!(at(root, "startTimeUnixNano") <= began && began <= ended);
        assert!(ended <= at(root, "endTimeUnixNano"));
    }
    // nothing of what was said is in it
    assert!(!found.iter().any(|span| span.to_string().contains("traced")));

    let seen = worker.seen();
    let parts: Vec<_> = seen[1].traceparent.as_deref().unwrap().split('-').collect();
    assert_eq!((parts[1], parts[2]), (TRACE, root["spanId"].as_str().unwrap()));
    assert!(seen[0].traceparent.as_deref().unwrap().ends_with("-00"));
}

#[tokio::test]
async fn a_collector_that_is_gone_holds_nobody_up() {
    let worker = worker();
    worker.set_acts(saying("ok"));
    let flags = ["--otlp-endpoint", "http://127.0.0.1:1"];
    let mut gateway = Gateway::start(&[&worker], &flags).await;
    for _ in 0..3 {
        assert_eq!(ask(&gateway, "01").await, 200);
    }
    gateway.assert_idle().await;
    gateway.begin_stop().await.unwrap();
}
