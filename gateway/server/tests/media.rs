//! Pictures and clips through the whole gateway: what each file of the handed set must give, what
//! a worker receives.

#![allow(clippy::unwrap_used)]

mod support;

use std::collections::HashSet;

use base64::Engine;
use serde_json::{Value, json};
use support::fake_worker::Seen;
use support::{Act, FakeWorker, Gateway, Holds, Reply, proto, saying, worker};

fn file(name: &str) -> Vec<u8> {
    std::fs::read(support::media_directory().join(name)).unwrap()
}

fn data_url(name: &str) -> String {
    // the media type is deliberately wrong: bytes are looked at, not labels
    format!(
        "data:text/plain;base64,{}",
        base64::engine::general_purpose::STANDARD.encode(file(name))
    )
}

fn expectations(section: &str) -> serde_json::Map<String, Value> {
    let all: Value = serde_json::from_slice(&file("expect.json")).unwrap();
    all[section].as_object().unwrap().clone()
}

fn picture(url: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url}})
}

fn video(url: &str) -> Value {
    json!({"type": "video_url", "video_url": {"url": url}})
}

async fn ask(gateway: &Gateway, parts: &[Value]) -> Reply {
    gateway.chat(json!({"messages": [{"role": "user", "content": parts}]})).await
}

async fn setup(flags: &[&str]) -> (FakeWorker, Gateway) {
    let worker = worker();
    worker.set_acts(saying("seen"));
    let gateway = Gateway::start(&[&worker], flags).await;
    (worker, gateway)
}

/// Checks what a worker got for its first item against itself: grid, spans, bytes, placeholders.
fn check_item(seen: &Seen, kind: proto::MediaKind) -> &proto::MediaItem {
    let item = &seen.header.media[0];
    assert_eq!(item.kind(), kind);
    let grid = item.grid.unwrap();
    let format = seen.header.patch_format.clone().unwrap();
    let pixels = format.channels * format.patch_size * format.patch_size * item.frames_per_patch;
    assert_eq!(item.patch_bytes, u64::from(grid.t * grid.h * grid.w * pixels));
    assert_eq!(seen.patches[&0].len() as u64, item.patch_bytes);
    assert_eq!(format.dtype(), proto::PatchDtype::U8);
    assert_eq!((format.mean.len(), format.std.len()), (3, 3));
    let merged = grid.t * grid.h * grid.w / (format.merge_size * format.merge_size);
    assert_eq!(item.spans.iter().map(|span| span.length).sum::<u32>(), merged);
    let facts = support::model().spec.facts().clone();
    let pad = match kind {
        proto::MediaKind::Video => facts.video_token_id,
        _ => facts.image_token_id,
    };
    for span in &item.spans {
        let range = span.offset as usize..(span.offset + span.length) as usize;
        assert!(seen.header.prompt_token_ids[range].iter().all(|id| *id == pad));
    }
    let pads = seen.header.prompt_token_ids.iter().filter(|id| **id == pad).count();
    assert_eq!(pads as u32, merged);
    item
}

#[tokio::test]
async fn every_picture_of_the_set_gives_what_is_expected() {
    let (worker, gateway) = setup(&[]).await;
    let mut served = 0;
    for (name, expect) in expectations("images") {
        let reply = ask(&gateway, &[picture(&data_url(&name))]).await;
        match expect["outcome"].as_str().unwrap() {
            "error" => {
                assert_eq!(
                    u64::from(reply.status),
                    expect["http_status"].as_u64().unwrap(),
                    "{name}"
                );
                assert_eq!(
                    reply.error()["param"],
                    "messages[0].content[0].image_url.url",
                    "{name}"
                );
            }
            "ok_or_clean_400" if reply.status == 400 => drop(reply.error()),
            _ => {
                assert_eq!(reply.status, 200, "{name}: {}", reply.text);
                served += 1;
                let seen = worker.seen().pop().unwrap();
                let item = check_item(&seen, proto::MediaKind::Image);
                let grid = item.grid.unwrap();
                let resized = expect["m3_resized_size_wh"].as_array().unwrap();
                assert_eq!(json!([grid.w * 14, grid.h * 14]), json!(resized), "{name}");
                let tokens = &reply.json()["usage"]["prompt_tokens_details"]["image_tokens"];
                assert_eq!(*tokens, json!(grid.w * grid.h / 4), "{name}");
                assert_eq!((grid.t, item.frames_per_patch), (1, 1), "{name}");
            }
        }
    }
    assert!(served > 25, "{served}");
    gateway.assert_idle().await;
}

