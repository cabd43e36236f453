//! The eight orientations of EXIF: finding the tag, turning a size, turning a frame.

use super::tiff_tags;
use crate::types::{ImageSize, RgbFrame};

/// Bytes of a pixel.
const CHANNELS: usize = 3;
/// Side of the squares in which pixels are moved when rows become columns, to stay in the cache.
const TILE: usize = 32;

/// How stored pixels become the upright picture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Orientation {
    /// Rows become columns, first of all.
    transpose: bool,
    /// Then left and right change places.
    mirror: bool,
    /// Then top and bottom change places.
    flip: bool,
}

impl Orientation {
    /// The EXIF values 1 to 8; any other counts as 1, the upright one.
    pub(super) fn from_exif_value(value: u16) -> Self {
        let (transpose, mirror, flip) = match value {
            2 => (false, true, false),
            3 => (false, true, true),
            4 => (false, false, true),
            5 => (true, false, false),
            6 => (true, true, false),
            7 => (true, true, true),
            8 => (true, false, true),
            _ => (false, false, false),
        };
        Self { transpose, mirror, flip }
    }

    /// Reads the orientation tag of an EXIF block, with or without the `Exif` prefix; a block that
    /// cannot be read counts as none.
    pub(super) fn from_exif_block(block: &[u8]) -> Self {
        Self::from_exif_value(exif_value(block).unwrap_or(1))
    }

    /// What the EXIF block says, or, if it is silent, the XMP packet.
    ///
    /// Source: `Image.getexif` of Pillow 13, through which transformers 5.24 turns pictures.
    pub(super) fn stated(exif: Option<&[u8]>, xmp: Option<&[u8]>) -> Self {
        let value = exif.and_then(exif_value).or_else(|| xmp.and_then(xmp_value));
        Self::from_exif_value(value.unwrap_or(1))
    }

    /// The size as displayed of a picture stored at `size`.
    pub(super) fn turned(self, size: ImageSize) -> ImageSize {
        if self.transpose { ImageSize { width: size.height, height: size.width } } else { size }
    }

    /// The upright frame.
    pub(super) fn apply(self, frame: RgbFrame) -> RgbFrame {
        if self == Self::default() {
            return frame;
        }
        let mut frame = if self.transpose { transposed(&frame) } else { frame };
        let row_bytes = frame.size.width as usize * CHANNELS;
        if self.mirror {
            for row in frame.pixels.chunks_exact_mut(row_bytes) {
                row.as_chunks_mut::<CHANNELS>().0.reverse();
            }
        }
        if self.flip {
            let half = frame.size.height as usize / 2 * row_bytes;
            let middle = frame.pixels.len() - half;
            let (top, rest) = frame.pixels.split_at_mut(half);
            let bottom = rest[middle - half..].chunks_exact_mut(row_bytes).rev();
            for (upper, lower) in top.chunks_exact_mut(row_bytes).zip(bottom) {
                upper.swap_with_slice(lower);
            }
        }
        frame
    }
}

fn exif_value(block: &[u8]) -> Option<u16> {
    let tiff = block.strip_prefix(b"Exif\0\0").unwrap_or(block);
    tiff_tags::values(tiff, tiff_tags::ORIENTATION).next().flatten()
}

/// The digit of the first `tiff:Orientation` that has one, as an attribute or an element; found as
/// text, because packets are often not well formed.
fn xmp_value(packet: &[u8]) -> Option<u16> {
    const NAME: &[u8] = b"tiff:Orientation";
    packet.windows(NAME.len() + 3).find_map(|window| match window.strip_prefix(NAME)? {
        [b'=', b'"', digit] | [b'>', digit, _] if digit.is_ascii_digit() => {
            Some(u16::from(digit - b'0'))
        }
        _ => None,
    })
}

fn transposed(frame: &RgbFrame) -> RgbFrame {
    let (width, height) = (frame.size.width as usize, frame.size.height as usize);
    let mut pixels = vec![0; frame.pixels.len()];
    let (source, _) = frame.pixels.as_chunks::<CHANNELS>();
    let (target, _) = pixels.as_chunks_mut::<CHANNELS>();
    for top in (0..height).step_by(TILE) {
        for left in (0..width).step_by(TILE) {
            for y in top..height.min(top + TILE) {
                for x in left..width.min(left + TILE) {
                    target[x * height + y] = source[y * width + x];
                }
            }
        }
    }
    let size = ImageSize { width: frame.size.height, height: frame.size.width };
    RgbFrame { size, pixels }
}

#[cfg(test)]
mod tests {
    use super::Orientation;
    use crate::types::{ImageSize, RgbFrame};

    fn frame(width: u32, rows: &[&str]) -> RgbFrame {
        let pixels = rows.concat().bytes().flat_map(|letter| [letter; 3]).collect();
        RgbFrame { size: ImageSize { width, height: rows.len() as u32 }, pixels }
    }

