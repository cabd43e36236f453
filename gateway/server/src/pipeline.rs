//! The story of a request, top to bottom.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gateway_core::constraint::{Constraint, OutputRules};
use gateway_core::conversation::{
    CompletionPrompt, CompletionTask, Conversation, Generation, MediaRef, Standing,
};
use gateway_core::model::ThinkingMode;
use gateway_core::prompt::{Prompt, Rendered};
use gateway_core::routing::Demand as Route;
use gateway_core::{RequestError, RequestErrorKind};

use crate::admission::Caller;
use crate::app::App;
use crate::error::{ErrorKind, GatewayError};
use crate::media::PlannedMedia;
use crate::reply::{Grammar, Job, Reply, Visit};
use crate::workers::{ItemHeader, RequestHeader};

/// Text above this leaves the async threads to be rendered and tokenized.
const LONG_TEXT_BYTES: u64 = 16 * 1024;

/// Serves a chat request, up to the reply that is about to come.
///
/// # Errors
/// Whatever keeps the request from being given to a worker; nothing is left behind.
pub async fn chat(
    app: &Arc<App>,
    conversation: Conversation,
    visit: Visit,
) -> Result<Reply, GatewayError> {
    // refused before anything costs something
    check_model(app, conversation.model.as_deref())?;
    let priority = conversation.standing.priority;
    let permit = app.admission.enter_as(Caller { tenant: &visit.tenant, priority })?;
    app.workers.check_someone_ready()?;

    // from here on the worker is asked, media are decoded on demand, and tokens become text:
    // see `Reply`, which does all of it when it is asked for its next step
    let began = tokio::time::Instant::now();
    let addressee = Addressee::of(&visit, &conversation.standing);
    let is_long = visit.body_bytes() > LONG_TEXT_BYTES;
    let job = prepare_for(app, conversation, is_long, Some(addressee)).await?;
    visit.trace.phase("prepare", began);
    Ok(Reply::new(app, vec![job], visit, permit))
}

/// Makes of a conversation what a worker must know; media are planned, not decoded.
///
/// # Errors
/// What the template, a media item or the context refuses.
pub async fn prepare(
    app: &Arc<App>,
    conversation: Conversation,
    is_long: bool,
) -> Result<Job, GatewayError> {
    prepare_for(app, conversation, is_long, None).await
}

/// The same with all that is needed to choose among the workers, if there is an addressee.
async fn prepare_for(
    app: &Arc<App>,
    mut conversation: Conversation,
    is_long: bool,
    addressee: Option<Addressee>,
) -> Result<Job, GatewayError> {
    let tenant = addressee.as_ref().map_or_else(String::new, |who| who.tenant.clone());
    // the conversation as the model reads it; media are still only markers
    let media = take_media(&mut conversation);
    let begin = Instant::now();
    let render = move |app: &App| {
        let demand = Demand::of(app, &conversation.output_rules()?)?;
        let rendered = app.model.prompt_builder.render(&conversation)?;
        Ok::<_, GatewayError>(Drawn { conversation, rendered, demand, addressee })
    };
    if media.is_empty() {
        // one step, so that a long text changes threads once
        return run_text(app, is_long, move |app| {
            let job = render(app)?.finish(app, Vec::new());
            app.metrics.prompt_built(begin.elapsed());
            job
        })
        .await;
    }
    let drawn = run_text(app, is_long, render).await?;
    let rendering = begin.elapsed();

    // what each picture and clip will become, from its header alone
    let begin = Instant::now();
    let door = (&*app.admission, &*tenant);
    let planned = app.media.plan(media, &*app.model.spec, door).await?;
    let planning = begin.elapsed();

    // the whole prompt, and whether it fits
    let begin = Instant::now();
    let job = run_text(app, is_long, move |app| drawn.finish(app, planned)).await?;
    app.metrics.prompt_built(rendering + begin.elapsed());
    Ok(Job { planning, ..job })
}

/// On whose behalf a worker is asked, and what else names the worker to ask.
struct Addressee {
    tenant: String,
    affinity: Option<String>,
}

impl Addressee {
    fn of(visit: &Visit, standing: &Standing) -> Self {
        let affinity = visit.affinity.clone().or_else(|| standing.affinity.clone());
        Self { tenant: visit.tenant.clone(), affinity }
    }

    /// The job with all that is needed to choose a worker for it.
    fn route(self, app: &App, mut job: Job) -> Job {
        job.header.tenant = self.tenant;
        job.route = app.workers.demand(&job.header, self.affinity.as_deref());
        job
    }
}

/// A conversation drawn by the template, its media only markers.
struct Drawn {
    conversation: Conversation,
    rendered: Rendered,
    demand: Demand,
    addressee: Option<Addressee>,
}

