//! A clip's own tables: what they say in place of a listing, and files of the needed samples alone.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use gateway_media::mp4::{Excerpt, Movie, ReadAt, Role, Sample};

use super::confine::MemoryFile;
use crate::error::GatewayError;
use crate::priority;

/// Written to a memory file at a time.
const WRITE_BYTES: usize = 1 << 20;

/// A plain MP4 or QuickTime file's tables.
#[derive(Debug)]
pub(super) struct Tables {
    pub(super) movie: Movie,
    /// Of each sample: whether it is a key frame that resets the decoder.
    pub(super) is_clean: Vec<bool>,
}

/// A file of some of a clip's samples, and when the picks are shown in it, in its ticks.
#[derive(Debug)]
pub(super) struct ClipExcerpt {
    pub(super) file: MemoryFile,
    pub(super) stamps: Vec<i64>,
}

/// Which samples to take, by their places in decoding order.
#[derive(Debug)]
pub(super) struct Wanted {
    /// What must be decoded, ascending.
    pub(super) parts: Vec<Range<usize>>,
    /// What is wanted itself, in the order in which it is shown.
    pub(super) picks: Vec<usize>,
}

impl Tables {
    /// The tables of a clip, if it is of the plain kind.
    ///
    /// # Errors
    /// `Internal` if a thread died.
    pub(super) async fn read(clip: &MemoryFile) -> Result<Option<Arc<Self>>, GatewayError> {
        let clip = clip.clone();
        on_a_thread(move || Self::read_now(&clip).map(Arc::new)).await
    }

    fn read_now(clip: &MemoryFile) -> Option<Self> {
        let movie = Movie::read(clip)?;
        let mut bytes = Vec::new();
        let is_looked_at = movie.tells_roles_by_bytes();
        let is_clean = movie.samples.iter().map(|sample| {
            sample.is_key
                && (!is_looked_at || read_sample(clip, *sample, &mut bytes).is_ok())
                && movie.role(*sample, &bytes) == Role::Refresh
        });
        let is_clean = is_clean.collect();
        Some(Self { movie, is_clean })
    }

    /// A file of the wanted samples and those that they need; `None` if it cannot be written.
    ///
    /// # Errors
    /// `Internal` if a thread died.
    pub(super) async fn excerpt(
        self: &Arc<Self>,
        clip: &MemoryFile,
        wanted: Wanted,
    ) -> Result<Option<ClipExcerpt>, GatewayError> {
        let (tables, clip) = (Arc::clone(self), clip.clone());
        on_a_thread(move || tables.excerpt_now(&clip, &wanted)).await
    }

    fn excerpt_now(&self, clip: &MemoryFile, wanted: &Wanted) -> Option<ClipExcerpt> {
        let picked: Option<Vec<Sample>> =
            wanted.picks.iter().map(|place| self.movie.samples.get(*place).copied()).collect();
        let picked = picked?;
        let mut excerpt = Excerpt::new(&self.movie);
        let file = MemoryFile::written(|file| self.write(clip, wanted, (&mut excerpt, file)));
        let stamps = picked.into_iter().map(|sample| excerpt.stamp(sample)).collect();
        Some(ClipExcerpt { file: file.ok()?, stamps })
    }

    fn write(
        &self,
        clip: &MemoryFile,
        wanted: &Wanted,
        (excerpt, file): (&mut Excerpt, &mut File),
    ) -> std::io::Result<()> {
        let mut picks = wanted.picks.clone();
        picks.sort_unstable();
        let mut out = BufWriter::with_capacity(WRITE_BYTES, &mut *file);
        out.write_all(&excerpt.head())?;
        let mut bytes = Vec::new();
        for place in wanted.parts.iter().cloned().flatten() {
            let sample = self.movie.samples[place];
            read_sample(clip, sample, &mut bytes)?;
            let is_free = self.movie.role(sample, &bytes) == Role::Disposable;
            if !is_free || picks.binary_search(&place).is_ok() {
                excerpt.push(sample);
                out.write_all(&bytes)?;
            }
        }
        let index = excerpt.index(&self.movie).ok_or(std::io::ErrorKind::InvalidData)?;
        out.write_all(&index)?;
        out.into_inner().map_err(std::io::IntoInnerError::into_error)?;
        file.write_all_at(&excerpt.head(), 0)
    }
}

fn read_sample(clip: &MemoryFile, sample: Sample, bytes: &mut Vec<u8>) -> std::io::Result<()> {
    bytes.resize(sample.bytes as usize, 0);
    clip.read_at(sample.place, bytes)
}

async fn on_a_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, GatewayError> {
    let running = tokio::task::spawn_blocking(|| {
        priority::take_time();
        work()
    });
    running.await.map_err(|error| GatewayError::internal(format!("a thread died: {error}")))
}
