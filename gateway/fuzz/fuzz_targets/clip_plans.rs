//! Any bytes as an MP4 file, from its tables to what is decoded of it: either it is left to ffprobe,
//! or its frames are ascending in time and each one asked for is reached from a key frame.
#![no_main]
#![allow(dead_code, reason = "parts of the gateway are compiled without those who use the rest")]

use libfuzzer_sys::fuzz_target;

/// The gateway's errors, as far as these files make them.
mod error {
    #[derive(Debug)]
    pub struct GatewayError(pub String);
}

#[path = "../clip_plans/media.rs"]
mod media;

fuzz_target!(|bytes: &[u8]| media::ffmpeg::check(bytes));
