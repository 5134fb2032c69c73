//! Integration tests of the lab: guests, probes, experiments.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test says what failed by panicking"
)]

mod example;
mod full_guest;
mod kvm_host;
mod place;
mod small_guest;
