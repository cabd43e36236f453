//! Boxes: a size, a name of four letters, a body that may be boxes again.

/// Most boxes beside each other; files of cameras have a dozen.
const MAX_BOXES: usize = 256;

/// A box in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<'a> {
    pub(crate) kind: [u8; 4],
    pub(crate) body: &'a [u8],
    /// With its head.
    pub(crate) whole: &'a [u8],
}

/// The boxes that fill these bytes; `None` if they do not, or are too many.
pub(crate) fn boxes(bytes: &[u8]) -> Option<Vec<Piece<'_>>> {
    let mut pieces = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let (head, size) = match u32_at(rest, 0)? {
            1 => (16, usize::try_from(u64_at(rest, 8)?).ok()?),
            size => (8, size as usize),
        };
        if size < head || size > rest.len() || pieces.len() == MAX_BOXES {
            return None;
        }
        let (whole, after) = rest.split_at(size);
        pieces.push(Piece { kind: fourcc(whole, 4)?, body: &whole[head..], whole });
        rest = after;
    }
    Some(pieces)
}

/// The body of the first box of that name.
pub(crate) fn find<'a>(pieces: &[Piece<'a>], kind: &[u8; 4]) -> Option<&'a [u8]> {
    pieces.iter().find(|piece| piece.kind == *kind).map(|piece| piece.body)
}

fn at<const N: usize>(bytes: &[u8], place: usize) -> Option<[u8; N]> {
    bytes.get(place..)?.first_chunk().copied()
}

pub(crate) fn fourcc(bytes: &[u8], place: usize) -> Option<[u8; 4]> {
    at(bytes, place)
}

pub(crate) fn u16_at(bytes: &[u8], place: usize) -> Option<u16> {
    at(bytes, place).map(u16::from_be_bytes)
}

pub(crate) fn u32_at(bytes: &[u8], place: usize) -> Option<u32> {
    at(bytes, place).map(u32::from_be_bytes)
}

pub(crate) fn i32_at(bytes: &[u8], place: usize) -> Option<i32> {
    at(bytes, place).map(i32::from_be_bytes)
}

pub(crate) fn u64_at(bytes: &[u8], place: usize) -> Option<u64> {
    at(bytes, place).map(u64::from_be_bytes)
}

pub(crate) fn i64_at(bytes: &[u8], place: usize) -> Option<i64> {
    at(bytes, place).map(i64::from_be_bytes)
}
