//! One choice at a time: load, cache, affinity, spilling, failing, stalling, slow start.

use super::super::{BreakerPolicy, Health, NoChoice, Outcome, Reason};
use super::*;

#[test]
fn the_idle_worker_takes_the_request() {
    let mut router = ready(3, Policy::default());
    for (seat, running) in [(0, 5), (1, 1), (2, 3)] {
        router.report(SeatId(seat), busy(running, 1), 0.0);
    }
    assert_eq!(chosen(&mut router, &prompt(10, &[])), SeatId(1));
}

#[test]
fn waiting_prompt_tokens_count_by_the_workers_own_rate() {
    let mut router = ready(2, Policy::default());
    let load = |tokens, rate| SeatLoad {
        waiting_prompt_tokens: tokens,
        prompt_tokens_per_s: rate,
        ..SeatLoad::default()
    };
    router.report(SeatId(0), load(10_000, 1_000.0), 0.0);
    router.report(SeatId(1), load(50_000, 10_000.0), 0.0);
    assert_eq!(chosen(&mut router, &prompt(10, &[])), SeatId(1));
}

#[test]
fn a_worker_that_has_read_nothing_yet_is_not_taken_to_be_faster_than_those_that_have() {
    let mut router = ready(2, Policy::default());
    let slow = SeatLoad { prompt_tokens_per_s: 100.0, steps: 1, ..SeatLoad::default() };
    router.report(SeatId(0), slow, 0.0);
    let keys: Vec<u64> = (0..9).collect();
    router.cache_news(SeatId(0), &CacheNews { added: &keys, ..CacheNews::default() });
    assert_eq!(chosen(&mut router, &prompt(9 * PAGE + 80, &keys)), SeatId(0));
}

#[test]
fn what_was_sent_since_the_last_word_counts() {
    let mut router = ready(2, Policy::default());
    router.report(SeatId(1), busy(2, 1), 0.0);
    for _ in 0..4 {
        router.take_seat(&prompt(10, &[]), SeatId(0)).unwrap();
    }
    assert_eq!(chosen(&mut router, &prompt(10, &[])), SeatId(1));

    // the next word knows of them; only what comes later is added to it
    router.report(SeatId(0), busy(1, 2), 0.0);
    assert_eq!(chosen(&mut router, &prompt(10, &[])), SeatId(0));
}

#[test]
fn equals_take_turns() {
    let mut router = ready(3, Policy::default());
    let mut picks: Vec<_> = (0..3).map(|_| chosen(&mut router, &prompt(10, &[])).0).collect();
    picks.sort_unstable();
    assert_eq!(picks, [0, 1, 2]);
}

#[test]
fn who_holds_the_beginning_takes_the_request_unless_the_wait_is_longer_than_the_work_saved() {
    let mut router = ready(2, Policy::default());
    let keys = [11, 12, 13];
    router.cache_news(SeatId(1), &CacheNews { added: &keys, ..CacheNews::default() });
    let demand = prompt(3 * PAGE + 10, &keys);

    let first = router.choose(&demand, 0.0).unwrap();
    assert_eq!((first.ticket.seat, first.reason), (SeatId(1), Reason::Cache));
    assert_eq!(first.matched_tokens, 3 * PAGE);

    let load = |tokens| SeatLoad { waiting_prompt_tokens: tokens, ..SeatLoad::default() };
    router.report(SeatId(1), load(400), 0.0);
    router.report(SeatId(0), load(0), 0.0);
    assert_eq!(chosen(&mut router, &demand), SeatId(1));
    router.report(SeatId(1), load(5_000), 0.0);
    assert_eq!(chosen(&mut router, &demand), SeatId(0));
}

#[test]
fn a_holder_with_far_more_than_its_share_gets_nothing_for_its_cache() {
    let mut router = ready(4, Policy::default());
    let keys: Vec<u64> = (0..700).collect();
    router.cache_news(SeatId(2), &CacheNews { added: &keys, ..CacheNews::default() });
    router.report(SeatId(2), busy(20, 1), 0.0);
    let choice = router.choose(&prompt(700 * PAGE, &keys), 0.0).unwrap();
    assert_ne!(choice.ticket.seat, SeatId(2));
    assert_eq!(choice.reason, Reason::Spill);
}

