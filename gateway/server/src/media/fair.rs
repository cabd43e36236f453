//! A queue for a limited good: whoever has used little of it comes before whoever has used much.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Hands out units of a good (threads, processes, bytes), those that wait in order of what they
/// and theirs have cost so far: self-clocked fair queuing, each request a flow of its own.
#[derive(Debug)]
pub struct FairQueue {
    capacity: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    free: u64,
    /// Finish tag of the ticket served last: the cost at which newcomers begin.
    clock: u64,
    next_number: u64,
    waiting: BTreeMap<Tag, Waiter>,
}

/// Place in the line: what the flow will have cost, then order of arrival.
type Tag = (u64, u64);

#[derive(Debug)]
struct Waiter {
    units: u64,
    turn: oneshot::Sender<()>,
}

/// What one request has cost at one queue so far.
#[derive(Debug, Default)]
pub struct Flow(AtomicU64);

/// Units held; dropping it passes them on.
#[derive(Debug)]
pub struct Place {
    queue: Arc<FairQueue>,
    units: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.queue.give_back(self.units);
    }
}

impl FairQueue {
    /// A queue for `capacity` units, 1 at least.
    pub fn new(capacity: u64) -> Arc<Self> {
        let capacity = capacity.max(1);
        let state = State { free: capacity, clock: 0, next_number: 0, waiting: BTreeMap::new() };
        Arc::new(Self { capacity, state: Mutex::new(state) })
    }

    /// Waits for `units` (more than there are means all of them), for work of that cost. Dropping
    /// the future leaves the line.
    pub async fn enter(self: &Arc<Self>, flow: &Flow, units: u64, cost: u64) -> Place {
        let units = units.min(self.capacity);
        let (ticket, turn) = {
            let mut state = self.lock();
            let finish = state.clock.max(flow.0.load(Ordering::Relaxed)).saturating_add(cost);
            flow.0.store(finish, Ordering::Relaxed);
            if state.waiting.is_empty() && units <= state.free {
                state.free -= units;
                state.clock = state.clock.max(finish);
                return Place { queue: Arc::clone(self), units };
            }
            let tag = (finish, state.next_number);
            state.next_number += 1;
            let (turn, called) = oneshot::channel();
            state.waiting.insert(tag, Waiter { units, turn });
            (Ticket { queue: Arc::clone(self), tag, units, is_redeemed: false }, called)
        };
        // the sender is dropped only by a ticket that leaves the line, and this one is here
        let _ = turn.await;
        ticket.redeem()
    }

    fn give_back(&self, units: u64) {
        let mut state = self.lock();
        state.free += units;
        state.call_next();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // nothing panics while it is held
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Units nobody holds.
    #[cfg(test)]
    pub fn free(&self) -> u64 {
        self.lock().free
    }

    /// Tickets that wait.
    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        self.lock().waiting.len()
    }
}

impl State {
    /// Serves the line from its head; who needs much is waited for, never passed by for ever.
    fn call_next(&mut self) {
        while let Some(head) = self.waiting.first_entry() {
            if head.get().units > self.free {
                return;
            }
            let (tag, waiter) = head.remove_entry();
            self.free -= waiter.units;
            self.clock = self.clock.max(tag.0);
            // a receiver that is gone gives its units back itself, in `Ticket::drop`
            let _ = waiter.turn.send(());
        }
    }
}

/// A place in the line, or units already granted and not yet taken.
struct Ticket {
    queue: Arc<FairQueue>,
    tag: Tag,
    units: u64,
    is_redeemed: bool,
}

impl Ticket {
    fn redeem(mut self) -> Place {
        self.is_redeemed = true;
        Place { queue: Arc::clone(&self.queue), units: self.units }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.is_redeemed {
            return;
        }
        let mut state = self.queue.lock();
        if state.waiting.remove(&self.tag).is_none() {
            state.free += self.units;
        }
        // who stood behind may fit now
        state.call_next();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test]
    async fn one_small_job_does_not_wait_for_all_of_a_large_request() {
        let queue = FairQueue::new(1);
        let (large, small) = (Flow::default(), Flow::default());
        let first = queue.enter(&large, 1, 100).await;
        let mut rest: Vec<_> = (0..5).map(|_| Box::pin(queue.enter(&large, 1, 100))).collect();
        for waiting in &mut rest {
            assert!(waiting.as_mut().now_or_never().is_none());
        }
        let mut newcomer = Box::pin(queue.enter(&small, 1, 100));
        assert!(newcomer.as_mut().now_or_never().is_none());

        drop(first);

        // the large request's second job came first and has cost no more than this one will
        let second = rest[0].as_mut().now_or_never().unwrap();
        assert!(newcomer.as_mut().now_or_never().is_none());
        drop(second);
        assert!(newcomer.as_mut().now_or_never().is_some(), "before the third");
    }

    #[tokio::test]
    async fn cheap_work_goes_first_but_dear_work_is_never_starved() {
        let queue = FairQueue::new(1);
        let holder = queue.enter(&Flow::default(), 1, 0).await;
        let dear_flow = Flow::default();
        let mut dear = Box::pin(queue.enter(&dear_flow, 1, 10));
        assert!(dear.as_mut().now_or_never().is_none());
        let mut served_before = 0;
        let mut held = Some(holder);
        loop {
            // a stream of newcomers, each of cost 3
            let flow = Flow::default();
            let mut cheap = Box::pin(queue.enter(&flow, 1, 3));
            assert!(cheap.as_mut().now_or_never().is_none());
            drop(held.take());
            if dear.as_mut().now_or_never().is_some() {
                break;
            }
            held = cheap.as_mut().now_or_never();
            served_before += 1;
            assert!(served_before < 10, "starved");
        }
        assert!(served_before >= 2, "{served_before}");
    }

    #[tokio::test]
    async fn whoever_leaves_the_line_or_dies_with_a_granted_turn_holds_up_nobody() {
        let queue = FairQueue::new(10);
        let flow = Flow::default();
        let all = queue.enter(&flow, 10, 1).await;
        let mut big = Box::pin(queue.enter(&flow, 10, 1));
        let mut small = Box::pin(queue.enter(&flow, 2, 1));
        assert!(big.as_mut().now_or_never().is_none() && small.as_mut().now_or_never().is_none());

        drop(all);
        // granted to the big one, which never looks
        assert!(small.as_mut().now_or_never().is_none());
        drop(big);
        let place = small.as_mut().now_or_never().unwrap();

        assert_eq!((queue.free(), queue.waiting()), (8, 0));
        drop(place);
        assert_eq!(queue.free(), 10);
    }

    #[tokio::test]
    async fn more_than_there_is_means_all_of_it() {
        let queue = FairQueue::new(4);
        let place = queue.enter(&Flow::default(), 1000, 1).await;
        assert_eq!(queue.free(), 0);
        drop(place);
        assert_eq!(queue.free(), 4);
    }
}
