//! The protocols of a virtual cluster, played by a model that tries every step in every order, and by one that throws dice.

#![allow(clippy::expect_used, clippy::panic, reason = "a test that fails panics")]

mod cut_model;
mod explore;
mod failover_model;
mod simulation;
