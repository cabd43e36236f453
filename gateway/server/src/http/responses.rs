//! `POST /v1/responses`, whole or streamed, without stored state.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use gateway_core::openai::FinishReason;
use gateway_core::responses::{Ending, ResponseFolder, ResponsesTask, check_responses};
use serde_json::Value;

use super::sse::{self, Frames, Wording};
use super::{json_response, receive, refuse, timed};
use crate::app::{App, unix_now};
use crate::error::GatewayError;
use crate::pipeline;
use crate::reply::{Reply, ReplyStep};

/// `POST /v1/responses`
pub(super) async fn create(State(app): State<Arc<App>>, request: Request) -> Response {
    // stages after the translation name what a chat calls it
    respond(&app, request)
        .await
        .unwrap_or_else(|error| refuse(&app, &error.renamed("response_format", "text.format")))
}

async fn respond(app: &Arc<App>, request: Request) -> Result<Response, GatewayError> {
    let max_bytes = app.config.max_request_bytes;
    let (task, visit) = receive(app, request, "resp", max_bytes, check_responses).await?;
    let ResponsesTask { conversation, echo } = task;
    let is_stream = conversation.stream.stream;
    let mut reply = pipeline::chat(app, conversation, visit).await?;
    let id = reply.id().replacen('-', "_", 1);
    let created_at = unix_now().try_into().unwrap_or(0);
    let model = &app.config.served_model_name;
    let folder = ResponseFolder::new(&id, created_at, model, echo);
    let words = ItemWording { folder, reason: None };
    if is_stream {
        return sse::respond(app, reply, words, app.config.pace).await;
    }
    let whole = whole(&mut reply, words).await?;
    Ok(timed(json_response(&whole), reply.timing()))
}

/// The whole response is what the stream's last event holds.
async fn whole(reply: &mut Reply, mut words: ItemWording) -> Result<Value, GatewayError> {
    while let Some(step) = reply.next().await? {
        words.read(step);
    }
    let last = words.close(reply)?.pop();
    last.and_then(|mut event| event.get_mut("response").map(Value::take))
        .ok_or_else(|| GatewayError::internal("a response has no end"))
}

/// Steps as events of output items.
struct ItemWording {
    folder: ResponseFolder,
    reason: Option<FinishReason>,
}

impl ItemWording {
    fn read(&mut self, step: ReplyStep) -> Vec<Value> {
        self.reason = step.end.map(|end| end.reason).or(self.reason);
        self.folder.add(step.deltas)
    }

    fn close(&mut self, reply: &Reply) -> Result<Vec<Value>, GatewayError> {
        let reason = self.reason.ok_or_else(|| GatewayError::internal("a sample has no end"))?;
        Ok(self.folder.end(&Ending { reason, usage: reply.usage() }))
    }
}

fn put(events: Vec<Value>, frames: &mut Frames) {
    for event in events {
        frames.named(event["type"].as_str().unwrap_or_default(), &event);
    }
}

impl Wording for ItemWording {
    fn begin(&mut self, _reply: &Reply, frames: &mut Frames) {
        put(self.folder.begin(), frames);
    }

    fn step(&mut self, step: ReplyStep, _reply: &Reply, frames: &mut Frames) {
        put(self.read(step), frames);
    }

    fn end(&mut self, reply: &Reply, frames: &mut Frames) {
        match self.close(reply) {
            Ok(events) => put(events, frames),
            Err(error) => self.fail(&error, frames),
        }
    }

    fn fail(&mut self, error: &GatewayError, frames: &mut Frames) {
        put(self.folder.fail(error.code, &error.message), frames);
    }
}
