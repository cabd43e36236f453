//! AVIF: what a file holds, from its boxes alone, and its picture from the planes of a decoder that
//! runs elsewhere. AV1 itself is decoded in a process of its own: see [`AvifPlan::streams`].

mod colour;
mod grid;
mod items;
mod planes;
mod sequence;
#[cfg(test)]
mod tests;
mod upsample;

use super::orientation::Orientation;
use super::pixels::{self, Layout};
use super::{DecodeLimits, RawHeader};
use crate::error::MediaError;
use crate::types::{ImageSize, RgbFrame};
use colour::Colour;
use grid::Grid;
use items::{Item, Items};
use planes::Planes;
use sequence::Sequence;
use std::borrow::Cow;
use std::collections::HashSet;

const FORMAT: &str = "AVIF";
/// Coded pixels for each pixel shown, at most: the tiles at the edges of a grid reach over it.
const MAX_CODED: u64 = 2;
/// What a tile may have beyond that: the least that one measures is 64 by 64.
const TILE_PIXELS: u64 = 64 * 64;
/// Coded frames of one item, at most: four layers, and hidden ones.
const MAX_FRAMES: usize = 8;

/// What must be decoded of an AVIF file, and how it becomes a picture.
#[derive(Debug)]
pub struct AvifPlan<'a> {
    size: ImageSize,
    orientation: Orientation,
    colour: Colour,
    grid: Grid,
    main: Vec<Av1Item<'a>>,
    alpha: Option<Alpha<'a>>,
}

#[derive(Debug)]
struct Alpha<'a> {
    grid: Grid,
    items: Vec<Av1Item<'a>>,
    /// Colours have been multiplied by it.
    is_premultiplied: bool,
}

/// One coded picture.
#[derive(Debug)]
struct Av1Item<'a> {
    data: Cow<'a, [u8]>,
    sequence: Sequence,
}

/// Pictures to be decoded one after the other: AV1 in IVF, each of one size and layout.
#[derive(Debug)]
pub struct Av1Stream {
    /// The IVF file.
    pub ivf: Vec<u8>,
    /// How many pictures come out; the first of each packet is the one.
    pub num_frames: usize,
    /// Bytes of all of them: planes Y, U, V in turn, of bytes, or of 16-bit little-endian words
    /// above 8 bits.
    pub num_bytes: usize,
    /// Pixels of one.
    pub frame_pixels: u64,
}

/// Size and turning, of files alone that can be decoded as far as their headers tell.
pub(super) fn read_header(bytes: &[u8]) -> Result<RawHeader, MediaError> {
    let plan = AvifPlan::read(bytes, &DecodeLimits { max_pixels: u64::MAX })?;
    Ok(RawHeader { size: plan.size, orientation: plan.orientation })
}

impl<'a> AvifPlan<'a> {
    /// Reads the boxes and the heads of the coded pictures; decodes nothing.
    ///
    /// # Errors
    /// [`MediaError`] for what is damaged, contradicts itself, passes a limit, or uses what is not
    /// supported, by name.
    pub fn read(bytes: &'a [u8], limits: &DecodeLimits) -> Result<Self, MediaError> {
        let items = Items::read(bytes)?;
        let main = items.item(items.primary())?;
        let size = main.size()?;
        if size.pixels() > limits.max_pixels {
            return Err(MediaError::TooManyPixels { size, limit: limits.max_pixels });
        }
        let (grid, coded) = pictures(&items, &main, size)?;
        let alpha = match items.alpha_of(main.id) {
            Some(id) => {
                let item = items.item(id)?;
                let (grid, coded) = pictures(&items, &item, size)?;
                let is_premultiplied = items.is_premultiplied(main.id, id);
                Some(Alpha { grid, items: coded, is_premultiplied })
            }
            None => None,
        };
        let first = coded[0].sequence;
        let is_grey = |alpha: &Alpha<'_>| alpha.items[0].sequence.chroma == planes::Chroma::None;
        if alpha.as_ref().is_some_and(|alpha| !is_grey(alpha)) {
            return Err(unreadable("its transparency has colours"));
        }
        if alpha.as_ref().is_some_and(|alpha| alpha.items[0].sequence.depth != first.depth) {
            return Err(unreadable("its transparency has another bit depth than its colours"));
        }
        let colour = main.colour().unwrap_or(first.colour).checked(first.chroma)?;
        let orientation = main.orientation();
        Ok(Self { size, orientation, colour, grid, main: coded, alpha })
    }

    /// What a decoder must be given: the colours, then, if the picture has it, the transparency.
    pub fn streams(&self) -> Vec<Av1Stream> {
        let alpha = self.alpha.as_ref().map(|alpha| alpha.items.as_slice());
        [Some(self.main.as_slice()), alpha].into_iter().flatten().map(stream).collect()
    }