#[test]
fn a_prompt_on_its_way_attracts_its_like_until_it_has_ended() {
    let mut router = ready(8, Policy::default());
    let keys: Vec<u64> = (0..100).collect();
    let demand = prompt(100 * PAGE, &keys);
    let first = router.choose(&demand, 0.0).unwrap();
    let second = router.choose(&demand, 0.0).unwrap();
    assert_eq!(second.ticket.seat, first.ticket.seat);

    router.end(first.ticket, Outcome::Fault, 0.0);
    router.end(second.ticket, Outcome::Neutral, 0.0);
    assert_eq!(router.num_pages(), (0, 0));
}

#[test]
fn pages_of_a_served_request_are_expected_until_the_worker_has_had_time_to_tell() {
    let mut router = ready(4, Policy::default());
    let keys: Vec<u64> = (0..20).collect();
    let demand = prompt(20 * PAGE + 1, &keys);
    let first = router.choose(&demand, 0.0).unwrap();
    let seat = first.ticket.seat;
    router.end(first.ticket, Outcome::Served, 0.0);

    let second = router.choose(&demand, 0.0).unwrap();
    assert_eq!((second.ticket.seat, second.matched_tokens), (seat, 20 * PAGE));
    router.end(second.ticket, Outcome::Served, 0.0);
    router.report(seat, SeatLoad::default(), 0.1);
    assert_eq!(router.num_pages(), (0, 20));
    // it has evicted them at once: what it does not tell it does not hold
    router.report(seat, SeatLoad::default(), 0.2);
    assert_eq!(router.num_pages(), (0, 0));
}

#[test]
fn who_does_not_tell_its_pages_is_remembered_by_what_was_sent() {
    let policy = Policy { max_sent_pages: 4, ..Policy::default() };
    let mut router = Router::new(policy);
    for number in 0..2 {
        let seat = router.join(number).unwrap();
        router.set_ready(seat, Some(STANDING), -1000.0);
    }
    let demand = prompt(3 * PAGE + 1, &[1, 2, 3]);
    let first = router.choose(&demand, 0.0).unwrap();
    let seat = first.ticket.seat;
    router.end(first.ticket, Outcome::Served, 0.0);
    let again = router.choose(&demand, 0.0).unwrap();
    assert_eq!((again.ticket.seat, again.matched_tokens), (seat, 3 * PAGE));

    // memory is bounded: the oldest goes first
    router.take_seat(&prompt(3 * PAGE + 1, &[4, 5, 6]), seat).unwrap();
    assert_eq!(router.num_pages(), (0, 4));
    assert_eq!(router.choose(&demand, 0.0).unwrap().matched_tokens, 0);
}

#[test]
fn a_flushed_or_restarted_worker_holds_nothing() {
    let mut router = ready(1, Policy::default());
    let demand = prompt(PAGE + 1, &[5]);
    router.cache_news(SeatId(0), &CacheNews { added: &[5], ..CacheNews::default() });
    let news = CacheNews { is_restart: true, epoch: 1, ..CacheNews::default() };
    router.cache_news(SeatId(0), &news);
    assert_eq!(router.choose(&demand, 0.0).unwrap().matched_tokens, 0);
    assert_eq!(router.epochs(), [(1, PAGE)]);

    router.cache_news(SeatId(0), &CacheNews { epoch: 1, added: &[5], ..CacheNews::default() });
    router.restarted(SeatId(0));
    assert_eq!(router.num_pages(), (0, 0));
    assert_eq!(router.choose(&demand, 0.0).unwrap_err(), NoChoice::NobodyReady);
}

#[test]
fn affinity_is_kept_when_others_come_and_go_and_given_up_when_its_worker_is_full() {
    let mut router = ready(10, Policy::default());
    let sticky = |number| Demand { affinity: Some(number), ..prompt(10, &[]) };
    let homes: Vec<_> = (0..40).map(|number| chosen(&mut router, &sticky(number))).collect();
    router.leave(SeatId(9));
    for (number, home) in (0..).zip(&homes).filter(|(_, home)| **home != SeatId(9)) {
        assert_eq!(chosen(&mut router, &sticky(number)), *home);
    }

    router.report(homes[0], busy(500, 1), 0.0);
    let choice = router.choose(&sticky(0), 0.0).unwrap();
    assert_ne!(choice.ticket.seat, homes[0]);
    assert_eq!(choice.reason, Reason::Spill);
}

