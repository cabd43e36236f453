//! Sample clips, damaged at random, through the whole way from bytes to patch rows: they are clips
//! still or refused as such, and nothing of them stays behind. `CLIP_MUTATIONS=1000` takes that many
//! of each file instead of one.

// a run by hand is read as it goes
#![allow(clippy::print_stdout, clippy::unwrap_used)]

mod damage;
mod support;

use bytes::Bytes;
use gateway_core::model::SizeControls;
use gateway_server::prepare::Preparer;

use damage::{Held, count, damage_each, files};

#[test]
fn damaged_clips_are_shown_or_refused_and_nothing_stays_behind() {
    let preparer = Preparer::open(&support::checkpoint()).unwrap();
    let controls = SizeControls { fps: Some(1.0), ..SizeControls::default() };
    let show = |bytes| {
        let (pieces, plan) = preparer.clip(bytes, controls.clone())?;
        assert!(!pieces.is_empty() && !plan.frames.is_empty());
        Ok(())
    };
    let folder = support::media_directory();
    show(Bytes::from(std::fs::read(folder.join("vid_h264.mkv")).unwrap())).unwrap();
    let before = Held::now();
    let clips = files(&folder, |name| name.starts_with("vid_"));

    let outcomes = damage_each(&clips, count("CLIP_MUTATIONS", 1), show);

    println!("{outcomes:?} of {} files", clips.len());
    assert_eq!(outcomes.len(), 2, "{outcomes:?} of {} files", clips.len());
    before.assert_nothing_stayed();
}
