//! Calls from an application in a guest to Firn on its host, through memory that both share, around
//! the guest's kernel.
//!
//! After Lee, Krishnakumar, Krishnan, Singh, Yajnik, "Hypervisor-Assisted Application Checkpointing
//! in Virtualized Environments", sections III.B to III.D: there the application executes `vmcall`;
//! here it writes to the memory of a device that the hypervisor has already (ivshmem), and the host
//! polls it.
//!
//! ```text
//!   application                                    host
//!     hello: name, a random number     ------>       is the name in the policy?
//!                                      <------     challenge: a random number of the host
//!     writes a proof into its own memory
//!     prove: address of the proof      ------>       which address space has the proof there? exactly one: it is that process
//!                                      <------     open
//!     follow: an area                  ------>       is each page the process's own, accessible to programs, and writable?
//!     collect                          ------>       which pages were written since the last time?
//! ```
//!
//! # Recorded stores
//!
//! A plugin in the hypervisor may observe the application's stores. Then a commit needs no call. An
//! *epoch* in this crate is the time between two commits of an application, not an epoch of a
//! protected VM.
//!
//! ```text
//!   supervisor  -- PluginOrder: areas, end word, ReportKey ------>  plugin
//!                                                 RecordedStores: the words stored to since the last commit
//!   application -- commit: a store to the end word ------------->   plugin
//!               <------------- SealedReport, in the application's slot of the window
//!   ReportReader: opens it, and returns the StoreReport: which words were stored to, or that this is unknown
//! ```
//!
//! # Keys
//!
//! A key never crosses the channel, and neither does the proof: both sides compute the proof from
//! the key and the two numbers, so only a process with the key can have it in memory. All further
//! messages are sealed with a key of the session, in both directions: other programs of the guest
//! can write anything anywhere in the window, but cannot forge messages.
//!
//! This crate is pure: [`SessionServer`] receives requests and accesses the guest by
//! [`GuestAccess`]; [`Caller`] makes requests and opens replies. Neither does I/O. The guest may
//! write any bytes into the window: the host's side refuses those that are no valid request, and
//! never fails because of them.

mod caller;
mod key;
mod message;
mod policy;
mod server;
mod store_recording;
mod window;

pub use caller::{CallError, Caller, WrittenPages};
pub use key::{ApplicationKey, KeyError, Nonce, Proof};
pub use message::{CallRefusal, CallReply, CallRequest, FollowedAreaId, PageRun};
pub use policy::{CallPolicy, PolicyError};
pub use server::{
    CallLogEvent, GuestAccess, PartMapping, PartNumber, PartTranslation, ServedCall, SessionServer,
};
pub use store_recording::{
    PluginOrder, RecordedApplication, RecordedArea, RecordedStores, ReportKey, ReportReader,
    SealedReport, StoreReport, WORD, WordRun,
};
pub use window::{CallWindow, SLOT_BYTES, SlotField, WindowError, WindowSlot};
