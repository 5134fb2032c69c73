//! The rest of a restore, which the event loop runs on a thread of its own.

use crate::records::control_protocol::OperationProgress;
use crate::records::failure::Failure;

/// The rest of a restore whose guest runs already; it reports progress and returns facts.
pub(crate) type RestoreTask =
    Box<dyn FnOnce(&dyn Fn(OperationProgress)) -> Result<serde_json::Value, Failure> + Send>;
