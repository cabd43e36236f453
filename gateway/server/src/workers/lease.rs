//! The right to give one request to one worker.

use std::sync::Arc;
use std::time::Duration;

use gateway_core::routing::{Division, Outcome, SeatId, Ticket};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use super::shared::{Member, Shared};
use super::shared_pieces::Ways;
use super::{Source, WorkerId};

/// A request on its way to a worker; counted until dropped.
#[derive(Debug)]
pub struct WorkerLease {
    /// The worker.
    pub id: WorkerId,
    /// What others should compute before it is asked.
    pub division: Division,
    pub(super) seat: SeatId,
    pub(super) address: Arc<str>,
    pub(super) channel: Channel,
    tls_name: Option<Arc<str>>,
    pub(super) lost: CancellationToken,
    pub(super) silent: CancellationToken,
    reads_memory: bool,
    shared: Arc<Shared>,
    ticket: Option<Ticket>,
    outcome: Outcome,
}

impl WorkerLease {
    pub(super) fn new(
        shared: &Arc<Shared>,
        member: &Member,
        ticket: Ticket,
        division: Division,
    ) -> Self {
        let (lost, silent, reads_memory) = {
            let report = member.reports.borrow();
            (report.lost.clone(), report.silent.clone(), report.reads_memory)
        };
        Self {
            id: member.id,
            division,
            seat: member.seat,
            address: Arc::clone(&member.uri),
            channel: member.channel.clone(),
            tls_name: member.tls_name.clone(),
            lost,
            silent,
            reads_memory,
            shared: Arc::clone(shared),
            ticket: Some(ticket),
            outcome: Outcome::Neutral,
        }
    }

    /// The worker as others reach it.
    pub fn source(&self) -> Source {
        let uri = &*self.address;
        let address = uri.split_once("://").map_or(uri, |(_, address)| address);
        Source { address: address.to_owned(), tls_name: self.tls_name.clone() }
    }

    /// Ways for the patches of one call.
    pub(super) fn ways(&self) -> Ways {
        Ways::new(&self.shared.memory, self.reads_memory)
    }

    /// The worker has begun the request that was sent it so long ago, its queue's time apart.
    pub(super) fn lagged(&self, delay: Duration) {
        let now_s = self.shared.now_s();
        self.shared.router().lagged(self.seat, delay.as_secs_f64(), now_s);
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
