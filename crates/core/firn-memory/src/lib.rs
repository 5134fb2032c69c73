//! Guest memory of another process: attach to a running hypervisor, trace what its guest touches,
//! and protect, install and read pages.
//!
//! ```text
//!        Firn                                      hypervisor (unmodified)
//!   Process ---- pidfd, /proc/PID ----------------> the process
//!   Tracee ----- ptrace: one injected system call -> one thread, stopped for microseconds
//!   GuestMemory  pread, fallocate ----> [ RAM file (tmpfs, memfd) ] <---- shared mapping, seen by the guest
//!   PageFaults   read, UFFDIO_* -----> [ userfaultfd of the hypervisor's address space ] <---- page faults
//! ```
//!
//! A userfaultfd (`userfaultfd(2)`) belongs to the address space that creates it. [`Tracee`] makes
//! the hypervisor create one, and `pidfd_getfd(2)` copies the descriptor to Firn; from then on
//! every request works from Firn. If Firn dies, the hypervisor's own copy keeps missing pages
//! missing: the guest waits, and a new Firn adopts the descriptor ([`PageFaults::adopt`]).
//!
//! # Unsafe code
//!
//! All unsafe code of this crate is in the module `sys`. Three rules keep it small. Guest memory is
//! copied by system calls, or by one instruction that the compiler cannot analyze, so that no
//! reference to memory exists that another process writes. Addresses of the hypervisor are numbers
//! ([`firn_types::HostVirt`]) and never become pointers. A [`Process`] is never Firn itself, so no
//! request can change Firn's own address space.

#![deny(unsafe_code)]

mod guest_memory;
pub mod guest_pages;
pub mod heap;
mod hole_tracker;
mod page_bits;
mod page_faults;
mod page_scan;
mod page_tables;
mod process;
pub mod process_memory;
pub mod scheduling;
mod sys;
pub mod template;
mod tracee;
pub mod transparent_huge_pages;
mod vcpu_waits;

pub use guest_memory::{GuestMemory, HUGE_PAGE_BYTES, MemoryError, RamUser, RegionLocation};
pub use hole_tracker::HoleTracker;
pub use page_bits::AtomicPageSet;
pub use page_faults::{
    FaultKind, InstallAttempt, InstallOutcome, KernelFeatures, MemoryEvent, PageFaultError,
    PageFaults, TraceMode, UserfaultfdAccess, abort_on_panic,
};
pub use page_scan::{PageScan, ScanError, mapped_pages, merge_runs};
pub use page_tables::{DropError, drop_page_tables};
pub use process::{Process, ProcessError};
pub use sys::shared_words::SharedWords;
pub use tracee::{TraceError, Tracee};
pub use vcpu_waits::VcpuWaits;
