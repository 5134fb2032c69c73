//! Stub.
#![forbid(unsafe_code)]
pub mod cut;
pub mod epoch;
pub mod failover;
pub mod output;
pub mod predict;
mod words;
pub use words::{Epoch, Generation, Host, RequestNumber, Seq, Vm};
