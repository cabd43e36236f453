//! One sample: one call to one worker, and, before its first token, at most one more elsewhere.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::Stream;
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
    silent,
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
    /// A worker is being found and asked.
    opening: Option<Opening>,
    events: Option<WorkerEvents>,
    /// Tells the other samples of this prompt where it runs; only the first sample has it.
    started: Option<watch::Sender<Option<WorkerId>>>,
    /// What the first sample tells, for the others.
    first: Option<watch::Receiver<Option<WorkerId>>>,
    /// What other workers have computed for it, once they were asked.
    prepared: Option<Prepared>,
    /// Why the first worker was lost, and which one it was.
    first_failure: Option<(GatewayError, WorkerId)>,
    may_retry: bool,
    cached_tokens: u64,
    /// Time in the worker's queue, until it is told.
    queue: Option<Duration>,
    is_over: bool,
}

/// Finds a worker and makes the call to it, once others have done their part.
type Opening = BoxFuture<'static, Result<(WorkerEvents, Prepared), GatewayError>>;

/// Where a sample stands among those of its prompt.
pub enum Order {
    /// The others wait for it, and are told where it runs.
    First(watch::Sender<Option<WorkerId>>),
    /// It waits for the first one and goes to the same worker, which then holds the media and the
    /// prompt's cache.
    Later(watch::Receiver<Option<WorkerId>>),
}

impl Sample {
    /// A sample that has not begun.
    pub fn new(
        app: &Arc<App>,
        job: Arc<Job>,
        visit: Arc<Visit>,
        choice: u32,
        order: Order,
    ) -> Self {
        let generation = &job.header.generation;
        let base = generation.seed.unwrap_or_else(rand::random);
        let (started, first) = match order {
            Order::First(started) => (Some(started), None),
            Order::Later(first) => (None, Some(first)),
        };
        Self {
            app: Arc::clone(app),
            seed: derived_seed(base, choice % generation.num_samples.max(1)),
            reader: Reader::new(reader_parts(app, &job, &visit, choice)),
            echo: job.echo.clone(),
            visit,
            choice,
            opening: None,
            events: None,
            started,
            first,
            prepared: None,
            first_failure: None,
            may_retry: true,
            cached_tokens: 0,
            queue: None,
            is_over: false,
            job: Some(job),
        }
    }

