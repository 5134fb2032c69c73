//! Mirrors of drives: jobs of the hypervisor that copy a drive to an NBD server, and send it each
//! write of the guest before the guest gets the reply.
//!
//! ```text
//!   guest's device --> (filter of the job) --> the drive's own image
//!                           |
//!                           '--> firn-mirror0: NBD client --> Firn's server
//! ```
//!
//! The job copies the whole drive (`sync=full`), while writes of the guest come in between: QEMU
//! orders requests that overlap. Once it has copied everything it stays `ready`. QEMU sends zeros for
//! the whole drive first, then the parts that are allocated. The node detects zeros in those.
//!
//! **An end of the job is no end of the drive.** The client does not connect again
//! (`reconnect-delay` is 0), and an error of the target ends the job (`on-target-error=report`), so
//! the guest's write succeeds on its own disk. A job that another program completes would make the
//! drive that of the target: so it must be finalized by a command (`auto-finalize` is off), which
//! Firn never sends.
//!
//! Source: QEMU `block/mirror.c`, `block/nbd.c`, `qapi/block-core.json`.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::backup::{end_job, query_node_names};
use crate::qmp::{QmpClient, QmpError};

/// The prefix of the names of jobs and nodes.
const PREFIX: &str = "firn-mirror";
/// The error of a job that was cancelled: `strerror(ECANCELED)`.
const CANCELLED: &str = "Operation canceled";

/// The name of the job of the mirror with this number, and of its target's node.
pub fn mirror_name(number: u32) -> String {
    format!("{PREFIX}{number}")
}

/// How far a mirror has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MirrorProgress {
    /// The number of bytes that the job has copied.
    pub copied: u64,
    /// Everything is copied, and each write of the guest is sent before the guest gets the reply.
    pub is_synced: bool,
}

/// The part of a drive that a job sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MirrorExtent {
    /// All of it.
    Whole,
    /// The writes of the guest: to try whether QEMU can mirror the drive.
    Writes,
}

/// The state of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MirrorState {
    /// It sends the guest's writes.
    Works(MirrorProgress),
    /// It does not any more, for this reason.
    Ended(String),
}

#[derive(Debug, Deserialize)]
struct MirrorJobInfo {
    device: String,
    #[serde(default)]
    ready: bool,
    #[serde(default)]
    status: String,
    #[serde(default)]
    offset: u64,
    #[serde(default)]
    error: Option<String>,
    /// Reported by QEMU 8.2 and later.
    #[serde(rename = "actively-synced", default)]
    is_synced: Option<bool>,
}

impl MirrorJobInfo {
    fn state(self) -> MirrorState {
        match (self.error, &*self.status) {
            (Some(error), _) if error == CANCELLED => {
                MirrorState::Ended("its job was cancelled".to_owned())
            }
            (Some(error), _) => MirrorState::Ended(error),
            (None, "pending" | "waiting") => {
                MirrorState::Ended("another program has completed or cancelled its job".to_owned())
            }
            (None, "aborting" | "concluded" | "null") => {
                MirrorState::Ended("its job was cancelled".to_owned())
            }
            (None, _) => MirrorState::Works(MirrorProgress {
                copied: self.offset,
                is_synced: self.ready && self.is_synced != Some(false),
            }),
        }
    }
}

/// Connects to a server at a socket with an abstract name, as the target of a mirror.
pub(crate) fn add_target(
    qmp: &mut QmpClient,
    name: &str,
    (socket, export): (&str, &str),
) -> Result<(), QmpError> {
    let server = json!({ "type": "unix", "path": socket, "abstract": true, "tight": true });
    let node = json!({
        "driver": "nbd",
        "node-name": name,
        "server": server,
        "export": export,
        "discard": "unmap",
        "detect-zeroes": "unmap",
    });
    qmp.execute("blockdev-add", node).map(drop)
}

/// Starts the job from a node to a target that was added.
pub(crate) fn begin_mirror(
    qmp: &mut QmpClient,
    name: &str,
    source: &str,
    extent: MirrorExtent,
) -> Result<(), QmpError> {
    let sync = match extent {
        MirrorExtent::Whole => "full",
        MirrorExtent::Writes => "none",
    };
    let job = json!({
        "job-id": name,
        "device": source,
        "target": name,
        "sync": sync,
        "copy-mode": "write-blocking",
        "on-source-error": "report",
        "on-target-error": "report",
        "auto-finalize": false,
        "auto-dismiss": false,
    });
    qmp.execute("blockdev-mirror", job).map(drop)
}

/// The state of a job.
pub(crate) fn query_mirror(qmp: &mut QmpClient, name: &str) -> Result<MirrorState, QmpError> {
    let jobs: Vec<MirrorJobInfo> = qmp.query("query-block-jobs")?;
    let job = jobs.into_iter().find(|job| job.device == name);
    let gone = || MirrorState::Ended("another program has removed its job".to_owned());
    Ok(job.map_or_else(gone, MirrorJobInfo::state))
}

/// Ends the job of a mirror, if there is one.
pub(crate) fn end_mirror(qmp: &mut QmpClient, name: &str) -> Result<(), QmpError> {
    end_job(qmp, name).map(drop)
}

/// Removes the target of a mirror whose job has ended, if it is there.
pub(crate) fn remove_target(qmp: &mut QmpClient, name: &str) -> Result<(), QmpError> {
    match query_node_names(qmp)?.iter().any(|node| node == name) {
        true => qmp.execute("blockdev-del", json!({ "node-name": name })).map(drop),
        false => Ok(()),
    }
}

/// The names of all mirrors of Firn's that the hypervisor has parts of.
pub(crate) fn list_mirrors(qmp: &mut QmpClient) -> Result<Vec<String>, QmpError> {
    let jobs = qmp.execute("query-jobs", Value::Null)?;
    let jobs = jobs.as_array().map(Vec::as_slice).unwrap_or_default();
    let jobs = jobs.iter().filter_map(|job| Some(job.get("id")?.as_str()?.to_owned()));
    let mut names: Vec<String> = jobs.chain(query_node_names(qmp)?).collect();
    names.retain(|name| name.starts_with(PREFIX));
    names.sort();
    names.dedup();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(job: Value) -> MirrorState {
        serde_json::from_value::<MirrorJobInfo>(job).unwrap().state()
    }

    #[test]
    fn a_job_works_until_it_ends() {
        let job = |status: &str, ready: bool| json!({ "device": "firn-mirror0", "len": 9, "offset": 7, "ready": ready, "status": status });
        let works = |is_synced| MirrorState::Works(MirrorProgress { copied: 7, is_synced });
        assert_eq!(state(job("running", false)), works(false));
        assert_eq!(state(job("ready", true)), works(true));
        assert_eq!(state(job("standby", true)), works(true));
        let mut newer = job("ready", true);
        newer["actively-synced"] = false.into();
        assert_eq!(state(newer), works(false));
        let mut failed = job("concluded", false);
        failed["error"] = "Input/output error".into();
        assert_eq!(state(failed.clone()), MirrorState::Ended("Input/output error".to_owned()));
        failed["error"] = CANCELLED.into();
        assert_eq!(state(failed), MirrorState::Ended("its job was cancelled".to_owned()));
        for status in ["pending", "waiting", "aborting", "concluded"] {
            assert!(matches!(state(job(status, true)), MirrorState::Ended(_)), "{status}");
        }
    }
}
