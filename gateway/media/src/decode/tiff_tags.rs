//! The first directory of a TIFF structure: of a TIFF file, and of the EXIF block of any other.

/// `Orientation`.
pub(super) const ORIENTATION: u16 = 0x0112;
/// `Compression`.
pub(super) const COMPRESSION: u16 = 0x0103;

/// Bytes of a directory entry: tag, type, count, value.
const ENTRY: usize = 12;
/// Type of 16-bit numbers.
const SHORT: u16 = 3;
/// Type of 32-bit numbers.
const LONG: u16 = 4;

/// Values of every entry of `tag`: the number, or `None` where the entry holds anything but one.
/// What cannot be read has no entries.
pub(super) fn values(tiff: &[u8], tag: u16) -> impl Iterator<Item = Option<u16>> {
    let reader = Reader::of(tiff);
    let directory = reader.as_ref().and_then(|reader| reader.u32_at(4)).unwrap_or(0) as usize;
    let count = reader.as_ref().and_then(|reader| reader.u16_at(directory)).unwrap_or(0);
    (0..usize::from(count)).filter_map(move |index| {
        let reader = reader.as_ref()?;
        let at = directory.checked_add(2 + ENTRY * index)?;
        (reader.u16_at(at)? == tag).then(|| reader.number_at(at))
    })
}

struct Reader<'a> {
    tiff: &'a [u8],
    is_little_endian: bool,
}

impl<'a> Reader<'a> {
    fn of(tiff: &'a [u8]) -> Option<Self> {
        match tiff.get(..4)? {
            b"II\x2a\0" => Some(Self { tiff, is_little_endian: true }),
            b"MM\0\x2a" => Some(Self { tiff, is_little_endian: false }),
            _ => None,
        }
    }

    /// The number in the entry at `at`; a SHORT stands at the beginning of the value field.
    fn number_at(&self, at: usize) -> Option<u16> {
        match (self.u16_at(at + 2)?, self.u32_at(at + 4)?) {
            (SHORT, 1) => self.u16_at(at + 8),
            (LONG, 1) => self.u32_at(at + 8)?.try_into().ok(),
            _ => None,
        }
    }

    fn u16_at(&self, at: usize) -> Option<u16> {
        let field = *self.tiff.get(at..)?.first_chunk()?;
        Some(if self.is_little_endian {
            u16::from_le_bytes(field)
        } else {
            u16::from_be_bytes(field)
        })
    }

    fn u32_at(&self, at: usize) -> Option<u32> {
        let field = *self.tiff.get(at..)?.first_chunk()?;
        Some(if self.is_little_endian {
            u32::from_le_bytes(field)
        } else {
            u32::from_be_bytes(field)
        })
    }
}
