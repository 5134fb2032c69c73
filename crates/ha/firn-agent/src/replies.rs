//! Replies to requests that take long: a line of JSON for each step, and one for the result.

use bytes::Bytes;
use firn_supervisor::{Failure, FailureContext as _, SupervisorReply};
use http_body_util::channel::{Channel, Sender};
use hyper::StatusCode;
use serde::Serialize;
use tokio::sync::mpsc;

use crate::http::{self, HttpResponse};
use crate::moves::ProgressSender;

/// Maximum number of replies that wait for the client. Progress that finds no room is dropped.
pub(crate) const REPLIES_MAX: usize = 16;

/// Answers by progress, and a last reply. The work continues when the client disconnects.
pub(crate) fn answer_with_progress<T, F>(work: impl FnOnce(ProgressSender) -> F) -> HttpResponse
where
    T: Serialize + Send + 'static,
    F: Future<Output = Result<T, Failure>> + Send + 'static,
{
    let (reply_sender, replies) = mpsc::channel(REPLIES_MAX);
    let (lines, body) = Channel::new(REPLIES_MAX);
    tokio::spawn(forward_replies(replies, lines));
    let (progress_sender, mut progress) = mpsc::channel(REPLIES_MAX);
    let working = work(progress_sender);
    tokio::spawn(async move {
        let forwarding = reply_sender.clone();
        let forward = async {
            while let Some(now) = progress.recv().await {
                let _ = forwarding.send(SupervisorReply::Progress(now)).await;
            }
        };
        let (done, ()) = tokio::join!(working, forward);
        let facts = done.and_then(|facts| serde_json::to_value(facts).while_doing("answering"));
        let last = match facts {
            Ok(facts) => SupervisorReply::Done { facts },
            Err(failure) => SupervisorReply::Failed(failure),
        };
        // The client may have disconnected.
        let _ = reply_sender.send(last).await;
    });
    http::response_with_body(StatusCode::OK, "application/x-ndjson", body)
}

pub(crate) async fn forward_replies(
    mut replies: mpsc::Receiver<SupervisorReply>,
    mut lines: Sender<Bytes>,
) {
    while let Some(reply) = replies.recv().await {
        // It consists of strings and numbers, so nothing in it can fail to serialize.
        let mut line = serde_json::to_vec(&reply).unwrap_or_default();
        line.push(b'\n');
        if lines.send_data(line.into()).await.is_err() {
            return;
        }
    }
}