impl Drawn {
    fn finish(self, app: &App, planned: Vec<PlannedMedia>) -> Result<Job, GatewayError> {
        let Self { conversation, rendered, demand, addressee } = self;
        let plans: Vec<_> = planned.iter().map(|item| item.plan.clone()).collect();
        let prompt = app.model.prompt_builder.expand(&rendered, &plans)?;
        let max_tokens = room(app, prompt.token_ids.len(), &conversation.generation, "messages")?;
        let grammar = Grammar::Chat {
            options: conversation.output_options(),
            is_single_call: !conversation.parallel_tool_calls,
        };
        let wishes = Wishes {
            generation: conversation.generation,
            max_tokens,
            standing: conversation.standing,
            demand,
        };
        let header = header(app, prompt, &planned, wishes);
        let (route, planning) = (Route::default(), Duration::ZERO);
        let job = Job { header, route, media: planned, grammar, echo: None, planning };
        Ok(match addressee {
            Some(addressee) => addressee.route(app, job),
            None => job,
        })
    }
}

/// What the output must look like.
#[derive(Clone, Default)]
struct Demand {
    constraint: Option<Constraint>,
    banned_token_ids: Vec<u32>,
}

impl Demand {
    fn of(app: &App, rules: &OutputRules) -> Result<Self, RequestError> {
        let spec = &app.model.spec;
        let constraint = spec.constraint(rules)?;
        Ok(Self { constraint, banned_token_ids: spec.banned_token_ids(rules) })
    }
}

/// What a request says of its reply.
struct Wishes {
    generation: Generation,
    max_tokens: u32,
    standing: Standing,
    demand: Demand,
}

/// Serves a text completion, up to the reply that is about to come.
///
/// # Errors
/// As [`chat`].
pub async fn completion(
    app: &Arc<App>,
    task: CompletionTask,
    visit: Visit,
) -> Result<Reply, GatewayError> {
    check_model(app, task.model.as_deref())?;
    let priority = task.standing.priority;
    let permit = app.admission.enter_as(Caller { tenant: &visit.tenant, priority })?;
    app.workers.check_someone_ready()?;

    let begin = Instant::now();
    let is_long = visit.body_bytes() > LONG_TEXT_BYTES;
    let (task, encoded, demand) = run_text(app, is_long, move |app| {
        let rules = OutputRules {
            thinking: ThinkingMode::Disabled,
            format: task.response_format.clone(),
            ..OutputRules::default()
        };
        let demand = Demand::of(app, &rules)?;
        let encoded: Result<Vec<_>, _> = task
            .prompts
            .iter()
            .map(|prompt| encode(app, prompt, task.add_special_tokens))
            .collect();
        encoded.map(|encoded| (task, encoded, demand))
    })
    .await?;
    app.metrics.prompt_built(begin.elapsed());

    let mut jobs = Vec::with_capacity(encoded.len());
    for (token_ids, source) in encoded.into_iter().zip(task.prompts) {
        let max_tokens = room(app, token_ids.len(), &task.generation, "prompt")?;
        let echo = task.echo.then(|| match source {
            CompletionPrompt::Text(text) => text,
            CompletionPrompt::Ids(ids) => app.model.prompt_builder.decode(&ids),
        });
        let prompt = Prompt { token_ids, spans: Vec::new() };
        let wishes = Wishes {
            generation: task.generation.clone(),
            max_tokens,
            standing: task.standing.clone(),
            demand: demand.clone(),
        };
        let header = header(app, prompt, &[], wishes);
        let (route, grammar) = (Route::default(), Grammar::PlainText);
        let planning = Duration::ZERO;
        let job = Job { header, route, media: Vec::new(), grammar, echo, planning };
        let addressee = Addressee::of(&visit, &job.header.standing);
        let route = move |app: &App| Ok::<_, GatewayError>(addressee.route(app, job));
        jobs.push(run_text(app, is_long, route).await?);
    }
    Ok(Reply::new(app, jobs, visit, permit))
}

/// Renders and tokenizes a conversation without running it, media counted by their plans.
///
/// # Errors
/// As [`chat`], short of a worker.
pub async fn tokenize_chat(
    app: &Arc<App>,
    mut conversation: Conversation,
) -> Result<Vec<u32>, GatewayError> {
    check_model(app, conversation.model.as_deref())?;
    let _permit = app.admission.enter()?;
    let media = take_media(&mut conversation);
    let rendered =
        run_text(app, true, move |app| app.model.prompt_builder.render(&conversation)).await?;
    let planned = app.media.plan(media, &*app.model.spec, (&*app.admission, "")).await?;
    let plans: Vec<_> = planned.into_iter().map(|item| item.plan).collect();
    let prompt =
        run_text(app, true, move |app| app.model.prompt_builder.expand(&rendered, &plans)).await?;
    Ok(prompt.token_ids)
}

