//! Holds the workers: follows each, hands out leases, says what is missing.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gateway_core::model::ModelFacts;
use gateway_core::routing::{
    ChainMemory, Choice, Demand, Division, Health, MAX_SEATS, NoChoice, Policy, Role, Router,
    SeatLoad, Stage,
};
use tokio::sync::watch;
use tonic::transport::ClientTlsConfig;

use super::channel::open;
use super::demand::{demand, number};
use super::session::{Report, Session};
use super::shared::{Member, Shared};
use super::{RequestHeader, WorkerAddress, WorkerId, WorkerLease, WorkerState, WorkerView};
use crate::admission::Admission;
use crate::error::{ErrorKind, GatewayError};
use crate::telemetry::{Fleet, Metrics, WorkerCount};

/// How often a worker that others wait for is looked at.
const STALL_INTERVAL: Duration = Duration::from_millis(500);

/// The workers and the tasks that follow them.
#[derive(Debug)]
pub struct WorkerPool {
    shared: Arc<Shared>,
    tls: Option<ClientTlsConfig>,
    num_ids: AtomicU32,
    /// Page keys of prompts seen of late.
    chains: Mutex<ChainMemory>,
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        self.stop();
    }
}

impl WorkerPool {
    /// A pool that follows nobody yet; what it shares with workers counts among the bytes that the
    /// door lets requests hold.
    pub fn new(
        policy: Policy,
        facts: ModelFacts,
        tls: Option<ClientTlsConfig>,
        admission: Arc<Admission>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let shared = Arc::new(Shared::new(Router::new(policy), facts, admission, metrics));
        Self { shared, tls, num_ids: AtomicU32::new(0), chains: Mutex::default() }
    }

    /// Follows these workers and no others; needs a running tokio runtime. Workers that are
    /// followed already stay as they are; requests on those that go run to their end.
    ///
    /// # Errors
    /// The addresses that cannot be followed, each with the reason; all others are.
    pub fn set_workers(&self, addresses: &[WorkerAddress]) -> Result<(), String> {
        let old = self.shared.members();
        let mut complaints = Vec::new();
        let mut members: Vec<Arc<Member>> = Vec::with_capacity(addresses.len());
        let is_wanted =
            |member: &Arc<Member>| addresses.iter().any(|address| *address.uri == *member.uri);
        for member in old.iter().filter(|member| is_wanted(member)) {
            members.push(Arc::clone(member));
        }
        for member in old.iter().filter(|member| !is_wanted(member)) {
            self.shared.router().leave(member.seat);
            member.follower.abort();
            tracing::info!(worker = member.address(), "worker left the list");
        }
        for address in addresses {
            if members.iter().any(|member| *member.uri == *address.uri) {
                continue;
            }
            match self.follow(address) {
                Ok(member) => members.push(Arc::new(member)),
                Err(reason) => complaints.push(format!("worker {}: {reason}", address.uri)),
            }
        }
        self.shared.set_members(members);
        if complaints.is_empty() { Ok(()) } else { Err(complaints.join("; ")) }
    }

    fn follow(&self, address: &WorkerAddress) -> Result<Member, String> {
        let channel = open(address, self.tls.as_ref()).map_err(|error| innermost(&error))?;
        let Some(seat) = self.shared.router().join(number(&address.uri)) else {
            return Err(format!("{MAX_SEATS} workers are followed already, the most there can be"));
        };
        let (sender, reports) = watch::channel(Report::unknown());
        let uri: Arc<str> = Arc::from(&*address.uri);
        let session = Session {
            address: Arc::clone(&uri),
            channel: channel.clone(),
            seat,
            shared: Arc::clone(&self.shared),
            reports: sender,
        };
        let id = WorkerId(self.num_ids.fetch_add(1, Ordering::Relaxed));
        let follower = tokio::spawn(session.run());
        let tls_name = address.tls_name.as_deref().map(Arc::from);
        Ok(Member { id, seat, uri, tls_name, channel, reports, follower })
    }

    /// Follows the workers no longer; what is known of them stays as it is.
    pub fn stop(&self) {
        for member in self.shared.members().iter() {
            member.follower.abort();
        }
    }

    /// Every worker at this moment.
    pub fn snapshot(&self) -> Vec<WorkerView> {
        let now_s = self.shared.now_s();
        let members = self.shared.members();
        let router = self.shared.router();
        let view = |member: &Arc<Member>| {
            let report = member.reports.borrow();
            WorkerView {
                id: member.id,
                address: Arc::clone(&member.uri),
                state: state(&report, router.health(member.seat, now_s)),
                role: report.role,
                load: report.load,
                assigned_requests: router.assigned(member.seat),
                max_context_tokens: report.max_context_tokens,
            }
        };
        members.iter().map(view).collect()
    }

