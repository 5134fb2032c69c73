//! Input of the report: run records, which may be damaged or of another version.

use std::io;
use std::path::{Path, PathBuf};

use firn_restore::{FaultRecord, RUN_RECORD_VERSION, ReadRecord, RunRecord};
use thiserror::Error;

use crate::run::ReportedRun;

/// The maximum size of a run record, in bytes: one with the maximum number of faults and reads has
/// a fifth of it.
const BYTES_MAX: u64 = 256 << 20;

/// The latest time in a record: about two years. Sums over all vCPUs of a VM fit 64 bits.
const TIME_US_MAX: u64 = 1 << 46;

/// Why a file can't be reported on.
#[derive(Debug, Error)]
pub enum RunError {
    /// It can't be read.
    #[error("can't read {path}", path = .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// It is not a run record.
    #[error("{path} is no run record", path = .path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Where it differs.
        source: serde_json::Error,
    },
    /// It is of another version.
    #[error("{path} is a run record of version {found}, not {RUN_RECORD_VERSION}", path = .path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// Its times can't be times of a restore.
    #[error(
        "{path} is damaged: it has a time of {found_us} microseconds, more than two years; copy it from the VM's runtime directory again",
        path = .path.display()
    )]
    Time {
        /// The file.
        path: PathBuf,
        /// Its latest time, in microseconds.
        found_us: u64,
    },
}

impl ReportedRun {
    /// Reads a run record; its file's name, without the extension, becomes its name.
    ///
    /// # Errors
    /// If it can't be read, or is not a run record.
    pub fn read_file(path: &Path) -> Result<Self, RunError> {
        let text = firn_files::read_input(path, BYTES_MAX)
            .map_err(|source| RunError::Read { path: path.to_owned(), source })?;
        let record: RunRecord = serde_json::from_slice(&text)
            .map_err(|source| RunError::Format { path: path.to_owned(), source })?;
        if record.version != RUN_RECORD_VERSION {
            return Err(RunError::Version { path: path.to_owned(), found: record.version });
        }
        let found_us = latest_us(&record);
        if found_us > TIME_US_MAX {
            return Err(RunError::Time { path: path.to_owned(), found_us });
        }
        let name = path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        Ok(Self { name, record })
    }
}

/// The latest time of a record.
fn latest_us(record: &RunRecord) -> u64 {
    let instants = [record.prefilled_us, record.resumed_us, record.finished_us];
    let faults = record.faults.iter().map(FaultRecord::answered_us);
    let reads = record.reads.iter().map(ReadRecord::ended_us);
    let events = faults.chain(reads).chain(instants.into_iter().flatten());
    events.chain([record.recorded_us]).max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::tests::run;
    use serde_json::json;
    use std::fs;

    #[test]
    fn an_invalid_run_record_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("web.json");
        assert!(matches!(ReportedRun::read_file(&path), Err(RunError::Read { .. })));
        fs::write(&path, "{}").unwrap();
        assert!(matches!(ReportedRun::read_file(&path), Err(RunError::Format { .. })));
        let mut record = serde_json::to_value(run().record).unwrap();
        fs::write(&path, record.to_string()).unwrap();
        assert_eq!(ReportedRun::read_file(&path).unwrap().name, "web");
        record["version"] = json!(99);
        fs::write(&path, record.to_string()).unwrap();
        assert!(matches!(ReportedRun::read_file(&path), Err(RunError::Version { found: 99, .. })));
        record["version"] = json!(RUN_RECORD_VERSION);
        record["faults"][0]["wait_us"] = json!(u64::MAX);
        fs::write(&path, record.to_string()).unwrap();
        assert!(matches!(ReportedRun::read_file(&path), Err(RunError::Time { .. })));
    }
}
