//! Several stretches of one clip in one child: a list that plays the file again from key frame to
//! key frame, each time moved to a time of its own.

use std::io::Read;

use super::confine::MemoryFile;
use super::segments::{SeekTable, Segment};

/// Seconds between the beginnings of two stretches on the list: longer than any clip, shorter than
/// what FFmpeg takes for a broken clock (30 hours).
const STRIDE_S: i64 = 50_000;
const MICROS: i128 = 1_000_000;

/// Length of a tick of time stamps: `ticks / per_second` seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct TimeBase {
    pub(super) ticks: i64,
    pub(super) per_second: i64,
}

impl TimeBase {
    /// Microseconds in ticks, halves away from zero.
    ///
    /// Source: `av_rescale_q` of FFmpeg, by which its concat demuxer moves time stamps.
    fn ticks_of(self, micros: i128) -> i64 {
        let (above, below) =
            (micros * i128::from(self.per_second), MICROS * i128::from(self.ticks));
        let rounded = (above.abs() + below / 2) / below;
        (rounded * above.signum()) as i64
    }
}

/// A list for FFmpeg, and when the picks are shown on it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Joined {
    pub(super) list: String,
    /// In ticks, ascending.
    pub(super) stamps: Vec<i64>,
}

impl Joined {
    /// For a segment of several stretches; `frames` are all frames chosen from the clip at `path`.
    pub(super) fn new(
        table: &SeekTable,
        segment: &Segment,
        frames: &[u64],
        path: &str,
    ) -> Option<Self> {
        let time_base = table.time_base.filter(|_| !segment.stretches.is_empty())?;
        let mut list = String::from("ffconcat version 1.0\n");
        let mut stamps = Vec::with_capacity(segment.picks.len());
        let ends = segment.stretches.iter().skip(1).chain([&segment.picks.end]);
        for (index, (first, end)) in (0_i64..).zip(segment.stretches.iter().zip(ends)) {
            let picks = &frames[*first..*end];
            let (from, last) = (*picks.first()? as usize, *picks.last()? as usize);
            let inpoint = table.micros(from);
            let outpoint = table.reach_micros(last);
            list.push_str(&format!(
                "file '{path}'\ninpoint {}\noutpoint {}\nduration {STRIDE_S}\n",
                seconds(inpoint),
                seconds(outpoint)
            ));
            let start = i128::from(index * STRIDE_S) * MICROS;
            let moved = time_base.ticks_of(start - i128::from(inpoint));
            stamps.extend(picks.iter().map(|frame| table.stamps[*frame as usize] + moved));
        }
        Some(Self { list, stamps })
    }
}

/// Microseconds as FFmpeg reads them.
pub(super) fn seconds(micros: i64) -> String {
    let sign = if micros < 0 { "-" } else { "" };
    let micros = micros.unsigned_abs();
    format!("{sign}{}.{:06}", micros / 1_000_000, micros % 1_000_000)
}

/// Longest list of units in one picture.
const MAX_UNITS: usize = 256;

/// Whether the picture of that codec at `place` in the file, `size` bytes, resets its decoder: then
/// what comes after it is the same whatever was decoded before. Not every frame that containers call
/// a key frame does (open groups of pictures, recovery points).
pub(super) fn is_clean(codec: &str, clip: &MemoryFile, (place, size): (u64, u64)) -> bool {
    let resets = match codec {
        "mjpeg" | "vp9" => return true,
        // pictures of an instantaneous decoder refresh; any other unit that holds a slice is not
        "h264" => |first: u8| match first & 0x1f {
            1..=4 => Some(false),
            5 => Some(true),
            _ => None,
        },
        "hevc" => |first: u8| match (first >> 1) & 0x3f {
            19 | 20 => Some(true),
            0..=31 => Some(false),
            _ => None,
        },
        _ => return false,
    };
    let mut found = false;
    let mut at = 0_u64;
    for _ in 0..MAX_UNITS {
        if at == size {
            return found;
        }
        // units have their length in front, mostly in four bytes; with any other the walk goes astray
        // and does not end at the picture's end
        let mut head = [0; 5];
        if size - at < 5 || clip.at(place + at).read_exact(&mut head).is_err() {
            return false;
        }
        match resets(head[4]) {
            Some(false) => return false,
            Some(true) => found = true,
            None => {}
        }
        let [a, b, c, d, _] = head;
        let length = u64::from(u32::from_be_bytes([a, b, c, d]));
        if length == 0 || length > size - at - 4 {
            return false;
        }
        at += 4 + length;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn microseconds_become_ticks_as_ffmpeg_rounds_them() {
        let clock = TimeBase { ticks: 1, per_second: 15360 };
        // computed with av_rescale_q
        for (micros, ticks) in [
            (1_000_000, 15360),
            (-5_000_001, -76800),
            (32, 0),
            (33, 1),
            (-33, -1),
            (49_995_000_000, 767_923_200),
        ] {
            assert_eq!(clock.ticks_of(micros), ticks, "{micros}");
        }
        assert_eq!(TimeBase { ticks: 1001, per_second: 30000 }.ticks_of(50_050), 2);
    }

    #[test]
    fn a_picture_is_clean_only_if_all_its_slices_reset_the_decoder() {
        let unit = |first: u8, length: usize| {
            let body = vec![first; length];
            [&(length as u32).to_be_bytes()[..], &body].concat()
        };
        let clean = |codec: &str, units: &[Vec<u8>]| {
            let bytes = [b"xx".to_vec(), units.concat()].concat();
            let clip = MemoryFile::new(&bytes).unwrap();
            is_clean(codec, &clip, (2, bytes.len() as u64 - 2))
        };
        let (parameters, idr, other) = (unit(0x67, 9), unit(0x65, 30), unit(0x41, 30));
        assert!(clean("h264", &[parameters.clone(), idr.clone(), idr.clone()]));
        assert!(!clean("h264", &[parameters.clone(), other.clone()]));
        assert!(!clean("h264", &[idr.clone(), other]));
        assert!(!clean("h264", &[parameters]));
        assert!(!clean("h264", &[idr.clone(), vec![0, 0, 1]]), "goes astray");
        assert!(!clean("h264", &[vec![0, 0, 0, 1, 0x65], vec![0, 0, 0, 0]]));
        assert!(clean("hevc", &[unit(19 << 1, 9)]) && !clean("hevc", &[unit(21 << 1, 9)]));
        assert!(clean("vp9", &[]) && !clean("av1", &[idr]));
    }
}
