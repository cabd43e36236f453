//! What ffprobe prints about a clip, read into numbers that can be trusted.

mod own;

use gateway_media::{ClipInfo, ImageSize};

use super::colours::Colours;
use super::rejected;
use super::segments::{self, SeekTable};
use crate::error::GatewayError;

/// Asks for the stream and its packets: nothing is decoded.
pub(super) const PACKET_ENTRIES: &str = "packet=pts,pts_time,flags,pos,size:format=format_name:\
     stream=codec_name,width,height,avg_frame_rate,nb_frames,\
     color_range,color_space,color_transfer,color_primaries:\
     stream_side_data=displaymatrix";
/// Asks for the decoded frames.
pub(super) const FRAME_ENTRIES: &str = "frame=best_effort_timestamp_time:\
     stream=codec_name,width,height,avg_frame_rate,nb_frames:stream_side_data=displaymatrix";

/// Codecs in which a packet may give no frame, or more than one.
const UNEVEN_CODECS: [&str; 9] =
    ["vp8", "mpeg4", "msmpeg4v3", "msmpeg4v2", "h263", "mpeg2video", "mpeg1video", "vc1", "apng"];
/// Rates this close (relative) are one rate, seen through rounded time stamps.
const SAME_RATE: f64 = 1e-3;

/// A clip as the rest of the gateway needs to know it.
#[derive(Clone, Debug, PartialEq)]
pub struct ClipProbe {
    /// Size upright, frame count, average rate, duration.
    pub info: ClipInfo,
    /// FFmpeg's name of the codec.
    pub codec: String,
    /// When each frame is shown, from the first frame on.
    pub frame_times_s: Vec<f64>,
    /// Size as coded, before turning upright.
    pub(super) coded: ImageSize,
    /// Filters that turn a coded frame upright; empty if it is.
    pub(super) turn: &'static str,
    /// How its frames become RGB.
    pub(super) colours: Colours,
    /// Where decoding can begin besides the beginning, if the container says so reliably.
    pub(super) seek: Option<SeekTable>,
}

/// One run of ffprobe.
#[derive(Debug, Default)]
pub(super) struct Listing {
    stream: Option<Stream>,
    /// FFmpeg's names of the container.
    container: String,
    packets: Vec<Packet>,
    /// Times of decoded frames; NaN where unknown.
    frames: Vec<f64>,
    /// Whether `frames` decides, because the packets cannot be trusted.
    is_decoded: bool,
    /// Whether the packets are those of the container's own tables, one by one.
    has_tables: bool,
}

#[derive(Clone, Debug)]
struct Stream {
    codec: String,
    coded: ImageSize,
    average_rate: Option<f64>,
    container_frames: Option<usize>,
    turn: &'static str,
    colours: Colours,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Packet {
    pub(super) time_s: Option<f64>,
    /// The same in ticks of the stream.
    pub(super) pts: Option<i64>,
    pub(super) is_key: bool,
    /// Whether it is a key frame that resets the decoder.
    pub(super) is_clean: bool,
    pub(super) is_discarded: bool,
    is_corrupt: bool,
    /// Where its bytes stand in the file, and how many they are.
    span: Option<(u64, u64)>,
}

impl Listing {
    /// # Errors
    /// `MediaRejected` if there is no picture stream.
    pub(super) fn parse(output: &[u8]) -> Result<Self, GatewayError> {
        let mut listing = Self::default();
        for line in output.split(|byte| *byte == b'\n') {
            let Ok(line) = std::str::from_utf8(line) else { continue };
            if let Some(fields) = line.strip_prefix("packet|") {
                listing.packets.push(packet(fields));
            } else if let Some(fields) = line.strip_prefix("frame|") {
                let time = value(fields, "best_effort_timestamp_time").and_then(number);
                listing.frames.push(time.unwrap_or(f64::NAN));
            } else if let Some(fields) = line.strip_prefix("stream|") {
                listing.stream = listing.stream.or_else(|| stream(fields));
            } else if let Some(fields) = line.strip_prefix("format|") {
                listing.container = value(fields, "format_name").unwrap_or("").to_owned();
            }
        }
        if listing.stream.is_none() {
            return Err(rejected("the file holds no video stream"));
        }
        Ok(listing)
    }

    /// # Errors
    /// `MediaRejected` above the limit, with both figures.
    pub(super) fn check_size(&self, max_pixels: u64) -> Result<(), GatewayError> {
        match &self.stream {
            Some(stream) if stream.coded.pixels() > max_pixels => {
                let ImageSize { width, height } = stream.coded;
                Err(rejected(&format!(
                    "the clip's frames have {} pixels ({width}x{height}), the limit is {max_pixels}",
                    stream.coded.pixels()
                )))
            }
            _ => Ok(()),
        }
    }

