//! Where media may come from: the network, through a proxy or not, and files of one directory; and
//! what tenants may have of them.

#![allow(clippy::unwrap_used)]

mod support;

use std::collections::HashSet;

use serde_json::{Value, json};
use support::origin::Origin;
use support::{Act, FakeWorker, Gateway, Reply, saying, worker};

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

#[tokio::test]
async fn media_come_over_http_and_each_url_is_fetched_once() {
    let origin = Origin::start().await;
    let (worker, gateway) = setup(&["--allow-private-media"]).await;
    let url = origin.url("/file/img_plain.bmp");

    let reply = ask(
        &gateway,
        &[picture(&url), picture(&url), video(&origin.url("/file/vid_cfr_h264.mp4"))],
    )
    .await;

    assert_eq!(reply.status, 200, "{}", reply.text);
    assert_eq!(origin.connections(), 2);
    assert_eq!(worker.seen()[0].header.media.len(), 3);
    for hops in 0..=3 {
        let status = ask(
            &gateway,
            &[picture(&origin.url(&format!("/hops/{}", 2_u32.saturating_sub(hops))))],
        )
        .await
        .status;
        assert_eq!(status, 200);
    }
}

#[tokio::test]
async fn an_origin_that_fails_is_a_502_or_504_and_never_our_500() {
    let origin = Origin::start().await;
    let flags = ["--allow-private-media", "--set", "max_media_bytes=50000"];
    let (worker, gateway) = setup(&flags).await;
    let (_other, hasty) = setup(&[&flags[..], &["--set", "media_timeout_s=1"]].concat()).await;
    for (path, status, word) in [
        ("/missing", 502, "404"),
        ("/teapot", 502, "500"),
        ("/broken", 502, "broke off"),
        ("/hops/9", 502, "redirects"),
        ("/nowhere", 502, "nowhere"),
        ("/silent", 504, "1 s"),
        ("/large", 413, "50000"),
        ("/endless", 413, "50000"),
        ("/away", 502, "cannot be reached"),
        ("/to-file", 400, "file"),
    ] {
        let asked = if status == 504 { &hasty } else { &gateway };
        let reply = ask(asked, &[picture(&origin.url(path))]).await;
        assert_eq!(reply.status, status, "{path}: {}", reply.text);
        assert!(reply.message().contains(word), "{path}: {}", reply.message());
        assert_eq!(reply.error()["param"], "messages[0].content[0].image_url.url");
    }
    let nobody = ask(&gateway, &[picture("http://127.0.0.1:1/a.png")]).await;
    assert_eq!(
        (nobody.status, nobody.error()["code"].clone()),
        (502, json!("media_origin_failed"))
    );
    assert!(worker.seen().is_empty());
    gateway.assert_idle().await;
}

#[tokio::test]
async fn private_addresses_are_refused_without_a_connection() {
    let origin = Origin::start().await;
    let (worker, gateway) = setup(&[]).await;
    let port = origin.address.port();
    for host in ["127.0.0.1", "localhost", "2130706433", "[::ffff:127.0.0.1]", "0.0.0.0", "127.1"] {
        let reply =
            ask(&gateway, &[picture(&format!("http://{host}:{port}/file/img_plain.bmp"))]).await;
        assert_eq!(
            (reply.status, reply.error()["code"].clone()),
            (400, json!("media_url_refused")),
            "{host}"
        );
    }
    // on a web port it is the address that is refused, a name only once it is resolved
    for url in ["http://127.0.0.1/a.png", "http://localhost/a.png", "https://localhost/a.png"] {
        let reply = ask(&gateway, &[picture(url)]).await;
        assert_eq!(reply.status, 400, "{url}: {}", reply.text);
        assert!(reply.message().contains("public"), "{url}: {}", reply.message());
    }
    assert_eq!(origin.connections(), 0);
    assert!(worker.seen().is_empty());
}

#[tokio::test]
async fn a_list_of_hosts_holds_on_every_hop() {
    let origin = Origin::start().await;
    let flags = ["--allow-private-media", "--allowed-media-hosts", "127.0.0.1"];
    let (_worker, gateway) = setup(&flags).await;

    assert_eq!(ask(&gateway, &[picture(&origin.url("/hops/1"))]).await.status, 200);
    let away = ask(&gateway, &[picture(&origin.url("/away"))]).await;
    assert_eq!((away.status, away.error()["code"].clone()), (400, json!("media_url_refused")));
    let other = ask(&gateway, &[picture("http://localhost/a.png")]).await;
    assert_eq!(other.status, 400);
}

#[tokio::test]
async fn a_body_from_the_network_is_used_again_only_as_http_allows() {
    let origin = Origin::start().await;
    let (worker, gateway) = setup(&["--allow-private-media"]).await;
    for (terms, connections) in
        [("max-age=60", [1, 1]), ("no-cache", [1, 2]), ("no-store", [1, 2]), ("private", [1, 2])]
    {
        let before = origin.connections();
        let url = origin.url(&format!("/kept/{terms}/img_plain.bmp"));
        for expected in connections {
            let reply = ask(&gateway, &[picture(&url)]).await;
            assert_eq!(reply.status, 200, "{terms}: {}", reply.text);
            assert_eq!(origin.connections() - before, expected, "{terms}");
        }
    }
    let patches: HashSet<_> = worker.seen().iter().map(|seen| seen.patches[&0].to_vec()).collect();
    assert_eq!(patches.len(), 1, "asked again or not, it is the same picture");
    let page = gateway.get("/metrics").await.text;
    assert!(page.contains("cache_lookups_total{cache=\"fetched\",outcome=\"hit\"}"), "{page}");
}

