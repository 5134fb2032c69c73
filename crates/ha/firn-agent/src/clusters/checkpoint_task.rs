//! The handle of the task that makes the global checkpoints of a cluster.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use firn_cluster::cut::GlobalCheckpoint;
use firn_supervisor::{Failure, FailureKind};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

/// Receives the checkpoint that a client has requested.
pub(super) type CheckpointReplySender = oneshot::Sender<Result<GlobalCheckpoint, Failure>>;

/// The task that makes global checkpoints of a cluster, until this value is dropped.
pub(super) struct CheckpointTask {
    pub(super) task: JoinHandle<()>,
    pub(super) orders: mpsc::Sender<CheckpointReplySender>,
    pub(super) trouble: Arc<Mutex<Option<String>>>,
}

impl CheckpointTask {
    /// Requests a checkpoint now.
    pub(super) fn request_checkpoint(
        &self,
    ) -> impl Future<Output = Result<GlobalCheckpoint, Failure>> + Send + use<> {
        let orders = self.orders.clone();
        async move {
            let over =
                || Failure::new(FailureKind::Interrupted, "no more global checkpoints are made");
            let (reply_to, answer) = oneshot::channel();
            orders.send(reply_to).await.map_err(|_| over())?;
            answer.await.map_err(|_| over())?
        }
    }

    /// Why the newest attempt made no checkpoint, if it failed.
    pub(super) fn last_failure(&self) -> Option<String> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends the task. No record is written any more when this returns.
    pub(super) async fn end_task(mut self) {
        self.task.abort();
        // The task was aborted, so its result is an error.
        let _ = (&mut self.task).await;
    }
}

impl Drop for CheckpointTask {
    fn drop(&mut self) {
        self.task.abort();
    }
}
