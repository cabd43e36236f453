//! What other workers compute of a request before one answers it: the features of its media, the
//! pages of its prompt. Whatever cannot be had so is left to the worker that answers.

use std::sync::Arc;

use gateway_core::routing::{Demand, Division, Stage};

use crate::app::App;
use crate::error::{ErrorKind, GatewayError};
use crate::reply::{Job, Visit};
use crate::sample::upload;
use crate::workers::{
    GenerateCall, Source, Sources, Wish, WorkerEvent, WorkerEvents, WorkerLease, WorkerUsage,
    silent,
};

/// Workers that a stage is tried on.
const MAX_ATTEMPTS: usize = 2;

/// What others have computed.
#[derive(Clone, Debug, Default)]
pub struct Prepared {
    /// And where it is.
    pub sources: Sources,
    /// Prompt tokens that were in the cache of whoever computed the prompt.
    pub cached_tokens: u64,
}

/// Runs the stages of one sample, one after the other: the second needs what the first gives.
///
/// # Errors
/// What no other worker could do better: media that cannot be used, a deadline.
pub async fn prepare(
    app: &Arc<App>,
    job: &Arc<Job>,
    visit: &Visit,
    choice: u32,
    division: Division,
) -> Result<Prepared, GatewayError> {
    let mut prepared = Prepared::default();
    let stages = Stages { app, job, visit, choice };
    if division.encodes
        && let Some((source, _)) = stages.run(Stage::Encode, &prepared.sources).await?
    {
        prepared.sources.features = Some(source);
    }
    if division.prefills
        && let Some((source, usage)) = stages.run(Stage::Prefill, &prepared.sources).await?
    {
        prepared.sources.pages = Some(source);
        prepared.cached_tokens = u64::from(usage.cached_tokens);
    }
    Ok(prepared)
}

struct Stages<'a> {
    app: &'a Arc<App>,
    job: &'a Arc<Job>,
    visit: &'a Visit,
    choice: u32,
}

impl Stages<'_> {
    /// Who has done it; `None` if nobody could.
    async fn run(
        &self,
        stage: Stage,
        sources: &Sources,
    ) -> Result<Option<(Source, WorkerUsage)>, GatewayError> {
        let demand = self.job.route.of_stage(stage);
        let mut lost: Option<WorkerEvents> = None;
        let mut another = None;
        for _ in 0..MAX_ATTEMPTS {
            let failed = lost.as_ref().map(WorkerEvents::lease);
            let lease = another.take().map_or_else(|| self.app.workers.lease(&demand, failed), Ok);
            let Ok(lease) = lease else { break };
            let (source, id) = (lease.source(), lease.id);
            let mut events = self.call(lease, stage, sources);
            let ended = tokio::select! {
                ended = self.to_end(&mut events, &demand, &mut another) => ended,
                // whoever answers could do it meanwhile
                () = self.app.workers.until_stalled(id) => Err(GatewayError::new(
                    ErrorKind::WorkerUnavailable,
                    "the worker has requests and makes no step",
                )),
            };
            match ended {
                Ok(usage) => {
                    self.app.metrics.stage_ended(stage, true);
                    return Ok(Some((source, usage)));
                }
                Err(error) if !is_of_worker(error.kind) => return Err(error),
                Err(error) => {
                    tracing::warn!(reply_id = %self.visit.reply_id, stage = ?stage,
                        worker = %source.address,
                        reason = error.detail.as_deref().unwrap_or(&error.message),
                        "worker could not do its part");
                    let is_lost = error.kind == ErrorKind::WorkerUnavailable;
                    lost = Some(events);
                    if !is_lost {
                        break;
                    }
                }
            }
        }
        self.app.metrics.stage_ended(stage, false);
        Ok(None)
    }

    fn call(&self, lease: WorkerLease, stage: Stage, sources: &Sources) -> WorkerEvents {
        let (job, visit) = (self.job, self.visit);
        let name = if stage == Stage::Encode { "encode" } else { "prefill" };
        let call = GenerateCall {
            header: &job.header,
            request_id: &format!("{}-{}-{name}", visit.reply_id, self.choice),
            seed: 0,
            trace_id: &visit.trace_id,
            trace: &visit.trace,
            deadline: visit.deadline,
            upload: (!job.media.is_empty()).then(|| upload(self.app, job)),
            wish: Wish { stage, sources: sources.clone() },
        };
        WorkerEvents::new(lease, call)
    }

    /// Follows a call to its end, or leaves a silent worker for `another` that will do its part.
    async fn to_end(
        &self,
        events: &mut WorkerEvents,
        demand: &Demand,
        another: &mut Option<WorkerLease>,
    ) -> Result<WorkerUsage, GatewayError> {
        loop {
            match events.next().await? {
                Some(WorkerEvent::Finished { usage, .. }) => {
                    events.settle();
                    return Ok(usage);
                }
                Some(WorkerEvent::Silent) => {
                    *another = self.app.workers.lease_another(demand, events.lease());
                    if another.is_some() {
                        return Err(silent());
                    }
                }
                Some(_) => {}
                None => return Err(GatewayError::internal("the worker's events ended twice")),
            }
        }
    }
}

/// Whether another worker may do better with the same request.
fn is_of_worker(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::WorkerUnavailable
            | ErrorKind::Overloaded
            | ErrorKind::Internal
            | ErrorKind::InvalidRequest
            | ErrorKind::ContextTooLong
    )
}
