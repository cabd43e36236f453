//! Settings: precedence, refusal of what is unknown, messages that say what to do.

use super::raw::{read_file, tuning_variables};
use super::*;
use std::ffi::OsString;

fn config_of(flags: &[&str]) -> Result<GatewayConfig, ConfigError> {
    let all = ["m3stack-gateway", "--model-path", "/models/tiny"].iter().chain(flags);
    GatewayConfig::from_arguments(all.copied())
}

/// A config file that goes away with its holder.
fn file_with(text: &str) -> tempfile::TempPath {
    let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    std::fs::write(file.path(), text).unwrap();
    file.into_temp_path()
}

#[test]
fn defaults_serve_on_loopback_and_refuse_private_media() {
    let config = config_of(&[]).unwrap();

    assert_eq!(config.listen, "127.0.0.1:8000");
    assert_eq!(config.workers, [WorkerSource::Fixed("http://127.0.0.1:50051".into())]);
    assert_eq!(config.served_model_name, "tiny");
    assert_eq!(config.max_request_bytes, 64 << 20);
    assert!(!config.media.allow_private);
}

#[test]
fn a_flag_wins_over_the_file_and_the_file_over_the_default() {
    let file = file_with(
        "[shared]\nserved_model_name = \"from-file\"\n\
         [gateway]\nlisten = \"127.0.0.1:9001\"\nmedia_threads = 3\n\
         [worker]\nanything = 1\n",
    );

    let config =
        config_of(&["--config", file.to_str().unwrap(), "--listen", "127.0.0.1:9002"]).unwrap();

    assert_eq!(config.listen, "127.0.0.1:9002");
    assert_eq!(config.served_model_name, "from-file");
    assert_eq!(config.media.threads, 3);
}

#[test]
fn an_unknown_key_is_refused_by_name_and_position() {
    for text in ["[gateway]\nlisten_on = \"x:1\"\n", "[shared]\nmodel = \"x\"\n", "[gatway]\n"] {
        let file = file_with(text);
        let message = config_of(&["--config", file.to_str().unwrap()]).unwrap_err().to_string();
        let key = text.trim_start_matches("[gateway]\n").trim_start_matches("[shared]\n");
        let key = key.trim_matches(['[', ']', '\n']).split(' ').next().unwrap();
        assert!(message.contains(key) && message.contains("line"), "{message}");
    }
}

#[test]
fn an_unknown_variable_is_refused_but_kubernetes_service_links_are_not() {
    let names = |list: &[&str]| {
        list.iter().map(|name| (name.into(), "1".into())).collect::<Vec<(OsString, OsString)>>()
    };

    let links = names(&[
        "M3STACK_GATEWAY_PORT",
        "M3STACK_GATEWAY_PORT_8000_TCP_ADDR",
        "M3STACK_GATEWAY_SERVICE_HOST",
        "M3STACK_GATEWAY_LISTEN",
        "HOME",
    ]);
    assert!(tuning_variables(links.into_iter()).is_ok());

    let typo = names(&["M3STACK_GATEWAY_LISTNE"]);
    let message = tuning_variables(typo.into_iter()).unwrap_err().to_string();
    assert!(message.contains("M3STACK_GATEWAY_LISTNE"), "{message}");
}

#[test]
fn values_out_of_range_are_refused_with_key_and_value() {
    for (flags, key) in [
        (&["--max-concurrent-requests", "0"][..], "max_concurrent_requests"),
        (&["--listen", "8000"], "listen"),
        (&["--workers", "https://a:1"], "workers"),
        (&["--workers", "a"], "workers"),
        (&["--log-level", "loud"], "log_level"),
        (&["--log-format", "xml"], "log_format"),
        (&["--set", "reasoning_field=thoughts"], "reasoning_field"),
        (&["--set", "max_buffered_bytes=5"], "max_buffered_bytes"),
        (&["--set", "media_timeout_s=0"], "media_timeout_s"),
        (&["--set", "media_timeout_s=soon"], "gateway"),
        (&["--set", "media_timeout_s"], "set"),
        (&["--set", "media_time=3"], "set"),
        (&["--set", "listen=127.0.0.1:1"], "set"),
        (&["--set", "breaker_faults=0"], "breaker_faults"),
        (&["--workers", "k8s://ns/name"], "workers"),
        (&["--workers", "dns://name"], "workers"),
        (&["--workers", "file://relative"], "workers"),
        (&["--set", "media_root=media"], "media_root"),
        (&["--set", "media_root=/no/such/directory"], "media_root"),
        (&["--set", "media_root=/usr/../usr"], "media_root"),
        (&["--set", "media_proxy=proxy:3128"], "media_proxy"),
        (&["--set", "media_proxy=socks5://proxy:1080"], "media_proxy"),
        (&["--workers", "ftp://a:1"], "workers"),
        (&["--admin-listen", "9000"], "admin_listen"),
        (&["--otlp-endpoint", "collector"], "otlp_endpoint"),
        (&["--served-model-name", ""], "served_model_name"),
    ] {
        let message = config_of(flags).unwrap_err().to_string();
        assert!(message.starts_with(key), "{flags:?}: {message}");
    }
}