    #[test]
    fn each_value_turns_the_stored_picture_upright() {
        // the upright picture is ABC / DEF; each row: a value and the picture as stored under it
        let upright = frame(3, &["ABC", "DEF"]);
        let stored: [(u16, RgbFrame); 10] = [
            (1, frame(3, &["ABC", "DEF"])),
            (2, frame(3, &["CBA", "FED"])),
            (3, frame(3, &["FED", "CBA"])),
            (4, frame(3, &["DEF", "ABC"])),
            (5, frame(2, &["AD", "BE", "CF"])),
            (6, frame(2, &["CF", "BE", "AD"])),
            (7, frame(2, &["FC", "EB", "DA"])),
            (8, frame(2, &["DA", "EB", "FC"])),
            (0, frame(3, &["ABC", "DEF"])),
            (9, frame(3, &["ABC", "DEF"])),
        ];
        for (value, stored) in stored {
            let orientation = Orientation::from_exif_value(value);
            assert_eq!(orientation.turned(stored.size), upright.size, "value {value}");
            assert_eq!(orientation.apply(stored), upright, "value {value}");
        }
    }

    #[test]
    fn xmp_speaks_where_exif_is_silent() {
        const SIX: &[u8] = b"II\x2a\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0";
        let value = Orientation::from_exif_value;
        let attribute = b"<x tiff:Orientation=\"8\"/>".as_slice();
        let element = b"<tiff:Orientation>3</tiff:Orientation>".as_slice();
        let late = b"tiff:Orientation=\"x\" tiff:Orientation=\"5\"".as_slice();
        for (exif, xmp, expected) in [
            (Some(SIX), Some(attribute), value(6)),
            (None, Some(attribute), value(8)),
            (Some(b"II".as_slice()), Some(element), value(3)),
            (None, Some(late), value(5)),
            (None, Some(b"tiff:Orientation=\"".as_slice()), value(1)),
            (None, Some(b"".as_slice()), value(1)),
            (None, None, value(1)),
        ] {
            assert_eq!(Orientation::stated(exif, xmp), expected, "{xmp:?}");
        }
    }

    #[test]
    fn odd_heights_and_sizes_past_a_tile_turn_too() {
        let size = ImageSize { width: 67, height: 35 };
        let pixels: Vec<u8> = (0..size.pixels() * 3).map(|index| (index % 251) as u8).collect();
        let stored = RgbFrame { size, pixels };
        for value in 2..=8 {
            let turned = Orientation::from_exif_value(value).apply(stored.clone());
            for (x, y) in [(0, 0), (66, 0), (0, 34), (66, 34), (40, 33), (33, 17)] {
                let (tx, ty) = match value {
                    2 => (66 - x, y),
                    3 => (66 - x, 34 - y),
                    4 => (x, 34 - y),
                    5 => (y, x),
                    6 => (34 - y, x),
                    7 => (34 - y, 66 - x),
                    _ => (y, 66 - x),
                };
                let at = (ty * turned.size.width as usize + tx) * 3;
                let expected = &stored.pixels[(y * 67 + x) * 3..][..3];
                assert_eq!(&turned.pixels[at..at + 3], expected, "value {value} at {x},{y}");
            }
        }
    }

    fn block(little: bool, entries: &[(u16, u16, u32, u32)]) -> Vec<u8> {
        let two = |v: u16| if little { v.to_le_bytes() } else { v.to_be_bytes() };
        let four = |v: u32| if little { v.to_le_bytes() } else { v.to_be_bytes() };
        let mut out = if little { b"II\x2a\0".to_vec() } else { b"MM\0\x2a".to_vec() };
        out.extend(four(8));
        out.extend(two(entries.len() as u16));
        for &(tag, kind, count, value) in entries {
            out.extend([two(tag), two(kind)].concat());
            out.extend(four(count));
            if kind == 3 {
                out.extend([two(value as u16), two(0)].concat());
            } else {
                out.extend(four(value));
            }
        }
        out
    }

    #[test]
    fn the_tag_is_read_in_both_byte_orders_with_and_without_prefix() {
        let six = Orientation::from_exif_value(6);
        for little in [true, false] {
            let plain = block(little, &[(0x010f, 2, 4, 0), (0x0112, 3, 1, 6)]);
            assert_eq!(Orientation::from_exif_block(&plain), six);
            let prefixed = [b"Exif\0\0".as_slice(), &plain].concat();
            assert_eq!(Orientation::from_exif_block(&prefixed), six);
            let long = block(little, &[(0x0112, 4, 1, 6)]);
            assert_eq!(Orientation::from_exif_block(&long), six);
        }
    }

    #[test]
    fn a_broken_block_counts_as_none() {
        let whole = block(true, &[(0x0112, 3, 1, 6)]);
        for length in 0..whole.len() - 2 {
            assert_eq!(Orientation::from_exif_block(&whole[..length]), Orientation::default());
        }
        let mut far = whole.clone();
        far[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(Orientation::from_exif_block(&far), Orientation::default());
        let wrong_type = block(true, &[(0x0112, 2, 1, 6)]);
        assert_eq!(Orientation::from_exif_block(&wrong_type), Orientation::default());
    }
}
