//! Threads and children of media work step back behind requests for text.

#![allow(unsafe_code)]

/// How far pixel threads and FFmpeg's processes stand behind the gateway's other threads: about a
/// ninth of what those get where they compete, and all of what they leave.
const NICENESS: libc::c_int = 10;
/// How long they keep a core that another thread has woken for: the shortest that Linux knows. By
/// default it is some milliseconds, at each of the many turns that a request for text takes.
const SLICE_NS: u64 = 100_000;

/// What the system knows of a thread's turns.
///
/// Source: `sched_setattr(2)`, the first version of its structure.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Turns {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    slice_ns: u64,
    deadline_ns: u64,
    period_ns: u64,
}

/// Gives the calling thread, and what it becomes, the low priority of media work. A system that
/// refuses leaves things as they are; Linux before 6.12 knows no slices of a thread's own.
///
/// It can be called between fork and exec.
pub(super) fn lower() {
    // SAFETY: plain system calls about the calling thread.
    unsafe { libc::nice(NICENESS) };
    if let Some(turns) = turns() {
        set_turns(Turns { slice_ns: SLICE_NS, ..turns });
    }
}

/// Those of the calling thread.
fn turns() -> Option<Turns> {
    let mut turns = Turns::default();
    let size = size_of::<Turns>();
    // SAFETY: the structure lives through the call and has the size that is told.
    let done = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut turns, size, 0) };
    // a newer system has more to tell than was asked
    turns.size = size as u32;
    (done == 0).then_some(turns)
}

fn set_turns(turns: Turns) {
    // SAFETY: the structure lives through the call and tells its own size.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const turns, 0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Niceness and slice of a thread of its own, after some work on it.
    fn seen_after(work: impl FnOnce() + Send + 'static) -> Turns {
        let looking = std::thread::spawn(|| {
            work();
            turns().unwrap()
        });
        looking.join().unwrap()
    }

    #[test]
    fn a_lowered_thread_keeps_a_core_for_the_shortest_time_there_is() {
        let before = seen_after(|| {});
        let known = seen_after(move || set_turns(Turns { slice_ns: SLICE_NS, ..before }));
        let lowered = seen_after(lower);
        assert_eq!(lowered.nice, (before.nice + NICENESS).min(19));
        assert_eq!(lowered.policy, before.policy);
        // what this system makes of it
        assert_eq!(lowered.slice_ns, known.slice_ns);
        assert_eq!(seen_after(|| {}).slice_ns, before.slice_ns, "no other thread is touched");
    }
}
