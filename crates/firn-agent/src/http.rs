//! HTTP as agents speak it: small messages, with bounds on everything that comes in.
//!
//! | what | at most |
//! |---|---|
//! | the head of a message | 16 KiB, 32 fields, 5 s |
//! | the body of a request | 64 KiB, 5 s |
//! | the body of an answer | 4 MiB |

use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use firn_supervisor::{Context as _, Failure, FailureKind};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Body as HttpBody, Incoming};
use hyper::header::{CONNECTION, CONTENT_TYPE, HOST, HeaderValue, UPGRADE};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

/// How long a request may take to come in: its head, and then its body.
pub const REQUEST_WAIT: Duration = Duration::from_secs(5);

const HEAD_BYTES_MAX: usize = 16 << 10;
const FIELDS_MAX: usize = 32;
const REQUEST_BYTES_MAX: usize = 64 << 10;
const ANSWER_BYTES_MAX: usize = 4 << 20;

/// What is sent.
pub type Body = BoxBody<Bytes, Infallible>;

/// An answer.
pub type Answer = Response<Body>;

/// Serves one connection until it ends.
///
/// # Errors
/// If it ends otherwise than between two requests, or what comes is no request within the bounds.
pub async fn serve<I, H, F>(io: I, handle: H) -> Result<(), hyper::Error>
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    H: Fn(Request<Incoming>) -> F,
    F: Future<Output = Answer>,
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

/// What a request holds.
///
/// # Errors
/// If it is not that, too long, or too slow.
pub async fn read<T: DeserializeOwned>(request: Request<Incoming>) -> Result<T, Failure> {
    let bytes = read_bytes(request).await?;
    serde_json::from_slice(&bytes).doing_or(FailureKind::Usage, "reading the request")
}

/// What a request holds, whatever it is.
///
/// # Errors
/// If it is too long, or too slow.
pub async fn read_bytes(request: Request<Incoming>) -> Result<Bytes, Failure> {
    let body = Limited::new(request.into_body(), REQUEST_BYTES_MAX).collect();
    let slow = |_| Failure::new(FailureKind::Usage, "the request does not come to its end");
    let body = timeout(REQUEST_WAIT, body).await.map_err(slow)?;
    let long = |error: Box<dyn std::error::Error + Send + Sync>| {
        Failure::new(FailureKind::Usage, error.to_string()).while_doing("reading the request")
    };
    Ok(body.map_err(long)?.to_bytes())
}

/// A request, with JSON if there is anything to say.
///
/// # Errors
/// If the path is none.
pub fn request(
    method: Method,
    host: &str,
    path: &str,
    body: Option<&impl Serialize>,
) -> Result<Request<Full<Bytes>>, Failure> {
    let bytes = body.map(serde_json::to_vec).transpose().doing("writing a request")?;
    let body = Full::new(Bytes::from(bytes.unwrap_or_default()));
    let request = Request::builder().method(method).uri(path).header(HOST, host);
    request.header(CONTENT_TYPE, "application/json").body(body).doing("writing a request")
}

/// What a good answer holds; else the failure that it tells.
///
/// # Errors
/// That, or that it is neither.
pub async fn told<T: DeserializeOwned>(answer: Response<Incoming>) -> Result<T, Failure> {
    serde_json::from_slice(&told_bytes(answer).await?).doing("reading the answer")
}

/// What a good answer holds, whatever it is; else the failure that it tells.
///
/// # Errors
/// That.
pub async fn told_bytes(answer: Response<Incoming>) -> Result<Bytes, Failure> {
    let status = answer.status();
    let bytes = whole(answer).await?;
    match status.is_success() {
        true => Ok(bytes),
        false => Err(failure(status, &bytes)),
    }
}

/// The failure that an answer tells.
pub async fn told_failure(answer: Response<Incoming>) -> Failure {
    let status = answer.status();
    match whole(answer).await {
        Ok(bytes) => failure(status, &bytes),
        Err(failure) => failure,
    }
}

async fn whole(answer: Response<Incoming>) -> Result<Bytes, Failure> {
    let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
    let broken = |error: Box<dyn std::error::Error + Send + Sync>| {
        Failure::new(FailureKind::Other, error.to_string()).while_doing("reading the answer")
    };
    Ok(body.map_err(broken)?.to_bytes())
}

/// Somebody else's server has another form.
fn failure(status: StatusCode, bytes: &[u8]) -> Failure {
    serde_json::from_slice(bytes)
        .unwrap_or_else(|_| Failure::new(FailureKind::Other, format!("it answers {status}")))
}

/// An answer that holds JSON.
pub fn json(value: &impl Serialize) -> Answer {
    match serde_json::to_vec(value).doing("writing an answer") {
        Ok(bytes) => answer(StatusCode::OK, "application/json", bytes),
        Err(failure) => refusal(&failure),
    }
}

/// An answer that tells a failure.
pub fn refusal(failure: &Failure) -> Answer {
    let status = match failure.kind {
        FailureKind::Usage => StatusCode::BAD_REQUEST,
        FailureKind::NoSuchVm => StatusCode::NOT_FOUND,
        FailureKind::Busy => StatusCode::CONFLICT,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    // It is made of strings: nothing in it can fail to serialize.
    answer(status, "application/json", serde_json::to_vec(failure).unwrap_or_default())
}

/// An answer after which the connection is a stream of something else.
pub fn switching(protocol: &'static str) -> Answer {
    let kind = "application/octet-stream";
    let mut answer = answer(StatusCode::SWITCHING_PROTOCOLS, kind, Vec::new());
    let headers = answer.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static(protocol));
    answer
}

/// An answer to what nobody knows.
pub fn unknown(request: &Request<Incoming>) -> Answer {
    let text = format!("there is no {} {}", request.method(), request.uri().path());
    refusal(&Failure::new(FailureKind::Usage, text))
}

/// Any answer with a body that is there.
pub fn answer(status: StatusCode, kind: &'static str, bytes: Vec<u8>) -> Answer {
    answer_with(status, kind, Full::new(Bytes::from(bytes)))
}

/// Any answer.
pub fn answer_with<B>(status: StatusCode, kind: &'static str, body: B) -> Answer
where
    B: HttpBody<Data = Bytes, Error = Infallible> + Send + Sync + 'static,
{
    let mut answer = Response::new(body.boxed());
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}
