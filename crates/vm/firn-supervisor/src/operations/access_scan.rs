//! The access scan: it finds the pages that the guest uses while no operation runs, for the next
//! save.
//!
//! It only makes restores faster: if it fails, for whatever reason, the failure is logged and the
//! save continues without it.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use firn_checkpoint::AccessScanner;
use firn_memory::ScanError;
use firn_types::{Page, ThreadId};

use crate::hypervisor::qemu::{self, VmMemory};
use crate::records::failure::{Failure, FailureKind};
use crate::records::journal::HypervisorRecord;

/// How long a VM without an access scan is scanned before it is suspended.
const SHORT_SCAN: Duration = Duration::from_secs(1);

/// Ranges of pages.
pub(crate) type PageRanges = Vec<Range<Page>>;

/// The access scan of a VM's memory, if it runs.
#[derive(Default)]
pub(crate) struct AccessScan {
    scanner: Mutex<Option<AccessScanner>>,
}

impl AccessScan {
    /// Starts the scan, if the VM is to be scanned and the scan does not run yet.
    pub(crate) fn start_scan(&self, hypervisor_record: &HypervisorRecord) {
        let Some(bytes_per_s) = hypervisor_record.access_bits else { return };
        let mut scanner = self.scanner.lock().unwrap_or_else(PoisonError::into_inner);
        if scanner.is_none() {
            *scanner = start_scanner(hypervisor_record, bytes_per_s)
                .map_err(|failure| log_failure(&failure))
                .ok();
        }
    }

    /// Ends the scan, and returns what it found.
    pub(crate) fn finish_scan(&self) -> Option<PageRanges> {
        let scanner = self.scanner.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        ok_or_log(scanner.finish_scan()).flatten()
    }
}

fn start_scanner(
    hypervisor_record: &HypervisorRecord,
    bytes_per_s: u64,
) -> Result<AccessScanner, Failure> {
    let (process, memory) = qemu::open_journaled(hypervisor_record)?;
    AccessScanner::start_scan(process, memory, hypervisor_record.vcpus.clone(), bytes_per_s)
        .map_err(|error| Failure::from_error(FailureKind::Other, &error))
}

/// Finds the pages that a running guest uses within a short time.
pub(crate) fn scan_briefly(
    memory: &VmMemory,
    vcpus: Vec<ThreadId>,
    cancelled: &dyn Fn() -> bool,
) -> Option<PageRanges> {
    let (process, guest) = (memory.process.clone(), memory.guest.clone());
    ok_or_log(firn_checkpoint::watch_accesses(process, guest, vcpus, SHORT_SCAN, cancelled))
}

fn ok_or_log<T>(result: Result<T, ScanError>) -> Option<T> {
    result.map_err(|error| log_failure(&Failure::from_error(FailureKind::Other, &error))).ok()
}

fn log_failure(failure: &Failure) {
    tracing::warn!("no access scan: {failure}");
}
