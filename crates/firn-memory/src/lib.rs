//! Guest memory that belongs to another process: attach to a hypervisor that runs already, follow what its guest
//! touches, protect, install and read pages.
//!
//! ```text
//!        Firn                                      hypervisor (unmodified)
//!   Process ---- pidfd, /proc/PID ----------------> the process
//!   Tracee ----- ptrace: one injected system call -> one thread, stopped for microseconds
//!   GuestMemory  pread, fallocate ----> [ RAM file (tmpfs, memfd) ] <---- shared mapping, seen by the guest
//!   PageFaults   read, UFFDIO_* -----> [ userfaultfd of the hypervisor's address space ] <---- page faults
//! ```
//!
//! `userfaultfd(2)` belongs to the address space that calls it. [`Tracee`] makes the hypervisor call it, and
//! `pidfd_getfd(2)` copies the descriptor here; from then on every request works from Firn. The hypervisor's own copy
//! keeps missing pages missing if Firn dies: the guest waits, and a new Firn takes the descriptor up again
//! ([`PageFaults::adopt`]).
//!
//! # Unsafe code
//!
//! All unsafe code of this crate is in the module `sys`. Three rules keep it small: guest memory is copied by system
//! calls, or by one instruction that the compiler cannot look into, so that there is no reference to memory that
//! somebody else writes; addresses of the hypervisor are numbers ([`firn_types::HostVirt`]) and never become pointers; and
//! a [`Process`] is never Firn itself, so no request can change Firn's own address space.

#![deny(unsafe_code)]

mod guest_memory;
pub mod guest_pages;
pub mod heap;
mod page_faults;
mod page_scan;
mod page_tables;
mod process;
pub mod process_memory;
mod sys;
mod tracee;
pub mod urgency;

pub use guest_memory::{GuestMemory, MemoryError, RegionLocation, User};
pub use page_faults::{
    Attempt, Event, FaultKind, Features, Install, PageFaultError, PageFaults, Trace,
    UserfaultfdAccess,
};
pub use page_scan::{PageScan, ScanError, mapped_pages, union};
pub use page_tables::{DropError, drop_page_tables};
pub use process::{Process, ProcessError};
pub use sys::words::SharedWords;
pub use tracee::{TraceError, Tracee};
