//! The items of a HEIF file, what is said of each, and where its bytes are.
//!
//! Source: ISO/IEC 14496-12 8.11 (meta box) and 23008-12 (image items), read as libavif 1.4 does.

use super::colour::Colour;
use super::{truncated, unreadable, unsupported};
use crate::decode::orientation::Orientation;
use crate::error::MediaError;
use crate::mp4::boxes::{Piece, boxes, find, fourcc, u16_at, u32_at, u64_at};
use crate::types::ImageSize;
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

/// Most items of a file, and most properties: grids of cameras have a hundred.
const MAX_ITEMS: usize = 4096;
/// Most properties of one item, which is looked up once for each tile; files have a dozen.
const MAX_OF_ITEM: usize = 64;
/// Most parts of all items together: a part takes more memory than its place in the file.
const MAX_EXTENTS: u64 = 4 * MAX_ITEMS as u64;
/// Most boxes at the top of a file before its meta box.
const MAX_TOP: usize = 32;

/// Names of an auxiliary item that is transparency.
const ALPHA_NAMES: [&[u8]; 2] =
    [b"urn:mpeg:mpegB:cicp:systems:auxiliary:alpha", b"urn:mpeg:hevc:2015:auxid:1"];
/// Properties that may be marked as essential: they are read, or change no pixel of ours.
const KNOWN: [&[u8; 4]; 12] = [
    b"ispe", b"pixi", b"av1C", b"colr", b"irot", b"imir", b"auxC", b"clap", b"a1op", b"lsel",
    b"a1lx", b"pasp",
];

/// All items of a file.
pub(super) struct Items<'a> {
    file: &'a [u8],
    idat: &'a [u8],
    primary: u32,
    kinds: HashMap<u32, [u8; 4]>,
    places: HashMap<u32, Place>,
    properties: Vec<Piece<'a>>,
    /// Property numbers from 1, and whether who does not know one must refuse the item.
    associations: HashMap<u32, Vec<(usize, bool)>>,
    references: Vec<Reference>,
}

/// Where the bytes of an item are.
pub(super) struct Place {
    is_in_idat: bool,
    /// Offset and length; a length of 0 is all that follows.
    extents: Vec<(u64, u64)>,
}

struct Reference {
    kind: [u8; 4],
    from: u32,
    to: Vec<u32>,
}

/// One item.
#[derive(Clone)]
pub(super) struct Item<'a> {
    pub(super) id: u32,
    pub(super) kind: [u8; 4],
    properties: Vec<Piece<'a>>,
}

/// Reads numbers one after the other; `None` past the end.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn number(&mut self, bytes: usize) -> Option<u64> {
        let (field, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(field.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }

    fn id(&mut self, is_wide: bool) -> Option<u32> {
        self.number(if is_wide { 4 } else { 2 })?.try_into().ok()
    }
}

impl<'a> Items<'a> {
    pub(super) fn read(file: &'a [u8]) -> Result<Self, MediaError> {
        let meta = meta_box(file)?;
        Self::of_meta(file, meta).ok_or_else(|| unreadable("its meta box is damaged"))
    }

    fn of_meta(file: &'a [u8], meta: &'a [u8]) -> Option<Self> {
        let parts = boxes(meta.get(4..)?)?;
        let pitm = find(&parts, b"pitm")?;
        let primary = match pitm.first()? {
            0 => u32::from(u16_at(pitm, 4)?),
            _ => u32_at(pitm, 4)?,
        };
        let properties = boxes(find(&parts, b"iprp")?)?;
        Some(Self {
            file,
            idat: find(&parts, b"idat").unwrap_or_default(),
            primary,
            kinds: kinds(find(&parts, b"iinf")?)?,
            places: places(find(&parts, b"iloc")?)?,
            associations: associations(find(&properties, b"ipma")?)?,
            properties: boxes(find(&properties, b"ipco")?)?,
            references: find(&parts, b"iref").map_or(Some(Vec::new()), references)?,
        })
    }

