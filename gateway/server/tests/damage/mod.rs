//! Sample files, damaged at random, given to whoever makes patch rows of them; and what the process
//! holds before and after.

#[path = "../../../media/tests/damage/mod.rs"]
pub mod noise;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bytes::Bytes;
use gateway_server::error::GatewayError;

use noise::{Noise, damaged};

/// Time for children that were killed to be buried.
const BURIAL: Duration = Duration::from_secs(60);
/// Memory that may come with the many sizes of frames that were never seen before.
const MAX_MORE_KIB: u64 = 200 << 10;

/// What a process holds.
#[derive(Debug)]
pub struct Held {
    descriptors: usize,
    children: usize,
    resident_kib: u64,
}

impl Held {
    /// Open descriptors and children of this process, and its resident memory, once no child is
    /// left, or after a minute.
    pub fn now() -> Self {
        let deadline = Instant::now() + BURIAL;
        loop {
            let held = Self::at_once();
            if held.children == 0 || Instant::now() > deadline {
                return held;
            }
            std::thread::yield_now();
        }
    }

    fn at_once() -> Self {
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let children = tasks.filter_map(|task| {
            // a thread may end meanwhile
            std::fs::read_to_string(task.ok()?.path().join("children")).ok()
        });
        let children = children.map(|list| list.split_whitespace().count()).sum();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let resident_kib = resident.trim().trim_end_matches(" kB").parse().unwrap();
        Self { descriptors, children, resident_kib }
    }

    /// Panics if more is held now.
    pub fn assert_nothing_stayed(&self) {
        let now = Self::now();
        println!("{self:?} before, {now:?} after");
        assert_eq!((now.descriptors, now.children), (self.descriptors, self.children));
        assert!(now.resident_kib < self.resident_kib + MAX_MORE_KIB, "{now:?} after {self:?}");
    }
}

/// How many of each file: what the variable says, else a few.
pub fn count(variable: &str, few: u64) -> u64 {
    std::env::var(variable).map_or(few, |text| text.parse().unwrap())
}

/// Files of a folder that pass, sorted; `DAMAGED_FILES=a,b` keeps those whose names begin so.
pub fn files(folder: &Path, passes: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let wanted = std::env::var("DAMAGED_FILES").unwrap_or_default();
    let is_wanted = |name: &str| wanted.split(',').any(|start| name.starts_with(start));
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = entries
        .filter(|path| {
            let name = path.file_name().unwrap().to_string_lossy();
            passes(&name) && is_wanted(&name)
        })
        .collect();
    files.sort();
    files
}

/// Damages each file so many times; what became of them, by outcome.
///
/// # Panics
/// At the end, if one was neither shown nor refused as media; it names each, with the number that
/// damages it so again.
pub fn damage_each(
    files: &[PathBuf],
    count: u64,
    show: impl Fn(Bytes) -> Result<(), GatewayError>,
) -> BTreeMap<String, u64> {
    let (mut outcomes, mut surprises) = (BTreeMap::<String, u64>::new(), Vec::new());
    for file in files {
        let (name, bytes) =
            (file.file_name().unwrap().to_string_lossy(), std::fs::read(file).unwrap());
        let (begin, mut shown) = (Instant::now(), 0);
        for number in 0..count {
            let mut noise = Noise(number ^ (name.len() as u64) << 40);
            let broken = Bytes::from(damaged(&bytes, &mut noise));
            let outcome = match catch_unwind(AssertUnwindSafe(|| show(broken))) {
                Ok(Ok(())) => "shown",
                Ok(Err(error)) => error.kind.row().label,
                Err(_) => "panicked",
            };
            shown += u64::from(outcome == "shown");
            if !["shown", "media_rejected"].contains(&outcome) {
                println!("{name} damaged by {number}: {outcome}");
                surprises.push(format!("{name} damaged by {number}: {outcome}"));
            }
            *outcomes.entry(outcome.to_owned()).or_default() += 1;
        }
        println!("{name}: {shown} of {count} shown, {:.1} s", begin.elapsed().as_secs_f64());
    }
    assert!(surprises.is_empty(), "{surprises:#?}");
    outcomes
}
