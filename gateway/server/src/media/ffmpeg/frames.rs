//! Chosen frames of a clip, one after the other, as FFmpeg writes them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use gateway_media::RgbFrame;
use tokio::io::AsyncReadExt;
use tokio::process::ChildStdout;

use super::confine::{Confined, MemoryFile};
use super::segments::{self, SeekTable, Segment, Way};
use super::select;
use super::tables::{ClipExcerpt, Tables, Wanted};
use super::{ClipProbe, FORMATS, Ffmpeg, START_PIXELS, rejected, strings, too_slow};
use crate::error::GatewayError;
use crate::media::fair::{Flow, Place};

/// Which frames of which clip, for whom.
#[derive(Clone, Copy)]
pub(super) struct Job<'a> {
    pub(super) ffmpeg: &'a Ffmpeg,
    pub(super) clip: &'a MemoryFile,
    pub(super) probe: &'a ClipProbe,
    /// Ascending frame numbers.
    pub(super) frames: &'a [u64],
    pub(super) flow: &'a Flow,
    /// As [`Ffmpeg::sync_option`] gives it.
    pub(super) sync: &'static str,
}

/// Frames on their way from child processes, one process at a time; dropping it ends the child.
pub struct FrameStream<'a> {
    job: Job<'a>,
    segments: VecDeque<Segment>,
    /// Read when the first excerpt is made.
    tables: Option<Arc<Tables>>,
    running: Option<Running>,
    given: usize,
}

/// A child that decodes one segment.
struct Running {
    child: Confined,
    output: ChildStdout,
    segment: Segment,
    /// Time still allowed for waiting on the child; waiting on others costs it nothing.
    patience: Duration,
}

impl<'a> FrameStream<'a> {
    pub(super) fn new(job: Job<'a>) -> Self {
        let segments = segments::plan(job.probe, job.frames).into();
        Self { job, segments, tables: None, running: None, given: 0 }
    }

    /// The next frame, upright; `None` after the last one asked for.
    ///
    /// # Errors
    /// `MediaRejected` if the clip gives fewer frames than it promised, `DeadlineExceeded`.
    pub async fn next(&mut self) -> Result<Option<RgbFrame>, GatewayError> {
        while self.given < self.job.frames.len() {
            if self.running.as_ref().is_none_or(|run| run.segment.picks.end <= self.given) {
                // its place first: the next child may need it
                self.running = None;
                let Some(coming) = self.segments.front() else { break };
                // before a copy of its samples is made: what waits holds none
                let place = self.job.enter(coming).await;
                let Some(segment) = self.segments.pop_front() else { break };
                let excerpt = self.excerpt(&segment).await?;
                if excerpt.is_none() && segment.way == Way::Excerpt {
                    self.decode_the_rest("an excerpt cannot be written");
                    continue;
                }
                self.running = Some(self.job.start(segment, excerpt, place)?);
            }
            let Some(run) = &mut self.running else { break };
            let size = self.job.probe.info.size;
            let mut pixels = vec![0; size.pixels() as usize * 3];
            let begin = tokio::time::Instant::now();
            match tokio::time::timeout(run.patience, run.output.read_exact(&mut pixels)).await {
                Err(_) => return Err(too_slow(self.job.ffmpeg.limits.timeout)),
                Ok(Ok(_)) => {
                    run.patience = run.patience.saturating_sub(begin.elapsed());
                    self.given += 1;
                    // a stretch has the time that a child of its own would have
                    if run.segment.stretches.contains(&self.given) {
                        run.patience = self.job.ffmpeg.limits.timeout;
                    }
                    return Ok(Some(RgbFrame { size, pixels }));
                }
                Ok(Err(_)) => {
                    let messages = run.child.messages();
                    // what a decoder that lacked nothing complained of is no better a second time
                    let is_damaged = !messages.is_empty() && self.job.lacks_nothing(&run.segment);
                    if is_damaged || run.segment.way == Way::Counted {
                        return Err(self.cut_short(messages));
                    }
                    self.decode_the_rest(&messages);
                }
            }
        }
        Ok(None)
    }

