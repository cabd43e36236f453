//! FFmpeg, and nothing else in the gateway knows it: what a clip is, and the frames one asks for.

mod colours;
mod confine;
mod frames;
mod probe;
mod segments;
mod select;
mod still;
mod tables;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::sync::OnceCell;
use tokio::time::Instant;

use confine::{Confined, Launch};
use tables::Tables;

pub use confine::MemoryFile;
pub use frames::FrameStream;
pub use probe::ClipProbe;

use super::fair::{FairQueue, Flow, Place};
use crate::error::{ErrorKind, GatewayError};
use crate::telemetry::Metrics;

/// Containers that are opened at all. None of them can name another file or host.
const FORMATS: &str = "mov,matroska,avi,mpegts,mpeg,flv,ogg,asf,gif,apng";
/// Most bytes a probe may print: some million frames.
const MAX_PROBE_BYTES: usize = 64 << 20;
/// What starting a child costs, in pixels decoded meanwhile.
const START_PIXELS: u64 = 120_000_000;
/// Processor time a child may use for each second it may take.
const CPU_PER_WALL: u32 = 4;

/// The two programs, and how many may run at once.
pub struct Ffmpeg {
    programs: Result<Programs, String>,
    has_fps_mode: OnceCell<bool>,
    has_zscale: OnceCell<bool>,
    places: Arc<FairQueue>,
    threads: u32,
    limits: FfmpegLimits,
    metrics: Arc<Metrics>,
}

struct Programs {
    ffmpeg: PathBuf,
    ffprobe: PathBuf,
}

/// How many processes, how long, how large.
#[derive(Clone, Copy, Debug)]
pub struct FfmpegLimits {
    /// Processes at once.
    pub max_processes: u32,
    /// Time for one run.
    pub timeout: Duration,
    /// Largest frame.
    pub max_frame_pixels: u64,
    /// Most pixels of all frames that are decoded only to learn which frames there are.
    pub max_decoded_pixels: u64,
    /// Longest clip.
    pub max_duration: Duration,
}

