//! Output commit (VPC IV): what a VM sends is held until nothing can undo the state that sent it.
//!
//! ```text
//!      the VM sends                                      the receiver's part of a newer global
//!      in epoch n                                        checkpoint includes it
//!   ------------------------------------------> Out ------------------------------------------> gone      to a VM
//!          |                                     |  ^
//!          |                                     +--+ sent again: after a rollback, or a broken connection
//!          |
//!          |         a global checkpoint includes epoch n            the uplink has sent it
//!          +-----> Held ---------------------------------------> Out --------------------> gone           outside
//! ```
//!
//! Two rules, because two different things can undo a frame:
//!
//! - *Inside the cluster* a frame leaves as it is sent. A rollback takes the receiver back too; that
//!   the two go back to states that agree is the business of the [cut](crate::cut).
//! - *To the outside* a frame may leave only when a global checkpoint that includes its epoch is on record. A failure takes
//!   every VM back to that checkpoint, not to its own newest committed copy, and the outside goes back nowhere.
//!
//! # In-flight frames are part of the checkpoint
//!
//! Frames are numbered per sender and destination. The sender's half ([`Outbox`]) keeps each until the receiver's part of a
//! global checkpoint has it, and goes to the backup with the epoch; the receiver's half ([`Inbox`]) remembers how far it
//! had come at each of its cuts. After a rollback, what the sender's state has sent and the receiver's hasn't received is simply
//! sent again: nothing is lost, so that TCP doesn't back off, and nothing comes twice.
//!
//! The outside has no inbox. If a host dies between sending a frame and saying so, the backup sends it again: the same
//! bytes, a retransmission to TCP. The other choice would be to lose it; without the receiver's help there is no third.
//!
//! # At the bound
//!
//! Held and kept frames share a bound in bytes. When it is reached, [`Outbox::flow`] says to stop reading from the VM's
//! network socket: the hypervisor's queue fills, then the guest's transmit ring, and the guest waits as it would for a slow
//! network. Epochs go on, so that what is held will be released. A frame that was being read is still taken: the bound may
//! be exceeded by one frame per network card.

mod inbox;
mod outbox;

pub use inbox::{Accept, Inbox};
pub use outbox::{Flow, Outbox, Sent, To};

#[cfg(test)]
mod tests;