#[tokio::test]
async fn through_a_proxy_names_that_only_it_knows_must_be_listed_and_nothing_inside_is_reached() {
    let origin = Origin::start().await;
    let proxy = format!("media_proxy=http://{}", origin.address);
    let named = ["--set", &proxy, "--allowed-media-hosts", "pictures.invalid"];
    let (worker, gateway) = setup(&named).await;

    let reply = ask(&gateway, &[picture("http://pictures.invalid/file/img_plain.bmp")]).await;

    assert_eq!(reply.status, 200, "{}", reply.text);
    assert_eq!((worker.seen().len(), origin.connections()), (1, 1));
    // https asks the proxy for a tunnel, which this one does not dig
    let tunnel = ask(&gateway, &[picture("https://pictures.invalid/file/img_plain.bmp")]).await;
    assert_eq!((tunnel.status, origin.connections()), (502, 2), "{}", tunnel.text);
    // what can be judged here is judged here, and what cannot is not believed
    let (_other, gateway) = setup(&["--set", &proxy]).await;
    let hosts = ["pictures.invalid", "metadata.google.internal.invalid"];
    for host in
        hosts.into_iter().chain(["127.0.0.1", "10.0.0.1", "localhost", "[::1]", "169.254.169.254"])
    {
        let reply = ask(&gateway, &[picture(&format!("http://{host}/file/img_plain.bmp"))]).await;
        assert_eq!(reply.status, 400, "{host}: {}", reply.text);
        assert_eq!(reply.error()["code"], "media_url_refused", "{host}");
    }
    assert_eq!(origin.connections(), 2);
    let (_third, trusting) = setup(&["--set", &proxy, "--allow-private-media"]).await;
    let reply = ask(&trusting, &[picture("http://pictures.invalid/file/img_plain.bmp")]).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    let (_fourth, alone) = setup(&[]).await;
    let reply = ask(&alone, &[picture("http://pictures.invalid/file/img_plain.bmp")]).await;
    assert_eq!(reply.status, 502, "without it the name leads nowhere: {}", reply.text);
}

#[tokio::test]
async fn files_are_read_under_one_directory_if_there_is_one() {
    let root = support::media_directory().canonicalize().unwrap();
    let url = |name: &str| format!("file://{}/{name}", root.display());
    let setting = format!("media_root={}", root.display());
    let (worker, gateway) = setup(&["--set", &setting, "--set", "max_media_bytes=100000"]).await;

    let parts = [picture(&url("img_plain.bmp")), video(&url("vid_cfr_h264.mp4"))];
    let reply = ask(&gateway, &parts).await;

    assert_eq!(reply.status, 200, "{}", reply.text);
    assert_eq!(worker.seen()[0].header.media.len(), 2);
    for (place, status) in [
        // a path is put in order before it is judged
        (url("../media/img_plain.bmp"), 200),
        (url("../data.rs"), 400),
        (url("none.png"), 400),
        (url(""), 400),
        ("file:///etc/hostname".to_owned(), 400),
        (url("vid_long_10min_30fps.mp4"), 413),
    ] {
        let reply = ask(&gateway, &[picture(&place)]).await;
        assert_eq!(reply.status, status, "{place}: {}", reply.text);
    }
    gateway.assert_idle().await;
    let (_other, closed) = setup(&[]).await;
    let reply = ask(&closed, &[picture(&url("img_plain.bmp"))]).await;
    assert_eq!((reply.status, reply.error()["code"].clone()), (400, json!("media_url_refused")));
}

#[tokio::test]
async fn what_a_tenants_requests_have_of_media_together_is_held_to_and_given_back() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("limits.toml");
    std::fs::write(&file, "[default.media]\nmax_images = 3\nmax_video_s = 2\n").unwrap();
    let (worker, gateway) = setup(&["--tenant-limits", file.to_str().unwrap()]).await;
    let still = picture(&data_url("img_gray1.png"));

    let alone = ask(&gateway, &vec![still.clone(); 4]).await;
    assert_eq!((alone.status, alone.error()["code"].clone()), (400, json!("media_limit_exceeded")));
    assert!(alone.message().contains("4 pictures"), "{}", alone.message());
    let long = ask(&gateway, &[video(&data_url("vid_cfr_h264.mp4"))]).await;
    assert!(long.message().contains("3 seconds of video"), "{}", long.message());

    worker.set_acts(vec![Act::Hang]);
    let body = json!({"messages": [{"role": "user", "content": [still.clone(), still.clone()]}]});
    let waiting = tokio::spawn({
        let (client, url) = (gateway.client.clone(), gateway.url.clone());
        let body = support::chat_body(body).to_string();
        async move { client.post(format!("{url}/v1/chat/completions")).body(body).send().await }
    });
    worker.wait_until(|record| record.seen.len() == 1).await;
    let together = ask(&gateway, &[still.clone(), still.clone()]).await;
    assert_eq!(together.status, 429, "{}", together.text);
    assert!(together.headers.contains_key("retry-after"));
    assert!(together.message().contains("2 more"), "{}", together.message());
    waiting.abort();
    worker.wait_until(|record| record.cancelled == 1).await;
    gateway.assert_idle().await;

    worker.set_acts(saying("seen"));
    assert_eq!(ask(&gateway, &vec![still; 3]).await.status, 200);
}

fn data_url(name: &str) -> String {
    use base64::Engine;
    let bytes = std::fs::read(support::media_directory().join(name)).unwrap();
    format!("data:;base64,{}", base64::engine::general_purpose::STANDARD.encode(bytes))
}
