//! Point-in-time copies of drives, made by jobs of the hypervisor, which leave the block graph as
//! it was.
//!
//! ```text
//!   before the pause            in the pause, one transaction            afterwards
//!   target file, opened,        block-dirty-bitmap-add                   the job copies; data that the guest overwrites
//!   not attached to anything    blockdev-backup to the target            is copied first (copy-before-write)
//!                                                                        the job ends, the target is closed
//! ```
//!
//! The dirty bitmap records the guest's writes from the copy on. The next copy reads only those,
//! and has this copy as its backing file:
//!
//! ```text
//!   copy 1 (all)  <---  copy 2 (changes since 1)  <---  copy 3 (changes since 2)        qcow2 backing files
//! ```
//!
//! Before version 10.1 QEMU fails a guest's write if the old contents can't be copied first. So
//! Firn reserves room for the file of a copy before the pause. A job that runs out of room all the
//! same ends at once, and then guest writes succeed again.
//!
//! Source: QEMU `docs/interop/live-block-operations.rst`, `docs/interop/bitmaps.rst`,
//! `qapi/block-core.json`.

use std::fs::OpenOptions;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use thiserror::Error;

use crate::drives::{Drive, DriveError, OverlayBase, copy_owner, create_overlay, create_qcow2};
use crate::qcow2;
use crate::qmp::{QmpClient, QmpError};

/// The prefix of the names that Firn gives in QEMU's block layer.
const PREFIX: &str = "firn-";
/// The maximum number of files of a copy: above that the whole drive is copied again.
pub const COPIES_MAX: usize = 32;
/// The minimum that a job copies at once, in bytes.
const CLUSTER_BYTES: u64 = 64 << 10;
/// The speed limit of a job that begins in a pause, in bytes per second: it copies one cluster.
/// Without it QEMU would copy at full speed, and resume the VM late.
const PAUSED_SPEED: u64 = 1;
/// How long Firn waits for an event of a job before it reads the job's state again.
const POLL: Duration = Duration::from_millis(100);

/// A copy of a drive's contents at one instant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveCopy {
    /// QEMU's name for the drive's topmost node.
    pub source: String,
    /// QEMU's name for the copy's node, for the job that fills it, and for the dirty bitmap that
    /// begins with it.
    pub name: String,
    /// The copy's file, absolute: qcow2.
    pub path: PathBuf,
    /// The part of the drive that is copied.
    pub extent: CopyExtent,
}

/// The data in a copy's own file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CopyExtent {
    /// The whole drive.
    All,
    /// The drive's topmost image. The copy has the same backing file.
    Top,
    /// The writes that a dirty bitmap of this name has recorded. The copy with which that bitmap
    /// began is its backing file.
    Changes(String),
}

/// The reason why a drive could not be copied.
#[derive(Debug, Error)]
pub enum CopyError {
    /// QEMU refused a command.
    #[error("the copies of the VM's disks could not be monitored")]
    Qmp(#[from] QmpError),
    /// The copy's file could not be opened.
    #[error("cannot open {path}", path = .path.display())]
    Open {
        /// The copy's file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The job failed.
    #[error("the copy of a disk to {path} failed: {reason}", path = .path.display())]
    Failed {
        /// The copy's file.
        path: PathBuf,
        /// QEMU's error message.
        reason: String,
    },
    /// Another client of the monitor removed the job.
    #[error("the job that copied a disk to {path} is gone", path = .path.display())]
    Gone {
        /// The copy's file.
        path: PathBuf,
    },
    /// The caller cancelled it.
    #[error("the copies of the VM's disks were cancelled")]
    Cancelled,
}

/// The backing file of a copy's file.
#[derive(Clone, Copy, Debug)]
pub struct BaseFile<'a> {
    /// The file, absolute.
    pub file: &'a Path,
    /// Its format: `qcow2` or `raw`.
    pub format: &'a str,
}

#[derive(Debug, Deserialize)]
struct BlockJob {
    id: String,
    status: String,
    error: Option<String>,
}

#[derive(Debug, Deserialize)]
struct BlockNode {
    #[serde(rename = "node-name", default)]
    name: String,
    #[serde(rename = "dirty-bitmaps", default)]
    bitmaps: Vec<DirtyBitmap>,
}

#[derive(Debug, Deserialize)]
struct DirtyBitmap {
    #[serde(default)]
    name: String,
    #[serde(default)]
    count: u64,
    #[serde(default)]
    granularity: u64,
    #[serde(default)]
    recording: bool,
    #[serde(default)]
    busy: bool,
    #[serde(default)]
    inconsistent: bool,
}

impl DriveCopy {
    /// Makes the file, with the owner and the mode of the drive's own file, and reserves room for
    /// `bytes` of contents.
    pub fn create_file(
        &self,
        program: &str,
        drive: &Drive,
        base: Option<BaseFile<'_>>,
        bytes: u64,
    ) -> Result<(), DriveError> {
        match base {
            Some(BaseFile { file, format }) => {
                let below = OverlayBase { file, named: "", format, bytes: drive.bytes };
                create_overlay(program, &below, &self.path)?;
            }
            None => create_qcow2(program, None, &self.path, drive.bytes)?,
        }
        copy_owner(drive.owner_path(), &self.path)
            .map_err(|source| self.io_error("give its owner to", source))?;
        self.reserve_room(add_metadata(bytes.min(drive.bytes)))
    }