impl Ffmpeg {
    /// Looks for the programs in the directories of `search_path` (as in `PATH`).
    pub fn find(
        search_path: Option<&std::ffi::OsStr>,
        limits: FfmpegLimits,
        metrics: Arc<Metrics>,
    ) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
        Self {
            programs: find_programs(search_path),
            has_fps_mode: OnceCell::new(),
            has_zscale: OnceCell::new(),
            places: FairQueue::new(u64::from(limits.max_processes)),
            threads: (cores / limits.max_processes).clamp(1, 8),
            limits,
            metrics,
        }
    }

    /// Why clips cannot be read here, if they cannot.
    pub fn missing(&self) -> Option<&str> {
        self.programs.as_ref().err().map(String::as_str)
    }

    /// Size, rotation, frame count and rate of a clip, from its container where that can be
    /// trusted and by decoding where it cannot.
    ///
    /// # Errors
    /// `MediaRejected` for what is no clip or passes a limit, `MediaUnavailable` without FFmpeg,
    /// `DeadlineExceeded`.
    pub async fn probe(&self, clip: &MemoryFile, flow: &Flow) -> Result<ClipProbe, GatewayError> {
        let tables = Tables::read(clip).await?;
        let listing = match tables.as_deref().and_then(probe::Listing::of_tables) {
            Some(listing) => listing,
            None => self.list(clip, tables.as_deref(), flow).await?,
        };
        listing.check_size(self.limits.max_frame_pixels)?;
        listing.check_length(&self.limits)?;
        if listing.needs_zscale() {
            self.check_zscale(flow).await?;
        }
        let probe = if listing.is_trustworthy() {
            listing.into_probe()?
        } else {
            let cost = START_PIXELS + listing.coded_pixels();
            let decoded = self.run_probe(clip, probe::FRAME_ENTRIES, (flow, cost)).await?;
            listing.with_frames_of(&probe::Listing::parse(&decoded)?).into_probe()?
        };
        probe::check_duration(probe.info.duration_s, &self.limits)?;
        Ok(probe)
    }

    /// What ffprobe says of a clip's packets.
    async fn list(
        &self,
        clip: &MemoryFile,
        tables: Option<&Tables>,
        flow: &Flow,
    ) -> Result<probe::Listing, GatewayError> {
        let listing = self.run_probe(clip, probe::PACKET_ENTRIES, (flow, START_PIXELS)).await?;
        let mut listing = probe::Listing::parse(&listing)?;
        if let Some(tables) = tables {
            listing.compare(tables);
        }
        Ok(listing)
    }

    /// Decodes exactly these frames (ascending numbers), in order, upright, at source size.
    ///
    /// # Errors
    /// `MediaUnavailable` without FFmpeg; what the system said, as `Internal`.
    pub async fn frames<'a>(
        &'a self,
        clip: &'a MemoryFile,
        probe: &'a ClipProbe,
        frames: &'a [u64],
        flow: &'a Flow,
    ) -> Result<FrameStream<'a>, GatewayError> {
        let sync = self.sync_option(flow).await?;
        let job = frames::Job { ffmpeg: self, clip, probe, frames, flow, sync };
        Ok(FrameStream::new(job))
    }

    /// The option under which this FFmpeg is told to give frames as they come.
    async fn sync_option(&self, flow: &Flow) -> Result<&'static str, GatewayError> {
        let programs = self.programs()?;
        let reading = || async {
            let banner = self.ask(&programs.ffmpeg, &["-version"], flow).await?;
            Ok::<_, GatewayError>(knows_fps_mode(&banner))
        };
        let is_new = *self.has_fps_mode.get_or_try_init(reading).await?;
        Ok(if is_new { "-fps_mode" } else { "-vsync" })
    }

    /// # Errors
    /// `MediaUnavailable` if this FFmpeg cannot show clips of a high dynamic range.
    async fn check_zscale(&self, flow: &Flow) -> Result<(), GatewayError> {
        let ffmpeg = &self.programs()?.ffmpeg;
        let looking = || async {
            let list = self.ask(ffmpeg, &["-hide_banner", "-filters"], flow).await?;
            Ok::<_, GatewayError>(list.split_whitespace().any(|word| word == "zscale"))
        };
        if *self.has_zscale.get_or_try_init(looking).await? {
            return Ok(());
        }
        Err(unavailable("this one has a high dynamic range, and FFmpeg was built without zscale"))
    }

    /// Runs ffprobe and gives all it prints.
    async fn run_probe(
        &self,
        clip: &MemoryFile,
        entries: &str,
        turn: (&Flow, u64),
    ) -> Result<Vec<u8>, GatewayError> {
        let programs = self.programs()?;
        let threads = self.threads.to_string();
        let arguments = strings(&[
            "-hide_banner",
            "-loglevel",
            "error",
            "-threads",
            &threads,
            "-protocol_whitelist",
            "file",
            "-format_whitelist",
            FORMATS,
            "-select_streams",
            "V:0",
            "-show_entries",
            entries,
            "-of",
            "compact",
            &clip.path_in_child(),
        ]);
        let place = self.enter(turn.0, turn.1).await;
        let mut child = self.start(&programs.ffprobe, &arguments, Some(clip), place)?;
        let output = self.collect(&mut child).await?;
        if output.is_empty() {
            let reason = child.messages();
            return Err(rejected("the clip cannot be read: it is no video, or it is damaged")
                .because(reason));
        }
        Ok(output)
    }

    /// Reads a child's output to its end, within time and size.
    async fn collect(&self, child: &mut Confined) -> Result<Vec<u8>, GatewayError> {
        let mut stdout = child
            .take_output()
            .ok_or_else(|| GatewayError::internal("the child's output was already taken"))?;
        let mut output = Vec::new();
        let deadline = Instant::now() + self.limits.timeout;
        let reading = async {
            while stdout.read_buf(&mut output).await? > 0 && output.len() <= MAX_PROBE_BYTES {}
            child.wait().await
        };
        match tokio::time::timeout_at(deadline, reading).await {
            Err(_) => Err(too_slow(self.limits.timeout)),
            Ok(Err(error)) => Err(GatewayError::internal(format!("ffprobe: {error}"))),
            Ok(Ok(_)) if output.len() > MAX_PROBE_BYTES => {
                Err(rejected("the clip has too many frames to be listed"))
            }
            Ok(Ok(_)) => Ok(output),
        }
    }

    /// The place of one child, once it is this request's turn.
    async fn enter(&self, flow: &Flow, cost: u64) -> Place {
        self.places.enter(flow, 1, cost).await
    }

    fn start(
        &self,
        program: &Path,
        arguments: &[String],
        input: Option<&MemoryFile>,
        place: Place,
    ) -> Result<Confined, GatewayError> {
        let launch =
            Launch { program, arguments, input, cpu_time: self.limits.timeout * CPU_PER_WALL };
        Confined::start(&launch, place, &self.metrics).map_err(|error| {
            if error.kind() == std::io::ErrorKind::NotFound {
                unavailable(&format!("{} is gone", program.display()))
            } else {
                GatewayError::internal(format!("cannot start {}: {error}", program.display()))
            }
        })
    }

    /// What FFmpeg says of itself.
    async fn ask(
        &self,
        ffmpeg: &Path,
        arguments: &[&str],
        flow: &Flow,
    ) -> Result<String, GatewayError> {
        let place = self.enter(flow, START_PIXELS).await;
        let mut child = self.start(ffmpeg, &strings(arguments), None, place)?;
        let output = self.collect(&mut child).await?;
        Ok(String::from_utf8_lossy(&output).into_owned())
    }

    fn programs(&self) -> Result<&Programs, GatewayError> {
        self.programs.as_ref().map_err(|missing| unavailable(missing))
    }
}

fn find_programs(search_path: Option<&std::ffi::OsStr>) -> Result<Programs, String> {
    let find = |name: &str| {
        std::env::split_paths(search_path.unwrap_or_default())
            .map(|directory| directory.join(name))
            .find(|path| path.is_file())
            .ok_or_else(|| {
                format!(
                    "{name} is not installed on the gateway's machine; install the package ffmpeg"
                )
            })
    };
    Ok(Programs { ffmpeg: find("ffmpeg")?, ffprobe: find("ffprobe")? })
}

/// Whether it knows `-fps_mode` (5.1 and later; `-vsync` left with 8). Reads `ffmpeg version
/// 5.1.9-0+deb12u1 ...`; builds from git carry no number and are new.
fn knows_fps_mode(banner: &str) -> bool {
    let version = banner.split_whitespace().nth(2).unwrap_or("");
    let version = version.trim_start_matches('n');
    let mut numbers = version.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= (5, 1),
        _ => true,
    }
}

fn strings(parts: &[&str]) -> Vec<String> {
    parts.iter().map(|part| (*part).to_owned()).collect()
}

fn rejected(message: &str) -> GatewayError {
    GatewayError::new(ErrorKind::MediaRejected, message)
}

fn unavailable(missing: &str) -> GatewayError {
    GatewayError::new(ErrorKind::MediaUnavailable, format!("clips cannot be read: {missing}"))
}

pub(super) fn too_slow(limit: Duration) -> GatewayError {
    GatewayError::new(
        ErrorKind::DeadlineExceeded,
        format!("reading the clip took longer than {} s", limit.as_secs()),
    )
}
