//! Patch bytes that a worker of this host reads from sealed memory files of this process. They are
//! named by process and descriptor, in no directory: whoever dies, nothing is left behind.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::wire::proto;
use crate::admission::{Admission, ByteLease};
use crate::media::ffmpeg::MemoryFile;
use crate::telemetry::Metrics;

/// Bytes of all files at one time, in KiB; what finds no room is sent.
const MAX_KIB: usize = 64 << 10;
/// Files at one time: each takes a descriptor.
const MAX_FILES: usize = 128;
/// Fewer bytes are sent: a file takes five system calls.
const MIN_BYTES: usize = 64 << 10;

/// What the files of all calls may take; their bytes count among those that all requests hold.
#[derive(Debug)]
pub(super) struct SharedMemory {
    admission: Arc<Admission>,
    kib: Arc<Semaphore>,
    files: Arc<Semaphore>,
    /// A file that a worker must have read, and what is in it.
    probe: Option<(MemoryFile, Bytes)>,
    metrics: Arc<Metrics>,
}

impl SharedMemory {
    pub(super) fn new(admission: Arc<Admission>, metrics: Arc<Metrics>) -> Self {
        let semaphore = |count| Arc::new(Semaphore::new(count));
        let token = Bytes::copy_from_slice(&rand::random::<[u8; 16]>());
        // where there are no memory files, pieces are sent
        let probe = MemoryFile::new(&token).ok().map(|file| (file, token));
        Self { admission, kib: semaphore(MAX_KIB), files: semaphore(MAX_FILES), probe, metrics }
    }

    /// What a worker is asked to read, and what it finds there: only one of this host, with the
    /// same process numbers, and with the rights, can.
    pub(super) fn probe(&self) -> Option<(proto::SharedPiece, Bytes)> {
        let (file, token) = self.probe.as_ref()?;
        Some((piece(file, token.len()), token.clone()))
    }
}

/// Ways for the patches of one call, and its files; they live until it lets go of them.
#[derive(Clone, Debug)]
pub(super) struct Ways {
    memory: Arc<SharedMemory>,
    reads_memory: bool,
    held: Arc<Mutex<Vec<Held>>>,
}

#[derive(Debug)]
struct Held {
    _file: MemoryFile,
    _room: [OwnedSemaphorePermit; 2],
    _lease: ByteLease,
}

impl Ways {
    pub(super) fn new(memory: &Arc<SharedMemory>, reads_memory: bool) -> Self {
        Self { memory: Arc::clone(memory), reads_memory, held: Arc::default() }
    }

    /// Where the worker finds these bytes; `None` if they must be sent: to another host, or a few,
    /// or when there is no room, or no file to be had.
    pub(super) fn share(&self, data: &[u8]) -> Option<proto::SharedPiece> {
        if data.len() < MIN_BYTES {
            return None;
        }
        let given = self.reads_memory.then(|| self.put(data)).flatten();
        self.memory.metrics.piece_given(given.is_some());
        given
    }

    fn put(&self, data: &[u8]) -> Option<proto::SharedPiece> {
        let kib = u32::try_from(data.len().div_ceil(1 << 10)).ok()?;
        let room = Arc::clone(&self.memory.kib).try_acquire_many_owned(kib).ok()?;
        let place = Arc::clone(&self.memory.files).try_acquire_owned().ok()?;
        let mut lease = ByteLease::default();
        // sent, a piece holds no more than the gateway holds already
        self.memory.admission.grow(&mut lease, data.len() as u64).ok()?;
        let file = MemoryFile::new(data)
            .inspect_err(|error| tracing::warn!(%error, "no memory file for a worker"))
            .ok()?;
        let piece = piece(&file, data.len());
        let held = Held { _file: file, _room: [room, place], _lease: lease };
        self.held.lock().unwrap_or_else(PoisonError::into_inner).push(held);
        Some(piece)
    }

    /// The worker has read all of them.
    pub(super) fn release(&self) {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

fn piece(file: &MemoryFile, num_bytes: usize) -> proto::SharedPiece {
    proto::SharedPiece {
        process_id: std::process::id(),
        descriptor: file.descriptor(),
        num_bytes: num_bytes as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(max_bytes: u64) -> SharedMemory {
        let door = Admission::new(1, max_bytes, Arc::default(), Arc::default());
        SharedMemory::new(Arc::new(door), Arc::default())
    }

    #[test]
    fn the_probe_holds_what_it_is_told_by() {
        let memory = memory(0);
        let (piece, token) = memory.probe().unwrap();
        let path = format!("/proc/{}/fd/{}", piece.process_id, piece.descriptor);
        assert_eq!(std::fs::read(&path).unwrap(), token);
        assert_eq!(token.len() as u64, piece.num_bytes);
        let other = self::memory(0).probe().unwrap();
        assert_ne!(other.1, token, "nobody else's is taken for it");
        drop(memory);
        assert!(std::fs::read(path).is_err());
    }

    #[test]
    fn what_finds_no_room_is_not_shared_and_room_comes_back() {
        let memory = Arc::new(memory(1 << 30));
        let (one, other) = (Ways::new(&memory, true), Ways::new(&memory, true));
        let piece = vec![7; 1 << 20];
        for _ in 0..64 {
            let shared = one.share(&piece).unwrap();
            assert_eq!((shared.process_id, shared.num_bytes), (std::process::id(), 1 << 20));
        }
        assert!(other.share(&piece).is_none());
        one.release();
        assert!(other.share(&piece).is_some());
        assert!(other.share(b"a few").is_none());
        assert!(Ways::new(&memory, false).share(&piece).is_none());
        // a call that ends without a word gives back as well
        drop(other);
        assert_eq!(memory.kib.available_permits(), MAX_KIB);
        assert_eq!(memory.files.available_permits(), MAX_FILES);
    }
    #[test]
    fn what_is_shared_counts_among_the_bytes_that_requests_hold_and_comes_back() {
        let memory = Arc::new(memory(3 << 20));
        let (one, other) = (Ways::new(&memory, true), Ways::new(&memory, true));
        let door = Arc::clone(&memory.admission);
        let piece = vec![7; 1 << 20];

        assert!(one.share(&piece).is_some() && other.share(&piece).is_some());
        assert_eq!(door.held_bytes(), 2 << 20);
        let mut body = ByteLease::default();
        assert!(door.grow(&mut body, (1 << 20) + 1).is_err(), "a body finds what is left");
        door.grow(&mut body, 1 << 20).unwrap();
        // no refusal: the piece is sent, and takes no room in the memory either
        assert!(one.share(&piece).is_none());
        assert_eq!(memory.kib.available_permits(), MAX_KIB - (2 << 10));
        assert_eq!(memory.files.available_permits(), MAX_FILES - 2);

        one.release();
        assert_eq!(door.held_bytes(), 2 << 20);
        drop((other, body));
        assert_eq!(door.held_bytes(), 0);
        assert!(one.share(&piece).is_some());
    }
}
