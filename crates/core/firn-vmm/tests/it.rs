//! Tests with a real QEMU, and with a false one that misbehaves.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "it/device_state.rs"]
mod device_state;
#[path = "it/false_qemu.rs"]
mod false_qemu;
#[path = "it/filters.rs"]
mod filters;
#[path = "it/guest.rs"]
mod guest;
#[path = "it/hold.rs"]
mod hold;
#[path = "it/layouts.rs"]
mod layouts;
#[path = "it/qemu.rs"]
mod qemu;
#[path = "it/whole.rs"]
mod whole;
