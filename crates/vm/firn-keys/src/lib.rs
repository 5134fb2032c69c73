//! Where the keys of sealed images come from, and for whom they are wrapped.
//!
//! ```text
//!   save:     random key --> wrapped for age recipients, by a key file, by a command --> seal section
//!   restore:  seal section --> age identities, key file, command --> key --> key ring of the process
//! ```
//!
//! Commands wrap and unwrap. A supervisor gets the unwrapped key with the request, keeps it in
//! memory, and needs none of this.

#![forbid(unsafe_code)]

mod age_keys;
mod command;
mod error;
mod key_file;
mod sources;

pub use age_keys::AgeIdentities;
pub use command::KeyCommand;
pub use error::KeyError;
pub use key_file::KeyFile;
pub use sources::{KeySources, SealTargets};
