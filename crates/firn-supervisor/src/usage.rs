//! The access scan: it finds the pages that the guest uses while no operation runs, for the next
//! save.
//!
//! It only makes restores faster: if it fails, for whatever reason, the failure is logged and the
//! save continues without it.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use firn_checkpoint::Scanner;
use firn_memory::ScanError;
use firn_types::{Page, Tid};

use crate::failure::{Failure, FailureKind};
use crate::journal::Machine;
use crate::qemu::{self, Memory};

/// How long a VM without an access scan is scanned before it is suspended.
const WATCH: Duration = Duration::from_secs(1);

/// Ranges of pages.
pub(crate) type Pages = Vec<Range<Page>>;

/// The access scan of a VM's memory, if it runs.
#[derive(Default)]
pub(crate) struct Usage {
    scanner: Mutex<Option<Scanner>>,
}

impl Usage {
    /// Starts the scan, if the VM is to be scanned and the scan does not run yet.
    pub(crate) fn start(&self, machine: &Machine) {
        let Some(bytes_per_s) = machine.access_bits else { return };
        let mut scanner = self.scanner.lock().unwrap_or_else(PoisonError::into_inner);
        if scanner.is_none() {
            *scanner = scan(machine, bytes_per_s).map_err(|failure| explain(&failure)).ok();
        }
    }

    /// Ends the scan, and returns what it found.
    pub(crate) fn finish(&self) -> Option<Pages> {
        let scanner = self.scanner.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        found(scanner.finish()).flatten()
    }
}

fn scan(machine: &Machine, bytes_per_s: u64) -> Result<Scanner, Failure> {
    let (process, memory) = qemu::open_journaled(machine)?;
    Scanner::start(process, memory, machine.vcpus.clone(), bytes_per_s)
        .map_err(|error| Failure::from_error(FailureKind::Other, &error))
}

/// Finds the pages that a running guest uses within a short time.
pub(crate) fn watch(
    memory: &Memory,
    vcpus: Vec<Tid>,
    cancelled: &dyn Fn() -> bool,
) -> Option<Pages> {
    let (process, guest) = (memory.process.clone(), memory.guest.clone());
    found(firn_checkpoint::watch(process, guest, vcpus, WATCH, cancelled))
}

fn found<T>(result: Result<T, ScanError>) -> Option<T> {
    result.map_err(|error| explain(&Failure::from_error(FailureKind::Other, &error))).ok()
}

fn explain(failure: &Failure) {
    tracing::warn!("no access scan: {failure}");
}