    /// Bytes of the whole file.
    pub(super) fn file_bytes(&self) -> usize {
        self.file.len()
    }

    pub(super) fn primary(&self) -> u32 {
        self.primary
    }

    pub(super) fn item(&self, id: u32) -> Result<Item<'a>, MediaError> {
        let kind = *self.kinds.get(&id).ok_or_else(|| unreadable("an item is missing"))?;
        let mut properties = Vec::new();
        for (number, is_essential) in self.associations.get(&id).into_iter().flatten() {
            // 0 stands for no property
            let Some(index) = number.checked_sub(1) else { continue };
            let piece =
                *self.properties.get(index).ok_or_else(|| unreadable("a property is missing"))?;
            if *is_essential && !KNOWN.contains(&&piece.kind) {
                let name = String::from_utf8_lossy(&piece.kind).into_owned();
                return Err(unsupported(format!("the property {name:?}")));
            }
            properties.push(piece);
        }
        Ok(Item { id, kind, properties })
    }

    /// The item that is the transparency of another.
    pub(super) fn alpha_of(&self, id: u32) -> Option<u32> {
        let mut sources = self.from(b"auxl").filter(|reference| reference.to.contains(&id));
        sources.find_map(|reference| {
            let item = self.item(reference.from).ok()?;
            let name = find(&item.properties, b"auxC")?.get(4..)?;
            let name = name.split(|byte| *byte == 0).next()?;
            ALPHA_NAMES.contains(&name).then_some(reference.from)
        })
    }

    /// The items that have transparency of their own.
    pub(super) fn transparent(&self) -> HashSet<u32> {
        self.from(b"auxl").flat_map(|reference| reference.to.iter().copied()).collect()
    }

    pub(super) fn is_premultiplied(&self, id: u32, alpha: u32) -> bool {
        self.from(b"prem").any(|reference| reference.from == id && reference.to.contains(&alpha))
    }

    /// The tiles of a grid, row by row; at least one.
    pub(super) fn tiles_of(&self, id: u32) -> Result<Vec<Item<'a>>, MediaError> {
        let derived = self.from(b"dimg").find(|reference| reference.from == id);
        match derived {
            Some(reference) if reference.to.len() > MAX_ITEMS => {
                Err(unreadable("its grid has far too many tiles"))
            }
            Some(reference) if !reference.to.is_empty() => {
                reference.to.iter().map(|tile| self.item(*tile)).collect()
            }
            _ => Err(unreadable("its grid has no tiles")),
        }
    }

    fn from(&self, kind: &'static [u8; 4]) -> impl Iterator<Item = &Reference> {
        self.references.iter().filter(move |reference| reference.kind == *kind)
    }

    /// The bytes of an item, no more than the file has; copied only if they lie in parts.
    pub(super) fn data(&self, item: &Item<'_>) -> Result<Cow<'a, [u8]>, MediaError> {
        let place = self.places.get(&item.id).ok_or_else(|| unreadable("an item has no bytes"))?;
        let source = if place.is_in_idat { self.idat } else { self.file };
        let mut data = Cow::Borrowed(&[][..]);
        for (offset, length) in &place.extents {
            let rest = usize::try_from(*offset).ok().and_then(|offset| source.get(offset..));
            let length =
                if *length == 0 { rest.map(<[u8]>::len) } else { (*length).try_into().ok() };
            let piece = rest.zip(length).and_then(|(rest, length)| rest.get(..length));
            let piece = piece.ok_or_else(|| truncated("it ends before its pictures do"))?;
            if data.len() + piece.len() > self.file.len() {
                return Err(unreadable("the parts of an item lie over each other"));
            }
            if data.is_empty() {
                data = piece.into();
            } else {
                data.to_mut().extend_from_slice(piece);
            }
        }
        if data.is_empty() { Err(truncated("an item is empty")) } else { Ok(data) }
    }
}

