//! Times each stage between a picture's bytes and its patch rows, and bare libjpeg-turbo beside
//! them: `cargo run --release -p gateway-media --example picture_speed -- picture.jpg WIDTH HEIGHT`.

use std::time::Instant;

use gateway_media::decode::{DecodeLimits, decode_image};
use gateway_media::patchify::patchify_resized;
use gateway_media::resize::Resizer;
use gateway_media::{ImageSize, PatchLayout};

const ROUNDS: usize = 40;

/// Milliseconds of each round, sorted.
fn timed<T>(mut work: impl FnMut() -> T) -> (f64, f64) {
    let mut taken: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let begin = Instant::now();
            std::hint::black_box(work());
            begin.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    taken.sort_by(f64::total_cmp);
    (taken[ROUNDS / 2], taken[0])
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
    let mut bare = turbojpeg::Decompressor::new()?;
    let (w, h) = (frame.size.width as usize, frame.size.height as usize);
    let mut pixels = vec![0_u8; w * h * 3];
    let mut decode_bare = || {
        let format = turbojpeg::PixelFormat::RGB;
        let pixels = pixels.as_mut_slice();
        bare.decompress(
            &bytes,
            turbojpeg::Image { pixels, width: w, pitch: w * 3, height: h, format },
        )
    };
    let rows = [
        ("bare decode", timed(&mut decode_bare)),
        ("decode_image", timed(|| decode_image(&bytes, &limits))),
        ("weights", timed(|| Resizer::new(frame.size, target))),
        ("resize", timed(|| resizer.resize(&frame))),
        ("resize to rows", timed(|| patchify_resized(&frame, &resizer, layout))),
        (
            "whole",
            timed(|| {
                let frame = decode_image(&bytes, &limits)?;
                let resizer = Resizer::new(frame.size, target);
                Ok::<_, gateway_media::MediaError>(patchify_resized(&frame, &resizer, layout))
            }),
        ),
    ];
    for (name, (median, best)) in rows {
        println!("{name:<14} {median:8.3} ms   best {best:8.3}");
    }
    Ok(())
}
