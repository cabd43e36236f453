//! Which parts of a clip must be decoded for the frames one asks for: from key frame to pick,
//! where jumping there costs less than decoding on.

use std::ops::Range;

use super::START_PIXELS;
use super::joined::TimeBase;
use super::probe::{ClipProbe, Packet};

/// Containers with an index by time of presentation.
const INDEXED: [&str; 2] = ["mov", "matroska"];
/// Codecs whose decoders, begun at a key frame, show what follows it exactly or not at all.
const SEEKABLE: [&str; 5] = ["h264", "hevc", "vp9", "av1", "mjpeg"];

/// What a jump within a child costs, in pixels decoded meanwhile: the container is opened again.
const REOPEN_PIXELS: u64 = 30_000_000;
/// Most stretches of one child, so that each child has time for its part.
const MAX_STRETCHES: usize = 64;

/// Where decoding can begin.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SeekTable {
    /// Time stamp of each frame shown, in ticks of the stream; ascending, all different.
    pub(super) stamps: Vec<i64>,
    /// The same as time, in microseconds rounded up.
    micros: Vec<i64>,
    /// Place of each frame shown in decoding order.
    places: Vec<u32>,
    /// Key frames; stamps and places ascend.
    keys: Vec<Key>,
    /// Latest time of all packets up to each place, in microseconds rounded up.
    reach: Vec<i64>,
    /// Of the stamps, where stretches can share a child.
    pub(super) time_base: Option<TimeBase>,
}

/// A frame that is decoded without others.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Key {
    stamp: i64,
    place: u32,
    /// Whether nothing after it needs anything before it.
    is_clean: bool,
}

/// A run of one child: some picks, one after the other.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Segment {
    /// Which of the chosen frames.
    pub(super) picks: Range<usize>,
    /// Whether to jump to the key frame before the first pick; otherwise from the beginning.
    pub(super) is_seek: bool,
    /// Frames that are decoded.
    pub(super) decoded: u64,
    /// First picks of the stretches that share the child; empty where there is only one.
    pub(super) stretches: Vec<usize>,
}

impl SeekTable {
    /// Whether clips of that kind have one.
    pub(super) fn serves(container: &str, codec: &str) -> bool {
        let is_indexed = container.split(',').any(|name| INDEXED.contains(&name));
        is_indexed && SEEKABLE.contains(&codec)
    }

    /// The table of these packets, in decoding order; `None` where their stamps are not sound.
    pub(super) fn new(packets: &[Packet], time_base: Option<TimeBase>) -> Option<Self> {
        let mut shown = Vec::new();
        let mut keys = Vec::new();
        let mut reach = Vec::with_capacity(packets.len());
        let mut latest = i64::MIN;
        for (place, packet) in (0_u32..).zip(packets) {
            let stamp = packet.pts?;
            // the listing rounds to microseconds, perhaps down
            let micros = (packet.time_s? * 1e6).round() as i64 + 1;
            latest = latest.max(micros);
            reach.push(latest);
            if packet.is_key {
                keys.push(Key { stamp, place, is_clean: packet.is_clean });
            }
            if !packet.is_discarded {
                shown.push((stamp, micros, place));
            }
        }
        shown.sort_unstable();
        let is_sound = shown.windows(2).all(|pair| pair[0].0 < pair[1].0)
            && keys.windows(2).all(|pair| pair[0].stamp < pair[1].stamp)
            && !shown.is_empty();
        is_sound.then(|| Self {
            stamps: shown.iter().map(|(stamp, ..)| *stamp).collect(),
            micros: shown.iter().map(|(_, micros, _)| *micros).collect(),
            places: shown.iter().map(|(.., place)| *place).collect(),
            keys,
            reach,
            time_base,
        })
    }

    /// The last key frame shown no later than this frame, if there is one from which the frame can
    /// be reached.
    fn key_before(&self, frame: usize) -> Option<Key> {
        let next = self.keys.partition_point(|key| key.stamp <= self.stamps[frame]);
        let key = self.keys[next.checked_sub(1)?];
        (key.place <= self.places[frame]).then_some(key)
    }

    /// Whether a child may come to this frame by a jump, whatever it decoded before.
    pub(super) fn is_joinable(&self, frame: usize) -> bool {
        self.time_base.is_some() && self.key_before(frame).is_some_and(|key| key.is_clean)
    }

