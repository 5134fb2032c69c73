//! What the guest uses, found out while nothing else goes on, for the next save.
//!
//! It only makes restores quicker: where it can't be had, for whatever reason, the log says so and the save goes on without.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use firn_checkpoint::Scanner;
use firn_memory::ScanError;
use firn_types::{Page, Tid};

use crate::failure::{Failure, FailureKind};
use crate::journal::Machine;
use crate::qemu::{self, Memory};

/// How long a VM that is not scanned is watched before it is stopped for good.
const WATCH: Duration = Duration::from_secs(1);

/// Runs of pages.
pub(crate) type Pages = Vec<Range<Page>>;

/// The scan of a VM's memory, if there is one.
#[derive(Default)]
pub(crate) struct Usage {
    scanner: Mutex<Option<Scanner>>,
}

impl Usage {
    /// Begins to scan, if the VM is to be scanned and is not yet.
    pub(crate) fn start(&self, machine: &Machine) {
        let Some(bytes_per_s) = machine.access_bits else { return };
        let mut scanner = self.scanner.lock().unwrap_or_else(PoisonError::into_inner);
        if scanner.is_none() {
            *scanner = scan(machine, bytes_per_s).map_err(|failure| explain(&failure)).ok();
        }
    }

    /// Ends the scan, and gives what it found.
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

/// What a guest that runs uses within a moment.
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
    tracing::warn!("what the guest uses is not known: {failure}");
}
