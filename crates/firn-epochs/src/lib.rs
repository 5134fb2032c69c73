//! One running VM, saved to a backup several times a second (Lu, Ravindran, Kim, "VPC: Scalable, Low Downtime Checkpointing for
//! Virtual Clusters", III.A and III.B).
//!
//! ```text
//!   primary                                                          backup
//!     guest: pause [ scan, protect, copy, device state ]
//!       | EpochCopy, in a bounded buffer
//!       v
//!     sender: compare with the copy before ---- wire: pages, patches, end ----> receive: an epoch, whole or not at all
//!       |                                                                         |
//!       |  unchanged                    <------------- progress ----------------- |  Standby: the newest kept aside,
//!       v                                                                         v           the one before it folded
//!     Predictor, epoch::Primary (firn-cluster)                             RamFiles: memory that a hypervisor maps
//! ```
//!
//! What is decided is decided in `firn-cluster`: when to cut, which pages start an epoch writable, what is committed. Here are
//! the system calls, the stream and the threads.
//!
//! | module | what it decides or does |
//! |---|---|
//! | [`wire`] | the bytes between the two |
//! | [`copy`] | what an epoch wrote, and what of it is new (pure) |
//! | [`delta`] | what of a page is new (pure) |
//! | [`standby`] | what the backup holds (pure) |
//! | [`disks`] | disks whose changes go with the epochs |
//! | [`guest`] | following a VM's writes, and its pauses |
//! | [`primary`] | a VM's epochs, from the first to the last |
//! | [`primary_end`] | how that ended, as the backup is informed |
//! | [`backup`] | receiving them |
//! | [`endpoint`] | sockets |
//!
//! # A pause
//!
//! The hypervisor stops the VM by itself and waits (`firn-vmm`, `hold`). Meanwhile the kernel is asked which pages were written
//! (asynchronous write protection and `PAGEMAP_SCAN`), the predictor says which of them to protect again, and all that may have
//! changed is copied. What is not expected to be written up to the pause is protected and copied ahead of it; if it is written all
//! the same, it is copied again. So a write is in exactly one epoch. Comparing, checksums and the network come after the pause.
//!
//! # Memory
//!
//! Copies wait for the backup in a buffer of so many pages; one more epoch is kept to compare the next with. When the backup is
//! slower than the guest writes, the epoch stretches, then the VM is slowed, then stopped. An epoch larger than the buffer is sent
//! from within its pause, a part at a time.
//!
//! # The first epoch
//!
//! The backup starts with nothing. All of memory is sent while the guest runs (the *seed*, epoch 0), with what it wrote meanwhile
//! sent again; whatever was written since then belongs to epoch 1. So the seed alone is no state that can be run, and there is
//! nothing to fail over to before epoch 2 is complete.

#![forbid(unsafe_code)]

pub mod backup;
pub mod copy;
pub mod delta;
pub mod disks;
pub mod endpoint;
pub mod guest;
pub mod primary;
pub mod primary_end;
mod sender;
pub mod standby;
pub mod wire;

#[cfg(test)]
mod tests;
