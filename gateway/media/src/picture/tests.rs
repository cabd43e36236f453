//! Equality with the way over a whole frame, and giving up.

use super::{PictureJob, picture_patches};
use crate::decode::{DecodeLimits, decode_image, read_header};
use crate::error::MediaError;
use crate::patchify::patchify_resized;
use crate::resize::Resizer;
use crate::types::{ImageSize, PatchLayout, Patches};
use turbojpeg::{Compressor, Image, PixelFormat, Subsamp};

const LAYOUT: PatchLayout = PatchLayout { patch_size: 14, temporal_patch_size: 2, merge_size: 2 };

fn jpeg(size: ImageSize, format: PixelFormat, subsampling: Subsamp) -> Vec<u8> {
    let (width, height) = (size.width as usize, size.height as usize);
    let channels = format.size();
    let sample = |at: usize| (at * at / 7 + at * 31) as u8;
    let pixels: Vec<u8> = (0..width * height * channels).map(sample).collect();
    let image = Image { pixels: &pixels[..], width, pitch: width * channels, height, format };
    let mut compressor = Compressor::new().unwrap();
    compressor.set_quality(80).unwrap();
    compressor.set_subsamp(subsampling).unwrap();
    compressor.set_progressive(size.width % 2 == 1).unwrap();
    compressor.compress_to_vec(image).unwrap()
}

fn patches(bytes: &[u8], target: ImageSize) -> Result<Option<Patches>, MediaError> {
    let limits = &DecodeLimits::default();
    let resizer = &Resizer::new(read_header(bytes).unwrap().size, target);
    picture_patches(bytes, PictureJob { limits, resizer, layout: LAYOUT, is_wanted: &mut || true })
}

#[test]
fn rows_used_as_they_come_equal_a_whole_frame_resized() {
    let kinds = [
        (PixelFormat::RGB, Subsamp::Sub2x2),
        (PixelFormat::RGB, Subsamp::Sub2x1),
        (PixelFormat::RGB, Subsamp::None),
        (PixelFormat::GRAY, Subsamp::Gray),
        (PixelFormat::CMYK, Subsamp::Sub2x2),
    ];
    let sizes = [(28, 28), (28, 90), (97, 56), (130, 75), (1, 33), (33, 1), (401, 211)];
    for (format, subsampling) in kinds {
        for (width, height) in sizes {
            let bytes = jpeg(ImageSize { width, height }, format, subsampling);
            let frame = decode_image(&bytes, &DecodeLimits::default()).unwrap();
            for (width, height) in [(28, 28), (56, 84), (252, 56)] {
                let target = ImageSize { width, height };
                let resizer = Resizer::new(frame.size, target);
                let expected = patchify_resized(&frame, &resizer, LAYOUT);
                let name = format!("{format:?} {:?} to {target:?}", frame.size);
                assert_eq!(patches(&bytes, target), Ok(Some(expected)), "{name}");
            }
        }
    }
}

#[test]
fn damage_is_the_same_error_either_way() {
    let size = ImageSize { width: 130, height: 75 };
    let bytes = jpeg(size, PixelFormat::RGB, Subsamp::Sub2x2);
    for cut in [bytes.len() / 2, bytes.len() - 40, bytes.len() - 1] {
        for end in [b"".as_slice(), b"\xff\xd9"] {
            let damaged = [&bytes[..cut], end].concat();
            let expected = decode_image(&damaged, &DecodeLimits::default());
            let found = patches(&damaged, ImageSize { width: 56, height: 28 });
            assert_eq!(found.err(), expected.err(), "{cut} {end:?}");
        }
    }
}

#[test]
fn work_is_given_up_between_two_bands() {
    let bytes = jpeg(ImageSize { width: 64, height: 320 }, PixelFormat::RGB, Subsamp::Sub2x2);
    let mut asked = 0;
    let is_wanted = &mut || {
        asked += 1;
        asked < 4
    };
    let size = ImageSize { width: 64, height: 320 };
    let resizer = &Resizer::new(size, ImageSize { width: 28, height: 140 });
    let job = PictureJob { limits: &DecodeLimits::default(), resizer, layout: LAYOUT, is_wanted };
    assert_eq!(picture_patches(&bytes, job), Ok(None));
    assert_eq!(asked, 4);
}
