//! Pages for people, and the document that programs read: static files, part of the binary.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::Response;
use axum::routing::get;

use crate::app::App;

/// One file and where it stands.
struct Page {
    path: &'static str,
    content_type: &'static str,
    text: &'static str,
}

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";

const PAGES: [Page; 6] = [
    Page { path: "/", content_type: HTML, text: include_str!("../../assets/playground.html") },
    Page {
        path: "/playground.js",
        content_type: SCRIPT,
        text: include_str!("../../assets/playground.js"),
    },
    Page { path: "/pages.css", content_type: STYLE, text: include_str!("../../assets/pages.css") },
    Page { path: "/docs", content_type: HTML, text: include_str!("../../assets/docs.html") },
    Page { path: "/docs.js", content_type: SCRIPT, text: include_str!("../../assets/docs.js") },
    Page {
        path: "/openapi.json",
        content_type: "application/json",
        text: include_str!("../../assets/openapi.json"),
    },
];

/// Nothing but the page's own files runs, and nothing is sent but to this gateway.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
                      connect-src 'self'; img-src 'self' data: blob:; media-src data: blob:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The same routes, and those of the pages.
pub(super) fn add_to(router: Router<Arc<App>>) -> Router<Arc<App>> {
    PAGES.iter().fold(router, |router, page| {
        router.route(page.path, get(move || async move { shown(page) }))
    })
}

/// Whether a page stands there: pages say nothing that is not public, and a browser cannot send a
/// key before it has one.
pub(super) fn is_page(path: &str) -> bool {
    PAGES.iter().any(|page| page.path == path)
}

fn shown(page: &Page) -> Response {
    let mut response = Response::new(Body::from(page.text));
    let headers = [
        (header::CONTENT_TYPE, page.content_type),
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ];
    for (name, value) in headers {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}