/// Refuses a model that is not the one served.
///
/// # Errors
/// `ModelNotFound` with both names.
pub fn check_model(app: &App, asked: Option<&str>) -> Result<(), GatewayError> {
    let served = &app.config.served_model_name;
    match asked {
        Some(asked) if asked != served => {
            let message =
                format!("the model {asked:?} does not exist; this gateway serves {served:?}");
            Err(GatewayError::new(ErrorKind::ModelNotFound, message).at("model"))
        }
        _ => Ok(()),
    }
}

/// Runs text work, on another thread if it may take long.
///
/// # Errors
/// What the work says.
pub async fn run_text<T, E, F>(app: &Arc<App>, is_long: bool, work: F) -> Result<T, GatewayError>
where
    T: Send + 'static,
    E: Into<GatewayError> + Send + 'static,
    F: FnOnce(&App) -> Result<T, E> + Send + 'static,
{
    if !is_long {
        return work(app).map_err(Into::into);
    }
    let shared = Arc::clone(app);
    app.text_pool.run(move || work(&shared)).await?.map_err(Into::into)
}

/// The media with their URLs, which may be megabytes long; the conversation keeps the rest.
fn take_media(conversation: &mut Conversation) -> Vec<MediaRef> {
    let take = |item: &mut MediaRef| {
        let url = std::mem::take(&mut item.url);
        MediaRef { url, ..item.clone() }
    };
    conversation.media.iter_mut().map(take).collect()
}

fn encode(
    app: &App,
    prompt: &CompletionPrompt,
    add_special_tokens: bool,
) -> Result<Vec<u32>, RequestError> {
    let builder = &app.model.prompt_builder;
    match prompt {
        CompletionPrompt::Text(text) => builder.encode_text(text, add_special_tokens),
        CompletionPrompt::Ids(ids) => builder.refuse_media_ids(ids).map(|()| ids.clone()),
    }
}

/// How many tokens the reply may have.
fn room(
    app: &App,
    prompt_tokens: usize,
    generation: &Generation,
    param: &str,
) -> Result<u32, GatewayError> {
    let workers = app.workers.longest_context().unwrap_or(app.max_context_tokens);
    let limit = u64::from(app.max_context_tokens.min(workers));
    let prompt_tokens = prompt_tokens as u64;
    let too_long = |message: String| {
        RequestError::new(
            RequestErrorKind::ContextTooLong,
            "context_length_exceeded",
            param,
            message,
        )
    };
    if prompt_tokens == 0 {
        return Err(RequestError::invalid(param, "the prompt holds no token").into());
    }
    let fixed = generation.max_tokens.filter(|_| !generation.fit_context);
    let asked = u64::from(fixed.unwrap_or(1));
    if prompt_tokens + asked > limit {
        let excess = prompt_tokens + asked - limit;
        let wish = match fixed {
            Some(asked) => format!("{asked} for the reply"),
            None => "at least 1 for the reply".into(),
        };
        return Err(too_long(format!(
            "the prompt has {prompt_tokens} tokens; with {wish} that is {excess} more than the \
             context of {limit} tokens holds"
        ))
        .into());
    }
    let fits = u32::try_from(limit - prompt_tokens).unwrap_or(u32::MAX);
    Ok(generation.max_tokens.map_or(fits, |asked| asked.min(fits)))
}

fn header(app: &App, prompt: Prompt, media: &[PlannedMedia], wishes: Wishes) -> RequestHeader {
    let Wishes { mut generation, max_tokens, standing, demand } = wishes;
    generation.banned_token_ids.extend(demand.banned_token_ids);
    // workers keep to a mass above 0; the most probable token is always in it
    generation.top_p = generation.top_p.max(f32::MIN_POSITIVE);
    let spec = &app.model.spec;
    // what the caller names itself ends the reply all the same
    let own = if generation.ignore_eos { &[] } else { spec.stop_token_ids() };
    let stop_token_ids = [own, &generation.stop_token_ids].concat();
    let items = media.iter().zip(prompt.spans).map(|(item, spans)| ItemHeader {
        hash: item.hash,
        plan: item.plan.clone(),
        spans,
        frames_per_patch: item.frames_per_patch,
    });
    RequestHeader {
        fingerprint: app.fingerprint,
        items: items.collect(),
        prompt_token_ids: Arc::new(prompt.token_ids),
        stop_token_ids,
        // whoever has a visitor to ask fills it in
        tenant: String::new(),
        standing,
        constraint: demand.constraint,
        generation,
        max_tokens,
        layout: spec.patch_layout(),
        norm: spec.pixel_norm(),
    }
}
