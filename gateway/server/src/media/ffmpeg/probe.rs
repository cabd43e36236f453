//! What ffprobe prints about a clip, read into numbers that can be trusted.

use gateway_media::{ClipInfo, ImageSize};

use super::rejected;
use crate::error::GatewayError;

/// Asks for the stream and its packets: nothing is decoded.
pub(super) const PACKET_ENTRIES: &str = "packet=pts_time,flags:\
     stream=codec_name,width,height,avg_frame_rate,nb_frames:stream_side_data=displaymatrix";
/// Asks for the decoded frames.
pub(super) const FRAME_ENTRIES: &str = "frame=best_effort_timestamp_time:\
     stream=codec_name,width,height,avg_frame_rate,nb_frames:stream_side_data=displaymatrix";

/// Codecs in which a packet may give no frame, or more than one.
const UNEVEN_CODECS: [&str; 8] =
    ["vp8", "mpeg4", "msmpeg4v3", "msmpeg4v2", "h263", "mpeg2video", "mpeg1video", "vc1"];
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
}

/// One run of ffprobe.
#[derive(Debug, Default)]
pub(super) struct Listing {
    stream: Option<Stream>,
    packets: Vec<Packet>,
    /// Times of decoded frames; NaN where unknown.
    frames: Vec<f64>,
    /// Whether `frames` decides, because the packets cannot be trusted.
    is_decoded: bool,
}

#[derive(Clone, Debug)]
struct Stream {
    codec: String,
    coded: ImageSize,
    average_rate: Option<f64>,
    container_frames: Option<usize>,
    turn: &'static str,
}

#[derive(Clone, Copy, Debug)]
struct Packet {
    time_s: Option<f64>,
    is_key: bool,
    is_discarded: bool,
    is_corrupt: bool,
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
        })
    }
}

fn packet(fields: &str) -> Packet {
    let flags = value(fields, "flags").unwrap_or("");
    Packet {
        time_s: value(fields, "pts_time").and_then(number),
        is_key: flags.contains('K'),
        is_discarded: flags.contains('D'),
        is_corrupt: flags.contains('C'),
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
    })
}

fn value<'a>(fields: &'a str, name: &str) -> Option<&'a str> {
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
mod tests {
    use super::*;

    const STREAM: &str =
        "stream|codec_name=h264|width=128|height=96|avg_frame_rate=10/1|nb_frames=N/A\n";

    fn listing(lines: &str) -> Listing {
        Listing::parse(format!("{lines}{STREAM}").as_bytes()).unwrap()
    }

    #[test]
    fn packets_in_decoding_order_become_times_in_showing_order_from_zero() {
        let probe = listing(
            "packet|pts_time=11.4|flags=K_|side_data|\n\npacket|pts_time=11.6|flags=__\n\
             packet|pts_time=11.5|flags=__\n",
        );
        assert!(probe.is_trustworthy());
        let probe = probe.into_probe().unwrap();
        assert_eq!(probe.info.num_frames, 3);
        assert_eq!(probe.info.fps, 10.0);
        assert!(probe.frame_times_s.iter().zip([0.0, 0.1, 0.2]).all(|(a, b)| (a - b).abs() < 1e-9));
        assert!((probe.info.duration_s - 0.3).abs() < 1e-9);
    }

    #[test]
    fn discarded_packets_are_not_frames() {
        let probe = listing(
            "packet|pts_time=-0.1|flags=KD\npacket|pts_time=0.0|flags=__\n\
             packet|pts_time=0.1|flags=__\n",
        );
        assert!(probe.is_trustworthy());
        assert_eq!(probe.into_probe().unwrap().info.num_frames, 2);
    }

    #[test]
    fn what_packets_cannot_tell_is_asked_of_the_decoder() {
        for lines in [
            "packet|pts_time=0.0|flags=__\n",
            "packet|pts_time=N/A|flags=K_\n",
            "packet|pts_time=0.0|flags=K_\npacket|pts_time=0.0|flags=__\n",
            "packet|pts_time=0.0|flags=K_C\n",
        ] {
            assert!(!listing(lines).is_trustworthy(), "{lines}");
        }
        let short = STREAM.replace("N/A", "30");
        let lines = format!("packet|pts_time=0.0|flags=K_\n{short}");
        assert!(!Listing::parse(lines.as_bytes()).unwrap().is_trustworthy());
        let vp8 = STREAM.replace("h264", "vp8");
        let lines = format!("packet|pts_time=0.0|flags=K_\n{vp8}");
        assert!(!Listing::parse(lines.as_bytes()).unwrap().is_trustworthy());
    }

    #[test]
    fn decoded_frames_decide_when_asked() {
        let decoded = listing(
            "frame|best_effort_timestamp_time=0.0\nframe|best_effort_timestamp_time=N/A\n\
             frame|best_effort_timestamp_time=0.2\n",
        );
        let probe = listing("packet|pts_time=0.0|flags=__\n").with_frames_of(&decoded);
        let probe = probe.into_probe().unwrap();
        assert_eq!(probe.info.num_frames, 3);
        assert!((probe.frame_times_s[1] - 0.1).abs() < 1e-9);
        let nothing = listing("packet|pts_time=0.0|flags=__\n").with_frames_of(&listing(""));
        assert!(nothing.into_probe().is_err());
    }

    #[test]
    fn a_rate_seen_through_rounded_stamps_is_the_containers() {
        let times: Vec<f64> =
            (0..90).map(|n| (f64::from(n) / 30.0 * 1000.0).round() / 1000.0).collect();
        assert_eq!(frame_rate(&times, Some(30.0)), 30.0);
        assert!((frame_rate(&[0.0, 0.1, 1.0], Some(10.0)) - 2.0).abs() < 1e-9);
        assert_eq!(frame_rate(&[0.0], Some(25.0)), 25.0);
        assert_eq!(frame_rate(&[0.0], None), 1.0);
    }

    #[test]
    fn each_right_angle_has_its_filter_and_swaps_the_sides() {
        let matrix = |a: i32, b: i32, c: i32, d: i32| {
            format!("\\n00000000: {a} {b} 0\\n00000001: {c} {d} 0\\n00000002: 0 0 1073741824\\n")
        };
        let one = 65536;
        assert_eq!(turn(&matrix(0, one, -one, 0)), "transpose=clock");
        assert_eq!(turn(&matrix(-one, 0, 0, -one)), "hflip,vflip");
        assert_eq!(turn(&matrix(one, 0, 0, one)), "");
        assert_eq!(turn(&matrix(46341, 46341, -46341, 46341)), "");
        let size = ImageSize { width: 128, height: 96 };
        assert_eq!(upright(size, "transpose=clock"), ImageSize { width: 96, height: 128 });
        assert_eq!(upright(size, "hflip,vflip"), size);
    }

    #[test]
    fn a_file_without_pictures_is_refused() {
        assert!(Listing::parse(b"format|format_name=mov\n").is_err());
    }
}
