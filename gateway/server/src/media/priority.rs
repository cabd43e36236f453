//! Threads and children of media work step back behind requests for text.

#![allow(unsafe_code)]

/// Where pixel threads and FFmpeg's processes stand: about a ninth of what others get where they
/// compete, and all of what others leave.
const NICENESS: libc::c_int = 10;

/// Gives the calling thread, and what it becomes, the low priority of media work. A system that
/// refuses leaves things as they are.
///
/// It can be called between fork and exec.
pub(super) fn lower() {
    // SAFETY: a plain system call about the calling thread.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICENESS) };
}
