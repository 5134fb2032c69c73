//! Tests with real clients (qemu-img, qemu-io), hostile ones, and servers that are killed.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "it/client.rs"]
mod client;
#[path = "it/epochs.rs"]
mod epochs;
#[path = "it/hostile.rs"]
mod hostile;
#[path = "it/kill.rs"]
mod kill;
#[path = "it/qemu.rs"]
mod qemu;
#[path = "it/served.rs"]
mod served;
