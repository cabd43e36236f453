//! Sample AVIF pictures, damaged at random, through the whole way: boxes read here, AV1 decoded by a
//! child, colours made here. They are pictures still or refused as such, and nothing of them stays
//! behind. `PICTURE_MUTATIONS=1000` takes that many of each file instead of one. (Pictures of other
//! formats: the tests of `gateway-media`.)

// a run by hand is read as it goes
#![allow(clippy::print_stdout, clippy::unwrap_used)]

mod damage;
mod support;

use bytes::Bytes;
use gateway_core::model::SizeControls;
use gateway_server::prepare::Preparer;

use damage::{Held, count, damage_each, files};

#[test]
fn damaged_avif_pictures_are_shown_or_refused_and_nothing_stays_behind() {
    let preparer = Preparer::open(&support::checkpoint()).unwrap();
    let show = |bytes: Bytes| {
        let plan = preparer.plan_still(&bytes, &SizeControls::default())?;
        let mut rows = vec![0; plan.num_bytes];
        let grid = preparer.fill_still(&bytes, &plan, &mut rows)?;
        assert_eq!(grid.patches() * 588, rows.len() as u64);
        Ok(())
    };
    let folder = support::media_directory().join("../avif");
    show(Bytes::from(std::fs::read(folder.join("420.avif")).unwrap())).unwrap();
    let before = Held::now();
    let pictures = files(&folder, |name| name.ends_with(".avif"));

    let outcomes = damage_each(&pictures, count("PICTURE_MUTATIONS", 1), show);

    println!("{outcomes:?} of {} files", pictures.len());
    assert_eq!(outcomes.len(), 2, "{outcomes:?} of {} files", pictures.len());
    before.assert_nothing_stayed();
}
