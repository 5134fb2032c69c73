//! Where an image goes that is saved to object storage.
//!
//! ```text
//!   firn checkpoint web -o s3://vms/web.firn
//!     SaveRequest.image   STATE/spool/web-.../web.firn     the save writes this file
//!     SaveRequest.store   s3://vms/web.firn, credentials   and then the supervisor pushes it
//! ```

use std::fmt;
use std::process::Command;

use firn_cache::{StoreEnvironment, store_environment};
use serde::{Deserialize, Serialize};

/// An object that does not exist yet, and what allows to make it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreTarget {
    /// Its location.
    pub location: String,
    /// The variables of the store, with credentials.
    pub credentials: StoreCredentials,
}

/// The variables of a store, in the environment of a command. The control socket, by which a supervisor
/// gets them, belongs to one user.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct StoreCredentials(StoreEnvironment);

impl StoreCredentials {
    /// Those of this process.
    pub fn from_env() -> Self {
        Self(store_environment())
    }

    /// Gives them to a process, instead of those of this one.
    pub(crate) fn apply_to(&self, command: &mut Command) {
        for name in store_environment().keys() {
            command.env_remove(name);
        }
        command.envs(&self.0);
    }
}

/// Their values are in no log.
impl fmt::Debug for StoreCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_not_shown() {
        let variables = [("AWS_SECRET_ACCESS_KEY".to_owned(), "hush".to_owned())];
        let credentials = StoreCredentials(variables.into());
        let target = StoreTarget { location: "s3://vms/web.firn".to_owned(), credentials };
        let shown = format!("{target:?}");
        assert!(shown.contains("AWS_SECRET_ACCESS_KEY") && !shown.contains("hush"), "{shown}");
    }
}
