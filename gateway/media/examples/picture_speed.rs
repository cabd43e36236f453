//! Times each stage between a picture's bytes and its patch rows, and bare libjpeg-turbo beside
//! them: `cargo run --release -p gateway-media --example picture_speed -- picture.jpg WIDTH HEIGHT`.
//! The stages take turns, so that a busy moment meets all of them; times are of the processor.

#![allow(unsafe_code)]

use gateway_media::decode::{DecodeLimits, decode_image};
use gateway_media::patchify::patchify_resized;
use gateway_media::picture::{PictureJob, picture_patches};
use gateway_media::resize::Resizer;
use gateway_media::{ImageSize, PatchLayout};
use std::hint::black_box;

const ROUNDS: usize = 100;

/// Milliseconds that this thread has had a processor for.
fn processor_ms() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the struct lives through the call.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 / 1e6
}

/// What a caller of the bare library gets: a frame of its own.
fn decode_bare(bytes: &[u8]) -> Option<Vec<u8>> {
    let image = turbojpeg::decompress(bytes, turbojpeg::PixelFormat::RGB);
    image.ok().map(|image| image.pixels)
}

#[allow(clippy::print_stdout)]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, path, width, height] = arguments.as_slice() else {
        return Err("arguments: picture.jpg WIDTH HEIGHT".into());
    };
    let bytes = std::fs::read(path)?;
    let target = ImageSize { width: width.parse()?, height: height.parse()? };
    let layout = PatchLayout { patch_size: 14, temporal_patch_size: 2, merge_size: 2 };
    let limits = DecodeLimits::default();
    let frame = decode_image(&bytes, &limits)?;
    let resizer = Resizer::new(frame.size, target);
    let whole = || {
        let (limits, resizer, is_wanted) = (&limits, &resizer, &mut || true);
        picture_patches(&bytes, PictureJob { limits, resizer, layout, is_wanted })
    };
    let stages: [(&str, &dyn Fn()); 6] = [
        ("bare decode", &|| drop(black_box(decode_bare(&bytes)))),
        ("decode_image", &|| drop(black_box(decode_image(&bytes, &limits)))),
        ("weights", &|| drop(black_box(Resizer::new(frame.size, target)))),
        ("resize", &|| drop(black_box(resizer.resize(&frame)))),
        ("resize to rows", &|| drop(black_box(patchify_resized(&frame, &resizer, layout)))),
        ("whole", &|| drop(black_box(whole()))),
    ];
    let mut taken = vec![Vec::with_capacity(ROUNDS); stages.len()];
    for _ in 0..ROUNDS {
        for ((_, stage), times) in stages.iter().zip(&mut taken) {
            let begin = processor_ms();
            stage();
            times.push(processor_ms() - begin);
        }
    }
    for ((name, _), mut times) in stages.iter().zip(taken) {
        times.sort_by(f64::total_cmp);
        let (best, quarter, median) = (times[0], times[ROUNDS / 4], times[ROUNDS / 2]);
        println!("{name:<14} best {best:8.3} ms   quarter {quarter:8.3}   median {median:8.3}");
    }
    Ok(())
}
