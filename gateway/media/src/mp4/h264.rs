//! What H.264 and HEVC samples say in the heads of their units, and the size of H.264 frames.

use super::Role;
use super::boxes::{boxes, find, u16_at};
use crate::types::ImageSize;

/// Longest list of units in one sample.
const MAX_UNITS: usize = 256;
/// Bytes of a description before its first entry's body, and of that before its boxes.
const ENTRY: usize = 16;
const VISUAL: usize = 78;
/// Pixels of a macroblock's side.
const BLOCK: u32 = 16;
/// Longest side that H.264 knows, in macroblocks, with room.
const MAX_BLOCKS: u32 = 2048;

/// What an H.264 sample means to others.
///
/// Source: ITU-T H.264, 7.4.1: pictures with `nal_ref_idc` 0 are not referred to.
pub(super) fn role(sample: &[u8]) -> Role {
    let kinds = units(sample).map(|units| {
        units.map(|first| match (first & 0x1f, first >> 5 & 3) {
            (5, _) => Some(Role::Refresh),
            (1, 0) => Some(Role::Disposable),
            // delimiters and messages
            (6 | 9 | 12, _) => None,
            // parameters stand in front of a picture that resets, and are not to be lost
            (7 | 8, _) => Some(Role::Refresh),
            _ => Some(Role::Other),
        })
    });
    one_role(kinds, sample, |first| first & 0x1f == 5)
}

/// What an HEVC sample means to others; which of them are disposable is not looked for.
///
/// Source: ITU-T H.265, table 7-1: 19 and 20 are pictures of an instantaneous refresh, up to 31
/// others.
pub(super) fn hevc_role(sample: &[u8]) -> Role {
    let kinds = units(sample).map(|units| {
        units.map(|first| match first >> 1 & 0x3f {
            19 | 20 => Some(Role::Refresh),
            0..=31 => Some(Role::Other),
            _ => None,
        })
    });
    one_role(kinds, sample, |first| matches!(first >> 1 & 0x3f, 19 | 20))
}

/// The role that all units agree on; a reset needs a unit that is one.
fn one_role(
    kinds: Option<impl Iterator<Item = Option<Role>>>,
    sample: &[u8],
    resets: impl Fn(u8) -> bool,
) -> Role {
    let Some(kinds) = kinds else { return Role::Other };
    let mut kinds = kinds.flatten();
    let Some(first) = kinds.next() else { return Role::Other };
    if !kinds.all(|kind| kind == first) {
        return Role::Other;
    }
    let has_reset = || units(sample).is_some_and(|mut units| units.any(resets));
    if first == Role::Refresh && !has_reset() { Role::Other } else { first }
}

/// The first byte of each unit, if units with four bytes of length fill the sample.
fn units(sample: &[u8]) -> Option<impl Iterator<Item = u8>> {
    let mut firsts = Vec::new();
    let mut rest = sample;
    while !rest.is_empty() {
        let (length, after) = rest.split_first_chunk()?;
        let length = u32::from_be_bytes(*length) as usize;
        firsts.push(*after.first().filter(|_| length > 0 && firsts.len() < MAX_UNITS)?);
        rest = after.get(length..)?;
    }
    Some(firsts.into_iter())
}

/// The size of frames by the only parameter set in the body of a description of one `avc1` entry;
/// `None` unless the container says the same, where units have no lengths of four bytes, and where
/// either says that the pictures have a high dynamic range.
pub(super) fn frame_size(description: &[u8]) -> Option<ImageSize> {
    let entry = description.get(ENTRY..)?;
    let said =
        ImageSize { width: u32::from(u16_at(entry, 24)?), height: u32::from(u16_at(entry, 26)?) };
    let parts = boxes(entry.get(VISUAL..)?)?;
    if find(&parts, b"colr")
        .and_then(|colours| u16_at(colours, 6))
        .is_some_and(|code| is_high_range(code.into()))
    {
        return None;
    }
    let configuration = find(&parts, b"avcC")?;
    let [1, _, _, _, lengths, sets, high, low, ..] = configuration else { return None };
    let length = usize::from(u16::from_be_bytes([*high, *low]));
    let set = configuration.get(8..)?.get(..length)?;
    let is_plain = lengths & 3 == 3 && sets & 0x1f == 1 && *set.first()? & 0x1f == 7;
    (is_plain && size_of(set)? == said && said.pixels() > 0).then_some(said)
}