    /// What a request needs of a worker; hashes its prompt.
    pub fn demand(&self, header: &RequestHeader, affinity: Option<&str>) -> Demand {
        let epochs = self.shared.router().epochs();
        demand(header, affinity, &epochs, &self.chains)
    }

    /// Leases the worker that will probably answer first.
    ///
    /// # Errors
    /// `WorkerUnavailable` saying what is missing or how short the longest context is, `Overloaded`
    /// if the wait would be too long.
    pub fn lease(
        &self,
        demand: &Demand,
        failed: Option<&WorkerLease>,
    ) -> Result<WorkerLease, GatewayError> {
        let excluded = failed.map(|lease| lease.seat);
        let demand = &Demand { excluded, ..demand.clone() };
        match self.choose(demand) {
            Ok((choice, division)) => self.lease_for(choice, division),
            Err(none) => Err(self.nobody(none, demand)),
        }
    }

    fn choose(&self, demand: &Demand) -> Result<(Choice, Division), NoChoice> {
        let (began, now_s) = (Instant::now(), self.shared.now_s());
        let (choice, division) = {
            let mut router = self.shared.router();
            let choice = router.choose(demand, now_s)?;
            let division = router.division(demand, &choice, now_s);
            (choice, division)
        };
        let metrics = &self.shared.metrics;
        metrics.routed(choice.reason, choice.matched_tokens, began.elapsed());
        Ok((choice, division))
    }

    /// Leases a worker other than the leased one if one would take the request now: whoever then
    /// leaves the first is sure of the second.
    pub fn lease_another(&self, demand: &Demand, than: &WorkerLease) -> Option<WorkerLease> {
        let demand = Demand { excluded: Some(than.seat), ..demand.clone() };
        let (choice, division) = self.choose(&demand).ok()?;
        self.lease_for(choice, division).ok()
    }

    /// Leases one worker, whatever it has to do.
    ///
    /// # Errors
    /// `WorkerUnavailable` if it has left.
    pub fn lease_of(&self, demand: &Demand, id: WorkerId) -> Result<WorkerLease, GatewayError> {
        let members = self.shared.members();
        let seat = members.iter().find(|member| member.id == id).map(|member| member.seat);
        let choice = seat.and_then(|seat| self.shared.router().take_seat(demand, seat));
        match choice {
            Some(choice) => self.lease_for(choice, Division::default()),
            None => Err(GatewayError::new(
                ErrorKind::WorkerUnavailable,
                "the worker that served this request has left; try again",
            )),
        }
    }

    fn lease_for(&self, choice: Choice, division: Division) -> Result<WorkerLease, GatewayError> {
        let members = self.shared.members();
        match members.iter().find(|member| member.seat == choice.ticket.seat) {
            Some(member) => Ok(WorkerLease::new(&self.shared, member, choice.ticket, division)),
            // it left between choice and lease; its seat knows the ticket no longer
            None => Err(GatewayError::new(
                ErrorKind::WorkerUnavailable,
                "the worker chosen for this request has just left; try again",
            )),
        }
    }

    /// Waits until a worker has requests and makes no step.
    pub async fn until_stalled(&self, id: WorkerId) {
        loop {
            tokio::time::sleep(STALL_INTERVAL).await;
            let members = self.shared.members();
            let seat = members.iter().find(|member| member.id == id).map(|member| member.seat);
            let now_s = self.shared.now_s();
            // on one that has left the list, what runs runs to its end
            let is_stalled = |seat| self.shared.router().health(seat, now_s) == Health::Stalled;
            if seat.is_some_and(is_stalled) {
                return;
            }
        }
    }

    /// Confirms, before any media work, that someone could take a request.
    ///
    /// # Errors
    /// `WorkerUnavailable` saying what is missing.
    pub fn check_someone_ready(&self) -> Result<(), GatewayError> {
        let members = self.shared.members();
        let mut reports = members.iter().map(|member| member.reports.borrow());
        if reports.any(|report| report.answers()) {
            return Ok(());
        }
        Err(self.nobody(NoChoice::NobodyReady, &Demand::default()))
    }

    /// The longest context that any ready worker holds; `None` while none is ready.
    pub fn longest_context(&self) -> Option<u32> {
        let members = self.shared.members();
        let reports = members.iter().map(|member| member.reports.borrow());
        reports.filter(|report| report.answers()).map(|report| report.max_context_tokens).max()
    }

