//! Merging of layers of a drive into the layers below them, while the guest runs.
//!
//! ```text
//!   device -> c -> b -> a      block-commit, top b, base a        device -> c -> a      the contents of b are in a now
//!   device -> c -> a           block-commit, top c, base a        device -> a           after `complete`
//! ```
//!
//! Reads through the upper file are right at each instant: until the job has ended the upper file
//! covers the data that is copied already, and then the file above it names the lower one. A job
//! that ends early, for whatever reason, leaves the chain as it was; only the lower file alone is
//! useless then. Source: QEMU `docs/interop/live-block-operations.rst`, `qapi/job.json`.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::disks::{FileView, plain_file};
use crate::drives::{Drive, OverlayBase};
use crate::qmp::{QmpClient, QmpError};

/// The prefix of the ids of jobs that Firn starts.
pub const JOB_PREFIX: &str = "firn-merge-";

/// The prefix of the names of nodes that Firn adds.
const NODE_PREFIX: &str = "firn-";

/// A merge of layers of one drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockCommit {
    /// The id of its job.
    pub job: String,
    /// The topmost file that is merged.
    pub top: PathBuf,
    /// The file that receives the contents.
    pub base: PathBuf,
    /// The file above the topmost; `None` if the guest writes to the topmost.
    pub above: Option<PathBuf>,
}

/// The state of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobState {
    /// Its id.
    pub id: String,
    /// QEMU's name for its state, such as `running`, `ready` or `concluded`.
    pub status: String,
    /// The number of bytes that are done.
    pub done: u64,
    /// The number of bytes to do in all.
    pub total: u64,
    /// The reason why it has failed, if it has.
    pub error: Option<String>,
}

#[derive(Debug, Deserialize)]
struct JobInfo {
    id: String,
    status: String,
    #[serde(rename = "current-progress", default)]
    done: u64,
    #[serde(rename = "total-progress", default)]
    total: u64,
    #[serde(default)]
    error: Option<String>,
}

#[derive(Debug, Deserialize)]
struct CommitNode {
    #[serde(rename = "node-name", default)]
    name: String,
    file: String,
    drv: String,
}

/// Starts a merge, which continues in the background.
pub(crate) fn begin_commit(
    qmp: &mut QmpClient,
    view: &FileView,
    drive: &Drive,
    commit: &BlockCommit,
) -> Result<(), QmpError> {
    let nodes: Vec<CommitNode> = qmp.query("query-named-block-nodes")?;
    let node = |file: &Path| {
        let is_it = |node: &&CommitNode| {
            is_format(node) && view.absolute_path(&plain_file(&node.file)) == file
        };
        let none = || QmpError::unexpected("query-named-block-nodes", file.display().to_string());
        nodes.iter().find(is_it).ok_or_else(none)
    };
    let base = node(&commit.base)?;
    let mut arguments = json!({
        "job-id": commit.job,
        "device": drive.node,
        "base-node": base.name,
        "auto-dismiss": false,
    });
    if let Some(above) = &commit.above {
        let (file, named, format, bytes) = (&*commit.base, &*base.file, "", 0);
        let name = OverlayBase { file, named, format, bytes }.backing_name(above);
        arguments["top-node"] = json!(node(&commit.top)?.name);
        arguments["backing-file"] = json!(name);
    }
    qmp.execute("block-commit", arguments).map(drop)
}

fn is_format(node: &CommitNode) -> bool {
    matches!(&*node.drv, "qcow2" | "raw")
}

/// The jobs that Firn has started and has not dismissed.
pub(crate) fn query_commit_jobs(qmp: &mut QmpClient) -> Result<Vec<JobState>, QmpError> {
    let jobs: Vec<JobInfo> = qmp.query("query-jobs")?;
    let ours = jobs.into_iter().filter(|job| job.id.starts_with(JOB_PREFIX));
    let state =
        |JobInfo { id, status, done, total, error }| JobState { id, status, done, total, error };
    Ok(ours.map(state).collect())
}

/// Makes a job that is `ready` switch the drive to its lower file.
pub(crate) fn complete_job(qmp: &mut QmpClient, job: &str) -> Result<(), QmpError> {
    qmp.execute("job-complete", json!({ "id": job })).map(drop)
}

/// Ends a job early.
pub(crate) fn cancel_job(qmp: &mut QmpClient, job: &str) -> Result<(), QmpError> {
    qmp.execute("job-cancel", json!({ "id": job })).map(drop)
}

/// Makes QEMU forget a job that is `concluded`.
pub(crate) fn dismiss_job(qmp: &mut QmpClient, job: &str) -> Result<(), QmpError> {
    qmp.execute("job-dismiss", json!({ "id": job })).map(drop)
}

/// Closes nodes of these files that Firn added and that are no longer in use, the topmost first.
pub(crate) fn close_layers(
    qmp: &mut QmpClient,
    view: &FileView,
    files: &[PathBuf],
) -> Result<(), QmpError> {
    for file in files {
        let nodes: Vec<CommitNode> = qmp.query("query-named-block-nodes")?;
        let is_it = |node: &&CommitNode| {
            node.name.starts_with(NODE_PREFIX)
                && is_format(node)
                && view.absolute_path(&plain_file(&node.file)) == *file
        };
        for node in nodes.iter().filter(is_it) {
            match qmp.execute("blockdev-del", json!({ "node-name": node.name })) {
                Ok(Value::Null) | Ok(_) | Err(QmpError::Refused { .. }) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}
