//! The index: longest held prefixes, notes taken back, memory that ends.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::super::index::{MAX_SEATS, PrefixIndex};

fn matched(index: &PrefixIndex, chain: &[u64], seats: usize) -> Vec<u32> {
    let mut pages = vec![0; seats];
    PrefixIndex::match_chain(&[index], chain, &mut pages);
    pages
}

#[test]
fn every_seat_gets_the_length_of_the_prefix_it_holds() {
    let mut index = PrefixIndex::new(100_000);
    let chain: Vec<u64> = (0..1000).map(|page| page * 17 + 3).collect();
    let lengths = [0, 1, 2, 499, 500, 999, 1000];
    for (seat, length) in lengths.into_iter().enumerate() {
        chain[..length].iter().for_each(|key| assert!(index.add(seat, *key)));
    }
    assert_eq!(matched(&index, &chain, 8), [0, 1, 2, 499, 500, 999, 1000, 0]);
    assert_eq!(matched(&index, &[], 8), [0; 8]);
}

#[test]
fn what_two_indices_hold_together_is_one_prefix() {
    let (mut told, mut sent) = (PrefixIndex::new(10), PrefixIndex::new(10));
    told.add(3, 1);
    sent.add(3, 2);
    let mut pages = vec![0; 4];
    PrefixIndex::match_chain(&[&told, &sent], &[1, 2, 3], &mut pages);
    assert_eq!(pages, [0, 0, 0, 2]);
}

#[test]
fn a_page_noted_twice_is_forgotten_twice() {
    let mut index = PrefixIndex::new(10);
    index.add(0, 7);
    index.add(0, 7);
    index.remove(0, 7);
    assert!(index.holds(0, 7));
    index.remove(0, 7);
    index.remove(0, 7);
    assert!(!index.holds(0, 7));
    assert_eq!(index.num_pages(), 0);
}

#[test]
fn a_million_distinct_prompts_take_no_more_than_the_limit() {
    let mut index = PrefixIndex::new(1000);
    let noted = (0..1_000_000_u64).filter(|key| index.add((key % 5) as usize, *key)).count();
    assert_eq!((noted, index.num_pages()), (1000, 1000));
    (0..5).for_each(|seat| index.clear(seat));
    assert_eq!(index.num_pages(), 0);
}

#[test]
fn a_seat_beyond_the_last_is_not_noted() {
    assert!(!PrefixIndex::new(10).add(MAX_SEATS, 1));
}

proptest! {
    #[test]
    fn it_agrees_with_plain_sets(
        notes in prop::collection::vec((any::<bool>(), 0..70_usize, 0..12_u64), 0..300),
    ) {
        let mut index = PrefixIndex::new(usize::MAX);
        let mut plain: HashMap<(usize, u64), u32> = HashMap::new();
        for (is_add, seat, key) in notes {
            if is_add {
                index.add(seat, key);
                *plain.entry((seat, key)).or_default() += 1;
            } else {
                index.remove(seat, key);
                plain.entry((seat, key)).and_modify(|count| *count = count.saturating_sub(1));
            }
        }
        plain.retain(|_, count| *count > 0);
        let held: HashSet<_> = plain.keys().copied().collect();
        prop_assert_eq!(index.num_pages(), held.len());
        for key in 0..12 {
            let alone = matched(&index, &[key], 70);
            for (seat, pages) in alone.iter().enumerate() {
                prop_assert_eq!(*pages == 1, held.contains(&(seat, key)));
            }
        }
        index.clear(3);
        prop_assert_eq!(index.pages_of(3), 0);
    }
}
