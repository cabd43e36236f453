//! Equality with torch's bytes, of the kernels with each other, and the speed of both.

use super::{Kernels, Resizer, resize};
use crate::hash::sha256;
use crate::types::{ImageSize, RgbFrame};
use proptest::prelude::*;

const VECTORS: &str = include_str!("../../../../tests/data/resize/vectors.txt");

/// The source pictures of the vectors: see `tests/data/resize/make.py`.
fn source(size: ImageSize, pattern: &str) -> RgbFrame {
    let noise = |index: u64| {
        let mut mixed = (index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 56) as u8
    };
    let byte = |index| match pattern {
        "noise" => noise(index),
        "extremes" => noise(index) / 128 * 255,
        _ => (index / 3 % 256) as u8,
    };
    RgbFrame { size, pixels: (0..size.pixels() * 3).map(byte).collect() }
}

fn hex(digest: [u8; 32]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn every_byte_equals_torch_for_all_kernels() {
    let mut cases = 0;
    for line in VECTORS.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let side = |index: usize| fields[index].parse::<u32>().unwrap();
        let from = ImageSize { width: side(0), height: side(1) };
        let to = ImageSize { width: side(2), height: side(3) };
        let frame = source(from, fields[4]);
        for kernels in Kernels::all() {
            let resized = Resizer::with_kernels(from, to, kernels).resize(&frame);
            assert_eq!(resized.size, to);
            assert_eq!(hex(sha256(&resized.pixels)), fields[5], "{kernels:?}: {line}");
        }
        cases += 1;
    }
    assert!(cases > 200);
}

#[test]
fn an_unchanged_size_is_the_same_picture() {
    let frame = source(ImageSize { width: 31, height: 17 }, "noise");
    assert_eq!(resize(&frame, frame.size), frame);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn fast_kernels_equal_plain_ones_on_any_shape(
        from in (1_u32..180, 1_u32..60), to in (1_u32..180, 1_u32..60), extremes in any::<bool>(),
    ) {
        let from = ImageSize { width: from.0, height: from.1 };
        let to = ImageSize { width: to.0, height: to.1 };
        let frame = source(from, if extremes { "extremes" } else { "noise" });
        let plain = Resizer::with_kernels(from, to, Kernels::Scalar).resize(&frame);
        for kernels in Kernels::all() {
            let fast = Resizer::with_kernels(from, to, kernels).resize(&frame);
            prop_assert!(plain == fast, "{kernels:?}");
        }
    }

    #[test]
    fn one_colour_stays_that_colour(
        from in (1_u32..400, 1_u32..90), to in (1_u32..300, 1_u32..90), colour in any::<[u8; 3]>(),
    ) {
        let from = ImageSize { width: from.0, height: from.1 };
        let to = ImageSize { width: to.0, height: to.1 };
        let frame = RgbFrame { size: from, pixels: colour.repeat(from.pixels() as usize) };
        let resized = resize(&frame, to);
        prop_assert!(resized.pixels.as_chunks::<3>().0.iter().all(|pixel| *pixel == colour));
    }
}

/// `cargo test -p gateway-media speed_of -- --ignored --nocapture`
#[test]
#[ignore = "prints times"]
fn speed_of_each_kernel() {
    let layout =
        crate::types::PatchLayout { patch_size: 14, temporal_patch_size: 2, merge_size: 2 };
    let frame = source(ImageSize { width: 1920, height: 1080 }, "noise");
    let target = ImageSize { width: 896, height: 504 };
    for kernels in Kernels::all() {
        let resizer = Resizer::with_kernels(frame.size, target, kernels);
        let mut taken: Vec<f64> = (0..200)
            .map(|_| {
                let begin = std::time::Instant::now();
                std::hint::black_box(resizer.resize(&frame));
                begin.elapsed().as_secs_f64() * 1e3
            })
            .collect();
        taken.sort_by(f64::total_cmp);
        println!("{kernels:?}: resize best {:.3} ms, quarter {:.3} ms", taken[0], taken[50]);
        let mut taken: Vec<f64> = (0..200)
            .map(|_| {
                let begin = std::time::Instant::now();
                std::hint::black_box(crate::patchify::patchify_resized(&frame, &resizer, layout));
                begin.elapsed().as_secs_f64() * 1e3
            })
            .collect();
        taken.sort_by(f64::total_cmp);
        println!("{kernels:?}: to patches best {:.3} ms, quarter {:.3} ms", taken[0], taken[50]);
    }
}