    /// Reserves room for the file, where the file system supports that.
    fn reserve_room(&self, bytes: u64) -> Result<(), DriveError> {
        let room = |source| DriveError::Room { bytes, path: self.path.clone(), source };
        let file = OpenOptions::new().write(true).open(&self.path).map_err(room)?;
        match rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, bytes) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            Err(errno) => Err(room(errno.into())),
        }
    }

    /// Frees the reserved room beyond the end of the file, which must be closed.
    pub fn trim_file(&self) -> io::Result<()> {
        let file = OpenOptions::new().write(true).open(&self.path)?;
        file.set_len(file.metadata()?.len())
    }

    fn io_error(&self, doing: &'static str, source: io::Error) -> DriveError {
        DriveError::Io { doing, path: self.path.clone(), source }
    }

    /// The actions of a transaction that begin the copy.
    fn build_actions(&self, fails_alone: bool) -> [Value; 2] {
        let Self { source, name, .. } = self;
        let bitmap = json!({ "node": source, "name": name });
        let mut job = json!({
            "job-id": name,
            "device": source,
            "target": name,
            "auto-dismiss": false,
            "speed": PAUSED_SPEED,
        });
        match &self.extent {
            CopyExtent::All => job["sync"] = "full".into(),
            CopyExtent::Top => job["sync"] = "top".into(),
            CopyExtent::Changes(since) => {
                job["sync"] = "bitmap".into();
                job["bitmap"] = since.clone().into();
                // The image with this copy may still fail: then the next copy needs these changes
                // too.
                job["bitmap-mode"] = "never".into();
            }
        }
        if fails_alone {
            job["on-cbw-error"] = "break-snapshot".into();
        }
        [
            json!({ "type": "block-dirty-bitmap-add", "data": bitmap }),
            json!({ "type": "blockdev-backup", "data": job }),
        ]
    }
}

/// The actions that begin all copies. `fails_alone` if this QEMU can let a copy fail instead of a
/// guest's write.
pub(crate) fn build_actions(copies: &[DriveCopy], fails_alone: bool) -> Vec<Value> {
    copies.iter().flat_map(|copy| copy.build_actions(fails_alone)).collect()
}

/// Adds room for the tables of a qcow2 file, and for the guest's allocations until the pause.
fn add_metadata(bytes: u64) -> u64 {
    bytes + bytes / 512 + (1 << 20)
}

/// The number of bytes that a file takes in its file system.
pub fn allocated_bytes(file: &Path) -> io::Result<u64> {
    Ok(file.metadata()?.blocks() * 512)
}

/// The backing files of a qcow2 file, the nearest first, with their formats, as each file names the
/// next.
pub fn list_backing_files(file: &Path) -> io::Result<Vec<(PathBuf, String)>> {
    let mut below = Vec::new();
    let mut next = qcow2::read_header(file)?;
    while let Some(path) = next.as_ref().and_then(|head| head.backing_file.clone()) {
        if below.len() >= 2 * crate::CHAIN_MAX {
            return Err(io::Error::other("the files below it have no end"));
        }
        let head = qcow2::read_header(&path)?;
        let named = next.and_then(|head| head.backing_format);
        let found = if head.is_some() { "qcow2" } else { "raw" };
        let format = named.unwrap_or_else(|| found.to_owned());
        next = head.filter(|_| format == "qcow2");
        below.push((path, format));
    }
    Ok(below)
}

