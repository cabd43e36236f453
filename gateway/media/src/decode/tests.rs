//! Every handed picture gives what its expectation says; mutated and cut files give clean errors.

use super::{DecodeLimits, ImageFormat, decode_image, read_header};
use crate::error::MediaError;
use crate::types::ImageSize;
use proptest::prelude::*;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;

const LIMITS: DecodeLimits = DecodeLimits { max_pixels: 16_000_000 };

fn data(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data").join(path)
}

fn expectations() -> serde_json::Map<String, Value> {
    let text = fs::read(data("media/expect.json")).unwrap();
    let all: Value = serde_json::from_slice(&text).unwrap();
    all["images"].as_object().unwrap().clone()
}

fn picture(name: &str) -> Vec<u8> {
    fs::read(data("media").join(name)).unwrap()
}

fn size_of(value: &Value) -> ImageSize {
    let side = |index: usize| value[index].as_u64().unwrap() as u32;
    ImageSize { width: side(0), height: side(1) }
}

#[test]
fn every_good_picture_has_the_expected_size_and_colours() {
    let mut good = 0;
    for (name, expected) in expectations() {
        // the geometry of the model refuses this one, not the decoder
        let is_good = expected["outcome"] != "error" || name == "img_shape_6000x2.png";
        if !is_good {
            continue;
        }
        let bytes = picture(&name);
        let header = read_header(&bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
        let frame = decode_image(&bytes, &LIMITS).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(header.size, size_of(&expected["upright_size"]), "{name}");
        assert_eq!(frame.size, header.size, "{name}");
        assert_eq!(frame.pixels.len() as u64, frame.size.pixels() * 3, "{name}");
        let tolerance = expected["tolerance"].as_i64().unwrap_or(0);
        for point in expected["points"].as_array().into_iter().flatten() {
            let (x, y) = (point[0].as_u64().unwrap(), point[1].as_u64().unwrap());
            let at = ((y * u64::from(frame.size.width) + x) * 3) as usize;
            for channel in 0..3 {
                let found = i64::from(frame.pixels[at + channel]);
                let wanted = point[2][channel].as_i64().unwrap();
                assert!((found - wanted).abs() <= tolerance, "{name} at {x},{y}: {found} {wanted}");
            }
        }
        good += 1;
    }
    assert!(good >= 34, "only {good} pictures were checked");
}

#[test]
fn every_bad_picture_is_an_error_that_says_why() {
    let reasons: [(&str, &str); 9] = [
        ("img_bomb_30000x30000.png", "900000000 pixels (30000x30000), the limit is 16000000"),
        ("img_header_lies_65500.jpg", "4290250000 pixels (65500x65500), the limit is 16000000"),
        ("img_truncated_128.jpg", "truncated"),
        ("img_truncated.png", "truncated"),
        ("img_badcrc.png", "cannot be decoded"),
        ("img_empty.png", "empty"),
        ("img_random.jpg", "unknown binary data"),
        ("img_text.png", "plain text"),
        ("img_vector.svg", "an SVG drawing"),
    ];
    for (name, reason) in reasons {
        assert_eq!(expectations()[name]["outcome"], "error", "{name}");
        let error = decode_image(&picture(name), &LIMITS).expect_err(name).to_string();
        assert!(error.contains(reason), "{name}: {error}");
    }
    let bad = expectations().values().filter(|expected| expected["outcome"] == "error").count();
    assert_eq!(bad, reasons.len() + 1, "a new bad picture needs its reason here");
}

#[test]
fn a_header_alone_refuses_a_bomb() {
    for (name, side) in
        [("img_bomb_30000x30000.png", 30_000), ("img_header_lies_65500.jpg", 65_500)]
    {
        let size = ImageSize { width: side, height: side };
        let start = &picture(name)[..700];
        assert_eq!(read_header(start).unwrap().size, size);
        let error = decode_image(start, &LIMITS).unwrap_err();
        assert_eq!(error, MediaError::TooManyPixels { size, limit: LIMITS.max_pixels });
    }
}

#[test]
fn the_format_is_that_of_the_bytes() {
    for (name, format) in [
        ("img_gray.jpg", ImageFormat::Jpeg),
        ("img_rgb16.png", ImageFormat::Png),
        ("img_rgba.webp", ImageFormat::WebP),
        ("img_anim.gif", ImageFormat::Gif),
        ("img_plain.bmp", ImageFormat::Bmp),
    ] {
        assert_eq!(read_header(&picture(name)).unwrap().format, format);
    }
}

#[test]
fn a_picture_cut_anywhere_is_never_shown_as_whole() {
    // the last bytes of some formats hold no pixels: a checksum, a trailer, padding
    for (name, trailer) in [
        ("img_exif_6.jpg", 0),
        ("img_progressive.jpg", 0),
        ("img_cmyk_adobe.jpg", 0),
        ("img_rgb16.png", 16),
        ("img_plain.bmp", 0),
        ("img_palette_transparent.gif", 8),
        ("img_rgba.webp", 2),
    ] {
        let whole = picture(name);
        for length in 0..whole.len() - trailer {
            let result = decode_image(&whole[..length], &LIMITS);
            assert!(result.is_err(), "{name} cut to {length} of {} bytes", whole.len());
        }
    }
}

/// A little-endian TIFF of 2x1 RGB pixels, its entries beyond the needed ones from `extra`.
fn tiff(extra: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut entries = vec![
        (256, 3, 2), // width
        (257, 3, 1), // height
        (258, 3, 8), // bits of a sample
        (262, 3, 2), // RGB
        (273, 4, 8), // where the pixels stand
        (277, 3, 3), // samples
        (279, 4, 6), // bytes of the pixels
    ];
    entries.extend(extra);
    entries.sort_unstable();
    let mut bytes = b"II\x2a\0\x0e\0\0\0".to_vec();
    bytes.extend([10, 20, 30, 40, 50, 60]);
    bytes.extend((entries.len() as u16).to_le_bytes());
    for (tag, kind, value) in entries {
        bytes.extend([u16::to_le_bytes(tag), u16::to_le_bytes(kind)].concat());
        bytes.extend([u32::to_le_bytes(1), u32::to_le_bytes(value)].concat());
    }
    bytes.extend([0; 4]);
    bytes
}

#[test]
fn a_plain_tiff_is_shown_in_its_orientation() {
    let frame = decode_image(&tiff(&[(259, 3, 1), (274, 3, 6)]), &LIMITS).unwrap();
    assert_eq!(frame.size, ImageSize { width: 1, height: 2 });
    assert_eq!(frame.pixels, [10, 20, 30, 40, 50, 60]);
}

#[test]
fn a_tiff_that_holds_another_format_is_refused_however_it_says_so() {
    for (extra, feature) in [
        (vec![(259, 3, 7)], "JPEG compression"),
        (vec![(259, 4, 7)], "JPEG compression"),
        (vec![(259, 3, 1), (259, 3, 7)], "JPEG compression"),
        (vec![(259, 3, 50_001)], "compression 50001"),
        (vec![(259, 1, 7)], "a malformed compression tag"),
    ] {
        let error = decode_image(&tiff(&extra), &LIMITS).unwrap_err();
        let feature = feature.to_owned();
        assert_eq!(error, MediaError::UnsupportedFeature { format: "TIFF", feature });
    }
}

/// Small pictures of every format and kind.
const SEEDS: [&str; 14] = [
    "img_exif_6.jpg",
    "img_progressive.jpg",
    "img_cmyk_adobe.jpg",
    "img_gray.jpg",
    "img_exif_6.png",
    "img_rgb16.png",
    "img_gray1.png",
    "img_palette_trns.png",
    "img_anim.png",
    "img_rgba.webp",
    "img_anim.gif",
    "img_palette_transparent.gif",
    "img_plain.bmp",
    "img_header_lies_65500.jpg",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_500))]

    #[test]
    fn mutated_pictures_decode_or_fail_but_never_panic(
        seed in 0..=SEEDS.len(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes =
            SEEDS.get(seed).map_or_else(|| tiff(&[(259, 3, 1), (274, 3, 6)]), |name| picture(name));
        for (index, value) in edits {
            let at = index.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let limits = DecodeLimits { max_pixels: 300_000 };
        if let Ok(frame) = decode_image(&bytes, &limits) {
            prop_assert_eq!(read_header(&bytes).unwrap().size, frame.size);
            prop_assert_eq!(frame.pixels.len() as u64, frame.size.pixels() * 3);
        }
    }
}
