//! `POST /v1/chat/completions`, whole or streamed.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use gateway_core::conversation::{StreamWish, check_chat};
use gateway_core::openai::{
    ChatChoice, ChatChunk, ChatCompletion, ChatLogprobs, ChunkChoice, Delta, FinishReason,
    TokenLogprob, Usage,
};
use gateway_core::output::MessageFolder;

use super::sse::{self, Frames, Wording};
use super::{json_response, receive, refuse, timed};
use crate::app::{App, unix_now};
use crate::error::GatewayError;
use crate::pipeline;
use crate::reply::{Reply, ReplyStep, SampleEnd};

/// `POST /v1/chat/completions`
pub(super) async fn completions(State(app): State<Arc<App>>, request: Request) -> Response {
    respond(&app, request).await.unwrap_or_else(|error| refuse(&app, &error))
}

async fn respond(app: &Arc<App>, request: Request) -> Result<Response, GatewayError> {
    let max_bytes = app.config.max_request_bytes;
    let (conversation, visit) = receive(app, request, "chatcmpl", max_bytes, check_chat).await?;
    let has_logprobs = conversation.generation.logprobs.wanted;
    let wish = conversation.stream;
    let mut reply = pipeline::chat(app, conversation, visit).await?;
    if wish.stream {
        let words = ChunkWording::new(app, &reply, wish, has_logprobs);
        let pace = app.config.pace.filter(|_| wish.coalesce);
        return sse::respond(app, reply, words, pace).await;
    }
    let whole = whole(app, &mut reply, has_logprobs).await?;
    Ok(timed(json_response(&whole), reply.timing()))
}

/// The whole reply is the stream, folded.
async fn whole(
    app: &App,
    reply: &mut Reply,
    has_logprobs: bool,
) -> Result<ChatCompletion, GatewayError> {
    let mut samples: Vec<WholeSample> = Vec::new();
    samples.resize_with(reply.num_samples() as usize, WholeSample::default);
    while let Some(step) = reply.next().await? {
        if let Some(sample) = samples.get_mut(step.choice as usize) {
            step.deltas.into_iter().for_each(|delta| sample.folder.add(delta));
            sample.logprobs.extend(step.logprobs);
            sample.end = step.end.or(sample.end.take());
        }
    }
    let choices: Option<Vec<_>> = (0..)
        .zip(samples)
        .map(|(index, sample)| {
            let end = sample.end?;
            Some(ChatChoice {
                index,
                message: sample.folder.finish(&end.folder),
                logprobs: has_logprobs.then_some(ChatLogprobs { content: sample.logprobs }),
                finish_reason: end.reason,
            })
        })
        .collect();
    Ok(ChatCompletion {
        id: reply.id().to_owned(),
        object: "chat.completion",
        created: unix_now().try_into().unwrap_or(0),
        model: app.config.served_model_name.clone(),
        choices: choices.ok_or_else(|| GatewayError::internal("a sample has no end"))?,
        usage: reply.usage(),
    })
}

#[derive(Default)]
struct WholeSample {
    folder: MessageFolder,
    logprobs: Vec<TokenLogprob>,
    end: Option<Box<SampleEnd>>,
}

/// Steps as `chat.completion.chunk` events.
struct ChunkWording {
    /// A chunk's JSON up to its choices, the same in all of them.
    beginning: Vec<u8>,
    wish: StreamWish,
    has_logprobs: bool,
    /// For each sample, whether its role was sent.
    has_begun: Vec<bool>,
}

impl ChunkWording {
    fn new(app: &App, reply: &Reply, wish: StreamWish, has_logprobs: bool) -> Self {
        let empty = ChatChunk {
            id: reply.id().to_owned(),
            object: "chat.completion.chunk",
            created: unix_now().try_into().unwrap_or(0),
            model: app.config.served_model_name.clone(),
            choices: Vec::new(),
            usage: None,
        };
        let mut beginning = serde_json::to_vec(&empty).unwrap_or_default();
        debug_assert!(beginning.ends_with(b"\"choices\":[]}"), "choices stand last");
        beginning.truncate(beginning.len().saturating_sub(b"]}".len()));
        let has_begun = vec![false; reply.num_samples() as usize];
        Self { beginning, wish, has_logprobs, has_begun }
    }

    fn chunk(&self, frames: &mut Frames, choice: Option<ChunkChoice>, usage: Option<&Usage>) {
        frames.object(&self.beginning, choice.as_ref(), usage.map(|usage| ("usage", usage)));
    }

    fn choice(
        &self,
        index: u32,
        (delta, logprobs): (Delta, Vec<TokenLogprob>),
        finish_reason: Option<FinishReason>,
    ) -> Option<ChunkChoice> {
        let has_logprobs = self.has_logprobs && !logprobs.is_empty();
        let logprobs = has_logprobs.then_some(ChatLogprobs { content: logprobs });
        Some(ChunkChoice { index, delta, logprobs, finish_reason })
    }
}

impl Wording for ChunkWording {
    fn step(&mut self, step: ReplyStep, reply: &Reply, frames: &mut Frames) {
        let usage = self.wish.continuous_usage.then(|| reply.usage());
        let usage = usage.as_ref();
        let index = step.choice;
        if let Some(has_begun) = self.has_begun.get_mut(index as usize)
            && !std::mem::replace(has_begun, true)
        {
            let role =
                Delta { role: Some("assistant"), content: Some(String::new()), ..Delta::default() };
            self.chunk(frames, self.choice(index, (role, Vec::new()), None), usage);
        }
        let mut logprobs = step.logprobs;
        let last_content = step.deltas.iter().rposition(|delta| delta.content.is_some());
        for (place, delta) in step.deltas.into_iter().enumerate() {
            let own =
                if Some(place) == last_content { std::mem::take(&mut logprobs) } else { vec![] };
            self.chunk(frames, self.choice(index, (delta, own), None), usage);
        }
        if let Some(end) = step.end {
            let last = self.choice(index, (Delta::default(), logprobs), Some(end.reason));
            self.chunk(frames, last, usage);
        } else if !logprobs.is_empty() {
            self.chunk(frames, self.choice(index, (Delta::default(), logprobs), None), usage);
        }
    }

    fn end(&mut self, reply: &Reply, frames: &mut Frames) {
        if self.wish.include_usage {
            self.chunk(frames, None, Some(&reply.usage()));
        }
        frames.done();
    }
}
