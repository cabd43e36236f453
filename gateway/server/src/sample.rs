//! One sample: one call to one worker, and, before its first token, at most one more elsewhere.

use std::sync::Arc;
use std::time::Duration;

use gateway_core::openai::{Delta, FinishReason};
use gateway_core::output::ReplyFolder;
use gateway_core::stop::StopMatcher;
use tokio::sync::watch;

use crate::app::App;
use crate::error::{ErrorKind, GatewayError};
use crate::reader::{PlainText, Reader, ReaderParts, Step};
use crate::reply::{Grammar, Job, ReplyStep, SampleEnd, SampleTokens, Visit};
use crate::stages::{Prepared, prepare};
use crate::workers::{
    GenerateCall, UploadWork, Wish, WorkerEvent, WorkerEvents, WorkerId, WorkerLease, WorkerUsage,
};

/// One sample of one prompt.
pub struct Sample {
    app: Arc<App>,
    /// Prompt and media; let go with the first token, when no second worker can need them.
    job: Option<Arc<Job>>,
    visit: Arc<Visit>,
    choice: u32,
    seed: u64,
    reader: Reader,
    echo: Option<String>,
    events: Option<WorkerEvents>,
    /// Tells the other samples of this prompt where it runs; only the first sample has it.
    started: Option<watch::Sender<Option<WorkerId>>>,
    is_first: bool,
    preferred: Option<WorkerId>,
    /// What other workers have computed for it, once they were asked.
    prepared: Option<Prepared>,
    may_retry: bool,
    cached_tokens: u64,
    /// Time in the worker's queue, until it is told.
    queue: Option<Duration>,
    is_over: bool,
}

impl Sample {
    /// A sample that has not begun.
    pub fn new(
        app: &Arc<App>,
        job: Arc<Job>,
        visit: Arc<Visit>,
        choice: u32,
        started: Option<watch::Sender<Option<WorkerId>>>,
    ) -> Self {
        let generation = &job.header.generation;
        let base = generation.seed.unwrap_or_else(rand::random);
        Self {
            app: Arc::clone(app),
            seed: derived_seed(base, choice % generation.num_samples.max(1)),
            reader: Reader::new(reader_parts(app, &job, &visit, choice)),
            echo: job.echo.clone(),
            visit,
            choice,
            events: None,
            is_first: started.is_some(),
            started,
            preferred: None,
            prepared: None,
            may_retry: true,
            cached_tokens: 0,
            queue: None,
            is_over: false,
            job: Some(job),
        }
    }

    /// Whether the other samples of this prompt wait for it.
    pub fn is_first(&self) -> bool {
        self.is_first
    }

    /// The worker that should run it.
    pub fn prefer(&mut self, worker: Option<WorkerId>) {
        self.preferred = worker;
    }

    /// The next step that has something to show; `None` after the last.
    ///
    /// # Errors
    /// What the worker, the connection or the media met.
    pub async fn next(&mut self) -> Result<Option<ReplyStep>, GatewayError> {
        if self.is_over {
            return Ok(None);
        }
        if let Some(text) = self.echo.take().filter(|text| !text.is_empty()) {
            let delta = Delta { content: Some(text), ..Delta::default() };
            return Ok(Some(self.reply_step(vec![delta], Step::default(), None)));
        }
        loop {
            match self.next_event().await? {
                WorkerEvent::Started { queue, cached_tokens } => {
                    self.queue = Some(queue);
                    self.cached_tokens = u64::from(cached_tokens);
                    self.announce();
                }
                WorkerEvent::Tokens { token_ids, logprobs } => {
                    self.job = None;
                    let step = self.reader.read(&token_ids, &logprobs);
                    if step.is_stopped {
                        // the request ends here; dropping the call tells the worker
                        self.events = None;
                        return Ok(Some(self.end(step, false, None)));
                    }
                    if !step.deltas.is_empty() || !step.logprobs.is_empty() {
                        return Ok(Some(self.reply_step(Vec::new(), step, None)));
                    }
                }
                WorkerEvent::Finished { is_length, usage } => {
                    if let Some(events) = &mut self.events {
                        events.settle();
                    }
                    let step = self.reader.finish();
                    return Ok(Some(self.end(step, is_length, Some(usage))));
                }
            }
        }
    }

    /// The worker's next word; a worker that is lost before its first token is replaced once.
    async fn next_event(&mut self) -> Result<WorkerEvent, GatewayError> {
        loop {
            let events = match &mut self.events {
                Some(events) => events,
                None => {
                    let fresh = self.call(None).await?;
                    self.events.insert(fresh)
                }
            };
            let error = match events.next().await {
                Ok(Some(event)) => return Ok(event),
                Ok(None) => GatewayError::internal("the worker's events ended twice"),
                Err(error) => error,
            };
            let is_before_first_token = self.job.is_some();
            if error.kind != ErrorKind::WorkerUnavailable
                || !is_before_first_token
                || !self.may_retry
            {
                return Err(error);
            }
            self.may_retry = false;
            let Some(lost) = self.events.take() else { return Err(error) };
            // if nobody else is there, the first failure is the one to tell
            let Ok(fresh) = self.call(Some(lost.lease())).await else { return Err(error) };
            tracing::warn!(reply_id = %self.visit.reply_id, worker = lost.worker().0,
                reason = error.detail.as_deref().unwrap_or(&error.message),
                "worker lost before the first token; trying another");
            self.app.metrics.retried();
            self.events = Some(fresh);
        }
    }

