//! Records of uploads that are not complete, so that their parts do not stay in the store for ever.
//!
//! ```text
//!   begin the upload -> write the record -> put parts -> complete -> remove the record
//!                                    killed anywhere here:
//!                                    the next push or `rm` of that key aborts the upload, removes the record
//! ```
//!
//! A record is a small object below `.firn-uploads/`, beside the image. S3 lists uploads as well,
//! but not every store with its interface does. A push aborts an upload only if the process that
//! began it has ended, which this host knows of its own processes, or if the record is older than a
//! day. Removing an image aborts every upload of its key.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::error::StoreError;
use crate::storage::{ObjectFacts, ObjectStorage};
use firn_cache::StoreLocation;

const DIRECTORY: &str = ".firn-uploads";

/// After this time an upload counts as ended, whichever host began it.
const ABANDONED_AFTER_S: u64 = 24 * 3600;

/// The uploads to abort.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Leftovers {
    /// Those whose process has ended.
    Abandoned,
    /// All of them.
    All,
}

#[derive(Serialize, Deserialize)]
struct UploadRecord {
    key: String,
    upload: String,
    process: ProcessIdentity,
}

/// A process of a host, among all of all hosts.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct ProcessIdentity {
    /// The boot of the kernel, and the namespace of the PID.
    host: String,
    pid: u32,
    /// In clock ticks after the boot.
    started: u64,
}

/// Records an upload that has begun; returns the location of the record.
pub(crate) fn write_record(
    storage: &ObjectStorage,
    at: &StoreLocation,
    upload: &str,
) -> Result<StoreLocation, StoreError> {
    let process = ProcessIdentity::own();
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |it| it.as_nanos());
    let name = format!("{DIRECTORY}/{}-{}-{nanos:x}.json", at.name(), process.pid);
    let record = UploadRecord { key: at.key.clone(), upload: upload.to_owned(), process };
    let place = at.with_name(&name);
    let json = serde_json::to_vec(&record).map_err(|error| StoreError::Failed {
        location: place.clone(),
        step: "write it",
        reason: error.to_string(),
        was_repeated: false,
    })?;
    storage.put_small(&place, json.into())?;
    Ok(place)
}

/// The maximum length of a record in bytes.
const RECORD_BYTES_MAX: u64 = 64 << 10;

/// Aborts uploads of one key that are not complete. Returns how many.
pub(crate) fn abort_leftovers(
    storage: &ObjectStorage,
    at: &StoreLocation,
    which: Leftovers,
) -> Result<usize, StoreError> {
    let mut aborted = 0;
    for (place, facts) in storage.list_objects(&at.with_name(DIRECTORY))? {
        let Some(bytes) = storage.read_small(&place, RECORD_BYTES_MAX)? else { continue };
        // A record that can't be read is of a later version, or no record.
        let Ok(record) = serde_json::from_slice::<UploadRecord>(&bytes) else { continue };
        if record.key == at.key && (which == Leftovers::All || record.is_abandoned(&facts)) {
            match storage.abort_upload(at, &record.upload) {
                Ok(()) => aborted += 1,
                // Some stores answer so if there is no such upload: it was completed.
                Err(StoreError::Denied { .. }) => {}
                Err(error) => return Err(error),
            }
            storage.remove_object(&place)?;
        }
    }
    Ok(aborted)
}

impl UploadRecord {
    fn is_abandoned(&self, facts: &ObjectFacts) -> bool {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |it| it.as_secs());
        now.saturating_sub(facts.modified) > ABANDONED_AFTER_S || self.process.has_ended()
    }
}

impl ProcessIdentity {
    fn own() -> Self {
        let pid = std::process::id();
        Self { host: host_identity(), pid, started: start_of_process(pid).unwrap_or(0) }
    }

    /// Whether this host knows that the process has ended.
    fn has_ended(&self) -> bool {
        self.host == host_identity() && start_of_process(self.pid) != Some(self.started)
    }
}

fn host_identity() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let space = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot.trim(), space.display())
}

/// Field 22 of /proc/PID/stat (proc_pid_stat(5)); `None` if there is no such process.
fn start_of_process(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program, in parentheses, may have spaces.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_runs_has_not_ended() {
        let own = ProcessIdentity::own();
        assert!(own.started > 0 && !own.has_ended());
        assert!(ProcessIdentity { started: own.started + 1, ..own.clone() }.has_ended());
        let elsewhere = ProcessIdentity { host: "another".into(), started: 1, ..own };
        assert!(!elsewhere.has_ended());
    }
}
