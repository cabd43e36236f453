//! What operators ask, on a listener of its own.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::response::Response;
use axum::routing::{get, post};
use gateway_core::routing::Role;
use serde_json::{Value, json};

use super::{json_response, ops, unknown_route, wrong_method};
use crate::app::App;
use crate::workers::{WorkerState, WorkerView};

/// The operators' routes.
pub(super) fn router(app: &Arc<App>) -> Router {
    Router::new()
        .route("/metrics", get(ops::metrics))
        .route("/health", get(ops::health))
        .route("/ready", get(ops::ready))
        .route("/version", get(ops::version))
        .route("/admin/workers", get(workers))
        .route("/admin/refresh", post(refresh))
        .route("/admin/drain", post(drain))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .with_state(Arc::clone(app))
}

/// `GET /admin/workers`: every worker that is known, and how it fares.
async fn workers(State(app): State<Arc<App>>) -> Response {
    let workers: Vec<Value> = app.workers.snapshot().iter().map(shown).collect();
    json_response(&json!({ "workers": workers }))
}

fn shown(view: &WorkerView) -> Value {
    let (state, reason) = match &view.state {
        WorkerState::Ready => ("ready", None),
        WorkerState::Loading => ("loading", None),
        WorkerState::Draining => ("draining", None),
        WorkerState::Stalled => ("stalled", None),
        WorkerState::Broken => ("broken", None),
        WorkerState::Refused { reason } => ("refused", Some(reason)),
        WorkerState::Unreachable { reason } => ("unreachable", Some(reason)),
    };
    let role = match view.role {
        Role::All => "all",
        Role::Encode => "encode",
        Role::Prefill => "prefill",
        Role::Decode => "decode",
    };
    json!({
        "address": &*view.address,
        "state": state,
        "role": role,
        "reason": reason.map(|reason| &**reason),
        "assigned_requests": view.assigned_requests,
        "running_requests": view.load.running_requests,
        "waiting_requests": view.load.waiting_requests,
        "waiting_prompt_tokens": view.load.waiting_prompt_tokens,
        "prompt_tokens_per_s": view.load.prompt_tokens_per_s,
        "used_pages": view.load.used_pages,
        "total_pages": view.load.total_pages,
        "steps": view.load.steps,
        "max_context_tokens": view.max_context_tokens,
    })
}

/// `POST /admin/refresh`: look for workers again, as SIGHUP does.
async fn refresh(State(app): State<Arc<App>>) -> Response {
    app.discovery.refresh();
    json_response(&json!({ "refreshing": true }))
}

/// `POST /admin/drain`: stop as SIGTERM does.
async fn drain(State(app): State<Arc<App>>) -> Response {
    app.leave.cancel();
    json_response(&json!({ "draining": true }))
}
