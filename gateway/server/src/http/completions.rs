//! `POST /v1/completions`, whole or streamed.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use gateway_core::conversation::{StreamWish, check_completion};
use gateway_core::openai::{
    Completion, CompletionChoice, CompletionLogprobs, FinishReason, TokenLogprob, Usage,
};

use super::sse::{self, Frames, Wording};
use super::{MAX_TEXT_BYTES, json_response, receive, refuse, timed};
use crate::app::{App, unix_now};
use crate::error::GatewayError;
use crate::pipeline;
use crate::reply::{Reply, ReplyStep};

/// `POST /v1/completions`
pub(super) async fn completions(State(app): State<Arc<App>>, request: Request) -> Response {
    respond(&app, request).await.unwrap_or_else(|error| refuse(&app, &error))
}

async fn respond(app: &Arc<App>, request: Request) -> Result<Response, GatewayError> {
    let max_bytes = app.config.max_request_bytes.min(MAX_TEXT_BYTES);
    let (task, visit) = receive(app, request, "cmpl", max_bytes, check_completion).await?;
    let (wish, has_logprobs) = (task.stream, task.generation.logprobs.wanted);
    let mut reply = pipeline::completion(app, task, visit).await?;
    let words = TextWording::new(app, &reply, wish, has_logprobs);
    if wish.stream {
        // benchmarks measure tokens here
        return sse::respond(app, reply, words, None).await;
    }
    let whole = whole(words, &mut reply).await?;
    Ok(timed(json_response(&whole), reply.timing()))
}

async fn whole(mut words: TextWording, reply: &mut Reply) -> Result<Completion, GatewayError> {
    let mut texts = vec![String::new(); reply.num_samples() as usize];
    let mut logprobs = vec![CompletionLogprobs::default(); texts.len()];
    let mut reasons: Vec<Option<FinishReason>> = vec![None; texts.len()];
    while let Some(step) = reply.next().await? {
        let (index, reason) = (step.choice as usize, step.end.as_ref().map(|end| end.reason));
        let (text, entries) = words.text_of(step);
        texts[index].push_str(&text);
        append(&mut logprobs[index], entries);
        reasons[index] = reason.or(reasons[index]);
    }
    let has_logprobs = words.has_logprobs;
    let parts = texts.into_iter().zip(logprobs).zip(reasons);
    let choices = (0..).zip(parts).map(|(index, ((text, logprobs), finish_reason))| {
        let logprobs = has_logprobs.then_some(logprobs);
        CompletionChoice { index, text, logprobs, finish_reason }
    });
    Ok(words.completion(choices.collect(), Some(reply.usage())))
}

fn append(whole: &mut CompletionLogprobs, part: CompletionLogprobs) {
    whole.tokens.extend(part.tokens);
    whole.token_logprobs.extend(part.token_logprobs);
    whole.top_logprobs.extend(part.top_logprobs);
    whole.text_offset.extend(part.text_offset);
}

/// Steps as `text_completion` events.
struct TextWording {
    id: String,
    created: u64,
    model: String,
    wish: StreamWish,
    has_logprobs: bool,
    /// For each sample, characters of the tokens reported so far.
    offsets: Vec<usize>,
}

impl TextWording {
    fn new(app: &App, reply: &Reply, wish: StreamWish, has_logprobs: bool) -> Self {
        Self {
            id: reply.id().to_owned(),
            created: unix_now().try_into().unwrap_or(0),
            model: app.config.served_model_name.clone(),
            wish,
            has_logprobs,
            offsets: vec![0; reply.num_samples() as usize],
        }
    }

    fn completion(&self, choices: Vec<CompletionChoice>, usage: Option<Usage>) -> Completion {
        Completion {
            id: self.id.clone(),
            object: "text_completion",
            created: self.created,
            model: self.model.clone(),
            choices,
            usage,
        }
    }

    fn text_of(&mut self, step: ReplyStep) -> (String, CompletionLogprobs) {
        let text: String = step.deltas.into_iter().filter_map(|delta| delta.content).collect();
        let mut logprobs = CompletionLogprobs::default();
        for entry in step.logprobs {
            let offset = self.offsets[step.choice as usize];
            self.offsets[step.choice as usize] += entry.token.chars().count();
            push(&mut logprobs, entry, offset);
        }
        (text, logprobs)
    }
}

fn push(logprobs: &mut CompletionLogprobs, entry: TokenLogprob, offset: usize) {
    let rivals = entry.top_logprobs.unwrap_or_default();
    let top = rivals.into_iter().map(|rival| (rival.token, rival.logprob.into()));
    logprobs.top_logprobs.push(top.collect());
    logprobs.tokens.push(entry.token);
    logprobs.token_logprobs.push(entry.logprob);
    logprobs.text_offset.push(offset);
}

impl Wording for TextWording {
    fn step(&mut self, step: ReplyStep, reply: &Reply, frames: &mut Frames) {
        let usage = self.wish.continuous_usage.then(|| reply.usage());
        let (index, end) = (step.choice, step.end.as_ref().map(|end| end.reason));
        let (text, entries) = self.text_of(step);
        let logprobs = self.has_logprobs.then_some(entries);
        let choice = CompletionChoice { index, text, logprobs, finish_reason: end };
        frames.json(&self.completion(vec![choice], usage));
    }

    fn end(&mut self, reply: &Reply, frames: &mut Frames) {
        if self.wish.include_usage {
            frames.json(&self.completion(Vec::new(), Some(reply.usage())));
        }
        frames.done();
    }
}