#[test]
fn a_proxys_password_is_in_no_message_and_in_no_listing() {
    for (key, value) in [
        ("media_proxy", "http://user:secret@proxy:3128/path"),
        ("media_proxy", "socks5://user:secret@proxy:1080"),
        ("media_proxy", "user:secret@proxy:3128"),
        ("media_proxy", "http://user:secret@:x"),
        ("otlp_endpoint", "ftp://user:secret@collector"),
    ] {
        let flags = match key {
            "otlp_endpoint" => ["--otlp-endpoint".to_owned(), value.to_owned()],
            _ => ["--set".to_owned(), format!("{key}={value}")],
        };
        let message = config_of(&[&flags[0], &flags[1]]).unwrap_err().to_string();
        assert!(message.starts_with(key) && !message.contains("secret"), "{value}: {message}");
    }
    let proxy = "media_proxy=http://user:secret@proxy:3128";
    let config = config_of(&["--set", proxy]).unwrap();
    assert_eq!(config.media.proxy.as_ref().unwrap().password(), Some("secret"));
    let listed = format!("{config:?}");
    assert!(listed.contains("proxy:3128") && !listed.contains("secret"), "{listed}");
}

#[test]
fn a_missing_model_says_which_flag_names_it() {
    let message = GatewayConfig::from_arguments(["m3stack-gateway"]).unwrap_err().to_string();
    assert!(message.contains("--model-path"), "{message}");
}

#[test]
fn a_missing_config_file_is_named() {
    let error = read_file(Path::new("/nowhere/m3stack.toml")).unwrap_err().to_string();
    assert!(error.contains("/nowhere/m3stack.toml"), "{error}");
}

#[test]
fn several_workers_come_from_one_flag() {
    let config = config_of(&["--workers", "a:1, http://b:2"]).unwrap();
    let fixed = |uri: &str| WorkerSource::Fixed(uri.into());
    assert_eq!(config.workers, [fixed("http://a:1"), fixed("http://b:2")]);
}

#[test]
fn workers_can_be_found_in_several_ways() {
    let list = "dns://workers.example:1,k8s://models/m3-worker:grpc,file:///etc/workers";
    let scheme = "http";
    let config = config_of(&["--workers", list]).unwrap();
    let dns = WorkerSource::Dns { host: "workers.example".into(), port: 1, scheme };
    let kubernetes = WorkerSource::Kubernetes {
        namespace: "models".into(),
        service: "m3-worker".into(),
        port: "grpc".into(),
        scheme,
    };
    assert_eq!(config.workers, [dns, kubernetes, WorkerSource::File("/etc/workers".into())]);

    let config = config_of(&["--workers", "https://a:1", "--worker-tls-dir", "/tls"]).unwrap();
    assert_eq!(config.workers, [WorkerSource::Fixed("https://a:1".into())]);
}

#[test]
fn an_address_that_others_reach_needs_keys_or_the_word_that_it_does_not() {
    for listen in ["0.0.0.0:80", "[::]:80", "10.1.2.3:80", "gateway:80"] {
        let message = config_of(&["--listen", listen]).unwrap_err().to_string();
        assert!(message.contains("--api-keys") && message.contains("--allow-anonymous"));
        assert!(config_of(&["--listen", listen, "--allow-anonymous"]).is_ok());
        assert!(config_of(&["--listen", listen, "--api-keys", "/etc/keys"]).is_ok());
    }
    for listen in ["127.0.0.1:80", "[::1]:80", "localhost:80", "127.9.9.9:80"] {
        assert!(config_of(&["--listen", listen]).is_ok(), "{listen}");
    }
}

#[test]
fn a_setting_without_a_flag_stands_in_set_the_environment_or_the_file() {
    let file = file_with("[gateway]\nmedia_threads = 3\nworker_stall_s = 7\n");
    let flags =
        ["--config", file.to_str().unwrap(), "--set", "media_threads=5", "--set", "slow_start_s=0"];
    let config = config_of(&flags).unwrap();
    assert_eq!(config.media.threads, 5);
    assert_eq!((config.routing.stall_s, config.routing.slow_start_s), (7.0, 0.0));

    let variable = ("M3STACK_GATEWAY_MEDIA_THREADS".into(), "4".into());
    let table = tuning_variables([variable].into_iter()).unwrap();
    assert_eq!(table["media_threads"].as_integer(), Some(4));
}

#[test]
fn help_names_every_setting() {
    let help = config_of(&["--help"]).unwrap_err().to_string();
    let example = std::fs::read_to_string("../../deploy/m3stack.example.toml").unwrap();
    let table = example.split("[gateway]").nth(1).unwrap().split("[worker]").next().unwrap();
    let keys: Vec<_> = table
        .lines()
        .map(|line| line.trim_start_matches("# "))
        .filter_map(|line| line.split_once(" = ").map(|(key, _)| key))
        .collect();
    assert!(keys.len() > 30, "{keys:?}");
    for key in keys {
        let flag = format!("--{}", key.replace('_', "-"));
        assert!(help.contains(&flag) || help.contains(&format!("  {key}\n")), "{key}");
    }
}
