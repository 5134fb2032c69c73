//! Checks the protocols of a virtual cluster with models that try every step in every order, and
//! with a simulation of random steps.

#![allow(clippy::expect_used, clippy::panic, reason = "a test that fails panics")]

mod cut_model;
mod explore;
mod failover_model;
mod simulation;
mod single_model;
