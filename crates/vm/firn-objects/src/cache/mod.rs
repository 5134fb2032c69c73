//! The cache of objects, from which images in object storage are restored.
//!
//! ```text
//!   firn restore s3://vms/web.firn                          supervisor, template holder: readers
//!      |  find                                                 |  read, refetch    ^ pread
//!      v                                                       v                   |
//!   server: one per cache directory --- GET with ranges --> the store      sparse files, with maps
//!      '---- writes ------------------------------------------------------------^
//! ```
//!
//! | module | its task |
//! |---|---|
//! | `object` | one object: which units are there, and the fetches of others |
//! | `client` | requests to the store, by the newest credentials that a client sent |
//! | `room` | the bound of the cache: what is removed |
//! | `registry` | all objects |
//! | `find`, `image_dir` | an image with those it builds on, as files with their names |
//! | `prefetch` | ranges that will be needed |
//! | `server`, `process` | connections; the process |
//!
//! The server starts with the first restore and ends when nothing was requested for a minute. It may be
//! killed at any time: a client starts another one.

mod client;
mod find;
mod image_dir;
mod object;
mod prefetch;
mod process;
mod registry;
mod room;
mod server;

pub use find::CachedImage;
pub use process::{CacheLimits, find_image, forget_image, query_report, run_server, start_server};
