//! Which parts of a clip must be decoded for the frames one asks for: from key frame to pick,
//! where jumping there costs less than decoding on.

use std::ops::Range;

use super::START_PIXELS;
use super::probe::{ClipProbe, Packet};

/// Containers with an index by time of presentation.
const INDEXED: [&str; 2] = ["mov", "matroska"];
/// Codecs whose decoders, begun at a key frame, show what follows it exactly or not at all.
const SEEKABLE: [&str; 5] = ["h264", "hevc", "vp9", "av1", "mjpeg"];

/// Most picks that are told apart by their stamps: an argument has 128 KiB at most.
const MAX_STAMPS: usize = 2048;
/// Most pixels that stretches decode in one child, so that it stays far below its processor time.
const MAX_CHILD_PIXELS: u64 = 10_000_000_000;

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
    /// Whether the container's own tables are plain, and parts of it can be taken by them.
    has_tables: bool,
}

/// A frame that is decoded without others.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Key {
    stamp: i64,
    place: u32,
    /// Whether nothing after it needs anything before it.
    is_clean: bool,
}

/// How a child comes to its frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// The whole clip from its beginning; frames are counted.
    Counted,
    /// The clip from the key frame before the first pick; frames are known by their stamps.
    Sought,
    /// A file of the needed samples alone; frames are known by their stamps.
    Excerpt,
}

/// A run of one child: some picks, one after the other.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Segment {
    /// Which of the chosen frames.
    pub(super) picks: Range<usize>,
    pub(super) way: Way,
    /// Frames that are decoded.
    pub(super) decoded: u64,
    /// First picks of the stretches that share the child, its own first pick not counted.
    pub(super) stretches: Vec<usize>,
}

impl SeekTable {
    /// Whether clips of that kind have one.
    pub(super) fn serves(container: &str, codec: &str) -> bool {
        let is_indexed = container.split(',').any(|name| INDEXED.contains(&name));
        is_indexed && SEEKABLE.contains(&codec)
    }

    /// The table of these packets, in decoding order; `None` where their stamps are not sound.
    pub(super) fn new(packets: &[Packet], has_tables: bool) -> Option<Self> {
        let mut shown = Vec::new();
        let mut keys = Vec::new();
        for (place, packet) in (0_u32..).zip(packets) {
            let stamp = packet.pts?;
            // the listing rounds to microseconds, perhaps down
            let micros = (packet.time_s? * 1e6).round() as i64 + 1;
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
            has_tables,
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
        self.has_tables && self.key_before(frame).is_some_and(|key| key.is_clean)
    }

    /// Places in decoding order of what is needed for these picks of one stretch (ascending): from
    /// the key frame before the first, or from the very first, to the last.
    pub(super) fn needed(&self, picks: &[u64], is_from_start: bool) -> Option<Range<usize>> {
        let first =
            if is_from_start { 0 } else { self.key_before(*picks.first()? as usize)?.place };
        let places = picks.iter().map(|frame| self.places[*frame as usize]);
        Some(first as usize..places.max()? as usize + 1)
    }

    /// Place of a frame in decoding order.
    pub(super) fn place(&self, frame: usize) -> usize {
        self.places[frame] as usize
    }

    /// When a frame is shown, in microseconds of the file's own clock, rounded up.
    pub(super) fn micros(&self, frame: usize) -> i64 {
        self.micros[frame]
    }

    /// Bytes it takes.
    pub(super) fn bytes(&self) -> u64 {
        (self.stamps.len() * 20 + self.keys.len() * 16) as u64
    }
}

/// The runs for these frames (ascending numbers of frames that the clip has).
pub(super) fn plan(probe: &ClipProbe, frames: &[u64]) -> Vec<Segment> {
    let known = probe.frame_times_s.len() as u64;
    let is_told_apart = frames.len() <= MAX_STAMPS && frames.iter().all(|frame| *frame < known);
    match probe.seek.as_ref().filter(|_| is_told_apart) {
        Some(table) => joined(probe, table, &stretches(probe, table, frames)),
        None => {
            let decoded = frames.last().map_or(0, |last| last + 1);
            vec![Segment::whole(0..frames.len(), decoded)]
        }
    }
}

impl Segment {
    /// Decoded from the beginning.
    pub(super) fn whole(picks: Range<usize>, decoded: u64) -> Self {
        Self { picks, way: Way::Counted, decoded, stretches: Vec::new() }
    }
}

/// The picks, cut where a jump costs less than decoding on; whether what comes before a stretch may
/// be decoded by the same child.
fn stretches(probe: &ClipProbe, table: &SeekTable, frames: &[u64]) -> Vec<(Segment, bool)> {
    let start_cost = START_PIXELS / probe.coded.pixels().max(1);
    let mut segments = vec![(Segment::whole(0..0, 0), false)];
    // frames decoded so far by the open run end here, in decoding order
    let mut reached = 0_u64;
    for (index, frame) in frames.iter().enumerate() {
        let place = u64::from(table.places[*frame as usize]) + 1;
        let is_joinable = table.is_joinable(*frame as usize);
        let cost = if is_joinable { 0 } else { start_cost };
        let jump = table
            .key_before(*frame as usize)
            .map(|key| u64::from(key.place))
            .filter(|key| index > 0 && *key > reached + cost);
        let decoded = place.saturating_sub(jump.unwrap_or(reached));
        match segments.last_mut().filter(|_| jump.is_none()) {
            Some((open, _)) => {
                open.picks.end = index + 1;
                open.decoded += decoded;
            }
            None => {
                let segment = Segment::whole(index..index + 1, decoded);
                segments.push((Segment { way: Way::Sought, ..segment }, is_joinable));
            }
        }
        reached = reached.max(place);
    }
    segments
}

/// The same work, stretches put together in one child where they can be.
fn joined(probe: &ClipProbe, table: &SeekTable, stretches: &[(Segment, bool)]) -> Vec<Segment> {
    let max_decoded = MAX_CHILD_PIXELS / probe.coded.pixels().max(1);
    let mut segments: Vec<Segment> = Vec::new();
    for (stretch, is_joinable) in stretches {
        let has_room = |open: &&mut Segment| open.decoded + stretch.decoded <= max_decoded;
        match segments.last_mut().filter(|_| *is_joinable).filter(has_room) {
            Some(open) => {
                open.stretches.push(stretch.picks.start);
                open.picks.end = stretch.picks.end;
                open.decoded += stretch.decoded;
            }
            None => segments.push(stretch.clone()),
        }
    }
    if table.has_tables {
        segments.iter_mut().for_each(|segment| segment.way = Way::Excerpt);
    }
    segments
}

#[cfg(test)]
mod tests {
    use super::super::colours::Colours;
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
            colours: Colours::default(),
            seek: SeekTable::new(&packets, false),
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
        assert_eq!(segments[0].way, Way::Counted);
        assert!(segments[1..].iter().all(|segment| segment.way == Way::Sought));
    }