/// Size of frames, cropped; `None` also where they have a high dynamic range.
///
/// Source: ITU-T H.264, 7.3.2.1.1, 7.4.2.1.1 and E.1.1.
fn size_of(set: &[u8]) -> Option<ImageSize> {
    let mut bits = Bits::new(set.get(1..)?);
    let profile = bits.take(8)?;
    bits.take(16)?;
    bits.unsigned()?;
    let mut chroma = 1;
    if [100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135].contains(&profile) {
        chroma = bits.unsigned()?;
        let separate = if chroma == 3 { bits.take(1)? } else { 0 };
        bits.unsigned()?;
        bits.unsigned()?;
        bits.take(1)?;
        // planes of their own and lists of scaling are unusual
        if separate == 1 || bits.take(1)? == 1 {
            return None;
        }
    }
    bits.unsigned()?;
    match bits.unsigned()? {
        0 => drop(bits.unsigned()?),
        1 => {
            bits.take(1)?;
            bits.unsigned()?;
            bits.unsigned()?;
            for _ in 0..bits.unsigned().filter(|count| *count < 256)? {
                bits.unsigned()?;
            }
        }
        _ => {}
    }
    bits.unsigned()?;
    bits.take(1)?;
    let blocks = |count: u32| (count < MAX_BLOCKS).then(|| (count + 1) * BLOCK);
    let width = blocks(bits.unsigned()?)?;
    let half_height = blocks(bits.unsigned()?)?;
    let fields = 2 - bits.take(1)?;
    if fields == 2 {
        bits.take(1)?;
    }
    bits.take(1)?;
    let mut crop = [0; 4];
    if bits.take(1)? == 1 {
        for side in &mut crop {
            *side = bits.unsigned()?;
        }
    }
    let [left, right, top, bottom] = crop;
    // a beginning that is cut off is unusual
    if left > 0 || top > 0 {
        return None;
    }
    if bits.take(1)? == 1 && is_high_range(transfer(&mut bits)?) {
        return None;
    }
    let across = if matches!(chroma, 1 | 2) { 2 } else { 1 };
    let down = fields * if chroma == 1 { 2 } else { 1 };
    Some(ImageSize {
        width: width.checked_sub(right.checked_mul(across)?)?,
        height: (half_height * fields).checked_sub(bottom.checked_mul(down)?)?,
    })
}

/// The transfer characteristics at the beginning of the usability information; 2 if it tells none.
fn transfer(bits: &mut Bits) -> Option<u32> {
    const UNKNOWN: u32 = 2;
    const OWN_RATIO: u32 = 255;
    if bits.take(1)? == 1 && bits.take(8)? == OWN_RATIO {
        bits.take(32)?;
    }
    if bits.take(1)? == 1 {
        bits.take(1)?;
    }
    if bits.take(1)? == 0 {
        return Some(UNKNOWN);
    }
    bits.take(4)?;
    if bits.take(1)? == 0 {
        return Some(UNKNOWN);
    }
    bits.take(8)?;
    bits.take(8)
}

/// Source: ITU-T H.273, table 3: 16 is PQ, 18 is HLG.
fn is_high_range(transfer: u32) -> bool {
    matches!(transfer, 16 | 18)
}

/// Bits of a parameter set, without the bytes that keep start codes out of it.
struct Bits {
    bytes: Vec<u8>,
    place: usize,
}

impl Bits {
    fn new(coded: &[u8]) -> Self {
        let mut bytes = Vec::with_capacity(coded.len());
        let mut zeros = 0;
        for byte in coded {
            if zeros >= 2 && *byte == 3 {
                zeros = 0;
                continue;
            }
            zeros = if *byte == 0 { zeros + 1 } else { 0 };
            bytes.push(*byte);
        }
        Self { bytes, place: 0 }
    }

    fn take(&mut self, count: u32) -> Option<u32> {
        let mut value = 0;
        for _ in 0..count {
            let byte = self.bytes.get(self.place / 8)?;
            value = value << 1 | u32::from(byte >> (7 - self.place % 8) & 1);
            self.place += 1;
        }
        Some(value)
    }

    /// An Exp-Golomb code.
    fn unsigned(&mut self) -> Option<u32> {
        let mut zeros = 0;
        while self.take(1)? == 0 {
            zeros += 1;
            if zeros > 30 {
                return None;
            }
        }
        Some((1 << zeros) - 1 + self.take(zeros)?)
    }
}