    /// The upright picture from what a decoder made of the [`Self::streams`], in their order.
    ///
    /// # Errors
    /// `Unreadable` when there is more or less of it than the headers promise.
    pub fn picture(&self, decoded: Vec<Vec<u8>>) -> Result<RgbFrame, MediaError> {
        let mut decoded = decoded.into_iter();
        let mut planes = |grid: &Grid, items: &[Av1Item<'_>]| {
            let bytes = decoded.next().unwrap_or_default();
            let promised = stream_bytes(items);
            if bytes.len() != promised {
                let got = bytes.len();
                let reason = format!("{got} bytes of pixels were decoded, {promised} promised");
                return Err(MediaError::Unreadable { format: FORMAT, reason });
            }
            Ok(grid.joined(bytes, &items[0].sequence, self.size))
        };
        let main = planes(&self.grid, &self.main)?;
        let alpha = match &self.alpha {
            Some(alpha) => Some((planes(&alpha.grid, &alpha.items)?, alpha.is_premultiplied)),
            None => None,
        };
        let layout = if alpha.is_some() { Layout::Rgba } else { Layout::Rgb };
        let samples = colour::samples(&main, alpha.as_ref(), self.colour);
        let pixels = pixels::to_rgb(samples, layout);
        Ok(self.orientation.apply(RgbFrame { size: self.size, pixels }))
    }
}

/// The coded pictures of an item: itself, or the tiles of a grid.
fn pictures<'a>(
    items: &Items<'a>,
    item: &Item<'a>,
    size: ImageSize,
) -> Result<(Grid, Vec<Av1Item<'a>>), MediaError> {
    if item.size()? != size {
        return Err(unreadable("its transparency has another size than its colours"));
    }
    let (grid, tiles) = match &item.kind {
        b"av01" => (Grid::single(size), vec![item.clone()]),
        b"grid" => {
            let tiles = items.tiles_of(item.id)?;
            let head = items.data(item)?;
            (Grid::read(&head, size, tiles[0].size()?, tiles.len())?, tiles)
        }
        kind => {
            return Err(unsupported(format!("items of type {:?}", String::from_utf8_lossy(kind))));
        }
    };
    let is_tiled = tiles.len() > 1;
    let transparent = if is_tiled { items.transparent() } else { HashSet::new() };
    let mut coded = Vec::with_capacity(tiles.len());
    let (mut pixels, mut num_bytes) = (0, 0);
    for tile in &tiles {
        if &tile.kind != b"av01" {
            return Err(unsupported("a grid of other things than AV1 pictures".into()));
        }
        if transparent.contains(&tile.id) {
            return Err(unsupported("transparency of single tiles".into()));
        }
        tile.check_layers()?;
        let data = items.data(tile)?;
        let (sequence, num_frames) = Sequence::find(&data)?;
        let agrees = tile.size()? == grid.tile && sequence.fits(grid.tile);
        if !agrees || coded.first().is_some_and(|first: &Av1Item<'_>| first.sequence != sequence) {
            return Err(unreadable("its coded pictures and its header disagree on the size"));
        }
        if num_frames == 0 || num_frames > if is_tiled { 1 } else { MAX_FRAMES } {
            return Err(unreadable("an item has no frame, or far too many"));
        }
        pixels += grid.tile.pixels();
        num_bytes += data.len();
        if num_bytes > items.file_bytes() {
            return Err(unreadable("its tiles share their bytes"));
        }
        coded.push(Av1Item { data, sequence });
    }
    if pixels > size.pixels() * MAX_CODED + tiles.len() as u64 * TILE_PIXELS {
        return Err(unreadable("its tiles are far larger than the picture"));
    }
    grid.check(&coded[0].sequence)?;
    Ok((grid, coded))
}

fn stream_bytes(items: &[Av1Item<'_>]) -> usize {
    items.iter().map(|item| Planes::bytes(item.sequence.size, &item.sequence)).sum()
}

/// Source: the IVF file format, as FFmpeg's `libavformat/ivfdec.c` reads it.
fn stream(items: &[Av1Item<'_>]) -> Av1Stream {
    let size = items[0].sequence.size;
    let length: usize = items.iter().map(|item| item.data.len() + 12).sum();
    let mut ivf = Vec::with_capacity(32 + length);
    ivf.extend(b"DKIF\0\0\x20\0AV01");
    ivf.extend((size.width as u16).to_le_bytes());
    ivf.extend((size.height as u16).to_le_bytes());
    ivf.extend([1_u32, 1, items.len() as u32, 0].map(u32::to_le_bytes).concat());
    for (stamp, item) in (0_u64..).zip(items) {
        ivf.extend((item.data.len() as u32).to_le_bytes());
        ivf.extend(stamp.to_le_bytes());
        ivf.extend_from_slice(&item.data);
    }
    let (num_frames, num_bytes) = (items.len(), stream_bytes(items));
    Av1Stream { ivf, num_frames, num_bytes, frame_pixels: size.pixels() }
}

/// Who has no process to decode it.
pub(super) fn not_here() -> MediaError {
    unsupported("decoding without FFmpeg".into())
}

fn unreadable(reason: &str) -> MediaError {
    MediaError::Unreadable { format: FORMAT, reason: reason.to_owned() }
}

fn truncated(reason: &str) -> MediaError {
    MediaError::Truncated { format: FORMAT, reason: reason.to_owned() }
}

fn unsupported(feature: String) -> MediaError {
    MediaError::UnsupportedFeature { format: FORMAT, feature }
}