#[test]
fn nobody_is_chosen_who_is_not_ready_excluded_or_too_small() {
    let mut router = ready(3, Policy::default());
    router.set_ready(SeatId(0), None, 0.0);
    let small = Standing { max_context_tokens: 50, ..STANDING };
    router.set_ready(SeatId(1), Some(small), 0.0);
    router.report(SeatId(2), busy(99, 1), 0.0);

    assert_eq!(chosen(&mut router, &prompt(10, &[])), SeatId(2));
    let excluded = Demand { excluded: Some(SeatId(2)), ..prompt(10, &[]) };
    assert_eq!(router.choose(&excluded, 0.0).unwrap_err(), NoChoice::NobodyFit);
    router.leave(SeatId(2));
    assert_eq!(router.choose(&prompt(10, &[]), 0.0).unwrap_err(), NoChoice::TooLong(50));
    router.leave(SeatId(1));
    assert_eq!(router.choose(&prompt(10, &[]), 0.0).unwrap_err(), NoChoice::NobodyReady);
}

#[test]
fn a_worker_that_makes_no_step_is_out_until_it_does() {
    let mut router = ready(2, Policy { stall_s: 5.0, ..Policy::default() });
    router.report(SeatId(1), busy(50, 1), 9.0);
    for second in 0..10 {
        router.report(SeatId(0), busy(1, 7), f64::from(second));
        router.report(SeatId(1), busy(50, 1 + second as u64), f64::from(second));
    }
    assert_eq!(router.health(SeatId(0), 9.0), Health::Stalled);
    let choice = router.choose(&prompt(10, &[]), 9.0).unwrap();
    assert_eq!(choice.ticket.seat, SeatId(1));

    router.report(SeatId(0), busy(1, 8), 9.5);
    assert_eq!(router.health(SeatId(0), 9.5), Health::Good);
    // without requests there is nothing to step for
    router.report(SeatId(0), busy(0, 8), 10.0);
    assert_eq!(router.health(SeatId(0), 100.0), Health::Good);
}

#[test]
fn faults_in_a_row_open_the_breaker_and_a_good_trial_closes_it() {
    let breaker = BreakerPolicy { faults: 3, pause_s: 2.0, max_pause_s: 3.0 };
    let mut router = ready(1, Policy { breaker, ..Policy::default() });
    let demand = prompt(10, &[]);
    let mut run = |outcome, now_s| {
        let choice = router.choose(&demand, now_s);
        choice.map(|choice| router.end(choice.ticket, outcome, now_s)).is_ok()
    };
    assert!(run(Outcome::Fault, 0.0) && run(Outcome::Fault, 0.0));
    assert!(run(Outcome::Served, 0.0));
    assert!((0..3).all(|_| run(Outcome::Fault, 0.0)));
    assert!(!run(Outcome::Served, 1.9));
    // the trial fails: a longer pause
    assert!(run(Outcome::Fault, 2.0));
    assert!(!run(Outcome::Served, 4.9));
    assert!(run(Outcome::Served, 5.0));
    assert!(run(Outcome::Served, 5.0));
}

#[test]
fn while_a_trial_runs_nobody_else_is_let_through() {
    let breaker = BreakerPolicy { faults: 1, ..BreakerPolicy::default() };
    let mut router = ready(1, Policy { breaker, ..Policy::default() });
    let demand = prompt(10, &[]);
    let (first, straggler) =
        (router.choose(&demand, 0.0).unwrap(), router.choose(&demand, 0.0).unwrap());
    router.end(first.ticket, Outcome::Fault, 0.0);
    let trial = router.choose(&demand, 10.0).unwrap();
    assert_eq!(router.choose(&demand, 10.0).unwrap_err(), NoChoice::NobodyFit);
    // success of a request from before the fault proves nothing about now
    router.end(straggler.ticket, Outcome::Served, 10.0);
    assert_eq!(router.choose(&demand, 10.0).unwrap_err(), NoChoice::NobodyFit);
    router.end(trial.ticket, Outcome::Served, 11.0);
    assert!(router.choose(&demand, 11.0).is_ok());
}

