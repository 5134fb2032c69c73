//! Replicated disks: the writable disks of a protected VM, which fail over together with its
//! memory.
//!
//! ```text
//!   primary                                                  standby
//!     QEMU  -- NBD, Unix socket -->  NbdServer                 StandbyDisk
//!                                      | each change: made      |  keeps epochs apart until they
//!                                      v and logged under       v  are committed, then folds them
//!                                    LoggedDisk                its own copy of the file
//!                                      |  \                     ^
//!                                      |   '-- log of an epoch -'
//!                                      v           (wire)
//!                                    the user's file
//! ```
//!
//! The guest writes to the user's file at once. While the VM is protected, the same changes are
//! recorded in the *log* of the running epoch. At the cut, while the VM is paused and no request is
//! in flight, the log is closed. It is sent together with the pages of the epoch. The standby's
//! file always has the state of its newest folded epoch. Logs of later epochs are stored beside it,
//! and are dropped at a failover.
//!
//! | module | what it decides or does |
//! |---|---|
//! | [`change`] | one change of a disk's bytes (pure) |
//! | [`primary`] | which changes are logged, and when the log has room for more (pure) |
//! | [`standby`] | which epochs are stored, folded and dropped (pure) |
//! | [`wire`] | encodes changes as bytes (pure) |
//! | [`sink`] | stands for the bytes of a disk that only the hypervisor has (a mirrored disk) |
//! | [`store`] | stores the bytes of a disk in a file |
//! | [`disk`] | a file and its log, changed together |
//! | [`nbd`] | serves disks to QEMU |
//!
//! A *mirrored* disk is any disk of the VM's own. A job of QEMU sends what it contains, and each
//! write of the guest before the guest gets the reply, to an NBD disk that has no file here:
//!
//! ```text
//!     QEMU  -- the guest's own disk
//!       '----- mirror job, NBD -->  NbdServer --> LoggedDisk (a sink) --> log of an epoch
//! ```
//!
//! # The order of calls
//!
//! ```text
//!   begin_protection(bound)
//!   seed_step(), until it is whole and memory is too   the copy, while the VM runs: epoch 0
//!   begin_drain()                                      when QEMU has been ordered to stop the VM
//!     (the VM is paused)
//!   cut_log()                                          the log of epoch 1; then 2, 3 ...
//!     (the VM runs)
//!   end_protection()                                   the standby is lost: logging ends
//! ```
//!
//! `begin_drain` is needed because a log is bounded, and a change for which there is no room waits.
//! QEMU, when it is ordered to stop the VM, first waits for the requests in flight. If the bound
//! were not lifted, QEMU and these requests would wait for each other. A log can then exceed its
//! bound by what the guest's queues contain.

#![forbid(unsafe_code)]

pub mod change;
pub mod disk;
pub mod nbd;
pub mod primary;
pub mod sink;
pub mod standby;
pub mod store;
pub mod wire;
mod written;

#[cfg(test)]
mod tests;

pub use change::DiskChange;
pub use disk::{DiskError, LogPressure, LoggedDisk, SeedChunk};
pub use primary::EpochLog;
pub use standby::StandbyDisk;
pub use store::{DiskFileId, DiskStore, FileStore};