    #[test]
    fn stretches_from_clean_key_frames_share_a_child() {
        let mut probe = probe(108_000, 60, FULL_HD);
        let frames: Vec<u64> = (0..720).map(|index| index * 150).collect();
        let apart: u64 = plan(&probe, &frames).iter().map(|segment| segment.decoded).sum();
        let table = probe.seek.as_mut().unwrap();
        table.has_tables = true;
        // a key frame that is not clean must be come to by a child of its own
        table.keys[5].is_clean = false;

        let segments = plan(&probe, &frames);

        let decoded = segments.iter().map(|segment| segment.decoded);
        assert!(decoded.clone().sum::<u64>() <= apart, "a jump within a child is free");
        assert!(decoded.clone().all(|decoded| decoded * FULL_HD.pixels() <= MAX_CHILD_PIXELS));
        let picks: Vec<usize> = segments.iter().flat_map(|segment| segment.picks.clone()).collect();
        assert_eq!(picks, (0..720).collect::<Vec<_>>());
        assert_eq!(segments[0].stretches, [1]);
        assert_eq!((segments[1].picks.start, segments[1].stretches[0]), (2, 3));
        assert!(segments.iter().all(|segment| segment.way == Way::Excerpt));
        assert!(segments.len() < 9, "{}", segments.len());
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
        let table = SeekTable::new(&packets, false).unwrap();
        assert_eq!(table.key_before(3).map(|key| key.place), Some(0));
        assert_eq!(table.key_before(5).map(|key| key.place), Some(3));
        let mut twice = packets.clone();
        twice[1] = twice[2];
        assert!(SeekTable::new(&twice, false).is_none());
        // the pick at stamp 4 is decoded last of all, and needs everything before it
        assert_eq!(
            (table.needed(&[2], false), table.needed(&[2, 4], false)),
            (Some(0..3), Some(0..6))
        );
        assert_eq!((table.needed(&[5], false), table.needed(&[5], true)), (Some(3..4), Some(0..4)));
    }
}