#[tokio::test]
async fn every_clip_of_the_set_gives_what_is_expected() {
    let (worker, gateway) = setup(&[]).await;
    for (name, expect) in expectations("videos") {
        let reply = ask(&gateway, &[video(&data_url(&name))]).await;
        match expect["outcome"].as_str().unwrap() {
            "error" => {
                assert_eq!(
                    u64::from(reply.status),
                    expect["http_status"].as_u64().unwrap(),
                    "{name}"
                );
                assert_eq!(
                    reply.error()["param"],
                    "messages[0].content[0].video_url.url",
                    "{name}"
                );
            }
            "ok_partial_or_400" if reply.status == 400 => drop(reply.error()),
            outcome => {
                assert_eq!(reply.status, 200, "{name}: {}", reply.text);
                let seen = worker.seen().pop().unwrap();
                let item = check_item(&seen, proto::MediaKind::Video);
                assert_eq!(item.frames_per_patch, 2);
                assert_eq!(item.spans.len() as u32, item.grid.unwrap().t, "{name}: a span a slice");
                if outcome == "ok" {
                    check_clip(&name, &expect, item);
                }
            }
        }
    }
    gateway.assert_idle().await;
}

/// One frame a second, the last frame besides.
fn check_clip(name: &str, expect: &Value, item: &proto::MediaItem) {
    let frames = expect["frames"].as_u64().unwrap() as f64;
    let Some(fps) = expect["avg_fps"].as_f64() else {
        assert_eq!(item.grid.unwrap().t, 1, "{name}: a single frame is repeated");
        return;
    };
    let fewest = ((frames - 1.0) / fps).floor() + 1.0;
    let slices = f64::from(item.grid.unwrap().t);
    let is_right = slices >= (fewest / 2.0).ceil() - 1.0 && slices <= ((fewest + 1.0) / 2.0).ceil();
    assert!(is_right || frames < fewest, "{name}: {slices} slices for {fewest} seconds");
}

#[tokio::test]
async fn hashes_tell_apart_what_looks_alike_and_join_what_is_the_same() {
    let (worker, gateway) = setup(&[]).await;
    let names = [
        "pair_red_112.png",
        "pair_blue_112.png",
        "pair_red_112_onepixel.png",
        "pair_samebytes_112x56.png",
        "pair_samebytes_56x112.png",
        "pair_red_112.png",
    ];
    let parts: Vec<_> = names.iter().map(|name| picture(&data_url(name))).collect();

    assert_eq!(ask(&gateway, &parts).await.status, 200);

    let header = worker.seen()[0].header.clone();
    let hashes: Vec<_> = header.media.iter().map(|item| item.media_hash.to_vec()).collect();
    assert_eq!(hashes.iter().collect::<HashSet<_>>().len(), 5);
    assert_eq!(hashes[0], hashes[5]);
    assert!(hashes.iter().all(|hash| hash.len() == 32));

    // the same file at another size is another item
    let small = json!({"type": "image_url",
        "image_url": {"url": data_url("pair_red_112.png"), "max_long_side_pixel": 56}});
    let reply = ask(&gateway, &[small]).await;
    if reply.status == 200 {
        assert_ne!(worker.seen()[1].header.media[0].media_hash.to_vec(), hashes[0]);
    }
}

