//! Colours against what the reference's library gave, and files that lie.
#![allow(clippy::unwrap_used, reason = "every function here is part of a test")]

use super::colour::{Colour, samples};
use super::planes::{Chroma, Planes, wide};
use super::{AvifPlan, read_header};
use crate::decode::DecodeLimits;
use crate::types::ImageSize;

/// Written by `golden.py` beside it.
const GOLDEN: &[u8] = include_bytes!("../../../../../tests/data/avif/colour.bin");

struct Golden<'a>(&'a [u8]);

impl<'a> Golden<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken
    }

    fn planes(&mut self, size: ImageSize, depth: u8, chroma: Chroma) -> Planes {
        let planes = 0..Planes::count(chroma);
        let samples = planes.map(|plane| Planes::plane_size(size, chroma, plane));
        let count: usize = samples.map(|(width, height)| width * height).sum();
        let bytes = self.take(count * wide(depth)).to_vec();
        Planes { size, depth, chroma, is_full: true, bytes }
    }
}

#[test]
fn colours_equal_those_of_the_reference_in_every_byte() {
    let mut golden = Golden(GOLDEN);
    let mut count = 0;
    while !golden.0.is_empty() {
        let case: [u8; 8] = golden.take(8).try_into().unwrap();
        let [width, height, depth, format, has_alpha, is_full, matrix, is_premultiplied] = case;
        let size = ImageSize { width: width.into(), height: height.into() };
        let formats = [Chroma::Full, Chroma::Half, Chroma::Quarter, Chroma::None];
        let chroma = formats[usize::from(format) - 1];
        let planes = golden.planes(size, depth, chroma);
        let alpha = (has_alpha == 1).then(|| golden.planes(size, depth, Chroma::None));
        let alpha = alpha.map(|alpha| (alpha, is_premultiplied == 1));
        let colour = Colour { primaries: 2, matrix: matrix.into(), is_full: is_full == 1 };
        let made = samples(&planes, alpha.as_ref(), colour.checked(chroma).unwrap());
        let expected = golden.take(made.len());
        assert_eq!(made, expected, "{case:?}");
        count += 1;
    }
    assert_eq!(count, 480);
}

fn file(name: &str) -> Vec<u8> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/avif/");
    std::fs::read(format!("{folder}{name}.avif")).unwrap()
}

const LIMITS: DecodeLimits = DecodeLimits { max_pixels: 1 << 20 };

/// What a decoder would give, all of one value.
fn blank(plan: &AvifPlan<'_>) -> Vec<Vec<u8>> {
    plan.streams().iter().map(|stream| vec![16; stream.num_bytes]).collect()
}

#[test]
fn a_grid_is_one_stream_of_tiles_and_one_of_their_transparency() {
    let bytes = file("grid_444_a");
    let plan = AvifPlan::read(&bytes, &LIMITS).unwrap();
    let streams = plan.streams();
    let [colours, alpha] = streams.as_slice() else { panic!("{streams:?}") };
    assert_eq!((colours.num_frames, colours.num_bytes), (6, 6 * 64 * 80 * 3));
    assert_eq!((alpha.num_frames, alpha.num_bytes), (6, 6 * 64 * 80));
    let header = read_header(&bytes).unwrap();
    assert_eq!(header.size, ImageSize { width: 180, height: 150 });
    assert_eq!(plan.picture(blank(&plan)).unwrap().size, header.size);
}

#[test]
fn pixels_that_a_decoder_left_out_or_added_are_an_error() {
    let bytes = file("420_a");
    let plan = AvifPlan::read(&bytes, &LIMITS).unwrap();
    for change in [-1_isize, 1] {
        let mut decoded = blank(&plan);
        let wrong = decoded[1].len().saturating_add_signed(change);
        decoded[1].resize(wrong, 0);
        let error = plan.picture(decoded).unwrap_err();
        assert!(error.to_string().contains("bytes of pixels"), "{error}");
    }
    assert!(plan.picture(Vec::new()).is_err());
}

/// The file with the first of these bytes replaced.
fn patched(name: &str, found: &[u8], replacement: &[u8]) -> Vec<u8> {
    let mut bytes = file(name);
    let place = bytes.windows(found.len()).position(|window| window == found).unwrap();
    bytes[place..][..replacement.len()].copy_from_slice(replacement);
    bytes
}

#[test]
fn files_that_lie_are_refused_with_the_reason() {
    let wide = b"ispe\0\0\0\0\0\0\0\x42";
    let huge = b"ispe\0\0\0\0\0\0\xff\xff";
    let cases = [
        (patched("420", b"ispe\0\0\0\0\0\0\0\x41", wide), "disagree on the size"),
        (patched("420", b"ispe\0\0\0\0\0\0\0\x41", huge), "pixels (65535x47)"),
        (patched("420", b"av01", b"hvc1"), "items of type \"hvc1\""),
        (patched("420", b"meta", b"mate"), "no meta box"),
        (patched("420", b"iloc", b"ilac"), "its meta box is damaged"),
        (patched("420", b"nclx\0\x01\0\x0d\0\x06", b"nclx\0\x01\0\x0d\0\x0e"), "colour matrix 14"),
        (patched("grid_420", b"\0\0\x01\x02\0\xb4\0\x96", b"\0\0\x01\x03"), "tiles disagree"),
        (file("420")[..300].to_vec(), "truncated"),
    ];
    for (bytes, reason) in cases {
        let limits = DecodeLimits { max_pixels: 1 << 20 };
        let error = AvifPlan::read(&bytes, &limits).unwrap_err().to_string();
        assert!(error.contains(reason), "{error} ({reason})");
    }
}

