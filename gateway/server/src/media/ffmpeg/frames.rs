//! Chosen frames of a clip, one after the other, as FFmpeg writes them.

use std::collections::VecDeque;
use std::time::Duration;

use gateway_media::RgbFrame;
use tokio::io::AsyncReadExt;
use tokio::process::ChildStdout;

use super::confine::{Confined, MemoryFile};
use super::joined::{self, Joined};
use super::segments::{self, Segment};
use super::select;
use super::{ClipProbe, FORMATS, Ffmpeg, START_PIXELS, rejected, strings, too_slow};
use crate::error::GatewayError;
use crate::media::fair::Flow;
use crate::media::source::memory_failure;

/// Conversion to RGB that gives the same bytes on every processor.
const EXACT: &str = "bicubic+accurate_rnd+full_chroma_int+bitexact";

/// Which frames of which clip, for whom.
#[derive(Clone, Copy)]
pub(super) struct Job<'a> {
    pub(super) ffmpeg: &'a Ffmpeg,
    pub(super) clip: &'a MemoryFile,
    pub(super) probe: &'a ClipProbe,
    /// Ascending frame numbers.
    pub(super) frames: &'a [u64],
    pub(super) flow: &'a Flow,
    /// Whether this FFmpeg knows `-fps_mode`.
    pub(super) has_fps_mode: bool,
}

/// Frames on their way from child processes, one process at a time; dropping it ends the child.
pub struct FrameStream<'a> {
    job: Job<'a>,
    segments: VecDeque<Segment>,
    running: Option<Running>,
    given: usize,
}

/// What a child opens.
#[derive(Clone, Copy)]
enum Input<'a> {
    Clip,
    List(&'a MemoryFile),
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
        Self { job, segments, running: None, given: 0 }
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
                let Some(segment) = self.segments.pop_front() else { break };
                self.running = Some(self.job.start(segment).await?);
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
                Ok(Err(_)) if run.segment.is_seek => self.decode_the_rest(),
                Ok(Err(_)) => return Err(self.cut_short()),
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

    /// The index led astray: what was given is right, the rest is counted from the beginning.
    fn decode_the_rest(&mut self) {
        let picks = self.given..self.job.frames.len();
        let decoded = self.job.frames[picks.clone()].last().map_or(0, |last| last + 1);
        self.segments = VecDeque::from([Segment::whole(picks, decoded)]);
        self.running = None;
    }

    fn cut_short(&mut self) -> GatewayError {
        let (given, expected) = (self.given, self.job.frames.len());
        let messages = self.running.as_mut().map_or_else(String::new, |run| run.child.messages());
        rejected(&format!(
            "the clip is damaged: only {given} of the {expected} chosen frames could be decoded"
        ))
        .because(messages)
    }
}

impl Job<'_> {
    async fn start(&self, segment: Segment) -> Result<Running, GatewayError> {
        let program = &self.ffmpeg.programs()?.ffmpeg;
        let joined = self.joined(&segment);
        let list = joined.as_ref().map(|joined| MemoryFile::new(joined.list.as_bytes()));
        let list = list.transpose().map_err(|error| memory_failure(&error))?;
        let input = match &list {
            Some(list) => Input::List(list),
            None => Input::Clip,
        };
        let arguments = self.arguments(&segment, input, joined.as_ref());
        let inputs = [Some(self.clip), list.as_ref()];
        let cost = START_PIXELS + segment.decoded.saturating_mul(self.probe.coded.pixels());
        let turn = (self.flow, cost);
        let mut child = self.ffmpeg.start(program, &arguments, inputs, turn).await?;
        let output = child
            .take_output()
            .ok_or_else(|| GatewayError::internal("the child's output was already taken"))?;
        Ok(Running { child, output, segment, patience: self.ffmpeg.limits.timeout })
    }

    /// The list to play instead of the clip, for a segment of several stretches.
    fn joined(&self, segment: &Segment) -> Option<Joined> {
        let table = self.probe.seek.as_ref()?;
        Joined::new(table, segment, self.frames, &self.clip.path_in_child())
    }

    /// One argument vector, written by us alone.
    fn arguments(
        &self,
        segment: &Segment,
        input: Input<'_>,
        joined: Option<&Joined>,
    ) -> Vec<String> {
        let threads = self.ffmpeg.threads.to_string();
        let mut arguments = strings(&["-nostdin", "-hide_banner", "-loglevel", "error"]);
        arguments.extend(strings(&["-threads", &threads, "-protocol_whitelist", "file"]));
        arguments.extend(strings(&["-noautorotate"]));
        // stamps stay as in the file: by them, not by counting, frames are told apart
        let path = match input {
            Input::List(list) => {
                let formats = format!("{FORMATS},concat");
                arguments.extend(strings(&["-copyts", "-format_whitelist", &formats]));
                arguments.extend(strings(&["-f", "concat", "-safe", "0"]));
                list.path_in_child()
            }
            Input::Clip => {
                arguments.extend(strings(&["-format_whitelist", FORMATS]));
                if let Some(seconds) = self.seek_seconds(segment) {
                    arguments.extend(strings(&["-copyts", "-seek_timestamp", "1"]));
                    arguments.extend(strings(&["-noaccurate_seek", "-ss", &seconds]));
                }
                self.clip.path_in_child()
            }
        };
        let filter = self.filter(segment, joined);
        arguments.extend(strings(&["-i", &path, "-map", "0:V:0", "-an", "-sn", "-dn"]));
        let sync = if self.has_fps_mode { "-fps_mode" } else { "-vsync" };
        let count = segment.picks.len().to_string();
        arguments.extend(strings(&["-vf", &filter, sync, "passthrough", "-frames:v", &count]));
        arguments.extend(strings(&["-f", "rawvideo", "-pix_fmt", "rgb24", "pipe:1"]));
        arguments
    }

    /// When the first pick of a segment is shown, as FFmpeg reads it, rounded up: a key frame at
    /// that very time must not be missed.
    fn seek_seconds(&self, segment: &Segment) -> Option<String> {
        let table = self.probe.seek.as_ref().filter(|_| segment.is_seek)?;
        Some(joined::seconds(table.micros(self.frames[segment.picks.start] as usize)))
    }

    /// The filter graph: choose, convert at the size the container promised, turn upright.
    fn filter(&self, segment: &Segment, joined: Option<&Joined>) -> String {
        let frames = &self.frames[segment.picks.clone()];
        let table = self.probe.seek.as_ref().filter(|_| segment.is_seek);
        let chosen = match (joined, table) {
            (Some(joined), _) => select::by_stamp(&joined.stamps),
            (None, Some(table)) => {
                let stamps: Vec<i64> =
                    frames.iter().map(|frame| table.stamps[*frame as usize]).collect();
                select::by_stamp(&stamps)
            }
            (None, None) => select::by_number(frames),
        };
        let (width, height) = (self.probe.coded.width, self.probe.coded.height);
        let turn = self.probe.turn;
        let turn = if turn.is_empty() { String::new() } else { format!(",{turn}") };
        // scaling changes nothing unless the stream changes its size, and then keeps ours
        format!("select='{chosen}',scale={width}:{height}:flags={EXACT},format=rgb24{turn}")
    }
}
