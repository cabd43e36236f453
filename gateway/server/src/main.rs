//! The plain binary: the gateway without an interpreter around it.

/// Requests come and go by the thousand; the default allocator would keep their memory.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    gateway_server::run_with_arguments(std::env::args_os()).into()
}