impl Item<'_> {
    /// Size as coded, before turning.
    pub(super) fn size(&self) -> Result<ImageSize, MediaError> {
        let body = find(&self.properties, b"ispe");
        let size = body.and_then(|body| u32_at(body, 4).zip(u32_at(body, 8)));
        let (width, height) = size.ok_or_else(|| unreadable("an item has no size"))?;
        // AV1 counts sides in 16 bits
        if width == 0 || height == 0 || width > 1 << 16 || height > 1 << 16 {
            return Err(unreadable(&format!("its size is {width}x{height}")));
        }
        Ok(ImageSize { width, height })
    }

    /// Quarter turns against the clock, then a mirror. EXIF is for information only.
    ///
    /// Source: `irot_imir_to_exif_orientation` of Pillow 13, through which transformers 5.24 turns
    /// pictures.
    pub(super) fn orientation(&self) -> Orientation {
        let first = |name| find(&self.properties, name).and_then(|body| body.first().copied());
        let turns = first(b"irot").unwrap_or(0) & 3;
        Orientation::from_exif_value(match (turns, first(b"imir").map(|axis| axis & 1)) {
            (0, None) => 1,
            (0, Some(1)) | (2, Some(0)) => 2,
            (2, None) => 3,
            (0, Some(_)) | (2, Some(_)) => 4,
            (1, Some(0)) | (3, Some(1)) => 5,
            (3, None) => 6,
            (1, Some(_)) | (3, Some(_)) => 7,
            _ => 8,
        })
    }

    /// What `colr` says, which counts more than the coded picture's own words.
    pub(super) fn colour(&self) -> Option<Colour> {
        let nclx = self
            .properties
            .iter()
            .find(|piece| piece.kind == *b"colr" && fourcc(piece.body, 0) == Some(*b"nclx"))?;
        Some(Colour {
            primaries: u16_at(nclx.body, 4)?,
            matrix: u16_at(nclx.body, 8)?,
            is_full: nclx.body.get(10)? & 0x80 != 0,
        })
    }

    /// Refuses items of which one layer or operating point is chosen: decoders show the best.
    pub(super) fn check_layers(&self) -> Result<(), MediaError> {
        let point = find(&self.properties, b"a1op").and_then(|body| body.first().copied());
        let layer = find(&self.properties, b"lsel").and_then(|body| u16_at(body, 0));
        if point.unwrap_or(0) != 0 || layer.unwrap_or(0xffff) != 0xffff {
            return Err(unsupported("a chosen layer of several".into()));
        }
        Ok(())
    }
}

/// The body of the meta box; boxes after it need not be whole.
fn meta_box(file: &[u8]) -> Result<&[u8], MediaError> {
    let mut rest = file;
    for _ in 0..MAX_TOP {
        let (Some(size), Some(kind)) = (u32_at(rest, 0), fourcc(rest, 4)) else { break };
        let (head, size) = match size {
            0 => (8, rest.len() as u64),
            1 => (16, u64_at(rest, 8).unwrap_or(0)),
            size => (8, u64::from(size)),
        };
        let Some(size) = usize::try_from(size).ok().filter(|size| *size >= head) else {
            return Err(unreadable("a box is smaller than its own head"));
        };
        if kind == *b"meta" {
            let whole = rest.get(..size).ok_or_else(|| truncated("its meta box is cut off"))?;
            return Ok(&whole[head..]);
        }
        rest = rest.get(size..).unwrap_or_default();
    }
    Err(truncated("it has no meta box, which says what pictures it holds"))
}

fn kinds(body: &[u8]) -> Option<HashMap<u32, [u8; 4]>> {
    let head = if *body.first()? == 0 { 6 } else { 8 };
    let entries = entries(body.get(head..)?)?;
    let mut kinds = HashMap::new();
    for entry in entries.iter().filter(|entry| entry.kind == *b"infe") {
        let mut fields = Fields(entry.body.get(4..)?);
        let version = *entry.body.first()?;
        if version < 2 {
            continue;
        }
        let id = fields.id(version > 2)?;
        fields.number(2)?;
        kinds.insert(id, fourcc(fields.0, 0)?);
    }
    Some(kinds)
}

