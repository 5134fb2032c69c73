//! Agents with certificates of their own, on this host's loopback: which peers they accept, what
//! they carry, and what they detect.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod command;
mod door;
mod failover;
mod half;
mod host;
mod lost;
mod membership;
mod page;
mod relay;
mod rules;
mod standby;
mod switch;
mod tap;
mod together;
mod tunnel;
