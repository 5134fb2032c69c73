//! Stub.
#![forbid(unsafe_code)]
pub mod predict;
mod words;
pub use words::{Epoch, Generation, Host, RequestNumber, Seq, Vm};
