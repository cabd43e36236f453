//! Media of `file:` URLs: only under one configured directory, and nothing that leads out of it.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use url::Url;

use super::data_url::too_large;
use super::fetch::too_late;
use crate::admission::{Admission, ByteLease};
use crate::blocking::BlockingPool;
use crate::error::{ErrorKind, GatewayError};

/// Files that are opened or read at one time: a file system that hangs takes no more threads.
const READS_AT_ONCE: u32 = 8;
/// Times that the system may say that something was renamed on the way.
const MAX_ATTEMPTS: u32 = 64;

/// Whether the text claims to be a `file:` URL.
pub fn is_file_url(url: &str) -> bool {
    url.as_bytes().get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"file:"))
}

/// A directory whose files may be asked for.
#[derive(Clone, Debug)]
pub struct LocalFiles {
    root: PathBuf,
    directory: Arc<File>,
    readers: BlockingPool,
    timeout: Duration,
}

impl LocalFiles {
    /// Opens the directory; each of its files may take that long.
    ///
    /// # Errors
    /// What the system said, also if it does not know how to stay in a directory.
    pub fn open(root: &Path, timeout: Duration) -> std::io::Result<Self> {
        let flags = libc::O_PATH | libc::O_DIRECTORY;
        let directory = File::options().read(true).custom_flags(flags).open(root)?;
        openat2(&directory, c".", flags).map_err(|error| {
            let needs = "media_root needs openat2 (Linux 5.6, and a sandbox that allows it)";
            std::io::Error::new(error.kind(), format!("{needs}: {error}"))
        })?;
        Ok(Self {
            root: root.to_owned(),
            directory: Arc::new(directory),
            readers: BlockingPool::new(READS_AT_ONCE),
            timeout,
        })
    }

    /// The bytes of the file that a URL names, held under `lease`.
    ///
    /// # Errors
    /// `InvalidRequest` for what is no file under the directory, `TooLarge`, `MediaOriginTimeout`,
    /// `Overloaded` when the byte budget is spent.
    pub async fn read(
        &self,
        url: &str,
        max_bytes: u64,
        held: (&Admission, &mut ByteLease),
    ) -> Result<Bytes, GatewayError> {
        let work = self.read_whole(url, max_bytes, held);
        tokio::time::timeout(self.timeout, work).await.map_err(|_| too_late(self.timeout))?
    }

    async fn read_whole(
        &self,
        url: &str,
        max_bytes: u64,
        (admission, lease): (&Admission, &mut ByteLease),
    ) -> Result<Bytes, GatewayError> {
        let place = self.place(url)?;
        let directory = Arc::clone(&self.directory);
        let opening = self.on_a_thread(move || open_beneath(&directory, &place));
        let (file, length) = opening.await?;
        if length > max_bytes {
            return Err(too_large(length, max_bytes));
        }
        admission.grow(lease, length)?;
        let capacity = usize::try_from(length).unwrap_or(usize::MAX);
        let reading = self.on_a_thread(move || {
            // as much as is held for it; a file that grows meanwhile ends where it was
            let mut bytes = Vec::with_capacity(capacity);
            file.take(length).read_to_end(&mut bytes)?;
            Ok(Bytes::from(bytes))
        });
        reading.await
    }

    async fn on_a_thread<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
    ) -> Result<T, GatewayError> {
        let done = self.readers.run(work).await?;
        done.map_err(|error| refused("it cannot be read").because(error.to_string()))
    }

    /// Where a URL points, from the directory on.
    fn place(&self, url: &str) -> Result<CString, GatewayError> {
        let path = Url::parse(url).ok().and_then(|url| {
            let is_here = matches!(url.host_str(), None | Some("localhost"));
            url.to_file_path().ok().filter(|_| is_here)
        });
        let place = path.as_deref().and_then(|path| path.strip_prefix(&self.root).ok());
        place
            .filter(|place| !place.as_os_str().is_empty())
            .and_then(|place| CString::new(place.as_os_str().as_bytes()).ok())
            .ok_or_else(|| refused("it is not under the configured directory"))
    }
}

/// Opens a plain file under the directory.
fn open_beneath(directory: &File, place: &CStr) -> std::io::Result<(File, u64)> {
    // a pipe must not be waited for
    let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = undisturbed(|| openat2(directory, place, flags))?;
    let facts = file.metadata()?;
    if !facts.is_file() {
        return Err(std::io::Error::other("not a plain file"));
    }
    Ok((file, facts.len()))
}