#[tokio::test]
async fn what_a_worker_holds_is_neither_decoded_nor_sent_again() {
    let (worker, gateway) = setup(&[]).await;
    worker.set_holds(Holds::Everything);
    // it would be a 400 if anyone decoded it
    let parts = [picture(&data_url("img_truncated_128.jpg")), video(&data_url("vid_cfr_h264.mp4"))];

    let reply = ask(&gateway, &parts).await;

    assert_eq!(reply.status, 200, "{}", reply.text);
    assert!(worker.seen()[0].patches.is_empty());
    let page = gateway.get("/metrics").await.text;
    for kind in ["image", "video"] {
        let held =
            format!("m3stack_gateway_media_items_total{{kind=\"{kind}\",outcome=\"held\"}} 1");
        assert!(page.contains(&held), "{page}");
    }
}

#[tokio::test]
async fn a_picture_that_breaks_while_decoded_is_a_400_and_the_call_ends() {
    let (worker, gateway) = setup(&[]).await;
    for stream in [false, true] {
        let message =
            json!([{"role": "user", "content": [picture(&data_url("img_truncated_128.jpg"))]}]);
        let reply = gateway.chat(json!({"messages": message, "stream": stream})).await;
        assert_eq!((reply.status, reply.error()["code"].clone()), (400, json!("media_rejected")));
    }
    worker.wait_until(|record| record.cancelled == 2).await;
    gateway.assert_idle().await;
}

#[tokio::test]
async fn samples_of_one_prompt_upload_its_media_once_if_the_worker_keeps_it() {
    let (worker, gateway) = setup(&[]).await;
    // kept only once the first call has started: a call made before that would upload again
    worker.set_acts(vec![Act::Keep, Act::Start, Act::Tokens(support::ids("x")), Act::Stop]);
    let message = json!([{"role": "user", "content": [picture(&data_url("img_plain.bmp"))]}]);
    let reply = gateway.chat(json!({"messages": message, "n": 3})).await;

    assert_eq!(reply.status, 200, "{}", reply.text);
    assert_eq!(reply.json()["choices"].as_array().unwrap().len(), 3);
    let seen = worker.seen();
    let uploads: Vec<_> = seen.iter().map(|seen| seen.patches.len()).collect();
    assert_eq!(uploads, [1, 0, 0]);
    let image_tokens = &reply.json()["usage"]["prompt_tokens_details"]["image_tokens"];
    assert_eq!(*image_tokens, json!(12), "counted once");
}

#[tokio::test]
async fn too_many_and_too_large_media_are_refused_before_any_worker_is_asked() {
    let (worker, gateway) = setup(&["--set", "max_media_bytes=20000"]).await;
    let small = picture(&data_url("img_gray1.png"));

    let many = ask(&gateway, &vec![small.clone(); 201]).await;
    assert_eq!(many.status, 400);
    assert!(many.message().contains("200"), "{}", many.message());
    let large = ask(&gateway, &[small.clone(), picture(&data_url("img_plain.bmp"))]).await;
    assert_eq!(large.status, 413);
    assert_eq!(large.error()["param"], "messages[0].content[1].image_url.url");
    assert!(large.message().contains("20000"), "{}", large.message());
    assert!(worker.seen().is_empty());

    let bomb = ask(&gateway, &[picture(&data_url("img_shape_6000x2.png"))]).await;
    assert_eq!(bomb.status, 400);
    assert!(worker.seen().is_empty());
    assert_eq!(ask(&gateway, &[small]).await.status, 200);
}

