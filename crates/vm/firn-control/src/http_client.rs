//! HTTP requests to an agent, by commands and by other agents, and what its answers mean.
//!
//! ```text
//!   200 ... 299   the body is the answer, as JSON or as bytes
//!   others        the body is a Failure, as JSON; of a server that is no agent: anything
//! ```
//!
//! The body of an answer has 4 MiB at most.

use bytes::Bytes;
use firn_supervisor::{Failure, FailureContext as _, FailureKind};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request, Response, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;

const ANSWER_BYTES_MAX: usize = 4 << 20;

/// Builds a request, with a JSON body if there is one.
///
/// # Errors
/// If the path is not valid.
pub fn build_request(
    method: Method,
    host: &str,
    path: &str,
    body: Option<&impl Serialize>,
) -> Result<Request<Full<Bytes>>, Failure> {
    let bytes = body.map(serde_json::to_vec).transpose().while_doing("writing a request")?;
    let body = Full::new(Bytes::from(bytes.unwrap_or_default()));
    let request = Request::builder().method(method).uri(path).header(HOST, host);
    request.header(CONTENT_TYPE, "application/json").body(body).while_doing("writing a request")
}

/// Reads the JSON body of a successful response.
///
/// # Errors
/// The failure that the peer reports, or a decoding error.
pub async fn read_answer<T: DeserializeOwned>(answer: Response<Incoming>) -> Result<T, Failure> {
    serde_json::from_slice(&read_answer_bytes(answer).await?).while_doing("reading the answer")
}

/// Reads the body of a successful response as bytes.
///
/// # Errors
/// The failure that the peer reports.
pub async fn read_answer_bytes(answer: Response<Incoming>) -> Result<Bytes, Failure> {
    let status = answer.status();
    let bytes = collect_body(answer).await?;
    match status.is_success() {
        true => Ok(bytes),
        false => Err(decode_failure(status, &bytes)),
    }
}

/// Reads the failure that a response reports.
pub async fn read_failure(answer: Response<Incoming>) -> Failure {
    let status = answer.status();
    match collect_body(answer).await {
        Ok(bytes) => decode_failure(status, &bytes),
        Err(failure) => failure,
    }
}

async fn collect_body(answer: Response<Incoming>) -> Result<Bytes, Failure> {
    let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
    let broken = |error: Box<dyn std::error::Error + Send + Sync>| {
        Failure::new(FailureKind::Other, error.to_string()).while_doing("reading the answer")
    };
    Ok(body.map_err(broken)?.to_bytes())
}

/// Decodes a failure. A server that is no agent reports failures in another form.
fn decode_failure(status: StatusCode, bytes: &[u8]) -> Failure {
    serde_json::from_slice(bytes)
        .unwrap_or_else(|_| Failure::new(FailureKind::Other, format!("it answers {status}")))
}
