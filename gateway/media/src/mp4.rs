//! The tables of plain MP4 and QuickTime files: which pictures there are, when each is shown, where
//! its bytes stand. Anything out of the ordinary is not read, and left to FFmpeg.

pub(crate) mod boxes;
mod excerpt;
mod h264;
mod tables;
#[cfg(test)]
mod tests;

use crate::types::ImageSize;
use boxes::{Piece, boxes, find, fourcc, i32_at, i64_at, u32_at, u64_at};

pub use excerpt::Excerpt;

/// Longest index that is read: some million pictures.
const MAX_INDEX_BYTES: u64 = 32 << 20;
/// Most boxes of a file beside each other.
const MAX_BOXES: usize = 256;
/// Bytes of a box's head, and of one with a long size.
const HEAD: u64 = 8;
const LONG_HEAD: u64 = 16;

/// Bytes that can be read at any place.
pub trait ReadAt {
    /// How many there are.
    fn length(&self) -> u64;

    /// Fills the buffer from `place` on.
    ///
    /// # Errors
    /// What the system said, or that the bytes end before.
    fn read_at(&self, place: u64, buffer: &mut [u8]) -> std::io::Result<()>;
}

impl ReadAt for [u8] {
    fn length(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, place: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        let from = usize::try_from(place).ok().and_then(|place| self.get(place..));
        let bytes = from.and_then(|from| from.get(..buffer.len()));
        buffer.copy_from_slice(bytes.ok_or(std::io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// One coded picture, in decoding order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// When it is decoded, in ticks from the first.
    pub decoded: i64,
    /// When it is shown, on the same clock; no two of a movie are equal.
    pub shown: i64,
    /// Where its bytes begin in the file; all of them are in it.
    pub place: u64,
    /// How many they are.
    pub bytes: u32,
    /// Whether the index calls it a key frame.
    pub is_key: bool,
}

/// What a coded picture means to those after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It resets the decoder: nothing after it needs anything before it.
    Refresh,
    /// No other picture needs it.
    Disposable,
    /// Others may need it.
    Other,
}

/// The only picture track of a file, every sample of it shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Movie {
    /// Ticks a second; above 0.
    pub ticks_per_s: u32,
    /// At least one; the first is a key frame.
    pub samples: Vec<Sample>,
    /// Where on the samples' clock the movie begins; none is shown before.
    pub start: i64,
    /// Ticks that all of them take, the last one's own time counted.
    pub duration: i64,
    /// Signs of the matrix that turns a coded frame upright: `a b c d`.
    pub turn: [i8; 4],
    /// Kind of the samples, as the file calls it.
    pub coding: [u8; 4],
    /// The description of the samples, the whole box.
    description: Vec<u8>,
    /// Size of an H.264 frame, if stream and container agree about it.
    h264_size: Option<ImageSize>,
}

impl Movie {
    /// The movie of a file, if it is a plain one: one picture track, tables that agree with each
    /// other and with the file's length, at most one edit and that of all pictures, no fragments.
    pub fn read<R: ReadAt + ?Sized>(file: &R) -> Option<Self> {
        let index = read_index(file)?;
        let parts = boxes(&index)?;
        if find(&parts, b"mvex").is_some() || find(&parts, b"cmov").is_some() {
            return None;
        }
        let clock = MovieClock::read(find(&parts, b"mvhd")?)?;
        let tracks = parts.iter().filter(|part| part.kind == *b"trak");
        let tracks: Option<Vec<Track<'_>>> = tracks.map(|track| Track::open(track.body)).collect();
        let mut pictures = tracks?;
        pictures.retain(|track| track.handler == *b"vide");
        let [track] = &pictures[..] else { return None };
        track.movie(clock, file.length())
    }

    /// The size of its frames if they are H.264; `None` for others and where the stream says
    /// another size than the container.
    pub fn h264_size(&self) -> Option<ImageSize> {
        self.h264_size
    }

    /// Whether [`Self::role`] looks at the bytes; elsewhere they need not be read.
    pub fn tells_roles_by_bytes(&self) -> bool {
        matches!(&self.coding, b"avc1" | b"avc3" | b"hvc1" | b"hev1")
    }

