//! Whether a request may pass: its key, before anything else of it is read.

use axum::extract::Request;
use axum::http::{HeaderValue, header};
use axum::response::Response;

use super::{Tenant, pages, refuse_request};
use crate::app::App;
use crate::error::{ErrorKind, GatewayError};
use crate::keys::{Caller, Role};

/// Which listener a request came in by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Door {
    /// That of the API.
    Clients,
    /// That of operators.
    Operators,
}

/// Lets a request pass, marked with its tenant, or answers it.
///
/// What probes and browsers ask first is open; metrics are open at the operators' door, whose
/// network is theirs; everything else there wants an admin's key.
pub(super) fn check(app: &App, door: Door, request: &mut Request) -> Result<(), Box<Response>> {
    let Some(keys) = &app.keys else { return Ok(()) };
    if is_open(door, request.uri().path()) {
        return Ok(());
    }
    let caller = presented(request).find_map(|key| keys.caller(key));
    let error = match (caller, door) {
        (Some(Caller { role: Role::User, .. }), Door::Operators) => GatewayError::new(
            ErrorKind::Forbidden,
            "this API key may use the model but not operate the gateway; its role must be admin",
        ),
        (Some(Caller { tenant, .. }), _) => {
            request.extensions_mut().insert(Tenant(tenant));
            return Ok(());
        }
        (None, _) => unknown(request),
    };
    Err(Box::new(shown(app, request, &error)))
}

fn is_open(door: Door, path: &str) -> bool {
    match path {
        "/health" | "/ready" | "/version" => true,
        "/metrics" => door == Door::Operators,
        _ => door == Door::Clients && pages::is_page(path),
    }
}

/// The keys that a request shows: `Authorization: Bearer` as OpenAI's clients do, `x-api-key` as
/// Anthropic's.
fn presented(request: &Request) -> impl Iterator<Item = &str> {
    let headers = request.headers();
    let bearer = headers.get_all(header::AUTHORIZATION).iter().filter_map(|value| {
        let (scheme, key) = value.to_str().ok()?.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    let plain = headers.get_all("x-api-key").iter().filter_map(|value| value.to_str().ok());
    bearer.chain(plain)
}

fn unknown(request: &Request) -> GatewayError {
    let message = if presented(request).next().is_none() {
        "no API key was sent; send one as Authorization: Bearer KEY, or as x-api-key: KEY"
    } else {
        "the API key is not one of this gateway's"
    };
    GatewayError::new(ErrorKind::Unauthorized, message)
}

fn shown(app: &App, request: &Request, error: &GatewayError) -> Response {
    let mut response = refuse_request(app, request, error);
    if error.kind == ErrorKind::Unauthorized {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}
