//! The page server against a real process whose threads touch shared memory on command, with real
//! images.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test says what failed by panicking"
)]

mod content;
mod damage;
mod driver;
mod guest;
mod modes;
mod prefilled;
mod scene;
mod successor;
mod use_of_prefetched;

/// Not a test: the process under test, when a test runs it.
#[test]
fn child_process() {
    guest::run_if_asked();
    successor::run_if_asked();
}