/// Opens the file of a copy. The VM may run. QEMU gets a descriptor: it may be another user, who
/// may not enter the directory, or be confined to files that a policy names.
pub(crate) fn open_copy(qmp: &mut QmpClient, copy: &DriveCopy) -> Result<(), CopyError> {
    let file = OpenOptions::new().read(true).write(true).open(&copy.path);
    let file = file.map_err(|source| CopyError::Open { path: copy.path.clone(), source })?;
    let answer = qmp.execute_with_fd("add-fd", json!({ "opaque": copy.name }), file.as_fd())?;
    let set = answer.get("fdset-id").and_then(Value::as_u64);
    let set = set.ok_or_else(|| QmpError::unexpected("add-fd", "no fdset-id"))?;
    let added = add_target(qmp, copy, &format!("/dev/fdset/{set}"));
    // The node has a duplicate.
    let removed = qmp.execute("remove-fd", json!({ "fdset-id": set }));
    added?;
    removed?;
    Ok(())
}

fn add_target(qmp: &mut QmpClient, copy: &DriveCopy, filename: &str) -> Result<(), QmpError> {
    // The file is synced when it is closed: a flush of the VM's disks does not wait for it.
    let cache = json!({ "direct": false, "no-flush": true });
    let arguments = json!({
        "driver": "qcow2",
        "node-name": copy.name,
        "backing": null,
        "cache": cache,
        "file": { "driver": "file", "filename": filename, "cache": cache },
    });
    qmp.execute("blockdev-add", arguments).map(drop)
}

/// Sets the speed of the jobs after the VM has resumed: equal shares of the speed of all of them.
pub(crate) fn limit_copies(
    qmp: &mut QmpClient,
    copies: &[DriveCopy],
    bytes_per_s: Option<NonZeroU64>,
) -> Result<(), QmpError> {
    // 0 is no limit.
    let speed = bytes_per_s.map_or(0, |all| (all.get() / copies.len().max(1) as u64).max(1));
    for copy in copies {
        let limit = json!({ "device": copy.name, "speed": speed });
        // A job that has already failed has no speed.
        ignore_refusal(qmp.execute("block-job-set-speed", limit).map(drop))?;
    }
    Ok(())
}

/// Waits until all copies are complete, and closes them.
pub(crate) fn finish_copies(
    qmp: &mut QmpClient,
    copies: &[DriveCopy],
    is_cancelled: &dyn Fn() -> bool,
) -> Result<(), CopyError> {
    while !are_complete(qmp, copies)? {
        if is_cancelled() {
            return Err(CopyError::Cancelled);
        }
        qmp.wait_event("JOB_STATUS_CHANGE", POLL, |_| true)?;
    }
    for copy in copies {
        qmp.execute("job-dismiss", json!({ "id": copy.name }))?;
        qmp.execute("blockdev-del", json!({ "node-name": copy.name }))?;
    }
    Ok(())
}

fn are_complete(qmp: &mut QmpClient, copies: &[DriveCopy]) -> Result<bool, CopyError> {
    if copies.is_empty() {
        return Ok(true);
    }
    let jobs: Vec<BlockJob> = qmp.query("query-jobs")?;
    check_jobs(&jobs, copies)
}

fn check_jobs(jobs: &[BlockJob], copies: &[DriveCopy]) -> Result<bool, CopyError> {
    let mut are_complete = true;
    for copy in copies {
        let path = || copy.path.clone();
        let job = jobs.iter().find(|job| job.id == copy.name);
        match job.ok_or_else(|| CopyError::Gone { path: path() })? {
            BlockJob { error: Some(reason), .. } => {
                return Err(CopyError::Failed { path: path(), reason: reason.clone() });
            }
            job => are_complete &= job.is_over(),
        }
    }
    Ok(are_complete)
}

impl BlockJob {
    fn is_over(&self) -> bool {
        self.status == "concluded"
    }
}

