//! What operators and clients ask about the gateway itself.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use gateway_core::openai::{ModelCard, ModelList};
use serde_json::json;

use super::{json_response, refuse};
use crate::app::App;
use crate::error::{ErrorKind, GatewayError};

/// `GET /v1/models`
pub(super) async fn models(State(app): State<Arc<App>>) -> Response {
    json_response(&ModelList { object: "list", data: vec![card(&app)] })
}

/// `GET /v1/models/{id}`
pub(super) async fn model(State(app): State<Arc<App>>, Path(id): Path<String>) -> Response {
    if id == app.config.served_model_name {
        return json_response(&card(&app));
    }
    let served = &app.config.served_model_name;
    let message = format!("the model {id:?} does not exist; this gateway serves {served:?}");
    refuse(&app, &GatewayError::new(ErrorKind::ModelNotFound, message).at("model"))
}

fn card(app: &App) -> ModelCard {
    ModelCard {
        id: app.config.served_model_name.clone(),
        object: "model",
        created: app.created,
        owned_by: "m3stack".into(),
        max_model_len: app.max_context_tokens,
    }
}

/// `GET /health`: the process lives and answers.
pub(super) async fn health() -> Response {
    json_response(&json!({"status": "ok"}))
}

/// `GET /ready`: requests can be served now; if not, what is missing.
pub(super) async fn ready(State(app): State<Arc<App>>) -> Response {
    let workers = app.workers.count();
    let mut missing = app.workers.what_is_missing();
    let is_draining = app.admission.is_closed();
    if is_draining {
        missing.insert(0, "the gateway is shutting down".into());
    }
    // workers that only compute for others serve nobody
    let answers = app.workers.check_someone_ready();
    if let (Err(nobody), true) = (&answers, workers.ready > 0) {
        missing.push(nobody.message.clone());
    }
    let is_ready = workers.ready > 0 && answers.is_ok() && !is_draining;
    let video = app.media.missing_for_video();
    let mut response = json_response(&json!({
        "ready": is_ready,
        "model": app.config.served_model_name,
        "workers": {
            "ready": workers.ready,
            "loading": workers.loading,
            "draining": workers.draining,
            "stalled": workers.stalled,
            "broken": workers.broken,
            "refused": workers.refused,
            "unreachable": workers.unreachable,
        },
        "missing": missing,
        "video": video.is_none(),
    }));
    if !is_ready {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    response
}

/// `GET /metrics`
pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let fleet = app.workers.fleet();
    let mut page = app.metrics.page(&fleet, app.admission.held_bytes());
    if app.config.vllm_metrics {
        page.push_str(&app.metrics.vllm_page(&app.config.served_model_name, &fleet));
    }
    let mut response = Response::new(Body::from(page));
    let text = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, text);
    response
}

/// `GET /version`
pub(super) async fn version(State(app): State<Arc<App>>) -> Response {
    let tokenizer = app.model.prompt_builder.tokenizer();
    json_response(&json!({
        "version": env!("CARGO_PKG_VERSION"),
        "model": app.config.served_model_name,
        "model_type": app.model.spec.facts().model_type,
        "tokenizer": tokenizer.engine_name(),
        "ffmpeg": app.media.missing_for_video().is_none(),
    }))
}
