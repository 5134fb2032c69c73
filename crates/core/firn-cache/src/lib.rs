//! Objects in object storage: where they are.

#![forbid(unsafe_code)]

mod location;

pub use location::{LocationError, StoreLocation, StoreScheme, is_location};

/// The program with the clients of stores. It is in the directory of `firn`.
pub const PROGRAM: &str = "firn-store";
