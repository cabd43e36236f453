//! A file of some samples of a movie: what a decoder needs for the pictures one asks for, and no
//! more.

use super::{Movie, Sample};

/// The beginning of every excerpt: its kind, then a box for the samples with a long size.
const FILE_KIND: [u8; 16] = *b"\0\0\0\x10ftypisom\0\0\x02\0";
const LONG_HEAD: u64 = 16;
/// No turning: as matrices are written.
const UPRIGHT: [u32; 9] = [1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30];
/// Ticks a second of the whole movie, which has no edits that would be measured by it.
const MOVIE_TICKS: u32 = 1000;

/// The index of an excerpt, while its samples are written behind each other.
#[derive(Clone, Debug)]
pub struct Excerpt {
    samples: Vec<Sample>,
    /// Bytes of all of them.
    bytes: u64,
    /// Added to when a sample is shown, so that none is shown before it is decoded.
    delay: i64,
}

impl Excerpt {
    /// Where the first sample's bytes begin.
    pub const FIRST_SAMPLE: u64 = FILE_KIND.len() as u64 + LONG_HEAD;

    /// An excerpt of this movie without samples.
    pub fn new(movie: &Movie) -> Self {
        let delay = movie.samples.iter().map(|sample| sample.decoded - sample.shown).max();
        Self { samples: Vec::new(), bytes: 0, delay: delay.unwrap_or(0).max(0) }
    }

    /// The next sample, in decoding order; its bytes follow those of the one before.
    pub fn push(&mut self, sample: Sample) {
        self.bytes += u64::from(sample.bytes);
        self.samples.push(sample);
    }

    /// When a sample of the movie is shown in the excerpt, in its ticks.
    pub fn stamp(&self, sample: Sample) -> i64 {
        let begin = self.samples.first().map_or(0, |first| first.decoded);
        sample.shown - begin + self.delay
    }

    /// What stands before the first sample, once all are known: [`Excerpt::FIRST_SAMPLE`] bytes.
    pub fn head(&self) -> Vec<u8> {
        let mut head = FILE_KIND.to_vec();
        head.extend(1_u32.to_be_bytes());
        head.extend(b"mdat");
        head.extend((LONG_HEAD + self.bytes).to_be_bytes());
        head
    }

    /// What stands after the last sample; `None` if the samples lie too far apart to be written.
    ///
    /// Source: ISO/IEC 14496-12, 8.
    pub fn index(&self, movie: &Movie) -> Option<Vec<u8>> {
        let last = self.samples.last()?.decoded - self.samples.first()?.decoded;
        let duration = u64::try_from(last).ok()?;
        let movie_header = [
            full(0, &[0; 8]),
            words(&[MOVIE_TICKS, 0, 1 << 16, 1 << 24, 0, 0]),
            words(&UPRIGHT),
            vec![0; 24],
            words(&[2]),
        ];
        let track_header =
            [full(3, &[0; 8]), words(&[1, 0, 0, 0, 0, 0, 0]), words(&UPRIGHT), words(&[0, 0])];
        let media_header = [
            full(1 << 24, &[0; 16]),
            words(&[movie.ticks_per_s]),
            duration.to_be_bytes().to_vec(),
            words(&[0x55c4_0000]),
        ];
        let handler = [full(0, &[0; 4]), b"vide".to_vec(), vec![0; 13]];
        let sources = [full(0, &[0, 0, 0, 1]), make(b"url ", &[full(1, &[])])];
        let information = [
            make(b"vmhd", &[full(1, &[0; 8])]),
            make(b"dinf", &[make(b"dref", &sources)]),
            make(b"stbl", &[movie.description.clone(), self.tables()?]),
        ];
        let media =
            [make(b"mdhd", &media_header), make(b"hdlr", &handler), make(b"minf", &information)];
        let track = [make(b"tkhd", &track_header), make(b"mdia", &media)];
        Some(make(b"moov", &[make(b"mvhd", &movie_header), make(b"trak", &track)]))
    }

    /// All tables besides the description, one behind the other.
    fn tables(&self) -> Option<Vec<u8>> {
        let count = u32::try_from(self.samples.len()).ok()?;
        let next = self.samples.iter().skip(1).map(|sample| sample.decoded);
        let gaps = self.samples.iter().zip(next).map(|(sample, next)| next - sample.decoded);
        let gaps = runs(gaps.chain([0]))?;
        let delays = self.samples.iter().map(|sample| sample.shown - sample.decoded + self.delay);
        let delays = runs(delays)?;
        let keys = (1_u32..).zip(&self.samples).filter(|(_, sample)| sample.is_key);
        let keys: Vec<u32> = keys.map(|(number, _)| number).collect();
        let sizes: Vec<u32> = self.samples.iter().map(|sample| sample.bytes).collect();
        let place = u32::try_from(Self::FIRST_SAMPLE).ok()?;
        let table = |name, count: usize, entries: &[u32]| {
            Some(make(name, &[full(0, &u32::try_from(count).ok()?.to_be_bytes()), words(entries)]))
        };
        let tables = [
            table(b"stts", gaps.len() / 2, &gaps)?,
            table(b"ctts", delays.len() / 2, &delays)?,
            table(b"stss", keys.len(), &keys)?,
            make(b"stsz", &[full(0, &[0; 4]), words(&[count]), words(&sizes)]),
            table(b"stsc", 1, &[1, count, 1])?,
            table(b"stco", 1, &[place])?,
        ];
        Some(tables.concat())
    }
}

/// Counts and values of runs; `None` for a value that readers do not take.
fn runs(values: impl Iterator<Item = i64>) -> Option<Vec<u32>> {
    let mut runs: Vec<u32> = Vec::new();
    for value in values {
        let value = u32::try_from(i32::try_from(value).ok()?).ok()?;
        match &mut runs[..] {
            [.., count, open] if *open == value => *count += 1,
            _ => runs.extend([1, value]),
        }
    }
    Some(runs)
}

/// Version and flags, and what follows.
fn full(flags: u32, rest: &[u8]) -> Vec<u8> {
    [&flags.to_be_bytes()[..], rest].concat()
}

fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_be_bytes()).collect()
}

/// A box of these parts.
fn make(name: &[u8; 4], parts: &[Vec<u8>]) -> Vec<u8> {
    let body: usize = parts.iter().map(Vec::len).sum();
    let mut whole = Vec::with_capacity(8 + body);
    // an index of less than 4 GiB
    whole.extend(((8 + body) as u32).to_be_bytes());
    whole.extend(name);
    parts.iter().for_each(|part| whole.extend(part));
    whole
}
