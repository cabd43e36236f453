//! The version, and the process metrics that Prometheus's own client libraries tell on Linux.

use super::exposition::Page;

/// Ticks of `/proc` in a second, on every system that Rust is built for.
const TICKS_PER_S: f64 = 100.0;

/// Adds the version, and what `/proc` says of this process; nothing of what it does not say.
pub(super) fn write(page: &mut Page) {
    let name = "m3stack_gateway_build_info";
    page.head(name, "gauge", "The running version.");
    page.sample(name, concat!("version=\"", env!("CARGO_PKG_VERSION"), "\""), 1);
    if let Some(bytes) = resident_bytes() {
        page.head("process_resident_memory_bytes", "gauge", "Resident memory.");
        page.sample("process_resident_memory_bytes", "", bytes);
    }
    if let Some((cpu_s, start_s)) = times() {
        page.head("process_cpu_seconds_total", "counter", "Time of all cores, user and system.");
        page.sample("process_cpu_seconds_total", "", cpu_s);
        page.head("process_start_time_seconds", "gauge", "Start of the process, in Unix time.");
        page.sample("process_start_time_seconds", "", start_s);
    }
    if let Ok(descriptors) = std::fs::read_dir("/proc/self/fd") {
        page.head("process_open_fds", "gauge", "Open file descriptors.");
        page.sample("process_open_fds", "", descriptors.count());
    }
}

/// In bytes whatever the size of a page of memory is.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Seconds of the processor, and the start in Unix time. Source: proc_pid_stat(5), fields 14, 15, 22.
fn times() -> Option<(f64, f64)> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // the second field is the program's name, which may hold anything
    let (_, rest) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let seconds = |place: usize| Some(fields.get(place - 3)?.parse::<f64>().ok()? / TICKS_PER_S);
    let system = std::fs::read_to_string("/proc/stat").ok()?;
    let boot = system.lines().find_map(|line| line.strip_prefix("btime "))?;
    Some((seconds(14)? + seconds(15)?, boot.trim().parse::<f64>().ok()? + seconds(22)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, SystemTime};

    #[test]
    fn what_is_told_of_the_process_is_true_of_this_one() {
        let (cpu_s, start_s) = times().expect("Linux tells it");
        let now_s = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or(Duration::ZERO)
            .as_secs_f64();
        // tests run within a day of their start; boot is told in whole seconds
        assert!((now_s - 86_400.0..now_s + 2.0).contains(&start_s), "{start_s} of {now_s}");
        assert!((0.0..86_400.0 * 64.0).contains(&cpu_s), "{cpu_s}");
        let bytes = resident_bytes().expect("Linux tells it");
        assert!((1 << 20..1 << 40).contains(&bytes), "{bytes}");
    }
}