    /// What a sample of these bytes means to others.
    pub fn role(&self, sample: Sample, bytes: &[u8]) -> Role {
        match &self.coding {
            b"avc1" | b"avc3" => h264::role(bytes),
            b"hvc1" | b"hev1" => h264::hevc_role(bytes),
            // every key frame of these resets the decoder
            b"vp09" | b"jpeg" | b"mjpa" if sample.is_key => Role::Refresh,
            _ => Role::Other,
        }
    }
}

/// The body of the only `moov` box; `None` if there are fragments.
fn read_index<R: ReadAt + ?Sized>(file: &R) -> Option<Vec<u8>> {
    let length = file.length();
    let mut place = 0;
    let mut index = None;
    for _ in 0..MAX_BOXES {
        if place == length {
            break;
        }
        let mut head = [0; LONG_HEAD as usize];
        let known = (length - place).min(LONG_HEAD);
        file.read_at(place, &mut head[..known as usize]).ok()?;
        if known < HEAD {
            return None;
        }
        let (head_bytes, size) = match u32_at(&head, 0)? {
            0 => (HEAD, length - place),
            1 if known == LONG_HEAD => (LONG_HEAD, u64_at(&head, 8)?),
            size => (HEAD, u64::from(size)),
        };
        if size < head_bytes || size > length - place {
            return None;
        }
        match &fourcc(&head, 4)? {
            b"moof" | b"sidx" => return None,
            b"moov" if index.is_some() || size > MAX_INDEX_BYTES => return None,
            b"moov" => {
                let mut body = vec![0; (size - head_bytes) as usize];
                file.read_at(place + head_bytes, &mut body).ok()?;
                index = Some(body);
            }
            _ => {}
        }
        place += size;
    }
    index.filter(|_| place == length)
}

/// Of the whole movie: edits are measured by it.
#[derive(Clone, Copy)]
struct MovieClock {
    ticks_per_s: u32,
}

impl MovieClock {
    fn read(header: &[u8]) -> Option<Self> {
        let (clock, matrix) = if header.first()? == &1 { (20, 48) } else { (12, 36) };
        let ticks_per_s = u32_at(header, clock).filter(|ticks| *ticks > 0)?;
        // a movie turned as a whole is unusual
        (matrix_signs(header, matrix)? == [1, 0, 0, 1]).then_some(Self { ticks_per_s })
    }
}

fn matrix_signs(bytes: &[u8], place: usize) -> Option<[i8; 4]> {
    let sign = |entry: usize| Some(i32_at(bytes, place + entry * 4)?.signum() as i8);
    Some([sign(0)?, sign(1)?, sign(3)?, sign(4)?])
}

/// The boxes of a track.
struct Track<'a> {
    handler: [u8; 4],
    header: &'a [u8],
    edits: Option<&'a [u8]>,
    media_header: &'a [u8],
    table: Vec<Piece<'a>>,
}

impl<'a> Track<'a> {
    fn open(track: &'a [u8]) -> Option<Self> {
        let parts = boxes(track)?;
        let media = boxes(find(&parts, b"mdia")?)?;
        let handler = fourcc(find(&media, b"hdlr")?, 8)?;
        let information = boxes(find(&media, b"minf")?)?;
        let edits = match find(&parts, b"edts") {
            Some(edits) => find(&boxes(edits)?, b"elst"),
            None => None,
        };
        Some(Self {
            handler,
            header: find(&parts, b"tkhd")?,
            edits,
            media_header: find(&media, b"mdhd")?,
            table: boxes(find(&information, b"stbl")?)?,
        })
    }

    fn movie(&self, clock: MovieClock, file_bytes: u64) -> Option<Movie> {
        let place = if self.media_header.first()? == &1 { 20 } else { 12 };
        let ticks_per_s = u32_at(self.media_header, place).filter(|ticks| *ticks > 0)?;
        let turn = matrix_signs(self.header, if self.header.first()? == &1 { 52 } else { 40 })?;
        let description = self.table.iter().find(|part| part.kind == *b"stsd")?;
        // one entry, of 4 bytes of size and 4 of its name
        let coding = fourcc(description.body, 12).filter(|_| {
            let entry_bytes = u32_at(description.body, 8).map(|bytes| bytes as usize);
            u32_at(description.body, 4) == Some(1)
                && entry_bytes == description.body.len().checked_sub(8)
        })?;
        let (samples, duration) = tables::samples(&self.table, file_bytes)?;
        let start = match self.edits {
            Some(edits) => edit_start(edits, clock, (ticks_per_s, &samples))?,
            None => 0,
        };
        let h264_size = (coding == *b"avc1").then(|| h264::frame_size(description.body)).flatten();
        let description = description.whole.to_vec();
        Some(Movie { ticks_per_s, samples, start, duration, turn, coding, description, h264_size })
    }
}

/// Where the only edit begins; `None` unless it has normal speed and shows all samples.
fn edit_start(
    edits: &[u8],
    clock: MovieClock,
    (ticks_per_s, samples): (u32, &[Sample]),
) -> Option<i64> {
    let is_long = edits.first()? == &1;
    let (duration, start, rate) = if is_long {
        (u64_at(edits, 8)?, i64_at(edits, 16)?, u32_at(edits, 24)?)
    } else {
        (u64::from(u32_at(edits, 8)?), i64::from(i32_at(edits, 12)?), u32_at(edits, 16)?)
    };
    let length = u128::from(duration) * u128::from(ticks_per_s) / u128::from(clock.ticks_per_s);
    let end = i128::from(start) + i128::try_from(length).ok()?;
    let first = samples.iter().map(|sample| sample.shown).min()?;
    let last = samples.iter().map(|sample| sample.shown).max()?;
    let is_plain = u32_at(edits, 4)? == 1 && rate == 1 << 16 && start >= 0;
    (is_plain && first >= start && i128::from(last) < end).then_some(start)
}
