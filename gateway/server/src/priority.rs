//! Who comes first where threads compete: sockets before everything, media work behind requests for
//! text.

#![allow(unsafe_code)]

/// How far pixel threads and FFmpeg's processes stand behind the gateway's other threads: about a
/// ninth of what those get where they compete, and all of what they leave.
const NICENESS: libc::c_int = 10;
/// How long a thread that serves sockets keeps a core at a time: the shortest that Linux knows. Who
/// asks for short turns gets them soon; by default each may wait for some milliseconds of another.
const SHORT_TURN_NS: u64 = 100_000;
/// What the system gives to everyone.
const DEFAULT_TURN_NS: u64 = 0;

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
/// refuses leaves things as they are.
///
/// It can be called between fork and exec.
pub(crate) fn step_back() {
    // SAFETY: plain system calls about the calling thread.
    unsafe { libc::nice(NICENESS) };
    take_time();
}

/// Gives the calling thread short turns, which come soon. Linux before 6.12 knows none.
pub(crate) fn answer_at_once() {
    set_turn(SHORT_TURN_NS);
}

/// Gives the calling thread, of those that answer at once, the turns of long work.
pub(crate) fn take_time() {
    set_turn(DEFAULT_TURN_NS);
}

fn set_turn(slice_ns: u64) {
    if let Some(turns) = turns() {
        set_turns(Turns { slice_ns, ..turns });
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

    /// Whether this is Linux 6.12 or later.
    fn knows_turns() -> bool {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut numbers = release.split(['.', '-']).map(|part| part.parse::<u32>().unwrap_or(0));
        (numbers.next(), numbers.next()) >= (Some(6), Some(12))
    }

    #[test]
    fn turns_are_short_for_sockets_and_as_usual_for_long_work() {
        let before = seen_after(|| {});
        // what this system makes of short ones
        let known = seen_after(move || set_turns(Turns { slice_ns: SHORT_TURN_NS, ..before }));
        if knows_turns() {
            assert_ne!(known.slice_ns, before.slice_ns, "Linux 6.12 and later keep them");
        } else if known.slice_ns == before.slice_ns {
            eprintln!("not shown: Linux before 6.12 has no turns of different lengths");
        }
        assert_eq!(seen_after(answer_at_once).slice_ns, known.slice_ns);
        let long = seen_after(|| {
            answer_at_once();
            take_time();
        });
        assert_eq!((long.slice_ns, long.nice), (before.slice_ns, before.nice));
        let back = seen_after(|| {
            answer_at_once();
            step_back();
        });
        assert_eq!(back.slice_ns, before.slice_ns);
        assert_eq!((back.nice, back.policy), ((before.nice + NICENESS).min(19), before.policy));
        assert_eq!(seen_after(|| {}).slice_ns, before.slice_ns, "no other thread is touched");
    }
}