    async fn call(&mut self, failed: Option<&WorkerLease>) -> Result<WorkerEvents, GatewayError> {
        let Some(job) = &self.job else {
            return Err(GatewayError::internal("a sample was begun after its first token"));
        };
        let lease = match (self.preferred, failed) {
            (Some(worker), None) => self.app.workers.lease_of(&job.route, worker)?,
            _ => self.app.workers.lease(&job.route, failed)?,
        };
        if self.prepared.is_none() {
            let prepared =
                prepare(&self.app, job, &self.visit, self.choice, lease.division).await?;
            self.prepared = Some(prepared);
        }
        let sources = self.prepared.clone().unwrap_or_default().sources;
        let call = GenerateCall {
            header: &job.header,
            request_id: &format!("{}-{}", self.visit.reply_id, self.choice),
            seed: self.seed,
            trace_id: &self.visit.trace_id,
            trace: &self.visit.trace,
            deadline: self.visit.deadline,
            upload: (!job.media.is_empty()).then(|| upload(&self.app, job)),
            wish: Wish { sources, ..Wish::default() },
        };
        Ok(WorkerEvents::new(lease, call))
    }

    fn announce(&mut self) {
        if let (Some(started), Some(events)) = (self.started.take(), &self.events) {
            started.send_replace(Some(events.worker()));
        }
    }

    fn end(&mut self, step: Step, is_length: bool, counted: Option<WorkerUsage>) -> ReplyStep {
        self.is_over = true;
        self.announce();
        self.events = None;
        // the worker's count is the true one; a stopped sample never hears it
        let cached = counted.map_or(self.cached_tokens, |usage| u64::from(usage.cached_tokens));
        let tokens = SampleTokens {
            // what others computed for this very request was in nobody's cache
            cached: self.prepared.as_ref().map_or(cached, |done| cached.max(done.cached_tokens)),
            completion: counted.map_or(self.reader.completion_tokens(), |usage| {
                u64::from(usage.completion_tokens)
            }),
            reasoning: self.reader.reasoning_tokens(),
        };
        let reason: FinishReason = self.reader.finish_reason(is_length);
        let stop_text = self.reader.stop_text().map(str::to_owned);
        let end = SampleEnd { reason, stop_text, folder: self.reader.folder().clone(), tokens };
        self.reply_step(Vec::new(), step, Some(end))
    }

    fn reply_step(
        &mut self,
        mut deltas: Vec<Delta>,
        step: Step,
        end: Option<SampleEnd>,
    ) -> ReplyStep {
        deltas.extend(step.deltas);
        let queue = self.queue.take();
        ReplyStep { choice: self.choice, deltas, logprobs: step.logprobs, queue, end }
    }
}

fn reader_parts(app: &App, job: &Job, visit: &Visit, choice: u32) -> ReaderParts {
    let builder = &app.model.prompt_builder;
    let generation = &job.header.generation;
    ReaderParts {
        detokenizer: builder.detokenizer(generation.skip_special_tokens),
        token_bytes: Arc::clone(builder.tokenizer().bytes()),
        parser: match &job.grammar {
            Grammar::Chat { options, .. } => app.model.spec.output_parser(options),
            Grammar::PlainText => Box::new(PlainText::default()),
        },
        stops: StopMatcher::new(&generation.stop, generation.include_stop),
        folder: ReplyFolder::new(&visit.reply_id, choice, app.config.reasoning_field),
        has_logprobs: generation.logprobs.wanted,
        is_single_call: matches!(job.grammar, Grammar::Chat { is_single_call: true, .. }),
    }
}

/// The media half of a call: items the worker lacks are made and sent, one after the other.
pub(crate) fn upload(app: &Arc<App>, job: &Arc<Job>) -> UploadWork {
    let (media, job) = (Arc::clone(&app.media), Arc::clone(job));
    Box::new(move |needed, sender| {
        Box::pin(async move {
            if let Some(unknown) = needed.iter().find(|index| **index as usize >= job.media.len()) {
                return Err(GatewayError::internal(format!("the worker asked for item {unknown}")));
            }
            for (index, item) in (0_u32..).zip(&job.media) {
                if !needed.contains(&index) {
                    media.count_held(item);
                    continue;
                }
                let header = &job.header.items[index as usize];
                let upload = sender.item(index, header.patch_bytes(job.header.layout));
                media.send(item, job.header.layout, upload).await?;
            }
            Ok(())
        })
    })
}

/// The first sample has the request's own seed, each other one a seed derived from it.
fn derived_seed(base: u64, sample: u32) -> u64 {
    if sample == 0 {
        return base;
    }
    // source: the splitmix64 generator
    let mut mixed = base.wrapping_add(u64::from(sample).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn samples_have_different_seeds_and_the_first_keeps_the_requests_own() {
        let seeds: HashSet<_> = (0..16).map(|sample| derived_seed(7, sample)).collect();
        assert_eq!(seeds.len(), 16);
        assert_eq!(derived_seed(7, 0), 7);
        assert_eq!(derived_seed(7, 3), derived_seed(7, 3));
    }
}
