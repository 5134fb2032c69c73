//! Could this have happened one after another?
//!
//! Clients ask a system that keeps a state: who asked what, when, what came back, and when. The system is right if there is an order of
//! all operations, each at one moment between its question and its answer, in which a plain sequential program gives the same answers
//! (Herlihy and Wing: linearizable). Nothing else is asked of it, and nothing is known of it but what was seen from outside.
//!
//! ```text
//!   client 0   |--- transfer 3 -> 7, 10 ---| done
//!   client 1        |-- balance of 7 --| 110                 right: the transfer, then this one, then that one
//!   client 2                                  |--| 100      wrong: whatever the order, the transfer is before it
//!   client 3     |--- transfer 1 -> 2, 5 ---- ?             no answer: at any later moment, or never
//! ```
//!
//! The search is Lowe's ("Testing for linearizability", 2017) after Wing and Gong: events are gone through as they came, and an operation
//! is put in its place no earlier than when an answer needs it. What was tried is remembered, so that each set of operations
//! still open, with a state, is looked at once. An operation without an answer is used only where another answer can't be without it.
//!
//! - [`Model`]: the sequential program. [`Bank`] is the one that there is.
//! - [`check`]: a [`Verdict`], with an [`Explanation`] where it is wrong: few operations that contradict each other, whatever else happened.

#![forbid(unsafe_code)]

mod bank;
mod check;
mod explain;
mod history;
mod model;
mod search;

pub use bank::{Answer, Bank, Operation};
pub use check::{Verdict, check};
pub use explain::Explanation;
pub use history::Call;
pub use model::{CallOf, Model};
