//! The sample tables of a track, put together into one list.

use super::Sample;
use super::boxes::{Piece, find, fourcc, u32_at, u64_at};

/// Bytes before the entries of most tables: version, flags, count.
const HEAD: usize = 8;
/// Bytes before the sizes: also the size that all samples share.
const SIZES_HEAD: usize = 12;
/// Most samples: 4 hours at 60 a second are fewer.
const MAX_SAMPLES: usize = 1 << 20;

/// All samples in decoding order, and the ticks that all of them take; `None` where tables
/// contradict each other or the file's length, or where two samples are shown at once.
///
/// Source: ISO/IEC 14496-12, 8.6 and 8.7.
pub(super) fn samples(table: &[Piece<'_>], file_bytes: u64) -> Option<(Vec<Sample>, i64)> {
    // groups of samples can make more key frames than the index names
    let is_plain = |group: &Piece<'_>| fourcc(group.body, 4) == Some(*b"roll");
    if !table.iter().filter(|piece| piece.kind == *b"sbgp").all(is_plain) {
        return None;
    }
    let sizes = sizes(find(table, b"stsz")?, file_bytes)?;
    let (mut samples, duration) = times(table, sizes.len())?;
    let places = places(table, &sizes)?;
    for ((sample, bytes), place) in samples.iter_mut().zip(sizes).zip(places) {
        (sample.bytes, sample.place) = (bytes, place);
        if place.checked_add(u64::from(bytes))? > file_bytes {
            return None;
        }
    }
    if let Some(keys) = find(table, b"stss") {
        samples.iter_mut().for_each(|sample| sample.is_key = false);
        for entry in entries::<4>(keys, HEAD)? {
            let number = u32_at(entry, 0)? as usize;
            samples.get_mut(number.checked_sub(1)?)?.is_key = true;
        }
    }
    let mut shown: Vec<i64> = samples.iter().map(|sample| sample.shown).collect();
    shown.sort_unstable();
    let is_sound = samples.first()?.is_key && shown.windows(2).all(|pair| pair[0] < pair[1]);
    is_sound.then_some((samples, duration))
}

/// The entries of a table, `N` bytes each: as many as it says, and it is no shorter.
fn entries<const N: usize>(table: &[u8], head: usize) -> Option<impl Iterator<Item = &[u8]>> {
    let count = u32_at(table, head - 4)? as usize;
    let bytes = count.checked_mul(N)?;
    Some(table.get(head..)?.get(..bytes)?.chunks_exact(N))
}

fn sizes(table: &[u8], file_bytes: u64) -> Option<Vec<u32>> {
    let (all, count) = (u32_at(table, 4)?, u32_at(table, 8)? as usize);
    if count > MAX_SAMPLES {
        return None;
    }
    if all > 0 {
        let fits = u64::from(all) * count as u64 <= file_bytes;
        return fits.then(|| vec![all; count]);
    }
    let sizes: Option<Vec<u32>> =
        entries::<4>(table, SIZES_HEAD)?.map(|entry| u32_at(entry, 0)).collect();
    // samples that share bytes would make a short file long
    sizes.filter(|sizes| {
        let sum: u64 = sizes.iter().map(|size| u64::from(*size)).sum();
        sizes.iter().all(|size| *size > 0) && sum <= file_bytes
    })
}

/// Runs of one value: its count and the value.
fn runs(table: &[u8]) -> Option<impl Iterator<Item = (usize, u32)>> {
    Some(
        entries::<8>(table, HEAD)?
            .filter_map(|entry| Some((u32_at(entry, 0)? as usize, u32_at(entry, 4)?))),
    )
}

/// Samples with their times alone, and the time that all take.
fn times(table: &[Piece<'_>], count: usize) -> Option<(Vec<Sample>, i64)> {
    let mut samples = Vec::with_capacity(count);
    let mut decoded = 0_i64;
    for (run, ticks) in runs(find(table, b"stts")?)? {
        // negative ones are known, and mended by each reader in its own way
        let ticks = i64::from(i32::try_from(ticks).ok()?);
        if run > count - samples.len() {
            return None;
        }
        for _ in 0..run {
            samples.push(Sample { decoded, shown: decoded, place: 0, bytes: 0, is_key: true });
            decoded = decoded.checked_add(ticks)?;
        }
    }
    if let Some(offsets) = find(table, b"ctts") {
        let mut rest = samples.iter_mut();
        for (run, offset) in runs(offsets)? {
            // signed in both versions, as files have it
            let offset = i64::from(offset.cast_signed());
            for _ in 0..run {
                rest.next()?.shown += offset;
            }
        }
        if rest.next().is_some() {
            return None;
        }
    }
    (samples.len() == count).then_some((samples, decoded))
}

/// Where each sample begins.
fn places(table: &[Piece<'_>], sizes: &[u32]) -> Option<Vec<u64>> {
    let chunks: Option<Vec<u64>> = match find(table, b"stco") {
        Some(chunks) => {
            entries::<4>(chunks, HEAD)?.map(|entry| u32_at(entry, 0).map(u64::from)).collect()
        }
        None => entries::<8>(find(table, b"co64")?, HEAD)?.map(|entry| u64_at(entry, 0)).collect(),
    };
    let chunks = chunks?;
    // (first chunk, samples in each chunk from there on)
    let runs: Option<Vec<(usize, usize)>> = entries::<12>(find(table, b"stsc")?, HEAD)?
        .map(|entry| {
            let is_first_description = u32_at(entry, 8)? == 1;
            let run = ((u32_at(entry, 0)? as usize).checked_sub(1)?, u32_at(entry, 4)? as usize);
            is_first_description.then_some(run)
        })
        .collect();
    let runs = runs?;
    if runs.first()?.0 != 0 {
        return None;
    }
    let mut places = Vec::with_capacity(sizes.len());
    let mut sizes = sizes.iter();
    for (index, (first, in_chunk)) in runs.iter().enumerate() {
        let end = runs.get(index + 1).map_or(chunks.len(), |(next, _)| *next);
        for chunk in chunks.get(*first..end)? {
            let mut place = *chunk;
            for _ in 0..*in_chunk {
                places.push(place);
                place = place.checked_add(u64::from(*sizes.next()?))?;
            }
        }
    }
    sizes.next().is_none().then_some(places)
}