/// Tries again while the system cannot tell whether a step of the way left the directory, because
/// something was renamed meanwhile.
fn undisturbed<T>(mut attempt: impl FnMut() -> std::io::Result<T>) -> std::io::Result<T> {
    let mut outcome = attempt();
    for _ in 1..MAX_ATTEMPTS {
        match &outcome {
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
            _ => break,
        }
        std::thread::yield_now();
        outcome = attempt();
    }
    outcome
}

/// Opens what is under the directory; every step of the way, symbolic links included, stays in it.
fn openat2(directory: &File, place: &CStr, flags: libc::c_int) -> std::io::Result<File> {
    // SAFETY: an all-zero `open_how` is a valid one.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = (flags | libc::O_CLOEXEC) as u64;
    how.resolve = libc::RESOLVE_BENEATH | libc::RESOLVE_NO_MAGICLINKS;
    // SAFETY: name and structure live through the call; the descriptor it gives is ours alone.
    unsafe {
        let descriptor = libc::syscall(
            libc::SYS_openat2,
            directory.as_raw_fd(),
            place.as_ptr(),
            &raw const how,
            size_of::<libc::open_how>(),
        );
        if descriptor < 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(File::from_raw_fd(descriptor as i32))
    }
}

/// A `file:` URL that is not served; the caller learns nothing about other files.
pub fn refused(reason: &str) -> GatewayError {
    let message = format!("the media file cannot be had: {reason}");
    let mut error = GatewayError::new(ErrorKind::InvalidRequest, message);
    error.code = "media_url_refused";
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::Metrics;
    use std::os::unix::fs::symlink;

    const A_MINUTE: Duration = Duration::from_secs(60);

    fn admission(max_bytes: u64) -> Admission {
        Admission::new(1, max_bytes, Arc::default(), Arc::new(Metrics::default()))
    }

    async fn read(files: &LocalFiles, url: &str) -> Result<Bytes, GatewayError> {
        files.read(url, 1000, (&admission(1 << 20), &mut ByteLease::default())).await
    }

    #[tokio::test]
    async fn files_under_the_directory_are_read_and_nothing_outside_it() {
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("secret"), b"secret").unwrap();
        let root = outside.path().join("media");
        std::fs::create_dir_all(root.join("a b")).unwrap();
        std::fs::write(root.join("a b/card.png"), b"card").unwrap();
        symlink("a b/card.png", root.join("within")).unwrap();
        symlink("../secret", root.join("out")).unwrap();
        symlink(outside.path().join("secret"), root.join("far")).unwrap();
        symlink("/proc/self/root", root.join("magic")).unwrap();
        let files = LocalFiles::open(&root, A_MINUTE).unwrap();
        let base = format!("file://{}", root.display());

        for place in ["a%20b/card.png", "within", "a%20b/../within", "./within"] {
            assert_eq!(read(&files, &format!("{base}/{place}")).await.unwrap(), "card", "{place}");
        }
        let local = format!("file://localhost{}/within", root.display());
        assert_eq!(read(&files, &local).await.unwrap(), "card");
        let secret = format!("file://{}/secret", outside.path().display());
        let elsewhere = format!("file://elsewhere{}/within", root.display());
        let places =
            ["out", "far", "magic/etc/hostname", "a b", "", "none", "../secret", "%2e%2e/secret"];
        let inside = places.map(|place| format!("{base}/{place}"));
        for url in inside.iter().chain([&secret, &elsewhere, &"file:///etc/hostname".to_owned()]) {
            let refused = read(&files, url).await.unwrap_err();
            assert_eq!(
                (refused.kind, refused.code),
                (ErrorKind::InvalidRequest, "media_url_refused")
            );
            assert!(!refused.message.contains("secret"), "{refused}");
        }
    }

    #[tokio::test]
    async fn bytes_are_bounded_and_counted_and_a_pipe_is_not_waited_for() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("large"), vec![7; 1001]).unwrap();
        std::fs::write(root.path().join("fits"), vec![7; 1000]).unwrap();
        let pipe = CString::new(root.path().join("pipe").as_os_str().as_bytes()).unwrap();
        // SAFETY: a valid name that lives through the call.
        assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
        let files = LocalFiles::open(root.path(), A_MINUTE).unwrap();
        let url = |name: &str| format!("file://{}/{name}", root.path().display());

        assert_eq!(read(&files, &url("large")).await.unwrap_err().kind, ErrorKind::TooLarge);
        assert_eq!(read(&files, &url("pipe")).await.unwrap_err().kind, ErrorKind::InvalidRequest);
        let (small, mut lease) = (admission(0), ByteLease::default());
        let full = files.read(&url("fits"), 1000, (&small, &mut lease)).await.unwrap_err();
        assert_eq!(full.kind, ErrorKind::Overloaded);
        let (door, mut lease) = (admission(1 << 20), ByteLease::default());
        assert_eq!(files.read(&url("fits"), 1000, (&door, &mut lease)).await.unwrap().len(), 1000);
        assert_eq!(lease.bytes(), 1000);
    }

    #[tokio::test]
    async fn a_file_takes_the_memory_that_is_held_for_it_and_no_more() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("clip"), vec![7; 100_000]).unwrap();
        let files = LocalFiles::open(root.path(), A_MINUTE).unwrap();
        let (door, mut lease) = (admission(1 << 20), ByteLease::default());
        let url = format!("file://{}/clip", root.path().display());

        let bytes = files.read(&url, 1 << 20, (&door, &mut lease)).await.unwrap();

        assert_eq!((bytes.len(), lease.bytes()), (100_000, 100_000));
        assert_eq!(bytes.try_into_mut().unwrap().capacity(), 100_000);
    }

    #[tokio::test]
    async fn a_file_system_that_hangs_is_waited_for_as_long_as_an_origin() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("clip"), b"clip").unwrap();
        let files = LocalFiles::open(root.path(), A_MINUTE).unwrap();
        // as if all of them stood still
        let timeout = Duration::from_millis(5);
        let files = LocalFiles { readers: BlockingPool::new(0), timeout, ..files };

        let late = read(&files, &format!("file://{}/clip", root.path().display())).await;

        assert_eq!(late.unwrap_err().kind, ErrorKind::MediaOriginTimeout);
    }

    #[test]
    fn what_was_renamed_on_the_way_is_looked_for_again_a_bounded_number_of_times() {
        let again = || std::io::Error::from_raw_os_error(libc::EAGAIN);
        let mut attempts = 0;
        let found = undisturbed(|| {
            attempts += 1;
            if attempts < 5 { Err(again()) } else { Ok(attempts) }
        });
        assert_eq!(found.unwrap(), 5);
        let mut attempts = 0;
        let never = undisturbed(|| {
            attempts += 1;
            Err::<(), _>(again())
        });
        assert_eq!(never.unwrap_err().raw_os_error(), Some(libc::EAGAIN));
        assert_eq!(attempts, MAX_ATTEMPTS);
        let mut attempts = 0;
        let gone = undisturbed(|| {
            attempts += 1;
            Err::<(), _>(std::io::Error::from_raw_os_error(libc::ENOENT))
        });
        assert_eq!((gone.unwrap_err().raw_os_error(), attempts), (Some(libc::ENOENT), 1));
    }

    /// Has the system refuse one call of the calling thread, for ever.
    fn forbid(call: libc::c_long) {
        let step =
            |code: u32, yes, no, k| libc::sock_filter { code: code as u16, jt: yes, jf: no, k };
        let refusal = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
        let mut steps = [
            // the number of the call is what the filter sees first
            step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
            step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, call as u32),
            step(libc::BPF_RET | libc::BPF_K, 0, 0, refusal),
            step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let filter = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
        // SAFETY: the filter lives through the call and holds for this thread alone.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            let set =
                libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter);
            assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
        }
    }

    #[test]
    fn a_system_that_cannot_stay_in_a_directory_is_refused_at_the_start() {
        let opening = std::thread::spawn(|| {
            let root = tempfile::tempdir().unwrap();
            forbid(libc::SYS_openat2);
            LocalFiles::open(root.path(), A_MINUTE).map(|_| ())
        });
        let refused = opening.join().unwrap().unwrap_err().to_string();
        assert!(refused.contains("media_root needs openat2"), "{refused}");
    }
}
