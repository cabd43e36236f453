//! Sample clips, damaged at random, through the whole way from bytes to patch rows: they are clips
//! still or refused as such, and nothing of them stays behind. `CLIP_MUTATIONS=1000` takes that many
//! of each file instead of one.

#![allow(clippy::unwrap_used)]

#[path = "../../media/tests/damage/mod.rs"]
mod damage;
mod support;

use std::collections::BTreeMap;

use bytes::Bytes;
use gateway_core::model::SizeControls;
use gateway_server::prepare::Preparer;

use damage::{Noise, damaged};

const FEW: u64 = 1;
/// Memory that may come with the many sizes of frames that were never seen before.
const MAX_MORE_KIB: u64 = 200 << 10;

/// Open descriptors and children of this process, and its resident memory in KiB.
fn held() -> (usize, usize, u64) {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let children = tasks.filter_map(|task| {
        // a thread may end meanwhile
        std::fs::read_to_string(task.ok()?.path().join("children")).ok()
    });
    let children = children.map(|list| list.split_whitespace().count()).sum();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    (descriptors, children, resident.trim().trim_end_matches(" kB").parse().unwrap())
}

#[test]
fn damaged_clips_are_shown_or_refused_and_nothing_stays_behind() {
    let count = std::env::var("CLIP_MUTATIONS").map_or(FEW, |text| text.parse().unwrap());
    let preparer = Preparer::open(&support::checkpoint()).unwrap();
    let controls = SizeControls { fps: Some(1.0), ..SizeControls::default() };
    let whole = std::fs::read(support::media_directory().join("vid_h264.mkv")).unwrap();
    preparer.clip(Bytes::from(whole), controls.clone()).unwrap();
    let before = held();
    let mut files: Vec<_> = std::fs::read_dir(support::media_directory())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("vid_"))
        .collect();
    files.sort();
    let mut outcomes: BTreeMap<String, u64> = BTreeMap::new();
    for file in &files {
        let (name, bytes) = (file.file_name().unwrap(), std::fs::read(file).unwrap());
        for number in 0..count {
            let mut noise = Noise(number ^ (name.len() as u64) << 40);
            let made = preparer.clip(Bytes::from(damaged(&bytes, &mut noise)), controls.clone());
            let outcome = match made {
                Ok((pieces, plan)) => {
                    assert!(!pieces.is_empty() && !plan.frames.is_empty());
                    "shown".to_owned()
                }
                Err(error) => error.kind.row().label.to_owned(),
            };
            if !["shown", "media_rejected"].contains(&&*outcome) {
                panic!("{} damaged by {number}: {outcome}", name.display());
            }
            *outcomes.entry(outcome).or_default() += 1;
        }
    }
    let (descriptors, children, resident) = held();
    println!("{outcomes:?}, resident {} KiB before, {resident} after", before.2);
    assert!(files.len() >= 28 && outcomes.len() == 2, "{outcomes:?} of {} files", files.len());
    assert_eq!((descriptors, children), (before.0, before.1));
    assert!(resident < before.2 + MAX_MORE_KIB, "{resident} KiB after {} before", before.2);
}
