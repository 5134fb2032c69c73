//! Tests of the image crate through its public interface.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test says what went wrong by panicking")]

#[path = "it/allocations.rs"]
mod allocations;
#[path = "it/chain.rs"]
mod chain;
#[path = "it/damage.rs"]
mod damage;
#[path = "it/faults.rs"]
mod faults;
#[path = "it/fixture.rs"]
mod fixture;
#[path = "it/model.rs"]
mod model;
#[path = "it/outline.rs"]
mod outline;
#[path = "it/reordered.rs"]
mod reordered;
#[path = "it/round_trip.rs"]
mod round_trip;
#[path = "it/sealed.rs"]
mod sealed;
#[path = "it/writing.rs"]
mod writing;
