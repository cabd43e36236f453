//! The marker walk, four-colour files, and which damage is harmless.

use super::{MediaError, Segments, read_header};
use crate::decode::{DecodeLimits, decode_image};
use crate::types::{ImageSize, RgbFrame};
use turbojpeg::{Compressor, Image, PixelFormat, Subsamp};

const SIZE: ImageSize = ImageSize { width: 61, height: 45 };

/// A smooth picture compressed by libjpeg-turbo; CMYK samples give a YCCK file.
fn compressed(format: PixelFormat, subsampling: Subsamp) -> (Vec<u8>, Vec<u8>) {
    let (width, height) = (SIZE.width as usize, SIZE.height as usize);
    let channels = format.size();
    let sample = |at: usize| {
        let (x, y) = (at / channels % width, at / channels / width);
        (x * (at % channels + 1) + y * 2 + 40) as u8
    };
    let pixels: Vec<u8> = (0..width * height * channels).map(sample).collect();
    let image = Image { pixels: &pixels[..], width, pitch: width * channels, height, format };
    let mut compressor = Compressor::new().unwrap();
    compressor.set_quality(100).unwrap();
    compressor.set_subsamp(subsampling).unwrap();
    (compressor.compress_to_vec(image).unwrap(), pixels)
}

fn decode(bytes: &[u8]) -> Result<RgbFrame, MediaError> {
    decode_image(bytes, &DecodeLimits::default())
}

/// Puts `junk` before the first `marker`.
fn with_junk(bytes: &[u8], marker: u8, junk: &[u8]) -> Vec<u8> {
    let at = bytes.windows(2).position(|pair| pair == [0xff, marker]).unwrap();
    [&bytes[..at], junk, &bytes[at..]].concat()
}

#[test]
fn markers_are_found_across_padding_restarts_and_stuffed_bytes() {
    let mut bytes = b"\xff\xd8".to_vec();
    bytes.extend(b"\xff\xff\xff\xfe\x00\x04\xff\xd9"); // padded comment that holds an end marker
    bytes.extend(b"junk\xff\xda\x00\x03\x01"); // bytes between segments, then a scan header
    bytes.extend(b"\x12\xff\x00\x34\xff\xd3\x56\xff\xff\xd9"); // coded data, then the end
    let markers: Vec<u8> = Segments::of(&bytes).map(|segment| segment.marker).take(3).collect();
    assert_eq!(markers, [0xfe, 0xda, 0xd9]);
}

#[test]
fn a_file_cut_before_its_frame_header_is_truncated() {
    for bytes in [b"\xff\xd8\xff".as_slice(), b"\xff\xd8\xff\xc0\x00\x11\x08\x00"] {
        assert!(matches!(read_header(bytes), Err(MediaError::Truncated { .. })));
    }
}

#[test]
fn a_scan_or_an_end_before_the_frame_header_is_unreadable() {
    for bytes in [b"\xff\xd8\xff\xda\x00\x02\x00".as_slice(), b"\xff\xd8\xff\xd9"] {
        assert!(matches!(read_header(bytes), Err(MediaError::Unreadable { .. })));
    }
}

#[test]
fn ycck_files_come_out_in_their_colours() {
    let (bytes, inks) = compressed(PixelFormat::CMYK, Subsamp::None);
    let frame = decode(&bytes).unwrap();
    for (pixel, ink) in frame.pixels.chunks_exact(3).zip(inks.chunks_exact(4)) {
        for (found, light) in pixel.iter().zip(ink) {
            let wanted = i32::from(*light) * i32::from(ink[3]) / 255;
            assert!((i32::from(*found) - wanted).abs() <= 6, "{pixel:?} from {ink:?}");
        }
    }
}

#[test]
fn harmless_oddities_change_no_pixel() {
    let (plain, _) = compressed(PixelFormat::RGB, Subsamp::Sub2x2);
    let frame = decode(&plain).unwrap();
    let mut odd_revision = plain.clone();
    let jfif = plain.windows(5).position(|window| window == b"JFIF\0").unwrap();
    odd_revision[jfif + 5] = 9;
    let odd_adobe = with_junk(&plain, 0xdb, b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00\x07");
    for (name, bytes) in [
        ("bytes before a table", with_junk(&plain, 0xc4, b"abc")),
        ("bytes before the frame", with_junk(&plain, 0xc0, b"\x00\x00")),
        ("bytes before the end", with_junk(&plain, 0xd9, b"abcdefgh")),
        ("bytes after the end", [&plain[..], b"\0\0\0\xff"].concat()),
        ("an unknown JFIF revision", odd_revision),
        ("an unknown Adobe transform", odd_adobe),
    ] {
        assert_eq!(decode(&bytes).as_ref(), Ok(&frame), "{name}");
    }
}

#[test]
fn damage_that_invents_pixels_is_an_error() {
    let (plain, _) = compressed(PixelFormat::RGB, Subsamp::None);
    let scan = plain.windows(2).position(|pair| pair == [0xff, 0xda]).unwrap();
    let early_end = [&plain[..scan + 400], b"\xff\xd9"].concat();
    assert!(matches!(decode(&early_end), Err(MediaError::Unreadable { .. })));
    let without_end = &plain[..plain.len() - 2];
    assert!(matches!(decode(without_end), Err(MediaError::Truncated { .. })));
    // a frame header that promises more rows than the scan holds
    let mut taller = plain.clone();
    let frame = plain.windows(2).position(|pair| pair == [0xff, 0xc0]).unwrap();
    taller[frame + 5] = 9;
    assert!(matches!(decode(&taller), Err(MediaError::Unreadable { .. })));
}

#[test]
fn a_file_of_endless_scans_is_refused() {
    let mut compressor = Compressor::new().unwrap();
    compressor.set_progressive(true).unwrap();
    let pixels = vec![90; 16 * 16 * 3];
    let image =
        Image { pixels: &pixels[..], width: 16, pitch: 48, height: 16, format: PixelFormat::RGB };
    let bytes = compressor.compress_to_vec(image).unwrap();
    assert!(decode(&bytes).is_ok());
    // repeats the last scan, its own header and data, a thousand times
    let last = bytes.windows(2).rposition(|pair| pair == [0xff, 0xda]).unwrap();
    let scan = &bytes[last..bytes.len() - 2];
    let many = [&bytes[..last], &scan.repeat(1_000), b"\xff\xd9"].concat();
    let error = decode(&many).unwrap_err().to_string();
    assert!(error.contains("scans"), "{error}");
}
