//! Child processes that read one clip from memory and can do little else.

#![allow(unsafe_code)]

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use gateway_media::mp4::ReadAt;
use tokio::process::{Child, ChildStdout, Command};

use crate::media::fair::Place;
use crate::priority;
use crate::telemetry::Metrics;

/// Address space: decoders of 8K clips stay below it, a bomb does not pass it.
const MAX_ADDRESS_BYTES: u64 = 4 << 30;
const MAX_DESCRIPTORS: u64 = 64;
/// Largest file a child may write; only its messages go to a file.
const MAX_MESSAGE_BYTES: u64 = 64 << 10;
/// Larger than the default, so that a frame needs fewer wake-ups.
const PIPE_BYTES: i32 = 1 << 20;
/// Messages kept for the log.
const LOGGED_BYTES: u64 = 2048;

/// A clip in an anonymous, sealed memory file.
#[derive(Clone, Debug)]
pub struct MemoryFile {
    file: Arc<File>,
    length: u64,
}

impl MemoryFile {
    /// Copies the bytes into a memory file that nobody can change afterwards.
    ///
    /// # Errors
    /// What the system said.
    pub fn new(bytes: &[u8]) -> std::io::Result<Self> {
        Self::written(|file| file.write_all(bytes))
    }

    /// A memory file that this writes, and nobody can change afterwards.
    ///
    /// # Errors
    /// What the system or the writer said.
    pub(super) fn written(
        write: impl FnOnce(&mut File) -> std::io::Result<()>,
    ) -> std::io::Result<Self> {
        let mut file = anonymous_file(libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)?;
        write(&mut file)?;
        let seals =
            libc::F_SEAL_WRITE | libc::F_SEAL_GROW | libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;
        // SAFETY: the descriptor is open and owned by `file`; fcntl changes no memory of ours.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        let length = file.metadata()?.len();
        Ok(Self { file: Arc::new(file), length })
    }

    /// The path under which a child that was given this file finds it.
    pub fn path_in_child(&self) -> String {
        format!("/proc/self/fd/{}", self.file.as_raw_fd())
    }

    /// Its number in this process, for those who are to find it there.
    pub fn descriptor(&self) -> u32 {
        self.file.as_raw_fd().unsigned_abs()
    }
}

/// Reads without moving anyone else's place in the file.
impl ReadAt for MemoryFile {
    fn length(&self) -> u64 {
        self.length
    }

    fn read_at(&self, place: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        self.file.read_exact_at(buffer, place)
    }
}

fn anonymous_file(flags: libc::c_uint) -> std::io::Result<File> {
    // SAFETY: the name is a valid C string; the descriptor returned is ours alone.
    unsafe {
        let descriptor = libc::memfd_create(c"m3stack-clip".as_ptr(), flags);
        if descriptor < 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(File::from_raw_fd(descriptor))
    }
}

/// A running child; dropping it kills its whole process group.
#[derive(Debug)]
pub(super) struct Confined {
    child: Child,
    messages: File,
    metrics: Arc<Metrics>,
    /// Taken when it dies.
    place: Option<Place>,
}

/// What a child needs to start.
pub(super) struct Launch<'a> {
    pub(super) program: &'a Path,
    pub(super) arguments: &'a [String],
    /// A file that it finds under the name it has here.
    pub(super) input: Option<&'a MemoryFile>,
    /// Processor time, over all threads.
    pub(super) cpu_time: Duration,
}

