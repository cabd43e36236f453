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
    let demand = Demand { media: Some(7), ..prompt(1000, &[]) };
    let (answerer, division) = division(&mut router, &demand);
    assert_eq!(answerer, SeatId(2));
    assert_eq!(division, Division { encodes: true, prefills: true });
    assert_eq!(chosen(&mut router, &demand.of_stage(Stage::Prefill)), SeatId(1));
    assert_eq!(chosen(&mut router, &demand.of_stage(Stage::Encode)), SeatId(0));
}

#[test]
fn workers_that_do_everything_need_nobody_else() {
    let mut router = fleet(&[Role::All, Role::All]);
    let demand = Demand { media: Some(7), ..prompt(1000, &[]) };
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
