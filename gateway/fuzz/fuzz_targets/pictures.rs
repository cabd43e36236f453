//! Any bytes as a picture: header, frame and patch rows agree, whatever the bytes are.
#![no_main]

use gateway_media::decode::{DecodeLimits, decode_image, read_header};
use gateway_media::patchify::patchify_resized;
use gateway_media::picture::{PictureJob, picture_patches};
use gateway_media::resize::Resizer;
use gateway_media::{ImageSize, PatchLayout};
use libfuzzer_sys::fuzz_target;

const LAYOUT: PatchLayout = PatchLayout { patch_size: 14, temporal_patch_size: 2, merge_size: 2 };
const TARGET: ImageSize = ImageSize { width: 56, height: 28 };
const LIMITS: DecodeLimits = DecodeLimits { max_pixels: 1_000_000 };

fuzz_target!(|bytes: &[u8]| {
    let frame = decode_image(bytes, &LIMITS);
    let Ok(header) = read_header(bytes) else {
        assert!(frame.is_err());
        return;
    };
    if header.size.pixels() > LIMITS.max_pixels {
        assert!(frame.is_err());
        return;
    }
    let resizer = &Resizer::new(header.size, TARGET);
    let job = PictureJob { limits: &LIMITS, resizer, layout: LAYOUT, is_wanted: &mut || true };
    let rows = picture_patches(bytes, job);
    match frame {
        Ok(frame) => {
            assert_eq!(frame.size, header.size);
            assert!(rows == Ok(Some(patchify_resized(&frame, resizer, LAYOUT))));
        }
        Err(error) => assert_eq!(rows, Err(error)),
    }
});
