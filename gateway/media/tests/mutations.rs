//! Sample pictures, damaged at random: whatever becomes of them, header, frame and patch rows agree,
//! and nothing panics. `PICTURE_MUTATIONS=1000` takes that many of each file instead of a few.

#![allow(clippy::unwrap_used)]

mod damage;

use std::path::Path;

use gateway_media::decode::{DecodeLimits, decode_image, read_header};
use gateway_media::patchify::patchify_resized;
use gateway_media::picture::{PictureJob, picture_patches};
use gateway_media::resize::Resizer;
use gateway_media::{ImageSize, PatchLayout};

use damage::{Noise, damaged};

const LAYOUT: PatchLayout = PatchLayout { patch_size: 14, temporal_patch_size: 2, merge_size: 2 };
const TARGET: ImageSize = ImageSize { width: 56, height: 28 };
/// Damage to a header must not make a test of minutes of one of seconds.
const LIMITS: DecodeLimits = DecodeLimits { max_pixels: 1_000_000 };
const FEW: u64 = 8;

fn check(bytes: &[u8]) -> bool {
    let header = read_header(bytes);
    let frame = decode_image(bytes, &LIMITS);
    let Ok(header) = header else {
        assert!(frame.is_err(), "a frame without a header");
        return false;
    };
    if header.size.pixels() > LIMITS.max_pixels {
        assert!(frame.is_err(), "{:?} passed the limit", header.size);
        return false;
    }
    let resizer = &Resizer::new(header.size, TARGET);
    let job = PictureJob { limits: &LIMITS, resizer, layout: LAYOUT, is_wanted: &mut || true };
    let rows = picture_patches(bytes, job);
    match frame {
        Ok(frame) => {
            assert_eq!(frame.size, header.size);
            let expected = patchify_resized(&frame, resizer, LAYOUT);
            assert!(rows.unwrap() == Some(expected), "rows differ from those of the frame");
            true
        }
        Err(error) => {
            assert_eq!(rows.unwrap_err(), error);
            false
        }
    }
}

#[test]
fn damaged_pictures_are_shown_alike_on_every_path_or_refused_alike() {
    let wanted = std::env::var("PICTURE_MUTATIONS").ok().map(|text| text.parse().unwrap());
    let count: u64 = wanted.unwrap_or(FEW);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/media");
    let mut files: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let (mut shown, mut tried) = (0, 0);
    for file in files {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        if !name.starts_with("img_") && !name.starts_with("pair_") {
            continue;
        }
        let bytes = std::fs::read(&file).unwrap();
        for number in 0..count {
            let mut noise = Noise(number ^ (name.len() as u64) << 40);
            shown += u64::from(check(&damaged(&bytes, &mut noise)));
            tried += 1;
        }
    }
    assert!(tried > 40 * count, "{tried}");
    assert!(shown > tried / 20 && shown < tried, "{shown} of {tried} still were pictures");
}
