//! Workers that words reach late: slow links, stuck event loops.

use super::*;

#[test]
fn a_worker_that_words_reach_late_is_spared_until_that_is_forgotten() {
    let mut router = ready(2, Policy::default());
    router.report(SeatId(1), busy(3, 1), 0.0);
    assert_eq!(chosen(&mut router, &prompt(10, &[])), SeatId(0));
    router.report(SeatId(0), busy(0, 1), 0.0);
    router.lagged(SeatId(0), 3.0, 0.0);
    // neither what it holds nor whom affinity names outweighs seconds
    let keys: Vec<u64> = (0..9).collect();
    router.cache_news(SeatId(0), &CacheNews { added: &keys, ..CacheNews::default() });
    for affinity in (0..20).map(Some).chain([None]) {
        let demand = Demand { affinity, ..prompt(9 * PAGE, &keys) };
        let choice = router.choose(&demand, 1.0).unwrap();
        assert_eq!(choice.ticket.seat, SeatId(1));
        router.end(choice.ticket, super::super::Outcome::Served, 1.0);
    }
    let choice = router.choose(&prompt(9 * PAGE, &keys), 60.0).unwrap();
    assert_eq!(choice.ticket.seat, SeatId(0));
}

#[test]
fn a_delay_that_any_link_may_have_changes_nothing() {
    let mut router = ready(2, Policy::default());
    router.report(SeatId(1), busy(1, 1), 0.0);
    router.lagged(SeatId(0), 0.2, 0.0);
    assert_eq!(chosen(&mut router, &prompt(10, &[])), SeatId(0));
}

#[test]
fn one_quick_word_does_not_make_a_late_one_forgotten_and_a_restart_does() {
    let mut router = ready(2, Policy::default());
    router.report(SeatId(1), busy(1, 1), 0.0);
    router.lagged(SeatId(0), 3.0, 0.0);
    router.lagged(SeatId(0), 0.01, 0.0);
    assert_eq!(chosen(&mut router, &prompt(10, &[])), SeatId(1));
    router.restarted(SeatId(0));
    router.set_ready(SeatId(0), Some(STANDING), -1000.0);
    assert_eq!(chosen(&mut router, &prompt(10, &[])), SeatId(0));
}