    fn nobody(&self, none: NoChoice, demand: &Demand) -> GatewayError {
        let message = match none {
            NoChoice::TooLong(longest) => format!(
                "the request needs {} tokens of context; the workers now ready \
                 hold {longest}",
                demand.context_tokens
            ),
            NoChoice::TooBusy { wait_s } => {
                // one that helps is missed by nobody
                if demand.stage == Stage::Answer {
                    self.shared.metrics.shed();
                }
                let message = format!(
                    "every worker has more than {wait_s:.0} s of prompts waiting; try again later"
                );
                let error = GatewayError::new(ErrorKind::Overloaded, message);
                return error.retry_after(wait_s.clamp(1.0, 60.0) as u32);
            }
            NoChoice::NobodyFit => {
                let missing = self.what_is_missing();
                let mut message = "no other worker is ready to take the request".to_owned();
                if !missing.is_empty() {
                    message = format!("{message}: {}", missing.join("; "));
                }
                message
            }
            NoChoice::NobodyReady => {
                let mut missing = self.what_is_missing();
                missing.extend(self.who_helps_only());
                let nobody = vec!["no worker is known".to_owned()];
                let missing = if missing.is_empty() { nobody } else { missing };
                format!("no worker is ready: {}", missing.join("; "))
            }
        };
        GatewayError::new(ErrorKind::WorkerUnavailable, message)
    }

    /// One line a worker that takes no requests.
    pub fn what_is_missing(&self) -> Vec<String> {
        let line = |view: WorkerView| {
            let address = view.address.split_once("://").map_or(&*view.address, |(_, rest)| rest);
            match view.state {
                WorkerState::Ready => None,
                WorkerState::Loading => Some(format!("worker {address} is loading")),
                WorkerState::Draining => Some(format!("worker {address} is draining")),
                WorkerState::Stalled => {
                    Some(format!("worker {address} has requests and makes no step"))
                }
                WorkerState::Broken => {
                    Some(format!("worker {address} is left alone after failing several requests"))
                }
                WorkerState::Refused { reason } => {
                    Some(format!("worker {address} is refused: {reason}"))
                }
                WorkerState::Unreachable { reason } => {
                    Some(format!("worker {address} is out of reach: {reason}"))
                }
            }
        };
        self.snapshot().into_iter().filter_map(line).collect()
    }

    /// One line a worker that is ready and answers nothing.
    fn who_helps_only(&self) -> Vec<String> {
        let line = |view: WorkerView| {
            let does = match (view.state, view.role) {
                (WorkerState::Ready, Role::Encode) => "encodes media",
                (WorkerState::Ready, Role::Prefill) => "computes prompts for others",
                _ => return None,
            };
            let address = view.address.split_once("://").map_or(&*view.address, |(_, rest)| rest);
            Some(format!("worker {address} only {does}"))
        };
        self.snapshot().into_iter().filter_map(line).collect()
    }

    /// Workers by state.
    pub fn count(&self) -> WorkerCount {
        counted(&self.snapshot())
    }

    /// All that metrics show of the workers.
    pub fn fleet(&self) -> Fleet {
        let views = self.snapshot();
        let mut load = SeatLoad::default();
        let silent = |view: &&WorkerView| {
            matches!(view.state, WorkerState::Unreachable { .. } | WorkerState::Refused { .. })
        };
        for view in views.iter().filter(|view| !silent(view)) {
            load.running_requests += view.load.running_requests;
            load.waiting_requests += view.load.waiting_requests;
            load.waiting_prompt_tokens += view.load.waiting_prompt_tokens;
            load.used_pages += view.load.used_pages;
            load.total_pages += view.load.total_pages;
        }
        Fleet { count: counted(&views), load, known_pages: self.shared.router().num_pages() }
    }

    /// Requests now given to workers, over all of them.
    pub fn assigned(&self) -> i64 {
        let members = self.shared.members();
        let router = self.shared.router();
        members.iter().map(|member| router.assigned(member.seat)).sum()
    }
}

fn counted(views: &[WorkerView]) -> WorkerCount {
    let mut count = WorkerCount::default();
    for view in views {
        match view.state {
            WorkerState::Ready => count.ready += 1,
            WorkerState::Loading => count.loading += 1,
            WorkerState::Draining => count.draining += 1,
            WorkerState::Stalled => count.stalled += 1,
            WorkerState::Broken => count.broken += 1,
            WorkerState::Refused { .. } => count.refused += 1,
            WorkerState::Unreachable { .. } => count.unreachable += 1,
        }
    }
    count
}

fn state(report: &Report, health: Health) -> WorkerState {
    match (&report.state, health) {
        (WorkerState::Ready, Health::Stalled) => WorkerState::Stalled,
        (WorkerState::Ready, Health::Broken) => WorkerState::Broken,
        (state, _) => state.clone(),
    }
}

/// The cause that says something; tonic's own words only say that there is one.
fn innermost(error: &tonic::transport::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}