    /// The next step that has something to show; `None` after the last, or after an error.
    ///
    /// # Errors
    /// What the worker, the connection or the media met.
    pub fn poll_next(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Option<ReplyStep>, GatewayError>> {
        if self.is_over {
            return Poll::Ready(Ok(None));
        }
        if let Some(text) = self.echo.take().filter(|text| !text.is_empty()) {
            let delta = Delta { content: Some(text), ..Delta::default() };
            let step = Step { deltas: vec![delta], ..Step::default() };
            return Poll::Ready(Ok(Some(self.reply_step(step, None))));
        }
        loop {
            let event = match ready!(self.poll_event(context)) {
                Ok(event) => event,
                Err(error) => {
                    self.is_over = true;
                    return Poll::Ready(Err(error));
                }
            };
            if let Some(step) = self.take(event) {
                return Poll::Ready(Ok(Some(step)));
            }
        }
    }

    /// What an event has to show.
    fn take(&mut self, event: WorkerEvent) -> Option<ReplyStep> {
        match event {
            // nobody else could take it
            WorkerEvent::Silent => None,
            WorkerEvent::Started { queue, cached_tokens } => {
                self.queue = Some(queue);
                self.cached_tokens = u64::from(cached_tokens);
                self.announce();
                None
            }
            WorkerEvent::Tokens { token_ids, logprobs } => {
                self.job = None;
                let step = self.reader.read(&token_ids, &logprobs);
                if step.is_stopped {
                    // the request ends here; dropping the call tells the worker
                    self.events = None;
                    return Some(self.end(step, false, None));
                }
                let is_shown = !step.deltas.is_empty() || !step.logprobs.is_empty();
                is_shown.then(|| self.reply_step(step, None))
            }
            WorkerEvent::Finished { is_length, usage } => {
                if let Some(events) = &mut self.events {
                    events.settle();
                }
                let step = self.reader.finish();
                Some(self.end(step, is_length, Some(usage)))
            }
        }
    }

    /// The worker's next word; a worker that is lost before its first token is replaced once.
    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Result<WorkerEvent, GatewayError>> {
        loop {
            if let Some(opening) = &mut self.opening {
                let outcome = ready!(opening.as_mut().poll(context));
                self.opening = None;
                let failure = self.first_failure.take();
                match (outcome, failure) {
                    (Ok((events, prepared)), failure) => {
                        failure.inspect(|failure| self.tell_retry(failure));
                        (self.events, self.prepared) = (Some(events), Some(prepared));
                    }
                    // if nobody else is there, the first failure is the one to tell; if somebody
                    // is and has no time, that is what keeps the request waiting
                    (Err(second), Some((first, _))) => {
                        let is_full = second.kind == ErrorKind::Overloaded;
                        return Poll::Ready(Err(if is_full { second } else { first }));
                    }
                    (Err(error), None) => return Poll::Ready(Err(error)),
                }
            }
            let Some(events) = &mut self.events else {
                self.opening = Some(self.open(None, None)?);
                continue;
            };
            let mut another = None;
            let error = match ready!(events.poll_next(context)) {
                Ok(Some(WorkerEvent::Silent)) if self.may_retry => {
                    let (workers, lease) = (&self.app.workers, events.lease());
                    let job = self.job.as_ref();
                    another = job.and_then(|job| workers.lease_another(&job.route, lease));
                    if another.is_none() {
                        continue;
                    }
                    silent()
                }
                Ok(Some(event)) => return Poll::Ready(Ok(event)),
                Ok(None) => GatewayError::internal("the worker's events ended twice"),
                Err(error) => error,
            };
            let is_before_first_token = self.job.is_some();
            if error.kind != ErrorKind::WorkerUnavailable
                || !is_before_first_token
                || !self.may_retry
            {
                return Poll::Ready(Err(error));
            }
            self.may_retry = false;
            self.first_failure = Some((error, events.worker()));
            let lost = self.events.take();
            self.opening = Some(self.open(lost, another)?);
        }
    }

    fn tell_retry(&self, (error, worker): &(GatewayError, WorkerId)) {
        tracing::warn!(reply_id = %self.visit.reply_id, worker = worker.0,
            reason = error.detail.as_deref().unwrap_or(&error.message),
            "worker lost before the first token; trying another");
        self.app.metrics.retried();
    }

    /// Finds a worker, another one than that of the `lost` call, if none is `found` yet, and asks it.
    fn open(
        &mut self,
        lost: Option<WorkerEvents>,
        found: Option<WorkerLease>,
    ) -> Result<Opening, GatewayError> {
        let Some(job) = self.job.clone() else {
            return Err(GatewayError::internal("a sample was begun after its first token"));
        };
        let (app, visit) = (Arc::clone(&self.app), Arc::clone(&self.visit));
        let (choice, seed) = (self.choice, self.seed);
        let (prepared, mut first) = (self.prepared.take(), self.first.take());
        let opening = async move {
            let preferred = match &mut first {
                // if the first one fails, the whole reply ends, and this with it
                Some(first) => first.wait_for(Option::is_some).await.ok().and_then(|id| *id),
                None => None,
            };
            let lease = match (found, preferred) {
                (Some(lease), _) => lease,
                (None, Some(worker)) => app.workers.lease_of(&job.route, worker)?,
                (None, None) => {
                    app.workers.lease(&job.route, lost.as_ref().map(WorkerEvents::lease))?
                }
            };
            let prepared = match prepared {
                Some(prepared) => prepared,
                None => prepare(&app, &job, &visit, choice, lease.division).await?,
            };
            let call = GenerateCall {
                header: &job.header,
                request_id: &format!("{}-{choice}", visit.reply_id),
                seed,
                trace_id: &visit.trace_id,
                trace: &visit.trace,
                deadline: visit.deadline,
                upload: (!job.media.is_empty()).then(|| upload(&app, &job)),
                wish: Wish { sources: prepared.sources.clone(), ..Wish::default() },
            };
            Ok((WorkerEvents::new(lease, call), prepared))
        };
        Ok(opening.boxed())
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
        self.reply_step(step, Some(Box::new(end)))
    }

    fn reply_step(&mut self, step: Step, end: Option<Box<SampleEnd>>) -> ReplyStep {
        let (deltas, logprobs, queue) = (step.deltas, step.logprobs, self.queue.take());
        ReplyStep { choice: self.choice, deltas, logprobs, queue, end }
    }
}

impl Stream for Sample {
    type Item = Result<ReplyStep, GatewayError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Sample::poll_next(&mut self, context).map(Result::transpose)
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
