//! Replication of one running VM to a backup, several times a second (Lu, Ravindran, Kim, "VPC:
//! Scalable, Low Downtime Checkpointing for Virtual Clusters", III.A and III.B).
//!
//! ```text
//!   primary                                              backup
//!     guest: pause [ scan, protect, copy, devices ]
//!       | EpochCopy, in a bounded buffer
//!       v
//!     sender: compare with --- pages, patches, end --->  receive: an epoch, whole or not at all
//!       |     the last copy                                |
//!       |  unchanged           <------- progress --------  |  StandbyVm: the newest stored apart,
//!       v                                                  v             the one before it folded
//!     DirtyPagePredictor, PrimaryEpochs (firn-cluster)            RamFiles: memory that a hypervisor maps
//! ```
//!
//! `firn-cluster` makes the decisions: when to cut, which pages start an epoch writable, which
//! epoch is committed. This crate has the system calls, the stream and the threads.
//!
//! | module | what it decides or does |
//! |---|---|
//! | [`wire`] | encodes the messages between primary and backup |
//! | [`copy`] | the pages that an epoch wrote, and which of them have to be sent (pure) |
//! | [`delta`] | the delta of a page (pure) |
//! | [`standby`] | the state that the backup has (pure) |
//! | [`disks`] | the disks that are replicated with the epochs |
//! | [`guest`] | tracks a VM's writes, and pauses it |
//! | [`primary`] | runs a VM's epochs, from the first to the last |
//! | [`protection_end`] | how the protection ended, as reported to the backup |
//! | [`backup`] | receives epochs |
//! | [`endpoint`] | sockets |
//!
//! # A pause
//!
//! The hypervisor stops the VM by itself and waits (`firn-vmm`, `hold`). Meanwhile the kernel
//! reports which pages were written (asynchronous write protection and `PAGEMAP_SCAN`), the
//! predictor determines which of them to protect again, and all pages that may have changed are
//! copied. Pages that are not expected to be written before the pause are protected and copied
//! ahead of it; a page that is written nevertheless is copied again. So a write is in exactly one
//! epoch. Comparing, checksums and sending follow after the pause.
//!
//! # Memory
//!
//! Copies wait for the backup in a buffer with a bounded number of pages; one more epoch is
//! retained, to compare the next one with it. When the backup is slower than the guest writes, the
//! epoch stretches, then the VM is slowed, then stopped. An epoch larger than the buffer is sent
//! from within its pause, a part at a time.
//!
//! # The first epoch
//!
//! The backup starts with nothing. All of memory is sent while the guest runs (the *seed*, epoch
//! 0), and pages written meanwhile are sent again; pages written since then belong to epoch 1. So
//! the seed alone is no state that can run, and no failover is possible before epoch 2 is complete.

#![forbid(unsafe_code)]

pub mod backup;
pub mod copy;
pub mod delta;
pub mod disks;
pub mod endpoint;
pub mod guest;
pub mod primary;
pub mod protection_end;
mod sender;
pub mod standby;
pub mod wire;

#[cfg(test)]
mod tests;
