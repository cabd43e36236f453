//! `/tokenize` and `/detokenize`: the tokenizer alone, no worker.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use gateway_core::conversation::{TokenizeTask, check_detokenize, check_tokenize};
use gateway_core::openai::{Detokenized, Tokenized};

use super::{MAX_TEXT_BYTES, json_response, receive, refuse};
use crate::app::App;
use crate::error::GatewayError;
use crate::pipeline::{check_model, run_text, tokenize_chat};

/// `POST /tokenize`
pub(super) async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Response {
    match tokenized(&app, request).await {
        Ok(tokens) => json_response(&Tokenized {
            count: tokens.len(),
            max_model_len: app.max_context_tokens,
            tokens,
        }),
        Err(error) => refuse(&app, &error),
    }
}

async fn tokenized(app: &Arc<App>, request: Request) -> Result<Vec<u32>, GatewayError> {
    let max_bytes = app.config.max_request_bytes;
    let (task, _visit) = receive(app, request, "tok", max_bytes, check_tokenize).await?;
    match task {
        TokenizeTask::Chat(conversation) => tokenize_chat(app, *conversation).await,
        TokenizeTask::Text { model, text, add_special_tokens } => {
            check_model(app, model.as_deref())?;
            run_text(app, true, move |app| {
                app.model.prompt_builder.encode_text(&text, add_special_tokens)
            })
            .await
        }
    }
}

/// `POST /detokenize`
pub(super) async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Response {
    match detokenized(&app, request).await {
        Ok(prompt) => json_response(&Detokenized { prompt }),
        Err(error) => refuse(&app, &error),
    }
}

async fn detokenized(app: &Arc<App>, request: Request) -> Result<String, GatewayError> {
    let (ids, _visit) = receive(app, request, "detok", MAX_TEXT_BYTES, check_detokenize).await?;
    run_text(app, true, move |app| Ok::<_, GatewayError>(app.model.prompt_builder.decode(&ids)))
        .await
}
