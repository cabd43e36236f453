//! The right to give one request to one worker.

use std::sync::Arc;

use gateway_core::routing::{Outcome, SeatId, Ticket};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use super::WorkerId;
use super::shared::{Member, Shared};

/// A request on its way to a worker; counted until dropped.
#[derive(Debug)]
pub struct WorkerLease {
    /// The worker.
    pub id: WorkerId,
    pub(super) seat: SeatId,
    pub(super) address: Arc<str>,
    pub(super) channel: Channel,
    pub(super) lost: CancellationToken,
    shared: Arc<Shared>,
    ticket: Option<Ticket>,
    outcome: Outcome,
}

impl WorkerLease {
    pub(super) fn new(shared: &Arc<Shared>, member: &Member, ticket: Ticket) -> Self {
        Self {
            id: member.id,
            seat: member.seat,
            address: Arc::clone(&member.uri),
            channel: member.channel.clone(),
            lost: member.reports.borrow().lost.clone(),
            shared: Arc::clone(shared),
            ticket: Some(ticket),
            outcome: Outcome::Neutral,
        }
    }

    /// Notes how the worker has done so far; the last word counts when the lease is dropped.
    pub(super) fn judge(&mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

impl Drop for WorkerLease {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            let now_s = self.shared.now_s();
            self.shared.router().end(ticket, self.outcome, now_s);
        }
    }
}
