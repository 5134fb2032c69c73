//! Linearizability checker for histories of client operations.
//!
//! Clients use a system that has a state. A history has each operation: the client, the request and
//! its time, the answer and its time. The system is right if there is an order of all operations,
//! each at one moment between its request and its answer, in which a plain sequential program gives
//! the same answers (Herlihy and Wing: linearizable). Nothing else is required of the system, and
//! the checker knows only what its clients observed.
//!
//! ```text
//!   client 0   |--- transfer 3 -> 7, 10 ---| done
//!   client 1        |-- balance of 7 --| 110                 right: the transfer, then this one, then that one
//!   client 2                                  |--| 100      wrong: whatever the order, the transfer is before it
//!   client 3     |--- transfer 1 -> 2, 5 ---- ?             no answer: at any later moment, or never
//! ```
//!
//! The search is Lowe's ("Testing for linearizability", 2017) after Wing and Gong: it processes
//! events in the order of their times, and puts an operation into the order no earlier than when an
//! answer needs it. It remembers what it has tried, so that it examines each set of open
//! operations, with a state, only once. It uses an operation without an answer only if another
//! answer is impossible without it.
//!
//! - [`SequentialModel`]: the sequential program. [`BankModel`] is the only one here.
//! - [`check_history`]: a [`Verdict`], with an [`Explanation`] of a wrong history: few operations
//!   that contradict each other, whatever else happened.
#![forbid(unsafe_code)]

mod bank;
mod check;
mod explain;
mod history;
mod model;
mod search;

pub use bank::{BankAnswer, BankModel, BankOperation};
pub use check::{Verdict, check_history};
pub use explain::Explanation;
pub use history::ClientCall;
pub use model::{ModelCall, SequentialModel};