    /// # Errors
    /// `MediaRejected` for a clip too long, or too much to decode only to learn its frames; with
    /// the figure and the limit.
    pub(super) fn check_length(&self, limits: &super::FfmpegLimits) -> Result<(), GatewayError> {
        let times = self.shown_packet_times();
        let span = times.last().zip(times.first()).map_or(0.0, |(last, first)| last - first);
        check_duration(span, limits)?;
        let cost = self.coded_pixels();
        if !self.is_trustworthy() && cost > limits.max_decoded_pixels {
            return Err(rejected(&format!(
                "the clip must be decoded to count its frames, which takes {cost} pixels ({} \
                 packets); the limit is {}",
                self.packets.len(),
                limits.max_decoded_pixels
            )));
        }
        Ok(())
    }

    /// Pixels of all packets' frames.
    pub(super) fn coded_pixels(&self) -> u64 {
        let pixels = self.stream.as_ref().map_or(0, |stream| stream.coded.pixels());
        pixels.saturating_mul(self.packets.len() as u64)
    }

    /// Whether every packet shown is one frame shown: no decoding needed to count them.
    pub(super) fn is_trustworthy(&self) -> bool {
        let Some(stream) = &self.stream else { return false };
        let mut times = self.shown_packet_times();
        times.dedup();
        let is_whole = stream.container_frames.is_none_or(|count| count == self.packets.len());
        let is_sound = |packet: &Packet| packet.time_s.is_some() && !packet.is_corrupt;
        is_whole
            && !UNEVEN_CODECS.contains(&stream.codec.as_str())
            && self.packets.first().is_some_and(|packet| packet.is_key)
            && self.packets.iter().all(is_sound)
            && times.len() == self.packets.iter().filter(|packet| !packet.is_discarded).count()
    }

    /// The same stream with the frames that another run has really decoded.
    pub(super) fn with_frames_of(mut self, decoded: &Self) -> Self {
        self.frames.clone_from(&decoded.frames);
        self.is_decoded = true;
        self
    }

    /// Whether its frames can only be converted by the filter `zscale`.
    pub(super) fn needs_zscale(&self) -> bool {
        self.stream.as_ref().is_some_and(|stream| stream.colours.needs_zscale())
    }

    fn shown_packet_times(&self) -> Vec<f64> {
        let shown = self.packets.iter().filter(|packet| !packet.is_discarded);
        let mut times: Vec<f64> = shown.filter_map(|packet| packet.time_s).collect();
        times.sort_by(f64::total_cmp);
        times
    }

    /// # Errors
    /// `MediaRejected` if there is no frame.
    pub(super) fn into_probe(self) -> Result<ClipProbe, GatewayError> {
        let times = if self.is_decoded { self.frames.clone() } else { self.shown_packet_times() };
        let seek = self.seek_table();
        let stream = self.stream.ok_or_else(|| rejected("the file holds no video stream"))?;
        if times.is_empty() {
            return Err(rejected("the clip holds no frame that can be decoded"));
        }
        let fps = frame_rate(&times, stream.average_rate);
        let frame_times_s = from_first(&times, fps);
        let last_s = frame_times_s.last().copied().unwrap_or(0.0);
        let info = ClipInfo {
            size: upright(stream.coded, stream.turn),
            num_frames: frame_times_s.len() as u64,
            fps,
            duration_s: last_s + 1.0 / fps,
        };
        Ok(ClipProbe {
            info,
            codec: stream.codec,
            frame_times_s,
            coded: stream.coded,
            turn: stream.turn,
            colours: stream.colours,
            seek,
        })
    }

    fn seek_table(&self) -> Option<SeekTable> {
        let stream = self.stream.as_ref()?;
        let codec = &stream.codec;
        let is_reliable = !self.is_decoded && self.is_trustworthy();
        (is_reliable && SeekTable::serves(&self.container, codec))
            .then(|| SeekTable::new(&self.packets, self.has_tables))
            .flatten()
    }
}

/// # Errors
/// `MediaRejected` with both figures.
pub(super) fn check_duration(
    seconds: f64,
    limits: &super::FfmpegLimits,
) -> Result<(), GatewayError> {
    let limit = limits.max_duration.as_secs_f64();
    if seconds > limit {
        return Err(rejected(&format!("the clip lasts {seconds:.1} s, the limit is {limit} s")));
    }
    Ok(())
}

impl ClipProbe {
    /// Pixels that must be decoded for these frames (ascending numbers).
    pub fn decoded_pixels(&self, frames: &[u64]) -> u64 {
        let runs = segments::plan(self, frames);
        let decoded: u64 = runs.iter().map(|run| run.decoded).sum();
        decoded.saturating_mul(self.coded.pixels())
    }

