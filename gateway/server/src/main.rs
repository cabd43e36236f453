//! The plain binary: the gateway without an interpreter around it.

#![allow(unsafe_code)]

/// Requests come and go by the thousand; the default allocator would keep their memory.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    // the allocator asks for huge pages, which would hold some 25 MB that nothing uses
    // SAFETY: a flag of this process; no memory is touched, and a refusal changes nothing.
    unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
    gateway_server::run_with_arguments(std::env::args_os()).into()
}
