//! Any text as a `data:` URL: refused, or the bytes that a strict reader finds in its plain form.
#![no_main]

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use libfuzzer_sys::fuzz_target;

/// The gateway's errors, as far as this file of it makes them.
mod error {
    pub enum ErrorKind {
        InvalidRequest,
        TooLarge,
    }

    pub struct GatewayError {
        pub kind: ErrorKind,
        pub code: &'static str,
        pub message: String,
    }

    impl GatewayError {
        pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
            Self { kind, code: "", message: message.into() }
        }
    }
}

#[path = "../../server/src/media/data_url.rs"]
mod data_url;

const MAX_BYTES: u64 = 4096;

fuzz_target!(|bytes: &[u8]| {
    // any bytes, written as most clients write them, are read back
    if (1..=MAX_BYTES as usize).contains(&bytes.len()) {
        let url = format!("data:image/png;base64,{}", STANDARD.encode(bytes));
        assert!(data_url::is_data_url(&url));
        assert!(data_url::decode(&url, MAX_BYTES).is_ok_and(|found| found == bytes));
    }
    let text = String::from_utf8_lossy(bytes);
    for url in [text.to_string(), format!("data:;base64,{text}")] {
        if !data_url::is_data_url(&url) {
            continue;
        }
        match data_url::decode(&url, MAX_BYTES) {
            Ok(found) => {
                assert!(!found.is_empty() && found.len() as u64 <= MAX_BYTES);
                assert!(found.len() as u64 <= data_url::most_bytes(&url));
                let (head, payload) = url.split_once(',').unwrap_or_default();
                let is_base64 = head.to_ascii_lowercase().ends_with(";base64");
                if let Some(strict) = STANDARD.decode(payload).ok().filter(|_| is_base64) {
                    assert_eq!(found, strict);
                }
            }
            Err(error) => {
                assert!(!error.message.is_empty());
                match error.kind {
                    error::ErrorKind::InvalidRequest => assert_eq!(error.code, "invalid_data_url"),
                    error::ErrorKind::TooLarge => {}
                }
            }
        }
    }
});
