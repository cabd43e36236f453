//! What a tenant has left, in the headers that OpenAI's clients read.

use std::time::Instant;

use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;

use crate::app::App;

const LIMIT_REQUESTS: HeaderName = HeaderName::from_static("x-ratelimit-limit-requests");
const LEFT_REQUESTS: HeaderName = HeaderName::from_static("x-ratelimit-remaining-requests");
const LIMIT_TOKENS: HeaderName = HeaderName::from_static("x-ratelimit-limit-tokens");
const LEFT_TOKENS: HeaderName = HeaderName::from_static("x-ratelimit-remaining-tokens");
const FULL_TOKENS: HeaderName = HeaderName::from_static("x-ratelimit-reset-tokens");

/// Tells how much a tenant may still ask for as of now; nothing if nothing limits it.
pub(super) fn show(app: &App, tenant: &str, response: &mut Response) {
    let Some(left) = app.admission.tenants().allowance(tenant, Instant::now()) else { return };
    let headers = response.headers_mut();
    if let Some(limit) = left.limits.max_concurrent_requests {
        headers.insert(LIMIT_REQUESTS, HeaderValue::from(limit));
        headers.insert(LEFT_REQUESTS, HeaderValue::from(left.remaining_requests));
    }
    if let Some(limit) = left.limits.tokens_per_minute {
        headers.insert(LIMIT_TOKENS, HeaderValue::from(limit));
        headers.insert(LEFT_TOKENS, HeaderValue::from(left.remaining_tokens));
        if let Ok(value) = HeaderValue::try_from(format!("{:.1}s", left.full_after_s)) {
            headers.insert(FULL_TOKENS, value);
        }
    }
}
