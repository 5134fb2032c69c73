//! Calls from an application in a guest to Firn on its host, through memory that both see, around the guest's kernel.
//!
//! After Lee, Krishnakumar, Krishnan, Singh, Yajnik, "Hypervisor-Assisted Application Checkpointing in Virtualized
//! Environments", sections III.B to III.D: there the application executes `vmcall`; here it writes to the memory of a
//! device that the hypervisor has already (ivshmem), and the host looks there.
//!
//! ```text
//!   application                                    host
//!     hello: name, number of its own   ------>       is it in the policy?
//!                                      <------     challenge: number of the host's
//!     writes a proof into its own memory
//!     prove: where                     ------>       which address space has the proof there? exactly one: it is that process
//!                                      <------     open
//!     follow: an area                  ------>       is each page there the process's own, for programs, and writable?
//!     collect                          ------>       which pages were written since?
//! ```
//!
//! Where a plugin in the hypervisor sees stores, [`Notes`] are kept from below, and a commit needs no call.
//!
//! A key never crosses the channel, nor does the proof: it is computed by both sides from the key and the two numbers, and
//! only who has the key can have it in memory. What follows is sealed with a key of the session, in both directions:
//! other programs of the guest may write anything anywhere in the window, but can't speak for others.
//!
//! Everything here is pure: [`Server`] is told what was asked and looks at the guest by [`Below`]; [`Caller`] makes requests and
//! opens answers. Neither does I/O, and the host's side takes any bytes.

mod caller;
mod key;
mod message;
mod noting;
mod policy;
mod server;
mod window;

pub use caller::{CallError, Caller, Changed};
pub use key::{Key, KeyError, Nonce, Proof};
pub use message::{Answer, AreaId, Refusal, Request, Run};
pub use noting::{
    Ended, NoteOrder, NotedArea, Notes, NotingKey, Order, Reader, Told, WORD, WordRun,
};
pub use policy::{Policy, PolicyError};
pub use server::{Answered, Below, Noted, Server};
pub use window::{Place, SLOT_BYTES, Slot, Window, WindowError};
