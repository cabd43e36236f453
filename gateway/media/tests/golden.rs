//! Decoding, resizing and patch order together against the reference processor's own outputs.
#![allow(clippy::unwrap_used, reason = "every function here is part of a test")]

use gateway_media::decode::{DecodeLimits, decode_image};
use gateway_media::patchify::{patchify_clip, patchify_still};
use gateway_media::resize::resize;
use gateway_media::{ImageSize, PatchLayout, Patches, RgbFrame};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;

const LAYOUT: PatchLayout = PatchLayout { patch_size: 14, temporal_patch_size: 2, merge_size: 2 };
const MEAN: [f64; 3] = [0.481_454_66, 0.457_827_5, 0.408_210_73];
const STD: [f64; 3] = [0.268_629_54, 0.261_302_58, 0.275_777_11];
/// Values of one reference patch row: 3 channels, 2 frames, 14 by 14 pixels.
const ROW: usize = 3 * 2 * 196;

fn checkpoint(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/tiny_m3").join(path)
}

/// A safetensors file: the length of a JSON header, the header, the data.
struct Tensors {
    header: Value,
    data: Vec<u8>,
}

impl Tensors {
    fn open(name: &str) -> Self {
        let bytes = fs::read(checkpoint(name)).unwrap();
        let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        Self { header: serde_json::from_slice(header).unwrap(), data: data.to_vec() }
    }

    fn bytes(&self, name: &str) -> &[u8] {
        let offsets = &self.header[name]["data_offsets"];
        let at = |index: usize| offsets[index].as_u64().unwrap() as usize;
        &self.data[at(0)..at(1)]
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        self.bytes(name).as_chunks::<4>().0.iter().map(|&field| f32::from_le_bytes(field)).collect()
    }

    fn integers(&self, name: &str) -> Vec<i32> {
        self.bytes(name).as_chunks::<4>().0.iter().map(|&field| i32::from_le_bytes(field)).collect()
    }
}

/// The 8-bit value of which the reference made `value`, which must be one.
fn byte_of(value: f32, channel: usize) -> u8 {
    let scaled = (f64::from(value) * STD[channel] + MEAN[channel]) * 255.0;
    // the reference normalises in single precision: its error stays far below half a level
    assert!((scaled - scaled.round()).abs() < 1e-3, "{value} is no 8-bit level");
    scaled.round() as u8
}

/// One of our rows as the reference has it: a still's second copy filled in.
fn full_row(patches: &Patches, row: usize) -> Vec<u8> {
    let row_bytes = patches.bytes.len() / patches.grid.patches() as usize;
    let bytes = &patches.bytes[row * row_bytes..][..row_bytes];
    match patches.frames_per_patch {
        1 => bytes.chunks_exact(196).flat_map(|plane| [plane, plane].concat()).collect(),
        _ => bytes.to_vec(),
    }
}

fn assert_rows_equal(patches: &Patches, rows: impl Iterator<Item = usize>, values: &[f32]) {
    let mut count = 0;
    for (row, reference) in rows.zip(values.chunks_exact(ROW)) {
        let expected: Vec<u8> = reference
            .iter()
            .enumerate()
            .map(|(index, &value)| byte_of(value, index / (2 * 196)))
            .collect();
        assert_eq!(full_row(patches, row), expected, "row {row}");
        count += 1;
    }
    assert_eq!(count * ROW, values.len());
}

#[test]
fn stills_equal_the_reference_processor_in_every_byte() {
    let meta: Value =
        serde_json::from_slice(&fs::read(checkpoint("golden_meta.json")).unwrap()).unwrap();
    let golden = Tensors::open("golden_image_processor.safetensors");
    let pictures = meta["image_processor"].as_array().unwrap();
    assert_eq!(pictures.len(), 12);
    for picture in pictures {
        let number = |key: &str, index: usize| picture[key][index].as_u64().unwrap() as u32;
        let (k, height, width) = (&picture["k"], number("in_hw", 0), number("in_hw", 1));
        let bytes = fs::read(checkpoint(&format!("images/img{k}_{height}x{width}.png"))).unwrap();
        let frame = decode_image(&bytes, &DecodeLimits::default()).unwrap();
        assert_eq!(frame.size, ImageSize { width, height });
        let target = ImageSize { width: number("resized_hw", 1), height: number("resized_hw", 0) };
        let patches = patchify_still(&resize(&frame, target), LAYOUT);
        let grid = [number("grid_thw", 0), number("grid_thw", 1), number("grid_thw", 2)];
        assert_eq!([patches.grid.t, patches.grid.h, patches.grid.w], grid);
        let rows = golden.integers(&format!("img{k}.rows"));
        let values = golden.floats(&format!("img{k}.pixel_values"));
        assert_rows_equal(&patches, rows.iter().map(|&row| row as usize), &values);
        // the rows left out of the file are held by their sum
        let sum: f64 = (0..patches.grid.patches() as usize)
            .flat_map(|row| full_row(&patches, row).into_iter().enumerate())
            .map(|(index, byte)| {
                let channel = index / (2 * 196);
                ((f64::from(byte) / 255.0 - MEAN[channel]) / STD[channel]).abs()
            })
            .sum();
        let expected = picture["sum_abs"].as_f64().unwrap();
        assert!((sum - expected).abs() / expected < 1e-6, "img{k}: {sum} {expected}");
    }
}

#[test]
fn a_clip_equals_the_reference_processor_in_every_byte() {
    let golden = Tensors::open("golden_video.safetensors");
    let from = ImageSize { width: 90, height: 50 };
    let to = ImageSize { width: 84, height: 56 };
    let frames: Vec<RgbFrame> = golden
        .bytes("frames")
        .chunks_exact(50 * 90 * 3)
        .map(|pixels| resize(&RgbFrame { size: from, pixels: pixels.to_vec() }, to))
        .collect();
    assert_eq!(frames.len(), 11);
    let patches = patchify_clip(&frames, LAYOUT);
    assert_rows_equal(&patches, 0..144, &golden.floats("pixel_values_videos"));
}