    /// When everything is over that is needed for this frame, as [`SeekTable::micros`].
    pub(super) fn reach_micros(&self, frame: usize) -> i64 {
        self.reach[self.places[frame] as usize]
    }

    /// When a frame is shown, in microseconds of the file's own clock, rounded up.
    pub(super) fn micros(&self, frame: usize) -> i64 {
        self.micros[frame]
    }

    /// Bytes it takes.
    pub(super) fn bytes(&self) -> u64 {
        (self.stamps.len() * 28 + self.keys.len() * 16) as u64
    }
}

/// The runs for these frames (ascending numbers of frames that the clip has).
pub(super) fn plan(probe: &ClipProbe, frames: &[u64]) -> Vec<Segment> {
    let known = probe.frame_times_s.len() as u64;
    match probe.seek.as_ref().filter(|_| frames.iter().all(|frame| *frame < known)) {
        Some(table) => joined(table, frames, stretches(probe, table, frames)),
        None => {
            let decoded = frames.last().map_or(0, |last| last + 1);
            vec![Segment::whole(0..frames.len(), decoded)]
        }
    }
}

impl Segment {
    /// Decoded from the beginning.
    pub(super) fn whole(picks: Range<usize>, decoded: u64) -> Self {
        Self { picks, is_seek: false, decoded, stretches: Vec::new() }
    }
}

/// The picks, cut where a jump costs less than decoding on.
fn stretches(probe: &ClipProbe, table: &SeekTable, frames: &[u64]) -> Vec<Segment> {
    let costs = |pixels: u64| pixels / probe.coded.pixels().max(1);
    let mut segments = vec![Segment::whole(0..0, 0)];
    // frames decoded so far by the open run end here, in decoding order
    let mut reached = 0_u64;
    for (index, frame) in frames.iter().enumerate() {
        let place = u64::from(table.places[*frame as usize]) + 1;
        let is_joinable = table.is_joinable(*frame as usize);
        let cost = costs(if is_joinable { REOPEN_PIXELS } else { START_PIXELS });
        let jump = table
            .key_before(*frame as usize)
            .map(|key| u64::from(key.place))
            .filter(|key| index > 0 && *key > reached + cost);
        let decoded = place.saturating_sub(jump.unwrap_or(reached));
        match segments.last_mut().filter(|_| jump.is_none()) {
            Some(open) => {
                open.picks.end = index + 1;
                open.decoded += decoded;
            }
            None => {
                let picks = index..index + 1;
                segments.push(Segment { is_seek: true, ..Segment::whole(picks, decoded) });
            }
        }
        reached = reached.max(place);
    }
    segments
}

/// The same work, stretches put together in one child where they can be.
fn joined(table: &SeekTable, frames: &[u64], stretches: Vec<Segment>) -> Vec<Segment> {
    let is_joinable = |segment: &Segment| {
        frames.get(segment.picks.start).is_some_and(|frame| table.is_joinable(*frame as usize))
    };
    let mut segments: Vec<Segment> = Vec::new();
    for stretch in stretches {
        let open = segments.last_mut().filter(|open| {
            is_joinable(open) && is_joinable(&stretch) && open.stretches.len() < MAX_STRETCHES
        });
        let Some(open) = open else {
            segments.push(stretch);
            continue;
        };
        if open.stretches.is_empty() {
            open.stretches.push(open.picks.start);
            open.is_seek = true;
        }
        open.stretches.push(stretch.picks.start);
        open.picks.end = stretch.picks.end;
        open.decoded += stretch.decoded;
    }
    segments
}

#[cfg(test)]
mod tests {
    use super::*;
    use gateway_media::{ClipInfo, ImageSize};

    /// A clip with a key frame every `gop` frames, of 1080p or tiny frames.
    fn probe(num_frames: u32, gop: u32, size: ImageSize) -> ClipProbe {
        let packets: Vec<Packet> = (0..num_frames)
            .map(|number| {
                let is_key = number.is_multiple_of(gop);
                Packet::for_test(i64::from(number) * 512, is_key)
            })
            .collect();
        ClipProbe {
            info: ClipInfo { size, num_frames: num_frames.into(), fps: 30.0, duration_s: 1.0 },
            codec: "h264".into(),
            frame_times_s: (0..num_frames).map(|number| f64::from(number) / 30.0).collect(),
            coded: size,
            turn: "",
            seek: SeekTable::new(&packets, None),
        }
    }