#[test]
fn a_file_cut_anywhere_is_refused_and_a_damaged_one_keeps_its_word() {
    let mut seed = 1_u64;
    let mut random = |below: usize| {
        seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (seed >> 33) as usize % below
    };
    let names = ["420", "444_a", "grid_420", "sequence_a", "turned_6", "400_12bit"];
    let (mut read, mut refused) = (0, 0);
    for name in names {
        let whole = file(name);
        for cut in (0..whole.len()).step_by(7) {
            assert!(AvifPlan::read(&whole[..cut], &LIMITS).is_err() || name == "sequence_a");
        }
        // damage to the boxes; what is coded is the decoder's business
        let boxes = whole.windows(4).position(|window| window == b"mdat").unwrap();
        for _ in 0..2000 {
            let mut bytes = whole.clone();
            for _ in 0..=random(3) {
                bytes[random(boxes)] = [0, 1, 2, 0x7f, 0x80, 0xff, random(256) as u8][random(7)];
            }
            match AvifPlan::read(&bytes, &LIMITS) {
                Ok(plan) => {
                    let header = read_header(&bytes).unwrap();
                    let frame = plan.picture(blank(&plan)).unwrap();
                    assert_eq!(frame.size, header.orientation.turned(header.size));
                    assert_eq!(frame.pixels.len() as u64, frame.size.pixels() * 3);
                    read += 1;
                }
                Err(_) => refused += 1,
            }
        }
    }
    assert!(read > 1000 && refused > 1000, "{read} {refused}");
}

fn boxed(kind: &[u8; 4], parts: &[&[u8]]) -> Vec<u8> {
    let body = parts.concat();
    [&(body.len() as u32 + 8).to_be_bytes(), &kind[..], &body].concat()
}

/// A file of a few KB whose grid names one tile so often, and that tile one property.
fn repeating(num_tiles: u16, num_properties: u32) -> Vec<u8> {
    let entry =
        |id: u8, kind: &[u8; 4]| boxed(b"infe", &[&[2, 0, 0, 0], &[0, id, 0, 0], kind, b"\0"]);
    let kinds = boxed(b"iinf", &[&[0; 4], &[0, 2], &entry(1, b"grid"), &entry(2, b"av01")]);
    let size = boxed(b"ispe", &[&[0; 4], &64_u32.to_be_bytes(), &64_u32.to_be_bytes()]);
    let mut links = vec![0, 1, 1, 1];
    for _ in 0..num_properties {
        links.extend([0, 2, 1, 1]);
    }
    let count = (num_properties + 1).to_be_bytes();
    let links = boxed(b"ipma", &[&[0; 4], &count, &links]);
    let properties = boxed(b"iprp", &[&boxed(b"ipco", &[&size]), &links]);
    let places = boxed(b"iloc", &[&[0; 4], &[0x44, 0, 0, 0]]);
    let tiles = [0, 2].repeat(num_tiles.into());
    let tiles = boxed(b"dimg", &[&[0, 1], &num_tiles.to_be_bytes(), &tiles]);
    let tiles = boxed(b"iref", &[&[0; 4], &tiles]);
    let primary = boxed(b"pitm", &[&[0; 4], &[0, 1]]);
    let meta = boxed(b"meta", &[&[0; 4], &primary, &kinds, &properties, &places, &tiles]);
    [boxed(b"ftyp", &[b"avif\0\0\0\0avif"]), meta].concat()
}

#[test]
fn what_is_named_again_and_again_takes_no_memory_each_time() {
    let reason = |num_tiles, num_properties| {
        let bytes = repeating(num_tiles, num_properties);
        AvifPlan::read(&bytes, &LIMITS).unwrap_err().to_string()
    };
    // a sound index, whose items have no bytes
    assert!(reason(4096, 64).contains("no bytes"), "{}", reason(4096, 64));
    assert!(reason(4096, 65).contains("meta box is damaged"), "{}", reason(4096, 65));
    assert!(reason(4097, 1).contains("too many tiles"), "{}", reason(4097, 1));
}

#[test]
fn parts_of_all_items_are_counted_together() {
    // offsets of no bytes, lengths of one: each part takes a byte of the file
    let places = |num_items: u16, num_parts: u16| {
        let mut body = vec![0, 0, 0, 0, 0x01, 0];
        body.extend(num_items.to_be_bytes());
        for id in 0..num_items {
            body.extend([id.to_be_bytes(), [0, 0], num_parts.to_be_bytes()].concat());
            body.extend(vec![1; num_parts.into()]);
        }
        super::items::places(&body).map(|places| places.len())
    };
    assert_eq!(places(4, 4096), Some(4));
    assert_eq!(places(4, 4097), None);
    assert_eq!(places(4096, 4096), None);
}
