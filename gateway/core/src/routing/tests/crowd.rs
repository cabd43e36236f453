//! Many requests over many workers: balance, hits, and memory that stays flat.

use super::super::Outcome;
use super::*;

#[test]
fn four_hundred_requests_with_one_shared_prefix_leave_no_worker_far_above_the_mean() {
    for shared_pages in [0, 1, 8, 700] {
        let mut router = ready(8, Policy::default());
        let keys: Vec<u64> = (0..shared_pages).collect();
        let mut taken = [0_u32; 8];
        for _ in 0..400 {
            let seat = chosen(&mut router, &prompt(shared_pages as u32 * PAGE + 50, &keys));
            taken[usize::from(seat.0)] += 1;
        }
        let most = taken.iter().max().unwrap();
        assert!(*most <= 75 + 4, "{shared_pages} shared pages: {taken:?}");
    }
}

#[test]
fn pictures_that_differ_spread_and_pictures_that_are_equal_meet() {
    let mut router = ready(2, Policy::default());
    let mut taken = [0; 2];
    for picture in 0..24 {
        let keys: Vec<u64> = (0..10).map(|page| picture * 100 + page).collect();
        taken[usize::from(chosen(&mut router, &prompt(10 * PAGE + 5, &keys)).0)] += 1;
    }
    assert_eq!(taken, [12, 12]);

    let mut router = ready(16, Policy::default());
    let mut homes: Vec<SeatId> = Vec::new();
    for turn in 0..3 {
        for picture in 0..16_u64 {
            let keys: Vec<u64> = (0..10).map(|page| picture * 100 + page).collect();
            let choice = router.choose(&prompt(10 * PAGE + 5, &keys), 0.0).unwrap();
            let seat = choice.ticket.seat;
            router.end(choice.ticket, Outcome::Served, 0.0);
            router.report(seat, SeatLoad::default(), 0.0);
            router.cache_news(seat, &CacheNews { added: &keys, ..CacheNews::default() });
            if turn == 0 {
                homes.push(seat);
            } else {
                assert_eq!(seat, homes[picture as usize]);
            }
        }
    }
}

#[test]
fn a_long_day_leaves_nothing_but_what_workers_still_hold() {
    let mut router = ready(4, Policy { max_index_pages: 500, ..Policy::default() });
    for request in 0..5_000_u64 {
        let keys: Vec<u64> = (0..20).map(|page| request * 1000 + page).collect();
        let choice = router.choose(&prompt(20 * PAGE, &keys), request as f64).unwrap();
        let seat = choice.ticket.seat;
        router.cache_news(seat, &CacheNews { added: &keys, ..CacheNews::default() });
        router.end(choice.ticket, Outcome::Served, request as f64);
        router.cache_news(seat, &CacheNews { removed: &keys, ..CacheNews::default() });
        for _ in 0..2 {
            router.report(seat, SeatLoad::default(), request as f64);
        }
    }
    assert_eq!(router.num_pages(), (0, 0));
    assert!((0..4).all(|seat| router.assigned(SeatId(seat)) == 0));
}