    /// Bytes of memory it takes.
    pub fn bytes(&self) -> u64 {
        let table = self.seek.as_ref().map_or(0, SeekTable::bytes);
        self.frame_times_s.len() as u64 * 8 + table + 256
    }
}

#[cfg(test)]
impl Packet {
    /// A sound packet shown at that tick of a 15360 Hz clock.
    pub(super) fn for_test(pts: i64, is_key: bool) -> Self {
        let time_s = Some(pts as f64 / 15360.0);
        Self {
            time_s,
            pts: Some(pts),
            is_key,
            is_clean: is_key,
            is_discarded: false,
            is_corrupt: false,
            span: None,
        }
    }
}

fn packet(fields: &str) -> Packet {
    let flags = value(fields, "flags").unwrap_or("");
    let whole = |name| value(fields, name).and_then(|text| text.parse::<u64>().ok());
    Packet {
        time_s: value(fields, "pts_time").and_then(number),
        pts: value(fields, "pts").and_then(|text| text.parse().ok()),
        is_key: flags.contains('K'),
        is_clean: false,
        is_discarded: flags.contains('D'),
        is_corrupt: flags.contains('C'),
        span: whole("pos").zip(whole("size")),
    }
}

fn stream(fields: &str) -> Option<Stream> {
    let side = |name| value(fields, name).and_then(|text| text.parse::<u32>().ok());
    let coded = ImageSize { width: side("width")?, height: side("height")? };
    if coded.width == 0 || coded.height == 0 {
        return None;
    }
    Some(Stream {
        codec: value(fields, "codec_name").unwrap_or("unknown").to_owned(),
        coded,
        average_rate: value(fields, "avg_frame_rate").and_then(rational),
        container_frames: value(fields, "nb_frames").and_then(|text| text.parse().ok()),
        turn: value(fields, "displaymatrix").map_or("", turn),
        colours: Colours::of_stream(fields),
    })
}

pub(super) fn value<'a>(fields: &'a str, name: &str) -> Option<&'a str> {
    fields.split('|').find_map(|field| field.strip_prefix(name)?.strip_prefix('='))
}

fn number(text: &str) -> Option<f64> {
    text.parse().ok().filter(|value: &f64| value.is_finite())
}

fn rational(text: &str) -> Option<f64> {
    let (above, below) = text.split_once('/')?;
    let rate = number(above)? / number(below)?;
    (rate.is_finite() && rate > 0.0).then_some(rate)
}

/// The filters for a display matrix, printed as rows `00000000: a b u`; only the eight turns and
/// mirrorings by right angles are applied, any other matrix is left alone.
fn turn(matrix: &str) -> &'static str {
    let mut signs = [0_i8; 4];
    let rows = matrix.split("\\n").filter(|row| !row.trim().is_empty());
    for (row, text) in rows.take(2).enumerate() {
        let numbers = text.split_once(':').map_or("", |(_, numbers)| numbers);
        for (column, entry) in numbers.split_whitespace().take(2).enumerate() {
            let entry = entry.parse::<i64>().unwrap_or(0);
            signs[row * 2 + column] = entry.signum() as i8;
        }
    }
    turn_of(signs)
}

/// The filters for the signs `a b c d` of a matrix.
fn turn_of(signs: [i8; 4]) -> &'static str {
    match signs {
        [0, 1, -1, 0] => "transpose=clock",
        [0, -1, 1, 0] => "transpose=cclock",
        [-1, 0, 0, -1] => "hflip,vflip",
        [-1, 0, 0, 1] => "hflip",
        [1, 0, 0, -1] => "vflip",
        [0, 1, 1, 0] => "transpose=cclock_flip",
        [0, -1, -1, 0] => "transpose=clock_flip",
        _ => "",
    }
}

fn upright(coded: ImageSize, turn: &str) -> ImageSize {
    if turn.starts_with("transpose") {
        return ImageSize { width: coded.height, height: coded.width };
    }
    coded
}

/// Frames a second over the whole clip: the container's figure where it agrees with the time
/// stamps (it is free of their rounding), else theirs.
fn frame_rate(times: &[f64], average: Option<f64>) -> f64 {
    let span = match (times.first(), times.last()) {
        (Some(first), Some(last)) => last - first,
        _ => f64::NAN,
    };
    let measured = (times.len() - 1) as f64 / span;
    match average {
        _ if !(measured.is_finite() && measured > 0.0) => average.unwrap_or(1.0),
        Some(average) if ((average - measured) / measured).abs() < SAME_RATE => average,
        _ => measured,
    }
}

/// Times from the first frame on; unknown ones are filled in at the average rate.
fn from_first(times: &[f64], fps: f64) -> Vec<f64> {
    let start = times.first().copied().filter(|time| time.is_finite()).unwrap_or(0.0);
    let mut last = f64::NEG_INFINITY;
    let relative = times.iter().map(|time| {
        let time = if time.is_finite() { time - start } else { last + 1.0 / fps };
        last = time.max(last).max(0.0);
        last
    });
    relative.collect()
}

#[cfg(test)]
mod tests;
