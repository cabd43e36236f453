//! Pictures of several tiles: how many there are, and one set of planes from theirs.
//!
//! Source: ISO/IEC 23008-12 6.6.2.3 (image grid).

use super::planes::{Planes, wide};
use super::sequence::Sequence;
use super::{unreadable, unsupported};
use crate::error::MediaError;
use crate::types::ImageSize;

/// Tiles of one size, row by row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grid {
    rows: u32,
    columns: u32,
    pub(super) tile: ImageSize,
}

impl Grid {
    /// One tile.
    pub(super) fn single(tile: ImageSize) -> Self {
        Self { rows: 1, columns: 1, tile }
    }

    /// Reads the bytes of a grid item.
    pub(super) fn read(
        head: &[u8],
        size: ImageSize,
        tile: ImageSize,
        num_tiles: usize,
    ) -> Result<Self, MediaError> {
        let number = |place: usize, bytes: usize| {
            let field = head.get(place..place + bytes)?;
            Some(field.iter().fold(0, |value, byte| value << 8 | u32::from(*byte)))
        };
        let wide = if head.get(1).is_some_and(|flags| flags & 1 != 0) { 4 } else { 2 };
        let fields = || {
            let stated = ImageSize { width: number(4, wide)?, height: number(4 + wide, wide)? };
            Some((number(2, 1)? + 1, number(3, 1)? + 1, stated))
        };
        let (rows, columns, stated) =
            fields().ok_or_else(|| unreadable("the description of its grid is cut off"))?;
        let is_covered =
            columns == size.width.div_ceil(tile.width) && rows == size.height.div_ceil(tile.height);
        if head[0] != 0 || stated != size || rows * columns != num_tiles as u32 || !is_covered {
            return Err(unreadable("its grid and its tiles disagree"));
        }
        Ok(Self { rows, columns, tile })
    }

    /// Colour differences must not be shared by two tiles.
    pub(super) fn check(&self, sequence: &Sequence) -> Result<(), MediaError> {
        let (x, y) = sequence.chroma.shifts();
        let is_odd =
            |side: u32, shift: u32, count: u32| count > 1 && !side.is_multiple_of(1 << shift);
        if is_odd(self.tile.width, x, self.columns) || is_odd(self.tile.height, y, self.rows) {
            return Err(unsupported("tiles of odd sides that share colours".into()));
        }
        Ok(())
    }

    /// The planes of the picture of this size: those of the only tile, or of all, side by side.
    pub(super) fn joined(&self, bytes: Vec<u8>, sequence: &Sequence, size: ImageSize) -> Planes {
        let Sequence { depth, chroma, colour, .. } = *sequence;
        let mut planes = Planes { size, depth, chroma, is_full: colour.is_full, bytes };
        if self.rows * self.columns == 1 && self.tile == size {
            return planes;
        }
        let tile_bytes = Planes::bytes(self.tile, sequence);
        let tiles: Vec<&[u8]> = planes.bytes.chunks_exact(tile_bytes).collect();
        let mut joined = Vec::with_capacity(Planes::bytes(size, sequence));
        let mut before = 0;
        for plane in 0..Planes::count(chroma) {
            let (width, height) = Planes::plane_size(size, chroma, plane);
            let (tile_width, tile_height) = Planes::plane_size(self.tile, chroma, plane);
            for row in 0..height {
                for column in 0..self.columns as usize {
                    let tile = tiles[row / tile_height * self.columns as usize + column];
                    let begin = (before + row % tile_height * tile_width) * wide(depth);
                    let count = tile_width.min(width - column * tile_width) * wide(depth);
                    joined.extend(&tile[begin..][..count]);
                }
            }
            before += tile_width * tile_height;
        }
        planes.bytes = joined;
        planes
    }
}
