//! Serves HTTP to peers and commands: small messages, with a limit on everything that is received.
//!
//! | what | at most |
//! |---|---|
//! | the head of a message | 16 KiB, 32 fields, 5 s |
//! | the body of a request | 64 KiB, 5 s |
//!
//! Requests are sent by [`firn_control::http_client`].

use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use firn_supervisor::{Failure, FailureContext as _, FailureKind};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Body as HttpBody, Incoming};
use hyper::header::{CONNECTION, CONTENT_TYPE, HeaderValue, UPGRADE};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

/// Maximum time in which the head of a request arrives, and then its body.
pub const REQUEST_WAIT: Duration = Duration::from_secs(5);

const HEAD_BYTES_MAX: usize = 16 << 10;
const FIELDS_MAX: usize = 32;
const REQUEST_BYTES_MAX: usize = 64 << 10;

/// The body of a message that is sent.
pub type ResponseBody = BoxBody<Bytes, Infallible>;

/// The response to a request.
pub type HttpResponse = Response<ResponseBody>;

/// Serves one connection until it ends.
///
/// # Errors
/// If it ends otherwise than between two requests, or a request exceeds the limits.
pub async fn serve_connection<I, H, F>(io: I, handle: H) -> Result<(), hyper::Error>
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    H: Fn(Request<Incoming>) -> F,
    F: Future<Output = HttpResponse>,
{
    let service = service_fn(|request| {
        let answer = handle(request);
        async { Ok::<_, Infallible>(answer.await) }
    });
    hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_WAIT)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(FIELDS_MAX)
        .serve_connection(TokioIo::new(io), service)
        .with_upgrades()
        .await
}

/// Reads the body of a request as JSON.
///
/// # Errors
/// If it has another form, is too long, or arrives too slowly.
pub async fn read_json<T: DeserializeOwned>(request: Request<Incoming>) -> Result<T, Failure> {
    let bytes = read_body(request).await?;
    serde_json::from_slice(&bytes).while_doing_as(FailureKind::Usage, "reading the request")
}

/// Reads the body of a request as bytes.
///
/// # Errors
/// If it is too long, or arrives too slowly.
pub async fn read_body(request: Request<Incoming>) -> Result<Bytes, Failure> {
    let body = Limited::new(request.into_body(), REQUEST_BYTES_MAX).collect();
    let slow = |_| Failure::new(FailureKind::Usage, "the request does not come to its end");
    let body = timeout(REQUEST_WAIT, body).await.map_err(slow)?;
    let long = |error: Box<dyn std::error::Error + Send + Sync>| {
        Failure::new(FailureKind::Usage, error.to_string()).while_doing("reading the request")
    };
    Ok(body.map_err(long)?.to_bytes())
}

/// A response with a JSON body.
pub fn json_response(value: &impl Serialize) -> HttpResponse {
    match serde_json::to_vec(value).while_doing("writing an answer") {
        Ok(bytes) => bytes_response(StatusCode::OK, "application/json", bytes),
        Err(failure) => failure_response(&failure),
    }
}

/// A response that reports a failure.
pub fn failure_response(failure: &Failure) -> HttpResponse {
    let status = match failure.kind {
        FailureKind::Usage => StatusCode::BAD_REQUEST,
        FailureKind::NoSuchVm => StatusCode::NOT_FOUND,
        FailureKind::Busy => StatusCode::CONFLICT,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    // It consists of strings, so nothing in it can fail to serialize.
    bytes_response(status, "application/json", serde_json::to_vec(failure).unwrap_or_default())
}

/// A response after which the connection carries another protocol.
pub fn upgrade_response(protocol: &'static str) -> HttpResponse {
    let kind = "application/octet-stream";
    let mut answer = bytes_response(StatusCode::SWITCHING_PROTOCOLS, kind, Vec::new());
    let headers = answer.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static(protocol));
    answer
}

/// The response to a request for an unknown path.
pub fn not_found_response(request: &Request<Incoming>) -> HttpResponse {
    let text = format!("there is no {} {}", request.method(), request.uri().path());
    failure_response(&Failure::new(FailureKind::Usage, text))
}

/// A response with a complete body.
pub fn bytes_response(status: StatusCode, kind: &'static str, bytes: Vec<u8>) -> HttpResponse {
    response_with_body(status, kind, Full::new(Bytes::from(bytes)))
}

/// A response with a body of any kind.
pub fn response_with_body<B>(status: StatusCode, kind: &'static str, body: B) -> HttpResponse
where
    B: HttpBody<Data = Bytes, Error = Infallible> + Send + Sync + 'static,
{
    let mut answer = Response::new(body.boxed());
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}