/// Cancels the jobs, closes the targets and removes the dirty bitmaps of copies, as far as they
/// exist. Returns whether a job had not succeeded.
pub(crate) fn discard_copies(qmp: &mut QmpClient, copies: &[DriveCopy]) -> Result<bool, QmpError> {
    let mut was_unfinished = false;
    for copy in copies {
        was_unfinished |= end_job(qmp, &copy.name)?;
    }
    for copy in copies {
        if query_nodes(qmp)?.iter().any(|node| node.name == copy.name) {
            qmp.execute("blockdev-del", json!({ "node-name": copy.name }))?;
        }
        remove_bitmap(qmp, &copy.source, &copy.name)?;
    }
    Ok(was_unfinished)
}

/// Ends a job, complete or not, if there is one. Returns whether it had not succeeded.
pub(crate) fn end_job(qmp: &mut QmpClient, id: &str) -> Result<bool, QmpError> {
    let deadline = Instant::now() + qmp.timeout();
    let mut is_asked = false;
    loop {
        let jobs: Vec<BlockJob> = qmp.query("query-jobs")?;
        let Some(job) = jobs.into_iter().find(|job| job.id == id) else { return Ok(false) };
        if job.is_over() {
            qmp.execute("job-dismiss", json!({ "id": id }))?;
            return Ok(is_asked || job.error.is_some());
        }
        if !is_asked {
            is_asked = true;
            // The job may have ended just now.
            ignore_refusal(qmp.execute("job-cancel", json!({ "id": id })).map(drop))?;
        }
        if Instant::now() >= deadline {
            let waited_ms = qmp.timeout().as_millis();
            return Err(QmpError::TimedOut { command: "job-cancel".to_owned(), waited_ms });
        }
        qmp.wait_event("JOB_STATUS_CHANGE", POLL, |_| true)?;
    }
}

fn ignore_refusal(done: Result<(), QmpError>) -> Result<(), QmpError> {
    match done {
        Err(QmpError::Refused { .. }) => Ok(()),
        done => done,
    }
}

fn query_nodes(qmp: &mut QmpClient) -> Result<Vec<BlockNode>, QmpError> {
    qmp.query("query-named-block-nodes")
}

/// The names of all nodes.
pub(crate) fn query_node_names(qmp: &mut QmpClient) -> Result<Vec<String>, QmpError> {
    Ok(query_nodes(qmp)?.into_iter().map(|node| node.name).collect())
}

fn remove_bitmap(qmp: &mut QmpClient, node: &str, name: &str) -> Result<(), QmpError> {
    let of_node = |it: &BlockNode| it.name == node && it.bitmaps.iter().any(|it| it.name == name);
    match query_nodes(qmp)?.iter().any(of_node) {
        true => {
            let arguments = json!({ "node": node, "name": name });
            qmp.execute("block-dirty-bitmap-remove", arguments).map(drop)
        }
        false => Ok(()),
    }
}

/// Removes the dirty bitmaps that Firn added, except those of these copies.
pub(crate) fn remove_bitmaps(qmp: &mut QmpClient, keep: &[DriveCopy]) -> Result<(), QmpError> {
    for (node, bitmap) in list_unneeded(&query_nodes(qmp)?, keep) {
        let arguments = json!({ "node": node, "name": bitmap });
        qmp.execute("block-dirty-bitmap-remove", arguments)?;
    }
    Ok(())
}

fn list_unneeded<'n>(nodes: &'n [BlockNode], keep: &[DriveCopy]) -> Vec<(&'n str, &'n str)> {
    let is_kept = |node: &BlockNode, bitmap: &DirtyBitmap| {
        keep.iter().any(|copy| copy.source == node.name && copy.name == bitmap.name)
    };
    let of_node = |node: &'n BlockNode| {
        let ours = node.bitmaps.iter().filter(|it| it.name.starts_with(PREFIX) && !it.busy);
        let surplus = ours.filter(move |it| !is_kept(node, it));
        surplus.map(|bitmap| (&*node.name, &*bitmap.name))
    };
    nodes.iter().flat_map(of_node).collect()
}

/// The number of bytes that a copy of the writes since this copy will take. `None` if they were not
/// recorded.
pub(crate) fn query_changed_bytes(
    qmp: &mut QmpClient,
    copy: &DriveCopy,
) -> Result<Option<u64>, QmpError> {
    Ok(recorded_bytes(&query_nodes(qmp)?, copy))
}