impl Confined {
    /// Starts the child: empty environment, no new privileges, limits on memory, time, files.
    ///
    /// # Errors
    /// What the system said; `NotFound` if the program is not there.
    pub(super) fn start(
        launch: &Launch<'_>,
        place: Place,
        metrics: &Arc<Metrics>,
    ) -> std::io::Result<Self> {
        let messages = anonymous_file(libc::MFD_CLOEXEC)?;
        let mut command = Command::new(launch.program);
        command
            .args(launch.arguments)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(messages.try_clone()?)
            .process_group(0)
            .kill_on_drop(true);
        let input = launch.input.map(|input| input.file.as_raw_fd());
        let cpu_seconds = launch.cpu_time.as_secs().max(1);
        let parent = std::process::id();
        // SAFETY: between fork and exec `confine` only makes async-signal-safe system calls.
        unsafe {
            command.pre_exec(move || confine(input, cpu_seconds, parent));
        }
        let child = command.spawn()?;
        metrics.video_processes(1);
        let confined = Self { child, messages, metrics: Arc::clone(metrics), place: Some(place) };
        if let Some(stdout) = &confined.child.stdout {
            // SAFETY: the descriptor is open; a refusal only leaves the pipe smaller.
            unsafe { libc::fcntl(stdout.as_raw_fd(), libc::F_SETPIPE_SZ, PIPE_BYTES) };
        }
        Ok(confined)
    }

    /// The child's output; given once.
    pub(super) fn take_output(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// The process id, while it runs.
    #[cfg(test)]
    pub(super) fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// Waits for the end.
    pub(super) async fn wait(&mut self) -> std::io::Result<ExitStatus> {
        self.child.wait().await
    }

    /// The beginning of what the child wrote to its standard error, for the log.
    pub(super) fn messages(&mut self) -> String {
        let mut bytes = Vec::new();
        let read = self
            .messages
            .seek(SeekFrom::Start(0))
            .and_then(|_| (&mut self.messages).take(LOGGED_BYTES).read_to_end(&mut bytes));
        match read {
            Ok(_) => String::from_utf8_lossy(&bytes).trim().replace('\n', "; "),
            Err(error) => format!("(messages unreadable: {error})"),
        }
    }
}

impl Drop for Confined {
    fn drop(&mut self) {
        self.metrics.video_processes(-1);
        // the id is gone once the child was waited for, so no stranger can be hit
        let Some(id) = self.child.id().and_then(|id| i32::try_from(id).ok()) else { return };
        // SAFETY: a signal to the group that this child leads.
        unsafe { libc::killpg(id, libc::SIGKILL) };
        // death takes its time when memory is to be given back; only then may the next one begin
        if let (Some(place), Ok(runtime)) =
            (self.place.take(), tokio::runtime::Handle::try_current())
        {
            runtime.spawn_blocking(move || {
                wait_for_death(id);
                drop(place);
            });
        }
    }
}

/// Returns when a killed child is dead, or was waited for by another.
fn wait_for_death(id: libc::pid_t) {
    let Ok(id) = libc::id_t::try_from(id) else { return };
    // SAFETY: an all-zero `siginfo_t` is a valid one to be written to; the child is only looked at.
    unsafe {
        let mut info = std::mem::zeroed();
        libc::waitid(libc::P_PID, id, &raw mut info, libc::WEXITED | libc::WNOWAIT);
    }
}

/// Runs in the child before it becomes FFmpeg.
fn confine(input: Option<RawFd>, cpu_seconds: u64, parent: u32) -> std::io::Result<()> {
    let limits = [
        (libc::RLIMIT_AS, MAX_ADDRESS_BYTES),
        (libc::RLIMIT_CPU, cpu_seconds),
        (libc::RLIMIT_NOFILE, MAX_DESCRIPTORS),
        (libc::RLIMIT_FSIZE, MAX_MESSAGE_BYTES),
        (libc::RLIMIT_CORE, 0),
    ];
    for (resource, limit) in limits {
        let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
        // SAFETY: the struct lives through the call.
        check(unsafe { libc::setrlimit(resource, &raw const limit) })?;
    }
    // SAFETY: plain system calls on our own process; SIG_IGN makes a full message file a failed
    // write instead of a death.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
        // a gateway that is killed cannot kill its children; all its threads live as long as it
        check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0))?;
        if libc::getppid().unsigned_abs() != parent {
            return Err(std::io::ErrorKind::Interrupted.into());
        }
        if let Some(input) = input {
            check(libc::fcntl(input, libc::F_SETFD, 0))?;
        }
    }
    priority::step_back();
    Ok(())
}

fn check(outcome: libc::c_int) -> std::io::Result<()> {
    if outcome == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}