#[tokio::test]
async fn what_was_seen_a_turn_ago_is_neither_probed_nor_decoded_again() {
    let (worker, gateway) = setup(&[]).await;
    let parts = [picture(&data_url("img_progressive.jpg")), video(&data_url("vid_cfr_h264.mp4"))];

    for _ in 0..2 {
        assert_eq!(ask(&gateway, &parts).await.status, 200);
    }

    let seen = worker.seen();
    assert!(seen[0].patches == seen[1].patches);
    let page = gateway.get("/metrics").await.text;
    // of each item what its text holds, and what that is
    for (cache, hits) in [("facts", 4), ("patches", 2)] {
        let hits = format!("lookups_total{{cache=\"{cache}\",outcome=\"hit\"}} {hits}");
        assert!(page.contains(&hits), "{hits} in {page}");
    }
}

#[tokio::test]
async fn facts_without_patches_make_the_same_bytes_again() {
    // room for facts, not for a picture: the text is known, and what it holds is needed after all
    let (worker, gateway) = setup(&["--set", "media_cache_bytes=65536"]).await;
    let parts = [picture(&data_url("img_progressive.jpg")), video(&data_url("vid_two_frames.mp4"))];
    for _ in 0..2 {
        assert_eq!(ask(&gateway, &parts).await.status, 200);
    }
    let seen = worker.seen();
    assert!(seen[0].patches == seen[1].patches && seen[0].patches.len() == 2);
    let page = gateway.get("/metrics").await.text;
    assert!(page.contains("lookups_total{cache=\"facts\",outcome=\"hit\"} 4"), "{page}");
    assert!(page.contains("lookups_total{cache=\"patches\",outcome=\"hit\"} 0"), "{page}");
}

#[tokio::test]
async fn without_a_cache_the_same_bytes_still_arrive() {
    let (worker, gateway) = setup(&["--set", "media_cache_bytes=0"]).await;
    let part = picture(&data_url("img_progressive.jpg"));
    assert_eq!(ask(&gateway, &[part.clone(), part.clone()]).await.status, 200);
    assert_eq!(ask(&gateway, &[part]).await.status, 200);
    let seen = worker.seen();
    assert!(seen[0].patches[&0] == seen[0].patches[&1]);
    assert!(seen[0].patches[&0] == seen[1].patches[&0]);
    let page = gateway.get("/metrics").await.text;
    assert!(page.contains("m3stack_gateway_media_cache_bytes{cache=\"patches\"} 0"), "{page}");
}

#[tokio::test]
async fn each_limit_of_a_request_is_named_with_its_figure_before_anything_is_decoded() {
    let still = || picture(&data_url("img_truncated_128.jpg"));
    let clip = || video(&data_url("vid_cfr_h264.mp4"));
    // 128x96 of 30 frames; 4 are taken, and with what they need 8 are decoded
    for (setting, parts, status, words) in [
        ("max_request_media_tokens=23", vec![still(), still()], 400, "24 tokens"),
        ("max_request_video_frames=7", vec![clip(), clip()], 400, "8 video frames"),
        ("max_request_decoded_pixels=98303", vec![clip()], 400, "98304 decoded pixels"),
        ("max_request_media_bytes=5000", vec![clip(), clip()], 413, "6316 bytes"),
        ("max_image_pixels=100", vec![still()], 400, "limit is 100"),
        ("max_image_pixels=100", vec![clip()], 400, "limit is 100"),
        ("max_video_duration_s=2", vec![clip()], 400, "limit is 2 s"),
        ("max_request_images=1", vec![still(), still()], 400, "1"),
        ("max_request_videos=1", vec![clip(), clip()], 400, "1"),
    ] {
        let (worker, gateway) = setup(&["--set", setting]).await;
        let reply = ask(&gateway, &parts).await;
        let limit = setting.split('=').next_back().unwrap();
        assert_eq!(reply.status, status, "{setting}: {}", reply.text);
        assert!(reply.message().contains(words), "{setting}: {}", reply.message());
        assert!(reply.message().contains(limit), "{setting}: {}", reply.message());
        assert!(worker.seen().is_empty(), "{setting}");
        gateway.assert_idle().await;
    }
}
