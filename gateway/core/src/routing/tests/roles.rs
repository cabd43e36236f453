//! Who is asked for which stage where workers divide the work.

use super::super::{Division, NoChoice, Stage};
use super::*;

/// Workers of these roles, ready for long, that tell of their pages.
fn fleet(roles: &[Role]) -> Router {
    let mut router = ready(roles.len() as u16, Policy::default());
    for (place, role) in roles.iter().enumerate() {
        let standing = Standing { role: *role, ..STANDING };
        router.set_ready(SeatId(place as u16), Some(standing), -1000.0);
    }
    router
}

fn division(router: &mut Router, demand: &Demand) -> (SeatId, Division) {
    let choice = router.choose(demand, 0.0).unwrap();
    (choice.ticket.seat, router.division(demand, &choice, 0.0))
}

const NOTHING: Division = Division { encodes: false, prefills: false };

#[test]
fn each_stage_goes_to_workers_of_its_role() {
    let mut router = fleet(&[Role::Encode, Role::Prefill, Role::Decode]);
    let demand = Demand { media: Some(7), media_end: 900, ..prompt(1000, &[]) };
    let (answerer, division) = division(&mut router, &demand);
    assert_eq!(answerer, SeatId(2));
    assert_eq!(division, Division { encodes: true, prefills: true });
    assert_eq!(chosen(&mut router, &demand.of_stage(Stage::Prefill)), SeatId(1));
    assert_eq!(chosen(&mut router, &demand.of_stage(Stage::Encode)), SeatId(0));
}

#[test]
fn workers_that_do_everything_need_nobody_else() {
    let mut router = fleet(&[Role::All, Role::All]);
    let demand = Demand { media: Some(7), media_end: 900, ..prompt(1000, &[]) };
    assert_eq!(division(&mut router, &demand).1, NOTHING);
    let none = router.choose(&demand.of_stage(Stage::Prefill), 0.0).unwrap_err();
    assert_eq!(none, NoChoice::NobodyReady);
}

#[test]
fn nobody_answers_where_workers_only_compute_for_others() {
    let mut router = fleet(&[Role::Encode, Role::Prefill]);
    let none = router.choose(&prompt(10, &[]), 0.0).unwrap_err();
    assert_eq!(none, NoChoice::NobodyReady);
}

#[test]
fn one_that_does_everything_answers_where_those_that_decode_are_out() {
    let mut router = fleet(&[Role::Prefill, Role::Decode, Role::All]);
    let demand = prompt(1000, &[]);
    assert_eq!(division(&mut router, &demand).0, SeatId(1));
    router.set_ready(SeatId(1), None, 0.0);
    assert_eq!(division(&mut router, &demand), (SeatId(2), NOTHING));
}

#[test]
fn one_that_decodes_computes_the_prompt_itself_where_nobody_else_can() {
    let mut router = fleet(&[Role::Prefill, Role::Decode]);
    let demand = prompt(1000, &[]);
    router.set_ready(SeatId(0), None, 0.0);
    assert_eq!(division(&mut router, &demand), (SeatId(1), NOTHING));
    // ready, but too small for the prompt
    let small = Standing { role: Role::Prefill, max_context_tokens: 1000, ..STANDING };
    router.set_ready(SeatId(0), Some(small), 0.0);
    assert_eq!(division(&mut router, &demand), (SeatId(1), NOTHING));
}

#[test]
fn a_prompt_of_which_little_is_missing_is_computed_where_it_is_answered() {
    let mut router = fleet(&[Role::Prefill, Role::Decode]);
    let keys = [1, 2, 3, 4];
    router.cache_news(SeatId(1), &CacheNews { added: &keys, ..CacheNews::default() });
    assert_eq!(division(&mut router, &prompt(4 * PAGE + 256, &keys)).1, NOTHING);
    assert!(division(&mut router, &prompt(4 * PAGE + 257, &keys)).1.prefills);
    assert_eq!(division(&mut router, &prompt(256, &[])).1, NOTHING);
}