    /// The child's process id, while it runs.
    #[cfg(test)]
    pub(super) fn child_id(&self) -> Option<u32> {
        self.running.as_ref().and_then(|run| run.child.id())
    }

    /// Runs still to come.
    #[cfg(test)]
    pub(super) fn segments(&mut self) -> &mut VecDeque<Segment> {
        &mut self.segments
    }

    /// Whether anything was read to make an excerpt.
    #[cfg(test)]
    pub(super) fn has_read_tables(&self) -> bool {
        self.tables.is_some()
    }

    /// The file of the samples that a segment needs, if it is decoded that way and can be.
    async fn excerpt(&mut self, segment: &Segment) -> Result<Option<ClipExcerpt>, GatewayError> {
        let Some(table) = self.job.probe.seek.as_ref().filter(|_| segment.way == Way::Excerpt)
        else {
            return Ok(None);
        };
        if self.tables.is_none() {
            self.tables = Tables::read(self.job.clip).await?;
        }
        let wanted = wanted(table, segment, self.job.frames);
        match self.tables.as_ref().zip(wanted) {
            Some((tables, wanted)) => tables.excerpt(self.job.clip, wanted).await,
            None => Ok(None),
        }
    }

    /// The index led astray: what was given is right, the rest is counted from the beginning.
    fn decode_the_rest(&mut self, reason: &str) {
        let (given, chosen) = (self.given, self.job.frames.len());
        tracing::warn!(given, chosen, reason, "a clip is decoded again from its beginning");
        self.job.ffmpeg.metrics.clip_decoded_again();
        let decoded = self.job.frames[given..].last().map_or(0, |last| last + 1);
        self.segments = VecDeque::from([Segment::whole(given..chosen, decoded)]);
        self.running = None;
    }

    fn cut_short(&self, messages: String) -> GatewayError {
        let (given, expected) = (self.given, self.job.frames.len());
        rejected(&format!(
            "the clip is damaged: only {given} of the {expected} chosen frames could be decoded"
        ))
        .because(messages)
    }
}

