//! Any bytes as an AVIF file: refused, or a plan whose streams, once decoded to whatever samples,
//! make a picture of the size that the header tells.
#![no_main]

use gateway_media::decode::avif::AvifPlan;
use gateway_media::decode::{DecodeLimits, ImageFormat, read_header};
use libfuzzer_sys::fuzz_target;

const LIMITS: DecodeLimits = DecodeLimits { max_pixels: 1 << 16 };
/// Four coded pixels for each shown, of three samples of two bytes, for colours and transparency;
/// and 4,096 tiles of the smallest size.
const MAX_DECODED_BYTES: usize = (4 * (1 << 16) + 4096 * 64 * 64) * 3 * 2 * 2;

fuzz_target!(|bytes: &[u8]| {
    if ImageFormat::of(bytes) != Ok(ImageFormat::Avif) {
        return;
    }
    let Ok(plan) = AvifPlan::read(bytes, &LIMITS) else { return };
    let header = read_header(bytes).expect("what can be planned has a header");
    assert!(header.size.pixels() <= LIMITS.max_pixels && header.size.pixels() > 0);
    let streams = plan.streams();
    let total: usize = streams.iter().map(|stream| stream.num_bytes).sum();
    assert!(total > 0 && total <= MAX_DECODED_BYTES);
    if total > 1 << 22 {
        return;
    }
    let samples = bytes.iter().copied().cycle();
    let decoded: Vec<Vec<u8>> =
        streams.iter().map(|stream| samples.clone().take(stream.num_bytes).collect()).collect();
    let mut short = decoded.clone();
    for planes in &mut short {
        planes.pop();
    }
    assert!(plan.picture(short).is_err() && plan.picture(Vec::new()).is_err());
    let frame = plan.picture(decoded).expect("as much as was promised");
    assert_eq!(frame.size, header.size);
    assert_eq!(frame.pixels.len() as u64, frame.size.pixels() * 3);
});