#[test]
fn prompts_go_where_their_beginning_is_and_answers_where_the_wait_is_short() {
    let mut router = fleet(&[Role::Prefill, Role::Prefill, Role::Decode, Role::Decode]);
    let keys = [1, 2, 3, 4];
    router.cache_news(SeatId(1), &CacheNews { added: &keys, ..CacheNews::default() });
    // holds a page, which is worth little here: it would be fetched
    router.cache_news(SeatId(2), &CacheNews { added: &keys[..1], ..CacheNews::default() });
    router.report(SeatId(2), busy(3, 1), 0.0);
    let demand = prompt(9 * PAGE, &keys);
    assert_eq!(chosen(&mut router, &demand), SeatId(3));
    assert_eq!(chosen(&mut router, &demand.of_stage(Stage::Prefill)), SeatId(1));
}

#[test]
fn equal_pictures_meet_on_one_encoder() {
    let mut router = fleet(&[Role::Encode, Role::Encode, Role::Encode, Role::All]);
    let mut homes = std::collections::HashSet::new();
    for picture in 0..30 {
        let demand = Demand { media: Some(picture), ..prompt(500, &[]) };
        let mut ask = || {
            let choice = router.choose(&demand.of_stage(Stage::Encode), 0.0).unwrap();
            let seat = choice.ticket.seat;
            router.end(choice.ticket, super::super::Outcome::Served, 0.0);
            seat
        };
        let home = ask();
        assert_eq!([ask(), ask()], [home, home]);
        homes.insert(home);
    }
    assert_eq!(homes.len(), 3);
}

#[test]
fn requests_that_come_together_with_one_beginning_all_ask_who_computes_it() {
    let mut router = fleet(&[Role::Prefill, Role::Decode]);
    let keys: Vec<u64> = (0..156).collect();
    let demand = prompt(156 * PAGE + 32, &keys);
    // none has ended, so nothing is there yet
    for _ in 0..3 {
        assert!(division(&mut router, &demand).1.prefills);
        // who is about to compute it is asked again, and joins what it computes already
        assert_eq!(chosen(&mut router, &demand.of_stage(Stage::Prefill)), SeatId(0));
    }
    router.cache_news(SeatId(1), &CacheNews { added: &keys, ..CacheNews::default() });
    assert!(!division(&mut router, &demand).1.prefills);
}

#[test]
fn nobody_waits_for_one_that_computes_prompts_much_longer_than_computing_it_takes() {
    let behind = |tokens| SeatLoad { waiting_prompt_tokens: tokens, ..SeatLoad::default() };
    let demand = prompt(1000, &[]);
    let mut router = fleet(&[Role::Prefill, Role::Decode]);
    router.report(SeatId(0), behind(2_900), 0.0);
    assert!(division(&mut router, &demand).1.prefills);
    router.report(SeatId(0), behind(3_100), 0.0);
    assert!(!division(&mut router, &demand).1.prefills);
    // a second one is free
    let mut router = fleet(&[Role::Prefill, Role::Decode, Role::Prefill]);
    router.report(SeatId(0), behind(5_000_000), 0.0);
    assert!(division(&mut router, &demand).1.prefills);
}

#[test]
fn the_wait_for_a_prompt_is_part_of_what_an_answer_costs() {
    let behind = |tokens| SeatLoad { waiting_prompt_tokens: tokens, ..SeatLoad::default() };
    let demand = prompt(1000, &[]);
    let mut router = fleet(&[Role::Prefill, Role::Decode, Role::All]);
    assert_eq!(chosen(&mut router, &demand), SeatId(1));
    router.report(SeatId(0), behind(2_900), 0.0);
    assert_eq!(chosen(&mut router, &demand), SeatId(2));
}

#[test]
fn pictures_in_a_prompt_that_is_there_are_not_encoded_again() {
    let mut router = fleet(&[Role::Encode, Role::All]);
    let keys = [1, 2, 3];
    router.cache_news(SeatId(1), &CacheNews { added: &keys, ..CacheNews::default() });
    let with_end = |media_end| Demand { media: Some(7), media_end, ..prompt(3 * PAGE + 90, &keys) };
    assert!(!division(&mut router, &with_end(3 * PAGE)).1.encodes);
    assert!(division(&mut router, &with_end(3 * PAGE + 1)).1.encodes);
}