/// Boxes beside each other, as many as a file may have items.
fn entries(bytes: &[u8]) -> Option<Vec<Piece<'_>>> {
    let mut pieces = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let size = u32_at(rest, 0)? as usize;
        if size < 8 || size > rest.len() || pieces.len() == MAX_ITEMS {
            return None;
        }
        let (whole, after) = rest.split_at(size);
        pieces.push(Piece { kind: fourcc(whole, 4)?, body: &whole[8..], whole });
        rest = after;
    }
    Some(pieces)
}

pub(super) fn places(body: &[u8]) -> Option<HashMap<u32, Place>> {
    let version = *body.first()?;
    let mut fields = Fields(body.get(4..)?);
    let sizes = fields.number(2)?;
    let width = |shift: u32| (sizes >> shift & 15) as usize;
    let (offset_bytes, length_bytes, base_bytes) = (width(12), width(8), width(4));
    let index_bytes = if version == 0 { 0 } else { width(0) };
    if [offset_bytes, length_bytes, base_bytes, index_bytes].iter().any(|bytes| *bytes > 8) {
        return None;
    }
    let count = fields.id(version > 1)? as usize;
    let (mut places, mut all_extents) = (HashMap::new(), 0);
    for _ in 0..count.min(MAX_ITEMS) {
        let id = fields.id(version > 1)?;
        let method = if version == 0 { 0 } else { fields.number(2)? & 15 };
        let file = fields.number(2)?;
        let base = fields.number(base_bytes)?;
        let mut extents = Vec::new();
        let num_extents = fields.number(2)?;
        all_extents += num_extents;
        if all_extents > MAX_EXTENTS {
            return None;
        }
        // what takes no bytes here could be said any number of times
        if num_extents > 1 && offset_bytes + length_bytes == 0 {
            return None;
        }
        for _ in 0..num_extents {
            fields.number(index_bytes)?;
            let offset = fields.number(offset_bytes)?.checked_add(base)?;
            extents.push((offset, fields.number(length_bytes)?));
        }
        // bytes in other files and in other items are nobody's
        if method < 2 && file == 0 {
            places.insert(id, Place { is_in_idat: method == 1, extents });
        }
    }
    Some(places)
}

fn associations(body: &[u8]) -> Option<HashMap<u32, Vec<(usize, bool)>>> {
    let (is_wide_id, is_wide_number) = (*body.first()? > 0, body.get(3)? & 1 != 0);
    let mut fields = Fields(body.get(4..)?);
    let count = fields.number(4)?;
    let mut associations: HashMap<u32, Vec<_>> = HashMap::new();
    for _ in 0..count.min(MAX_ITEMS as u64) {
        let id = fields.id(is_wide_id)?;
        let mut numbers = Vec::new();
        for _ in 0..fields.number(1)? {
            let bits = if is_wide_number { 15 } else { 7 };
            let field = fields.number(if is_wide_number { 2 } else { 1 })?;
            numbers.push(((field & ((1 << bits) - 1)) as usize, field >> bits != 0));
        }
        let of_item = associations.entry(id).or_default();
        of_item.extend(numbers);
        if of_item.len() > MAX_OF_ITEM {
            return None;
        }
    }
    Some(associations)
}

fn references(body: &[u8]) -> Option<Vec<Reference>> {
    let is_wide = *body.first()? > 0;
    let mut references = Vec::new();
    for entry in entries(body.get(4..)?)? {
        let mut fields = Fields(entry.body);
        let from = fields.id(is_wide)?;
        let count = fields.number(2)?;
        let to = (0..count).map(|_| fields.id(is_wide)).collect::<Option<_>>()?;
        references.push(Reference { kind: entry.kind, from, to });
    }
    Some(references)
}
