//! The checker against histories of which it is known what they are.

#![allow(clippy::unwrap_used, clippy::panic)] // a failing test panics

mod histories;
mod properties;
