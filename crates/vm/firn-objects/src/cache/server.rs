//! Connections of clients.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use firn_cache::{CacheReply, CacheRequest, StoreEnvironment, StoreLocation};
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;

use super::find::ImageSearch;
use super::object::{CachedObject, ProvidedBytes, ReadKind};
use super::prefetch::PrefetchQueue;
use super::registry::ObjectRegistry;
use crate::error::StoreError;
use crate::failure::store_failure;

/// The maximum length of a request in bytes.
const REQUEST_BYTES_MAX: u64 = 16 << 20;

/// The maximum number of bytes that one read may request.
const READ_BYTES_MAX: u64 = 1 << 30;

/// A connection on which nothing was requested for this time is closed. Its client makes another.
const IDLE_MAX: Duration = Duration::from_secs(30);

/// What all connections share.
pub(crate) struct CacheServer {
    pub(crate) registry: ObjectRegistry,
    pub(crate) prefetch: Arc<PrefetchQueue>,
    pub(crate) connections: AtomicUsize,
}

/// A reply, and the bytes that follow it.
type ReplyWithBytes = (CacheReply, Vec<u8>);

impl CacheServer {
    /// Serves a client until it closes the connection.
    pub(crate) async fn serve(self: Arc<Self>, stream: UnixStream) {
        self.connections.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = self.serve_requests(stream).await {
            tracing::debug!(%error, "a client's connection failed");
        }
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    async fn serve_requests(&self, stream: UnixStream) -> io::Result<()> {
        let mut stream = BufReader::new(stream);
        let mut object = None;
        loop {
            let mut line = Vec::new();
            let mut limited = (&mut stream).take(REQUEST_BYTES_MAX);
            let read = tokio::time::timeout(IDLE_MAX, limited.read_until(b'\n', &mut line)).await;
            if read.is_err() || line.last() != Some(&b'\n') {
                return Ok(());
            }
            let (reply, bytes) = match serde_json::from_slice(&line) {
                Ok(request) => self.answer(request, &mut object).await,
                Err(error) => (failed_text(format!("no request: {error}")), Vec::new()),
            };
            let mut message = serde_json::to_vec(&reply)?;
            message.push(b'\n');
            stream.get_mut().write_all(&message).await?;
            stream.get_mut().write_all(&bytes).await?;
        }
    }

    async fn answer(
        &self,
        request: CacheRequest,
        object: &mut Option<Arc<CachedObject>>,
    ) -> ReplyWithBytes {
        let alone = |reply| (reply, Vec::new());
        let request = match request {
            CacheRequest::Find { location, environment } => {
                return alone(self.find(&location, &environment).await);
            }
            CacheRequest::Open { object: hash, environment } => {
                return alone(match self.registry.open_hash(&hash, &environment) {
                    Ok(found) => {
                        *object = Some(found);
                        CacheReply::Done {}
                    }
                    Err(error) => failed(&error),
                });
            }
            CacheRequest::Report => return alone(CacheReply::Report(self.registry.room.report())),
            request => request,
        };
        match object {
            Some(object) => self.answer_for(request, object).await,
            None => alone(failed_text("no object is open".to_owned())),
        }
    }

    async fn answer_for(
        &self,
        request: CacheRequest,
        object: &Arc<CachedObject>,
    ) -> ReplyWithBytes {
        let alone = |reply| (reply, Vec::new());
        match request {
            CacheRequest::Read { offset, len, in_order } => {
                let kind = if in_order { ReadKind::InOrder } else { ReadKind::Demand };
                read(object, (offset, len), kind).await
            }
            CacheRequest::Refetch { offset, len } => {
                object.forget_wrong_units(offset..offset.saturating_add(len));
                read(object, (offset, len), ReadKind::Demand).await
            }
            CacheRequest::Forget => match object.forget_all() {
                Ok(()) => alone(CacheReply::Done {}),
                Err(error) => alone(failed_text(error.to_string())),
            },
            CacheRequest::Prefetch { ranges } => {
                self.prefetch.add(object, &ranges);
                alone(CacheReply::Done {})
            }
            _ => alone(failed_text("this request needs no object".to_owned())),
        }
    }

    async fn find(&self, location: &str, environment: &StoreEnvironment) -> CacheReply {
        let at: StoreLocation = match location.parse() {
            Ok(at) => at,
            Err(error) => return failed_text(format!("{error}")),
        };
        let search = ImageSearch { registry: &self.registry, environment };
        match search.find(&at).await {
            Ok(image) => CacheReply::Found { image: image.path, objects: image.objects },
            Err(error) => failed(&error),
        }
    }
}

async fn read(
    object: &Arc<CachedObject>,
    (offset, len): (u64, u64),
    kind: ReadKind,
) -> ReplyWithBytes {
    let end = offset.saturating_add(len);
    if end > object.name.len || len > READ_BYTES_MAX {
        return (failed_text("the object has no such range".to_owned()), Vec::new());
    }
    match object.provide(offset..end, kind).await {
        Ok(ProvidedBytes::InFile { has_waited }) => {
            (CacheReply::Present { has_waited }, Vec::new())
        }
        Ok(ProvidedBytes::InMemory(bytes)) => (CacheReply::Bytes { len }, bytes),
        Err(error) => (failed(&error), Vec::new()),
    }
}

fn failed(error: &StoreError) -> CacheReply {
    let failure = store_failure(error);
    CacheReply::Failed { message: failure.to_string(), failure: json!(failure) }
}

fn failed_text(message: String) -> CacheReply {
    CacheReply::Failed { message, failure: serde_json::Value::Null }
}
