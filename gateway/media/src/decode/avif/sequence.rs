//! The sequence header of a coded picture: size, bit depth, planes and colour before any decoding.
//!
//! Source: AV1 Bitstream & Decoding Process Specification, 5.3 to 5.5.

use super::colour::Colour;
use super::planes::Chroma;
use super::{truncated, unreadable};
use crate::error::MediaError;
use crate::types::ImageSize;

/// What holds for all frames of a coded picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sequence {
    /// The largest frame, which for a still is the frame.
    pub(super) size: ImageSize,
    /// Bits of a sample: 8, 10 or 12.
    pub(super) depth: u8,
    pub(super) chroma: Chroma,
    pub(super) colour: Colour,
}

/// Types of units.
const SEQUENCE_HEADER: u8 = 1;
const FRAME_HEADER: u8 = 3;
const FRAME: u8 = 6;

impl Sequence {
    /// The first sequence header, and how many frames follow in all.
    pub(super) fn find(data: &[u8]) -> Result<(Self, usize), MediaError> {
        let mut found = None;
        let mut num_frames = 0;
        let mut rest = data;
        while !rest.is_empty() {
            let (kind, body, after) =
                unit(rest).ok_or_else(|| truncated("a coded picture is cut off"))?;
            match kind {
                SEQUENCE_HEADER => {
                    let read = Self::read(&mut Bits { bytes: body, place: 0 })
                        .ok_or_else(|| unreadable("a sequence header makes no sense"))?;
                    if *found.get_or_insert(read) != read {
                        return Err(unreadable("a coded picture changes its size or layout"));
                    }
                }
                FRAME_HEADER | FRAME => num_frames += 1,
                _ => {}
            }
            rest = after;
        }
        let sequence = found.ok_or_else(|| unreadable("a coded picture has no header"))?;
        Ok((sequence, num_frames))
    }

    /// Whether it is of this size: coded pictures are never scaled.
    pub(super) fn fits(&self, size: ImageSize) -> bool {
        self.size == size
    }

    fn read(bits: &mut Bits<'_>) -> Option<Self> {
        let profile = bits.number(3)?;
        let _is_still = bits.flag()?;
        let is_reduced = bits.flag()?;
        if is_reduced {
            bits.number(5)?;
        } else {
            skip_points(bits)?;
        }
        let (width_bits, height_bits) = (bits.number(4)? + 1, bits.number(4)? + 1);
        let size = ImageSize {
            width: bits.number(width_bits)? + 1,
            height: bits.number(height_bits)? + 1,
        };
        if !is_reduced && bits.flag()? {
            bits.number(7)?;
        }
        bits.number(3)?;
        if !is_reduced {
            skip_tools(bits)?;
        }
        bits.number(3)?;
        let (depth, chroma, colour) = colours(bits, profile)?;
        Some(Self { size, depth, chroma, colour })
    }
}

/// Timing and operating points.
fn skip_points(bits: &mut Bits<'_>) -> Option<()> {
    let mut delay_bits = None;
    if bits.flag()? {
        bits.number(32)?;
        bits.number(32)?;
        if bits.flag()? {
            let zeros = (0..32).take_while(|_| bits.flag() == Some(false)).count();
            bits.number(zeros as u32)?;
        }
        if bits.flag()? {
            delay_bits = Some(bits.number(5)? + 1);
            bits.number(32)?;
            bits.number(10)?;
        }
    }
    let has_delays = bits.flag()?;
    for _ in 0..=bits.number(5)? {
        bits.number(12)?;
        if bits.number(5)? > 7 {
            bits.flag()?;
        }
        if let Some(delay_bits) = delay_bits
            && bits.flag()?
        {
            bits.number(delay_bits)?;
            bits.number(delay_bits)?;
            bits.flag()?;
        }
        if has_delays && bits.flag()? {
            bits.number(4)?;
        }
    }
    Some(())
}

/// Tools that only sequences of frames have.
fn skip_tools(bits: &mut Bits<'_>) -> Option<()> {
    bits.number(4)?;
    let has_order = bits.flag()?;
    if has_order {
        bits.number(2)?;
    }
    let is_screen_chosen = bits.flag()?;
    let is_screen = is_screen_chosen || bits.flag()?;
    if is_screen && !bits.flag()? {
        bits.flag()?;
    }
    if has_order {
        bits.number(3)?;
    }
    Some(())
}

fn colours(bits: &mut Bits<'_>, profile: u32) -> Option<(u8, Chroma, Colour)> {
    let is_high = bits.flag()?;
    let depth = match profile {
        2 if is_high => {
            if bits.flag()? {
                12
            } else {
                10
            }
        }
        0..=2 => {
            if is_high {
                10
            } else {
                8
            }
        }
        _ => return None,
    };
    let is_grey = profile != 1 && bits.flag()?;
    let (primaries, transfer, matrix) =
        if bits.flag()? { (bits.number(8)?, bits.number(8)?, bits.number(8)?) } else { (2, 2, 2) };
    let (primaries, matrix) = (primaries as u16, matrix as u16);
    if is_grey {
        let is_full = bits.flag()?;
        return Some((depth, Chroma::None, Colour { primaries, matrix, is_full }));
    }
    if (primaries, transfer, matrix) == (1, 13, 0) {
        return Some((depth, Chroma::Full, Colour { primaries, matrix, is_full: true }));
    }
    let is_full = bits.flag()?;
    let chroma = match (profile, depth) {
        (0, _) => Chroma::Quarter,
        (1, _) => Chroma::Full,
        (_, 12) => match bits.flag()? {
            false => Chroma::Full,
            true => {
                if bits.flag()? {
                    Chroma::Quarter
                } else {
                    Chroma::Half
                }
            }
        },
        _ => Chroma::Half,
    };
    Some((depth, chroma, Colour { primaries, matrix, is_full }))
}

/// Type and body of the unit at the beginning, and what follows it.
fn unit(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let head = *bytes.first()?;
    let (has_extension, has_size) = (head & 4 != 0, head & 2 != 0);
    let mut rest = bytes.get(1 + usize::from(has_extension)..)?;
    let mut size = rest.len() as u64;
    if has_size {
        size = 0;
        let mut is_last = false;
        for place in 0..8 {
            let (byte, after) = rest.split_first()?;
            size |= u64::from(byte & 0x7f) << (7 * place);
            rest = after;
            is_last = byte & 0x80 == 0;
            if is_last {
                break;
            }
        }
        if !is_last {
            return None;
        }
    }
    let (body, after) = rest.split_at_checked(usize::try_from(size).ok()?)?;
    Some((head >> 3 & 15, body, after))
}

struct Bits<'a> {
    bytes: &'a [u8],
    /// In bits.
    place: usize,
}

impl Bits<'_> {
    fn flag(&mut self) -> Option<bool> {
        let byte = self.bytes.get(self.place / 8)?;
        let bit = byte >> (7 - self.place % 8) & 1;
        self.place += 1;
        Some(bit != 0)
    }

    /// At most 32 bits.
    fn number(&mut self, bits: u32) -> Option<u32> {
        (0..bits).try_fold(0, |value: u32, _| Some(value << 1 | u32::from(self.flag()?)))
    }
}
