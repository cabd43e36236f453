//! Media of `file:` URLs: only under one configured directory, and nothing that leads out of it.

#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use url::Url;

use super::data_url::too_large;
use crate::admission::{Admission, ByteLease};
use crate::error::{ErrorKind, GatewayError};

/// Whether the text claims to be a `file:` URL.
pub fn is_file_url(url: &str) -> bool {
    url.as_bytes().get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"file:"))
}

/// A directory whose files may be asked for.
#[derive(Clone, Debug)]
pub struct LocalFiles {
    root: PathBuf,
    directory: Arc<File>,
}

impl LocalFiles {
    /// Opens the directory.
    ///
    /// # Errors
    /// What the system said.
    pub fn open(root: &Path) -> std::io::Result<Self> {
        let flags = libc::O_PATH | libc::O_DIRECTORY;
        let directory = File::options().read(true).custom_flags(flags).open(root)?;
        Ok(Self { root: root.to_owned(), directory: Arc::new(directory) })
    }

    /// The bytes of the file that a URL names, held under `lease`.
    ///
    /// # Errors
    /// `InvalidRequest` for what is no file under the directory, `TooLarge`, `Overloaded` when the
    /// byte budget is spent.
    pub async fn read(
        &self,
        url: &str,
        max_bytes: u64,
        (admission, lease): (&Admission, &mut ByteLease),
    ) -> Result<Bytes, GatewayError> {
        let place = self.place(url)?;
        let directory = Arc::clone(&self.directory);
        let (file, length) = on_a_thread(move || open_beneath(&directory, &place)).await?;
        if length > max_bytes {
            return Err(too_large(length, max_bytes));
        }
        admission.grow(lease, length)?;
        on_a_thread(move || {
            let mut bytes = Vec::new();
            // a file that grows meanwhile ends where it was
            file.take(length).read_to_end(&mut bytes)?;
            Ok(Bytes::from(bytes))
        })
        .await
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

/// Opens a plain file; every step of the way, symbolic links included, stays in the directory.
fn open_beneath(directory: &File, place: &CString) -> std::io::Result<(File, u64)> {
    // SAFETY: an all-zero `open_how` is a valid one.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    // a pipe must not be waited for
    how.flags = (libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY) as u64;
    how.resolve = libc::RESOLVE_BENEATH | libc::RESOLVE_NO_MAGICLINKS;
    // SAFETY: name and structure live through the call; the descriptor it gives is ours alone.
    let file = unsafe {
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
        File::from_raw_fd(descriptor as i32)
    };
    let facts = file.metadata()?;
    if !facts.is_file() {
        return Err(std::io::Error::other("not a plain file"));
    }
    Ok((file, facts.len()))
}

async fn on_a_thread<T: Send + 'static>(
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T, GatewayError> {
    let done = tokio::task::spawn_blocking(work).await;
    let done = done.map_err(|error| GatewayError::internal(format!("a thread died: {error}")))?;
    done.map_err(|error| refused("it cannot be read").because(error.to_string()))
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
        let files = LocalFiles::open(&root).unwrap();
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
        let files = LocalFiles::open(root.path()).unwrap();
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
}
