//! Objects in object storage: where they are, and the local cache of their bytes.
//!
//! | module | its task |
//! |---|---|
//! | `location` | what a user writes |
//! | `layout`, `unit_map` | the files of the cache |
//! | `messages`, `connection` | requests to its server, a process of `firn-store` |
//! | `cached_file` | a file of the cache, for a process that reads it |
//!
//! A process that reads an image is not linked with the clients of stores.

#![forbid(unsafe_code)]

mod cached_file;
mod connection;
mod layout;
mod location;
mod messages;
mod unit_map;

pub use cached_file::{CachedFile, fetch_count};
pub use connection::CacheConnection;
pub use layout::{CACHE_DIR_VARIABLE, CacheDir, map_path};
pub use location::{LocationError, StoreLocation, StoreScheme, is_location};
pub use messages::{
    CacheReply, CacheReport, CacheRequest, StoreEnvironment, receive_message, send_message,
    store_environment,
};
pub use unit_map::{ObjectName, UNIT_BYTES, units_of, write_map_byte};

/// The program with the clients of stores. It is in the directory of `firn`.
pub const PROGRAM: &str = "firn-store";
