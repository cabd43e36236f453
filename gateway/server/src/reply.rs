//! A reply in the making: one call to a worker a sample, its tokens read as they come.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::stream::{self, SelectAll, StreamExt};
use gateway_core::model::OutputOptions;
use gateway_core::openai::{
    CompletionTokensDetails, Delta, FinishReason, PromptTokensDetails, TokenLogprob, Usage,
};
use gateway_core::output::ReplyFolder;
use gateway_core::routing::Demand;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::admission::{ByteLease, Permit};
use crate::app::App;
use crate::error::{ErrorKind, GatewayError};
use crate::media::PlannedMedia;
use crate::rare::Rare;
use crate::sample::{Order, Sample};
use crate::telemetry::TokenClass;
use crate::telemetry::traces::RequestTrace;
use crate::workers::RequestHeader;

/// One caller's visit: its names, its clock, the bytes it holds.
#[derive(Debug)]
pub struct Visit {
    /// Names the reply, to the client and to workers.
    pub reply_id: String,
    /// The caller's own id.
    pub trace_id: String,
    /// Where its time goes.
    pub trace: Arc<RequestTrace>,
    /// Requests of equal affinity go to one worker.
    pub affinity: Option<String>,
    /// On whose behalf; empty for nobody in particular.
    pub tenant: String,
    /// When the request came.
    pub arrived: Instant,
    /// When it has lived long enough.
    pub deadline: Instant,
    /// The budget its body was read under.
    pub body: ByteLease,
}

impl Visit {
    /// Size of the body.
    pub fn body_bytes(&self) -> u64 {
        self.body.bytes()
    }
}

/// How a reply is to be read.
#[derive(Clone, Debug)]
pub enum Grammar {
    /// With the model's own parser.
    Chat {
        /// What the parser must know.
        options: OutputOptions,
        /// The first complete call ends the reply.
        is_single_call: bool,
    },
    /// As it is.
    PlainText,
}

/// One prompt, ready for a worker.
#[derive(Debug)]
pub struct Job {
    /// What a worker must know.
    pub header: RequestHeader,
    /// Which workers could take it, and why.
    pub route: Demand,
    /// Its pictures and clips.
    pub media: Vec<PlannedMedia>,
    /// How the reply is to be read.
    pub grammar: Grammar,
    /// Text to be repeated before the reply.
    pub echo: Option<String>,
    /// How long it took to fetch and plan the media.
    pub planning: Duration,
}

/// Where the time until the first token went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timing {
    /// In the worker's queue.
    pub queue: Duration,
    /// Fetching and planning pictures and clips.
    pub media: Duration,
    /// From the request's arrival to its first token, or until now if there is none.
    pub first_token: Duration,
}

impl Timing {
    /// The rest: the prompt's text, its transfer, and what the worker computed.
    pub fn prefill(&self) -> Duration {
        self.first_token.saturating_sub(self.queue + self.media)
    }
}

/// What is new in one sample.
#[derive(Debug)]
pub struct ReplyStep {
    /// Number of the sample: prompt by prompt, sample by sample.
    pub choice: u32,
    /// In order; none holds more than one kind of text.
    pub deltas: Vec<Delta>,
    /// Of the answer tokens shown.
    pub logprobs: Vec<TokenLogprob>,
    /// Time in the worker's queue, in the first step of the sample.
    pub queue: Option<Duration>,
    /// Present in the last step of the sample; apart, as every step is moved several times.
    pub end: Option<Box<SampleEnd>>,
}

/// How a sample ended.
#[derive(Debug)]
pub struct SampleEnd {
    /// In the client's terms.
    pub reason: FinishReason,
    /// The stop string that did it.
    pub stop_text: Option<String>,
    /// Knows which calls are complete.
    pub folder: ReplyFolder,
    /// Its tokens.
    pub tokens: SampleTokens,
}

/// Tokens of one sample.
#[derive(Clone, Copy, Debug, Default)]
pub struct SampleTokens {
    /// Prompt tokens found in the worker's cache.
    pub cached: u64,
    /// Made.
    pub completion: u64,
    /// Of these, thinking.
    pub reasoning: u64,
}

/// Everything needed to run samples and to account for them. Dropping it ends all of it: calls,
/// uploads, fetches, child processes, permit and leases.
pub struct Reply {
    app: Arc<App>,
    abort: Rare<()>,
    samples: Samples,
    clock: Clock,
    timing: Timing,
    usage: Usage,
    num_samples: u32,
    visit: Arc<Visit>,
    permit: Permit,
}

/// One sample is asked directly; of several, only those that have something to say.
enum Samples {
    One(Box<Sample>),
    Many(SelectAll<Box<Sample>>),
}

