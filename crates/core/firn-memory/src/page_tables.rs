//! Removal of the hypervisor's page-table entries, so that the next touch of each page is traced.

use std::ops::Range;

use firn_types::{PAGE_SIZE, Page};
use nix::errno::Errno;
use nix::libc::{MADV_DONTNEED, SYS_madvise};
use thiserror::Error;

use crate::guest_memory::{GuestMemory, MemoryError};
use crate::tracee::{TraceError, Tracee};

/// `madvise` advice that works on locked memory too (Linux 5.18).
const MADV_DONTNEED_LOCKED: i32 = 24;

/// Why page-table entries were not dropped.
#[derive(Debug, Error)]
pub enum DropError {
    /// The pages are not, or no longer, shared memory at the known address. Private memory would
    /// lose its data.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The call could not be made in the hypervisor.
    #[error(transparent)]
    Trace(#[from] TraceError),
}

/// Makes the hypervisor drop the page-table entries of these pages. No data is lost: the RAM file
/// keeps it, and the next touch of each page maps it again, or is a minor fault if the range is
/// registered for [`crate::TraceMode::Save`]. Write protection stays. Costs 15-20 ms per GiB of
/// mapped pages; the guest continues to run.
///
/// Not for a range that is registered for [`crate::TraceMode::Restore`]: there the kernel reports
/// the call as a removal, and blocks it until a thread of Firn reads the report.
///
/// # Errors
/// If the hypervisor does not map these pages as the shared memory they were found to be (private
/// memory would lose its data), or if the call cannot be injected.
pub fn drop_page_tables(
    tracee: &mut Tracee<'_>,
    memory: &GuestMemory,
    range: Range<Page>,
) -> Result<(), DropError> {
    memory.check_shared(&range)?;
    for (part, hva) in memory.locate_parts(range) {
        let len = (Page::count_in(&part) * PAGE_SIZE) as u64;
        let mut advise = |advice: i32| {
            tracee.syscall(SYS_madvise, [hva.0, len, advice as u64, 0, 0, 0]).map(drop)
        };
        match advise(MADV_DONTNEED) {
            // Locked memory (QEMU: -overcommit mem-lock=on).
            Err(TraceError::Call { source: Errno::EINVAL, .. }) => advise(MADV_DONTNEED_LOCKED)?,
            other => other?,
        }
    }
    Ok(())
}