    const FULL_HD: ImageSize = ImageSize { width: 1920, height: 1080 };

    #[test]
    fn an_hour_sampled_sparsely_is_mostly_skipped() {
        let probe = probe(108_000, 60, FULL_HD);
        let frames: Vec<u64> = (0..720).map(|index| index * 150).collect();
        let segments = plan(&probe, &frames);
        let decoded: u64 = segments.iter().map(|segment| segment.decoded).sum();
        assert_eq!(segments.len(), 720);
        assert!(decoded < 108_000 / 4, "{decoded}");
        let picks: Vec<usize> = segments.iter().flat_map(|segment| segment.picks.clone()).collect();
        assert_eq!(picks, (0..720).collect::<Vec<_>>());
        assert!(!segments[0].is_seek && segments[1..].iter().all(|segment| segment.is_seek));
    }

    #[test]
    fn stretches_from_clean_key_frames_share_a_child() {
        let mut probe = probe(108_000, 60, FULL_HD);
        let frames: Vec<u64> = (0..720).map(|index| index * 150).collect();
        let apart: u64 = plan(&probe, &frames).iter().map(|segment| segment.decoded).sum();
        let table = probe.seek.as_mut().unwrap();
        table.time_base = Some(TimeBase { ticks: 1, per_second: 15360 });
        // a key frame that is not clean must be come to by a child of its own
        table.keys[5].is_clean = false;

        let segments = plan(&probe, &frames);

        assert_eq!(segments.iter().map(|segment| segment.decoded).sum::<u64>(), apart);
        let picks: Vec<usize> = segments.iter().flat_map(|segment| segment.picks.clone()).collect();
        assert_eq!(picks, (0..720).collect::<Vec<_>>());
        assert_eq!(segments[0].stretches, [0, 1]);
        assert_eq!((segments[1].picks.clone(), segments[1].stretches.len()), (2..3, 0));
        assert_eq!(segments[2].picks, 3..3 + MAX_STRETCHES);
        assert!(segments.iter().all(|segment| segment.is_seek));
        assert_eq!(segments.len(), 2 + 717_usize.div_ceil(MAX_STRETCHES));
    }

    #[test]
    fn what_lies_close_together_is_decoded_through() {
        let dense = probe(600, 60, FULL_HD);
        let frames: Vec<u64> = (0..20).map(|index| index * 30).collect();
        assert_eq!(plan(&dense, &frames).len(), 1);
        // tiny frames cost less than a process
        let tiny = probe(18_000, 60, ImageSize { width: 128, height: 96 });
        let frames: Vec<u64> = (0..60).map(|index| index * 300).collect();
        assert_eq!(plan(&tiny, &frames).len(), 1);
    }

    #[test]
    fn without_a_table_or_beyond_it_everything_is_decoded() {
        let mut probe = probe(10_000, 60, FULL_HD);
        let beyond = plan(&probe, &[0, 9000, 10_000]);
        assert_eq!(beyond, [Segment::whole(0..3, 10_001)]);
        probe.seek = None;
        assert_eq!(plan(&probe, &[0, 9000]).len(), 1);
    }

    #[test]
    fn a_leading_picture_is_reached_from_the_key_frame_before() {
        // decoding order: key 0, 1, 2, key 5, then 3 and 4, which are shown before it
        let order = [(0, true), (1, false), (2, false), (5, true), (3, false), (4, false)];
        let packets: Vec<_> =
            order.iter().map(|(stamp, is_key)| Packet::for_test(*stamp, *is_key)).collect();
        let table = SeekTable::new(&packets, None).unwrap();
        assert_eq!(table.key_before(3).map(|key| key.place), Some(0));
        assert_eq!(table.key_before(5).map(|key| key.place), Some(3));
        let mut twice = packets.clone();
        twice[1] = twice[2];
        assert!(SeekTable::new(&twice, None).is_none());
        // the pick at stamp 2 comes after nothing later; that at 4 is decoded after 5 was
        assert_eq!(table.reach_micros(2), table.micros(2));
        assert_eq!(table.reach_micros(4), table.micros(5));
    }
}
