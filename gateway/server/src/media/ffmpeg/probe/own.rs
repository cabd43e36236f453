//! A listing from the clip's own tables, in place of ffprobe's or beside it.

use super::{Colours, Listing, Packet, Stream, turn_of};
use crate::media::ffmpeg::tables::Tables;

impl Listing {
    /// What the tables of a clip say, in place of ffprobe; `None` where they cannot say all.
    pub(in crate::media::ffmpeg) fn of_tables(tables: &Tables) -> Option<Self> {
        let movie = &tables.movie;
        let ticks_per_s = f64::from(movie.ticks_per_s);
        let average = movie.samples.len() as f64 * ticks_per_s / movie.duration as f64;
        let stream = Stream {
            codec: "h264".to_owned(),
            coded: movie.h264_size()?,
            average_rate: Some(average).filter(|rate| rate.is_finite() && *rate > 0.0),
            container_frames: None,
            turn: turn_of(movie.turn),
            // a high range is left to ffprobe
            colours: Colours::Plain,
        };
        let samples = movie.samples.iter().zip(&tables.is_clean);
        let packets = samples.map(|(sample, is_clean)| {
            // to the microsecond, as ffprobe prints it
            let stamp = sample.shown - movie.start;
            let time_s = stamp as f64 / ticks_per_s;
            Packet {
                time_s: Some((time_s * 1e6).round() / 1e6),
                pts: Some(stamp),
                is_key: sample.is_key,
                is_clean: *is_clean,
                is_discarded: false,
                is_corrupt: false,
                span: Some((sample.place, u64::from(sample.bytes))),
            }
        });
        let packets = packets.collect();
        let container = "mov".to_owned();
        let stream = Some(stream);
        Some(Self { stream, container, packets, has_tables: true, ..Self::default() })
    }

    /// Takes from the tables what ffprobe does not tell, if both name the same packets.
    pub(in crate::media::ffmpeg) fn compare(&mut self, tables: &Tables) {
        let samples = &tables.movie.samples;
        let spans = samples.iter().map(|sample| Some((sample.place, u64::from(sample.bytes))));
        let is_mov = self.container.split(',').any(|name| name == "mov");
        self.has_tables = is_mov && spans.eq(self.packets.iter().map(|packet| packet.span));
        if self.has_tables {
            for (packet, is_clean) in self.packets.iter_mut().zip(&tables.is_clean) {
                packet.is_clean = *is_clean;
            }
        }
    }
}
