//! Linearizability checker for histories of client operations.
//!
//! Clients use a system that has a state. A history has each operation: the client, the request and
//! its time, the answer and its time. The system is right if there is an order of all operations,
//! each at one moment between its request and its answer, in which a plain sequential program gives
//! the same answers (Herlihy and Wing: linearizable). Nothing else is required of the system, and
//! the checker knows only what its clients observed.
//!
//! ```text
//!   time ------------------------------------------------->     account 7 has 100 at first
//!   client 0   |--- transfer 3 -> 7, 10 ---| done
//!   client 1        |-- balance of 7 --| 110                 right: the order may have the transfer first, then this
//!   client 2                                  |--| 100       wrong: balance of 7; in every order the transfer comes first
//!   client 3     |--- transfer 1 -> 2, 5 ---- ?              no answer: done at any later moment, or never
//! ```
//!
//! The search is Lowe's ("Testing for linearizability", 2017) after Wing and Gong: it processes
//! events in the order of their times, and puts an operation into the order no earlier than when an
//! answer needs it. It remembers what it has tried: it examines the same set of open operations
//! with the same state only once. It uses an operation without an answer only if another answer is
//! impossible without it.
//!
//! - [`SequentialModel`]: the sequential program. [`BankModel`] is the only one here.
//! - [`ClientCall`]: one operation of a history. [`ModelCall`] is the same type with the requests
//!   and answers of a given model.
//! - [`check_history`]: returns a [`LinearizabilityVerdict`]: linearizable, wrong, or undecided if the search needs
//!   too many tries. A wrong history comes with an [`Explanation`]: a few operations that
//!   contradict each other, whatever else happened.
#![forbid(unsafe_code)]

mod bank;
mod check;
mod explain;
mod history;
mod model;
mod search;

pub use bank::{BankAnswer, BankModel, BankOperation};
pub use check::{LinearizabilityVerdict, check_history};
pub use explain::Explanation;
pub use history::ClientCall;
pub use model::{ModelCall, SequentialModel};
