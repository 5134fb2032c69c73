//! Output commit (VPC IV): frames of a VM are buffered until no failover can undo the state that
//! sent them.
//!
//! ```text
//!     the VM sends                                  the receiver's part of a newer global
//!     in epoch n                                    checkpoint includes it
//!   ---------------------------------------> Out ---------------------------------> gone, to a VM
//!         |                                   |  ^
//!         |                                   +--+ sent again: rollback, or broken connection
//!         |
//!         |        a global checkpoint includes epoch n      the uplink has sent it
//!         +-----> Buffered ----------------> Out ---------------------------------> gone, outside
//! ```
//!
//! Two rules, because two different things can undo a frame:
//!
//! - *Inside the cluster* a frame leaves as it is sent. A rollback takes the receiver back too. The
//!   [cut](crate::cut) makes sure that both go back to consistent states.
//! - *To the outside* a frame may leave only when a global checkpoint that includes its epoch is
//!   recorded. A failure takes every VM back to that checkpoint, not to its own newest committed
//!   copy, and the outside is not taken back.
//!
//! # In-flight frames are part of the checkpoint
//!
//! Frames are numbered per sender and destination. The sender's half ([`FrameOutbox`]) stores each
//! frame until the receiver's part of a global checkpoint includes it, and is sent to the backup
//! with the epoch. The receiver's half ([`ReceiveCounters`]) records the newest received frame at
//! each of its cuts. After a rollback, frames that the sender's state has sent and the receiver's
//! state has not received are sent again: none is lost, so that TCP doesn't back off, and none is
//! received twice.
//!
//! The outside has no receive counters. If a host dies between sending a frame and reporting it,
//! the backup sends the frame again: the same bytes, which are a retransmission to TCP. The
//! alternative would be to lose it; without the receiver's help there is no third.
//!
//! # At the bound
//!
//! Buffered and stored frames share a bound in bytes. When it is reached,
//! [`FrameOutbox::input_flow`] requests to stop reading from the VM's network socket: the
//! hypervisor's queue fills, then the guest's transmit ring, and the guest waits as it would for a
//! slow network. Epochs continue, so that buffered frames will be released. A frame that was being
//! read is still taken: the bound may be exceeded by one frame per network card.

mod outbox;
mod receive_counters;

pub use outbox::{FrameDestination, FrameOutbox, InputFlow, SentFrame};
pub use receive_counters::{ReceiveCounters, ReceiveDecision};

#[cfg(test)]
mod tests;
