//! Settings: precedence, refusal of what is unknown, messages that say what to do.

use super::raw::{read_file, refuse_unknown_variables};
use super::*;

fn config_of(flags: &[&str]) -> Result<GatewayConfig, ConfigError> {
    let all = ["m3stack-gateway", "--model-path", "/models/tiny"].iter().chain(flags);
    GatewayConfig::from_arguments(all.copied())
}

fn file_with(text: &str) -> tempfile_path::TempPath {
    tempfile_path::TempPath::new(text)
}

/// A config file that removes itself.
mod tempfile_path {
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicU32, Ordering};

    static NEXT: AtomicU32 = AtomicU32::new(0);

    pub struct TempPath(pub PathBuf);

    impl TempPath {
        pub fn new(text: &str) -> Self {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("m3stack-config-{}-{number}.toml", std::process::id());
            let path = std::env::temp_dir().join(name);
            std::fs::write(&path, text).unwrap();
            Self(path)
        }

        pub fn text(&self) -> &str {
            self.0.to_str().unwrap()
        }
    }

    impl Drop for TempPath {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }
}

#[test]
fn defaults_serve_on_loopback_and_refuse_private_media() {
    let config = config_of(&[]).unwrap();

    assert_eq!(config.listen, "127.0.0.1:8000");
    assert_eq!(config.workers, ["http://127.0.0.1:50051"]);
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

    let config = config_of(&["--config", file.text(), "--listen", "0.0.0.0:9002"]).unwrap();

    assert_eq!(config.listen, "0.0.0.0:9002");
    assert_eq!(config.served_model_name, "from-file");
    assert_eq!(config.media.threads, 3);
}

#[test]
fn an_unknown_key_is_refused_by_name_and_position() {
    for text in ["[gateway]\nlisten_on = \"x:1\"\n", "[shared]\nmodel = \"x\"\n", "[gatway]\n"] {
        let file = file_with(text);
        let message = config_of(&["--config", file.text()]).unwrap_err().to_string();
        let key = text.trim_start_matches("[gateway]\n").trim_start_matches("[shared]\n");
        let key = key.trim_matches(['[', ']', '\n']).split(' ').next().unwrap();
        assert!(message.contains(key) && message.contains("line"), "{message}");
    }
}

#[test]
fn an_unknown_variable_is_refused_but_kubernetes_service_links_are_not() {
    let names = |list: &[&str]| list.iter().map(std::ffi::OsString::from).collect::<Vec<_>>();

    let links = names(&[
        "M3STACK_GATEWAY_PORT",
        "M3STACK_GATEWAY_PORT_8000_TCP_ADDR",
        "M3STACK_GATEWAY_SERVICE_HOST",
        "M3STACK_GATEWAY_LISTEN",
        "HOME",
    ]);
    assert!(refuse_unknown_variables(links.into_iter()).is_ok());

    let typo = names(&["M3STACK_GATEWAY_LISTNE"]);
    let message = refuse_unknown_variables(typo.into_iter()).unwrap_err().to_string();
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
        (&["--max-buffered-bytes", "5"], "max_buffered_bytes"),
        (&["--media-timeout-s", "0"], "media_timeout_s"),
        (&["--served-model-name", ""], "served_model_name"),
    ] {
        let message = config_of(flags).unwrap_err().to_string();
        assert!(message.starts_with(key), "{flags:?}: {message}");
    }
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
    assert_eq!(config.workers, ["http://a:1", "http://b:2"]);
}