fn recorded_bytes(nodes: &[BlockNode], copy: &DriveCopy) -> Option<u64> {
    let node = nodes.iter().find(|node| node.name == copy.source)?;
    let bitmap = node.bitmaps.iter().find(|bitmap| bitmap.name == copy.name)?;
    let is_sound = bitmap.recording && !bitmap.busy && !bitmap.inconsistent;
    // A job copies whole clusters of its target.
    let times = CLUSTER_BYTES / bitmap.granularity.clamp(1, CLUSTER_BYTES);
    is_sound.then(|| bitmap.count.saturating_mul(times))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(source: &str, name: &str, extent: CopyExtent) -> DriveCopy {
        DriveCopy { source: source.into(), name: name.into(), path: "/c".into(), extent }
    }

    fn nodes(json: Value) -> Vec<BlockNode> {
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn a_copy_begins_with_its_bitmap() {
        let all = copy("n", "firn-1", CopyExtent::All);
        let changes = copy("n", "firn-2", CopyExtent::Changes("firn-1".into()));
        let actions = build_actions(&[all, changes], false);
        assert_eq!(actions.len(), 4);
        assert_eq!(actions[0]["type"], "block-dirty-bitmap-add");
        assert_eq!(actions[0]["data"], json!({ "node": "n", "name": "firn-1" }));
        assert_eq!(
            actions[3]["data"],
            json!({ "job-id": "firn-2", "device": "n", "target": "firn-2", "auto-dismiss": false,
                "speed": 1, "sync": "bitmap", "bitmap": "firn-1", "bitmap-mode": "never" })
        );
        let top = build_actions(&[copy("n", "firn-3", CopyExtent::Top)], true);
        assert_eq!(top[1]["data"]["on-cbw-error"], "break-snapshot");
    }

    #[test]
    fn a_job_that_failed_or_is_gone_is_an_error() {
        let copies = [copy("n", "firn-1", CopyExtent::All), copy("m", "firn-2", CopyExtent::All)];
        let job = |id: &str, status: &str, error: Option<&str>| BlockJob {
            id: id.into(),
            status: status.into(),
            error: error.map(str::to_owned),
        };
        let over = |id| job(id, "concluded", None);
        assert!(check_jobs(&[over("firn-1"), over("firn-2")], &copies).unwrap());
        assert!(!check_jobs(&[over("firn-1"), job("firn-2", "running", None)], &copies).unwrap());
        assert!(matches!(check_jobs(&[over("firn-1")], &copies), Err(CopyError::Gone { .. })));
        let failed = [over("firn-1"), job("firn-2", "concluded", Some("no room"))];
        let error = check_jobs(&failed, &copies).unwrap_err();
        assert_eq!(error.to_string(), "the copy of a disk to /c failed: no room");
    }

    #[test]
    fn only_bitmaps_of_firn_that_no_copy_needs_are_removed() {
        let bitmap = |name: &str, busy: bool| json!({ "name": name, "busy": busy });
        let all = nodes(json!([
            { "node-name": "n", "dirty-bitmaps":
                [bitmap("firn-1", false), bitmap("firn-2", false), bitmap("user", false)] },
            { "node-name": "m", "dirty-bitmaps": [bitmap("firn-1", false), bitmap("firn-3", true)] },
            { "node-name": "o" },
        ]));
        let keep = [copy("n", "firn-1", CopyExtent::All)];
        assert_eq!(list_unneeded(&all, &keep), [("n", "firn-2"), ("m", "firn-1")]);
    }

    #[test]
    fn only_a_valid_bitmap_shows_written_blocks() {
        let with = |granularity: u64, recording: bool| {
            nodes(json!([{ "node-name": "n", "dirty-bitmaps": [{ "name": "firn-1",
                "count": 8192, "granularity": granularity, "recording": recording, "busy": false }] }]))
        };
        let since = copy("n", "firn-1", CopyExtent::All);
        assert_eq!(recorded_bytes(&with(65536, true), &since), Some(8192));
        assert_eq!(recorded_bytes(&with(4096, true), &since), Some(8192 * 16));
        assert_eq!(recorded_bytes(&with(65536, false), &since), None);
        assert_eq!(recorded_bytes(&with(65536, true), &copy("m", "firn-1", CopyExtent::All)), None);
    }
}