impl Samples {
    fn poll_next(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Option<ReplyStep>, GatewayError>> {
        match self {
            Self::One(sample) => sample.poll_next(context),
            Self::Many(samples) => samples.poll_next_unpin(context).map(Option::transpose),
        }
    }
}

#[derive(Debug)]
struct Clock {
    first: Option<Instant>,
    is_over: bool,
}

impl Reply {
    /// Prepares every sample; nothing is sent before the first [`Reply::next`].
    pub fn new(app: &Arc<App>, jobs: Vec<Job>, visit: Visit, permit: Permit) -> Self {
        let visit = Arc::new(visit);
        let mut usage = Usage::default();
        let media = jobs.iter().map(|job| job.planning).sum();
        let mut samples = Vec::with_capacity(jobs.len());
        let mut choice = 0;
        for job in jobs {
            count_prompt(&mut usage, &job);
            let job = Arc::new(job);
            let (started, follow) = watch::channel(None);
            let mut started = Some(started);
            for _ in 0..job.header.generation.num_samples {
                let order =
                    started.take().map_or_else(|| Order::Later(follow.clone()), Order::First);
                let (job, visit) = (Arc::clone(&job), Arc::clone(&visit));
                samples.push(Box::new(Sample::new(app, job, visit, choice, order)));
                choice += 1;
            }
        }
        let samples = match <[_; 1]>::try_from(samples) {
            Ok([sample]) => Samples::One(sample),
            Err(samples) => Samples::Many(stream::select_all(samples)),
        };
        app.metrics.tokens(TokenClass::Prompt, usage.prompt_tokens);
        permit.charge(usage.prompt_tokens);
        Self {
            app: Arc::clone(app),
            abort: Rare::new(app.abort.clone().cancelled_owned()),
            samples,
            clock: Clock { first: None, is_over: false },
            timing: Timing { media, ..Timing::default() },
            usage,
            num_samples: choice,
            visit,
            permit,
        }
    }

    /// How many samples there will be.
    pub fn num_samples(&self) -> u32 {
        self.num_samples
    }

    /// The reply's id.
    pub fn id(&self) -> &str {
        &self.visit.reply_id
    }

    /// Where the time went so far.
    pub fn timing(&self) -> Timing {
        let first = self.clock.first.unwrap_or_else(Instant::now);
        Timing { first_token: first - self.visit.arrived, ..self.timing }
    }

    /// The next step of any sample; `None` after the last step of the last sample.
    ///
    /// # Errors
    /// The first failure of any sample; it ends the whole reply.
    pub async fn next(&mut self) -> Result<Option<ReplyStep>, GatewayError> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// [`Reply::next`] as one step of a task.
    pub fn poll_next(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Option<ReplyStep>, GatewayError>> {
        if self.clock.is_over {
            return Poll::Ready(Ok(None));
        }
        let step = match self.samples.poll_next(context) {
            Poll::Pending if self.abort.poll(context).is_ready() => Err(GatewayError::new(
                ErrorKind::Draining,
                "the gateway is shutting down and has no time left for this request",
            )),
            Poll::Pending => return Poll::Pending,
            Poll::Ready(step) => step,
        };
        match &step {
            Ok(Some(step)) => self.account(step),
            Ok(None) => {
                self.clock.is_over = true;
                self.close_account();
            }
            Err(_) => {
                self.clock.is_over = true;
                // ends what the other samples do
                self.samples = Samples::Many(SelectAll::new());
            }
        }
        Poll::Ready(step)
    }

    /// Tokens so far; final after the last step.
    pub fn usage(&self) -> Usage {
        Usage {
            total_tokens: self.usage.prompt_tokens + self.usage.completion_tokens,
            ..self.usage.clone()
        }
    }

    fn account(&mut self, step: &ReplyStep) {
        self.timing.queue = self.timing.queue.max(step.queue.unwrap_or_default());
        if self.clock.first.is_none() && (!step.deltas.is_empty() || step.end.is_some()) {
            let now = Instant::now();
            self.clock.first = Some(now);
            self.app.metrics.first_token(now - self.visit.arrived);
        }
        if let Some(end) = &step.end {
            self.permit.charge(end.tokens.completion);
            let details = &mut self.usage.prompt_tokens_details;
            details.cached_tokens = details.cached_tokens.max(end.tokens.cached);
            self.usage.completion_tokens += end.tokens.completion;
            self.usage.completion_tokens_details.reasoning_tokens += end.tokens.reasoning;
        }
    }

    fn close_account(&self) {
        let metrics = &self.app.metrics;
        metrics.tokens(TokenClass::Cached, self.usage.prompt_tokens_details.cached_tokens);
        metrics.tokens(TokenClass::Completion, self.usage.completion_tokens);
        metrics
            .tokens(TokenClass::Reasoning, self.usage.completion_tokens_details.reasoning_tokens);
        let now = Instant::now();
        metrics.reply(now - self.visit.arrived);
        let later_tokens =
            (self.usage.completion_tokens / u64::from(self.num_samples.max(1))).saturating_sub(1);
        if let (Some(first), Ok(later @ 1..)) = (self.clock.first, u32::try_from(later_tokens)) {
            metrics.token_gap((now - first) / later);
        }
    }
}

/// The prompt's own tokens are known before any worker is asked.
fn count_prompt(usage: &mut Usage, job: &Job) {
    let PromptTokensDetails { image_tokens, video_tokens, .. } = &mut usage.prompt_tokens_details;
    for item in &job.media {
        match item.plan.kind {
            gateway_core::model::MediaKind::Image => *image_tokens += item.plan.num_tokens,
            gateway_core::model::MediaKind::Video => *video_tokens += item.plan.num_tokens,
        }
    }
    usage.prompt_tokens += job.header.prompt_token_ids.len() as u64;
    usage.completion_tokens_details = CompletionTokensDetails::default();
}