#[test]
fn no_number_of_refused_requests_moves_the_breaker() {
    let mut router = ready(1, Policy::default());
    for _ in 0..100 {
        let choice = router.choose(&prompt(10, &[]), 0.0).unwrap();
        router.end(choice.ticket, Outcome::Neutral, 0.0);
    }
    // nor do they make up for faults
    for _ in 0..5 {
        let fault = router.choose(&prompt(10, &[]), 0.0).unwrap();
        router.end(fault.ticket, Outcome::Fault, 0.0);
        if let Ok(refused) = router.choose(&prompt(10, &[]), 0.0) {
            router.end(refused.ticket, Outcome::Neutral, 0.0);
        }
    }
    assert_eq!(router.choose(&prompt(10, &[]), 0.0).unwrap_err(), NoChoice::NobodyFit);
}

#[test]
fn a_worker_that_has_just_become_ready_begins_with_a_small_share() {
    let mut router = ready(3, Policy { slow_start_s: 10.0, ..Policy::default() });
    let late = router.join(99).unwrap();
    router.set_ready(late, Some(STANDING), 100.0);
    let counts = |router: &mut Router, now_s: f64| {
        let mut taken = 0;
        for _ in 0..40 {
            taken +=
                usize::from(router.choose(&prompt(100, &[]), now_s).unwrap().ticket.seat == late);
        }
        (0..4).for_each(|seat| router.report(SeatId(seat), SeatLoad::default(), now_s));
        taken
    };
    let (early, later, seasoned) =
        (counts(&mut router, 100.0), counts(&mut router, 105.0), counts(&mut router, 111.0));
    assert!(early <= 3 && early < later && later < seasoned, "{early} {later} {seasoned}");
    assert!((9..=11).contains(&seasoned), "{seasoned}");
}

#[test]
fn a_fleet_that_is_too_busy_says_how_long_the_wait_is() {
    let mut router = ready(2, Policy { max_wait_s: 3.0, ..Policy::default() });
    for seat in 0..2 {
        let load = SeatLoad { waiting_prompt_tokens: 40_000, ..SeatLoad::default() };
        router.report(SeatId(seat), load, 0.0);
    }
    let refusal = router.choose(&prompt(10, &[]), 0.0).unwrap_err();
    assert_eq!(refusal, NoChoice::TooBusy { wait_s: 5.0 });
}

#[test]
fn whoever_wants_another_worker_gets_none_that_is_too_busy() {
    let mut router = ready(3, Policy { max_wait_s: 3.0, ..Policy::default() });
    let but = |seat| Demand { excluded: Some(SeatId(seat)), ..prompt(10, &[]) };
    let busy = SeatLoad { waiting_prompt_tokens: 40_000, ..SeatLoad::default() };
    assert_ne!(router.choose(&but(0), 0.0).unwrap().ticket.seat, SeatId(0));

    // the others are there and too busy: one that is silent is the better hope
    router.report(SeatId(1), busy, 0.0);
    router.report(SeatId(2), busy, 0.0);
    assert_eq!(router.choose(&but(0), 0.0).unwrap_err(), NoChoice::TooBusy { wait_s: 5.0 });
    assert_eq!(router.choose(&but(1), 0.0).unwrap().ticket.seat, SeatId(0));

    router.leave(SeatId(1));
    router.leave(SeatId(2));
    assert_eq!(router.choose(&but(0), 0.0).unwrap_err(), NoChoice::NobodyFit);
}

#[test]
fn a_ticket_of_a_worker_that_left_changes_nothing_for_its_successor() {
    let mut router = ready(1, Policy::default());
    let old = router.choose(&prompt(10, &[]), 0.0).unwrap();
    router.leave(SeatId(0));
    let seat = router.join(5).unwrap();
    assert_eq!(seat, SeatId(0));
    router.end(old.ticket, Outcome::Fault, 0.0);
    assert_eq!(router.assigned(seat), 0);
}
