//! Answers requests for the page.

use std::sync::Arc;

use firn_supervisor::{Failure, FailureKind};
use hyper::body::Incoming;
use hyper::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, HeaderName, HeaderValue, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS,
};
use hyper::{Method, Request, StatusCode};

use super::access::Entrance;
use super::actions::answer_action;
use super::render::{self, SCRIPT, STYLE};
use super::view::{PageView, collect_view};
use crate::agent::Agent;
use crate::http::{self, HttpResponse};

/// All of the page's parts.
const PREFIX: &str = "/page/";

/// What a browser may do with the page: nothing from elsewhere, no script on the page itself, and no
/// frame around it.
const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const HEADERS: [(HeaderName, &str); 5] = [
    (CONTENT_SECURITY_POLICY, POLICY),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (REFERRER_POLICY, "no-referrer"),
    (CACHE_CONTROL, "no-store"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

/// Whether a request is for the page.
pub(crate) fn is_for_page(request: &Request<Incoming>) -> bool {
    let path = request.uri().path();
    path == "/" || path.starts_with(PREFIX)
}

/// Answers a request for the page.
pub(crate) async fn answer_page(
    agent: Arc<Agent>,
    entrance: Entrance,
    request: Request<Incoming>,
) -> HttpResponse {
    let mut answer = match entrance.accepts_name(request.headers()) {
        true => answer_part(agent, entrance, request).await,
        false => http::failure_response(&unknown_name()),
    };
    for (name, value) in HEADERS {
        answer.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    answer
}

async fn answer_part(
    agent: Arc<Agent>,
    entrance: Entrance,
    request: Request<Incoming>,
) -> HttpResponse {
    let path = request.uri().path().to_owned();
    let part = path.strip_prefix(PREFIX).unwrap_or_default();
    match (request.method(), part) {
        (&Method::GET, "") if path == "/" => {
            answer_html(&agent, entrance, render::render_page).await
        }
        (&Method::GET, "body") => {
            answer_html(&agent, entrance, |view| render::render_main(view).into_string()).await
        }
        (&Method::GET, "style.css") => answer_text("text/css; charset=utf-8", STYLE.to_owned()),
        (&Method::GET, "script.js") => {
            answer_text("text/javascript; charset=utf-8", SCRIPT.to_owned())
        }
        (&Method::POST, action) => answer_action(agent, entrance, action, request).await,
        _ => http::not_found_response(&request),
    }
}

async fn answer_html(
    agent: &Arc<Agent>,
    entrance: Entrance,
    render: impl FnOnce(&PageView) -> String,
) -> HttpResponse {
    match collect_view(agent, entrance).await {
        Ok(view) => answer_text("text/html; charset=utf-8", render(&view)),
        Err(failure) => http::failure_response(&failure),
    }
}

fn answer_text(kind: &'static str, text: String) -> HttpResponse {
    http::bytes_response(StatusCode::OK, kind, text.into_bytes())
}

fn unknown_name() -> Failure {
    let text = "the page is not shown under this name, which another site may have";
    Failure::new(FailureKind::Refused, text).with_hint("open it at localhost or 127.0.0.1")
}
