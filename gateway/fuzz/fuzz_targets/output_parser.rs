//! The reader of model output under libFuzzer.

#![no_main]

#[path = "../output_parser_body.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|data: &[u8]| body::check(data));
