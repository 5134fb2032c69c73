//! Firn's guest-memory layer against a real process whose threads touch shared memory on command.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says what failed by panicking")]

mod child;
mod discards;
mod driver;
mod faults;
mod filters;
mod hole_tracker;
mod huge_pages;
mod injection;
mod memory;
mod qemu;
mod scan;
mod transparent_huge_pages;
mod whole;
