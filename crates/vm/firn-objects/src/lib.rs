//! Images in object storage: push, pull, list and remove them.
//!
//! ```text
//!   /srv/web.firn       s3://vms/prod/web.firn           one object per file of a chain, the same bytes
//!   /srv/base.firn      s3://vms/prod/base.firn          parents lie beside the image, under their names
//!   /srv/web.firn.sig   s3://vms/prod/web.firn.sig       the signature, if there is one
//!   /srv/web.firn.learned   s3://vms/prod/web.firn.learned   the blocks that restores have learned, if there are some
//!                       s3://vms/prod/.firn-uploads/...  one record for each upload that is not complete
//! ```
//!
//! An object has exactly the bytes of an image file, so any tool of the store can copy it. This
//! crate promises:
//!
//! - An image is visible whole or not at all: its parts become an object by one request, which the
//!   store refuses if the name is taken meanwhile (`If-None-Match`). Parents are there before.
//! - A pulled image was verified, each byte, before it gets its name. Otherwise nothing new has it.
//! - A request that fails is repeated, for half a minute at most.
//! - Credentials come from the environment, and are in no error.
//!
//! - Bytes of an image that is restored from the store are of one state of the object (`cache`).
//!
//! The modules: [`StoreLocation`] is what a user writes; `storage` sends requests; `upload` and
//! `download` move one file in parts; `chain` finds out which files belong together; `push`,
//! `pull`, `list` and `remove` are the verbs.

#![forbid(unsafe_code)]

mod cache;
mod chain;
mod connector;
mod download;
mod error;
mod failure;
mod list;
mod open;
mod parts;
mod pull;
mod push;
mod remove;
mod reply;
mod side_files;
mod storage;
mod upload;
mod upload_record;

pub use cache::{
    CacheLimits, CachedImage, find_image, forget_image, query_report, run_server, start_server,
};
pub use error::StoreError;
pub use failure::{parse_location, store_failure};
pub use firn_cache::{LocationError, StoreLocation, is_location};
pub use list::{StoredImage, list_images};
pub use parts::TransferProgress;
pub use pull::{PulledFile, pull_image};
pub use push::{PushOptions, PushedFile, check_new_image, push_image};
pub use remove::{RemovedObject, remove_image};