impl Job<'_> {
    async fn enter(&self, segment: &Segment) -> Place {
        let cost = START_PIXELS + segment.decoded.saturating_mul(self.probe.coded.pixels());
        self.ffmpeg.enter(self.flow, cost).await
    }

    /// Whether the decoder is given all that its picks need, whatever the index said of it.
    fn lacks_nothing(&self, segment: &Segment) -> bool {
        let first = self.frames[segment.picks.start] as usize;
        let is_clean = || self.probe.seek.as_ref().is_some_and(|table| table.is_joinable(first));
        match segment.way {
            Way::Counted => true,
            Way::Sought => false,
            Way::Excerpt => segment.picks.start == 0 || is_clean(),
        }
    }

    fn start(
        &self,
        segment: Segment,
        excerpt: Option<ClipExcerpt>,
        place: Place,
    ) -> Result<Running, GatewayError> {
        let program = &self.ffmpeg.programs()?.ffmpeg;
        let input = excerpt.as_ref().map_or(self.clip, |excerpt| &excerpt.file);
        let stamps = self.stamps(&segment, excerpt.as_ref());
        let arguments = self.arguments(&segment, input, stamps.as_deref());
        let mut child = self.ffmpeg.start(program, &arguments, Some(input), place)?;
        let output = child
            .take_output()
            .ok_or_else(|| GatewayError::internal("the child's output was already taken"))?;
        Ok(Running { child, output, segment, patience: self.ffmpeg.limits.timeout })
    }

    /// When the picks of a segment are shown, in ticks of what is decoded, unless they are counted.
    fn stamps(&self, segment: &Segment, excerpt: Option<&ClipExcerpt>) -> Option<Vec<i64>> {
        if let Some(excerpt) = excerpt {
            return Some(excerpt.stamps.clone());
        }
        let table = self.probe.seek.as_ref().filter(|_| segment.way == Way::Sought)?;
        let frames = &self.frames[segment.picks.clone()];
        Some(frames.iter().map(|frame| table.stamps[*frame as usize]).collect())
    }

    /// One argument vector, written by us alone.
    fn arguments(
        &self,
        segment: &Segment,
        input: &MemoryFile,
        stamps: Option<&[i64]>,
    ) -> Vec<String> {
        let threads = self.ffmpeg.threads.to_string();
        // frames as coded are padded
        let max_pixels = self.ffmpeg.limits.max_frame_pixels.saturating_mul(5) / 4;
        let mut arguments = strings(&["-nostdin", "-hide_banner", "-loglevel", "error"]);
        arguments.extend(strings(&["-threads", &threads, "-protocol_whitelist", "file"]));
        arguments.extend(strings(&["-max_pixels", &max_pixels.to_string(), "-noautorotate"]));
        arguments.extend(strings(&["-format_whitelist", FORMATS]));
        // stamps stay as in the file: by them, not by counting, frames are told apart
        if stamps.is_some() {
            arguments.push("-copyts".to_owned());
        }
        if let Some(seconds) = self.seek_seconds(segment) {
            arguments.extend(strings(&["-seek_timestamp", "1", "-noaccurate_seek"]));
            arguments.extend(strings(&["-ss", &seconds]));
        }
        let filter = self.filter(segment, stamps);
        arguments.extend(strings(&["-i", &input.path_in_child(), "-map", "0:V:0"]));
        arguments.extend(strings(&["-an", "-sn", "-dn"]));
        let count = segment.picks.len().to_string();
        arguments.extend(strings(&["-vf", &filter, self.sync, "passthrough", "-frames:v", &count]));
        arguments.extend(strings(&["-f", "rawvideo", "-pix_fmt", "rgb24", "pipe:1"]));
        arguments
    }

    /// When the first pick of a segment is shown, as FFmpeg reads it, rounded up: a key frame at
    /// that very time must not be missed.
    fn seek_seconds(&self, segment: &Segment) -> Option<String> {
        let table = self.probe.seek.as_ref().filter(|_| segment.way == Way::Sought)?;
        Some(seconds(table.micros(self.frames[segment.picks.start] as usize)))
    }

    /// The filter graph: choose, convert at the size the container promised, turn upright.
    fn filter(&self, segment: &Segment, stamps: Option<&[i64]>) -> String {
        let chosen = match stamps {
            Some(stamps) => select::by_stamp(stamps),
            None => select::by_number(&self.frames[segment.picks.clone()]),
        };
        let (width, height) = (self.probe.coded.width, self.probe.coded.height);
        let convert = self.probe.colours.filters(width, height);
        let turn = self.probe.turn;
        let turn = if turn.is_empty() { String::new() } else { format!(",{turn}") };
        format!("select='{chosen}',{convert}{turn}")
    }
}

/// The samples that a segment's picks need, and those of the picks.
fn wanted(table: &SeekTable, segment: &Segment, frames: &[u64]) -> Option<Wanted> {
    let starts = [segment.picks.start].into_iter().chain(segment.stretches.iter().copied());
    let ends = segment.stretches.iter().copied().chain([segment.picks.end]);
    let parts: Option<Vec<_>> = starts
        .zip(ends)
        .map(|(start, end)| table.needed(frames.get(start..end)?, start == 0))
        .collect();
    let picks = frames.get(segment.picks.clone())?.iter();
    Some(Wanted { parts: parts?, picks: picks.map(|frame| table.place(*frame as usize)).collect() })
}

/// Microseconds as FFmpeg reads them.
fn seconds(micros: i64) -> String {
    let sign = if micros < 0 { "-" } else { "" };
    let micros = micros.unsigned_abs();
    format!("{sign}{}.{:06}", micros / 1_000_000, micros % 1_000_000)
}
