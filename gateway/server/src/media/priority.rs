//! Threads and children of media work step back behind requests for text.

#![allow(unsafe_code)]

/// How far pixel threads and FFmpeg's processes stand behind the gateway's other threads: about a
/// ninth of what those get where they compete, and all of what they leave.
const NICENESS: libc::c_int = 10;

/// Gives the calling thread, and what it becomes, the low priority of media work. A system that
/// refuses leaves things as they are.
///
/// It can be called between fork and exec.
pub(super) fn lower() {
    // SAFETY: plain system calls about the calling thread.
    unsafe { libc::nice(NICENESS) };
}
