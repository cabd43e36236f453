//! Which worker takes a request: a pure choice over one snapshot.

use super::{WorkerId, WorkerState, WorkerView};

/// Picks the worker with the least to do among those that are ready, not excluded and able to
/// hold `context_tokens`; `turn` decides between equals, so that they take turns.
pub(super) fn choose(
    workers: &[WorkerView],
    excluded: Option<WorkerId>,
    context_tokens: u64,
    turn: usize,
) -> Option<WorkerId> {
    let is_fit = |worker: &&WorkerView| {
        worker.state == WorkerState::Ready
            && Some(worker.id) != excluded
            && u64::from(worker.max_context_tokens) >= context_tokens
    };
    let least = workers.iter().filter(is_fit).map(expected_work).min()?;
    let equals: Vec<_> =
        workers.iter().filter(is_fit).filter(|worker| expected_work(worker) == least).collect();
    equals.get(turn % equals.len()).map(|worker| worker.id)
}

/// Requests before ours, then prompt tokens before ours.
///
/// A report is always a little old: what this gateway has sent since counts at once, or a burst
/// would all go to the worker that was idle a moment ago.
fn expected_work(worker: &WorkerView) -> (i64, u64) {
    let reported =
        i64::from(worker.load.running_requests) + i64::from(worker.load.waiting_requests);
    ((reported + worker.unreported_requests).max(0), worker.load.waiting_prompt_tokens)
}

#[cfg(test)]
mod tests {
    use super::super::WorkerLoad;
    use super::*;

    fn ready(id: u32, running: u32, unreported: i64) -> WorkerView {
        WorkerView {
            id: WorkerId(id),
            state: WorkerState::Ready,
            load: WorkerLoad { running_requests: running, ..WorkerLoad::default() },
            unreported_requests: unreported,
            max_context_tokens: 1000,
        }
    }

    #[test]
    fn the_idle_worker_takes_the_request() {
        let workers = [ready(0, 5, 0), ready(1, 1, 0), ready(2, 3, 0)];
        assert_eq!(choose(&workers, None, 10, 0), Some(WorkerId(1)));
    }

    #[test]
    fn requests_sent_since_the_last_report_count() {
        let workers = [ready(0, 0, 4), ready(1, 2, 0)];
        assert_eq!(choose(&workers, None, 10, 0), Some(WorkerId(1)));
    }

    #[test]
    fn equals_take_turns() {
        let workers = [ready(0, 1, 0), ready(1, 1, 0), ready(2, 9, 0)];
        let picks: Vec<_> =
            (0..4).map(|turn| choose(&workers, None, 10, turn).unwrap().0).collect();
        assert_eq!(picks, [0, 1, 0, 1]);
    }

    #[test]
    fn a_worker_that_is_not_ready_or_too_small_or_excluded_is_never_chosen() {
        let mut draining = ready(0, 0, 0);
        draining.state = WorkerState::Draining;
        let mut small = ready(1, 0, 0);
        small.max_context_tokens = 9;
        let workers = [draining, small, ready(2, 99, 0)];

        assert_eq!(choose(&workers, None, 10, 0), Some(WorkerId(2)));
        assert_eq!(choose(&workers, Some(WorkerId(2)), 10, 0), None);
    }

    #[test]
    fn four_hundred_requests_at_once_spread_evenly_over_eight() {
        let mut workers: Vec<_> = (0..8).map(|id| ready(id, 0, 0)).collect();
        for turn in 0..400 {
            let WorkerId(id) = choose(&workers, None, 10, turn).unwrap();
            workers[id as usize].unreported_requests += 1;
        }
        assert!(workers.iter().all(|worker| worker.unreported_requests == 50));
    }
}
