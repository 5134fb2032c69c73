//! The names of VMs, which are also the names of their runtime directories, and of networks between
//! them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The maximum length of a name, in bytes: a socket path has 107, and the runtime directory needs a
/// part.
pub const NAME_BYTES_MAX: usize = 48;

/// A VM's name: a letter or digit, then letters, digits, `.`, `_` and `-`.
///
/// It becomes a directory name, so no character with a special meaning in a path or a shell is
/// allowed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VmName(String);

/// The reason why a text is no VM name.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum VmNameError {
    /// It is empty, or longer than [`NAME_BYTES_MAX`].
    #[error("a VM name has 1 to {NAME_BYTES_MAX} characters, {0:?} has {len}", len = .0.len())]
    Length(String),
    /// It contains a character that is not allowed at its position.
    #[error(
        "a VM name is a letter or digit, then letters, digits, '.', '_' and '-': {0:?} has {1:?}"
    )]
    Character(String, char),
}

impl VmName {
    /// Checks a name.
    pub fn new(name: impl Into<String>) -> Result<Self, VmNameError> {
        let name = name.into();
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            return Err(VmNameError::Length(name));
        }
        match name.char_indices().find(|&(at, c)| !is_allowed(at, c)) {
            Some((_, c)) => Err(VmNameError::Character(name, c)),
            None => Ok(Self(name)),
        }
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

fn is_allowed(at: usize, c: char) -> bool {
    c.is_ascii_alphanumeric() || (at > 0 && matches!(c, '.' | '_' | '-'))
}

impl FromStr for VmName {
    type Err = VmNameError;

    fn from_str(name: &str) -> Result<Self, VmNameError> {
        Self::new(name)
    }
}

impl TryFrom<String> for VmName {
    type Error = VmNameError;

    fn try_from(name: String) -> Result<Self, VmNameError> {
        Self::new(name)
    }
}

impl From<VmName> for String {
    fn from(name: VmName) -> String {
        name.0
    }
}

impl fmt::Display for VmName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A network's name, with the characters of a VM's. It is the same on all hosts, and becomes the
/// name of a socket.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NetworkName(String);

/// The reason why a text is no network name.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "{0:?} is no name of a network: give a letter or digit, then letters, digits, '.', '_' and '-', at most {NAME_BYTES_MAX}"
)]
pub struct NetworkNameError(String);

impl NetworkName {
    /// Checks a name.
    ///
    /// # Errors
    /// If it could not be a file name, or is too long.
    pub fn new(name: impl Into<String>) -> Result<Self, NetworkNameError> {
        match VmName::new(name) {
            Ok(VmName(name)) => Ok(Self(name)),
            Err(VmNameError::Length(name) | VmNameError::Character(name, _)) => {
                Err(NetworkNameError(name))
            }
        }
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for NetworkName {
    type Error = NetworkNameError;

    fn try_from(name: String) -> Result<Self, NetworkNameError> {
        Self::new(name)
    }
}

impl From<NetworkName> for String {
    fn from(name: NetworkName) -> Self {
        name.0
    }
}

impl fmt::Display for NetworkName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinary_names_pass() {
        for name in ["web", "db-1", "a.b_c", "7"] {
            assert_eq!(VmName::new(name).unwrap().as_str(), name);
        }
    }

    #[test]
    fn names_that_would_leave_the_directory_do_not() {
        for name in ["..", ".hidden", "a/b", "-o", "a b", "ä", "a\nb"] {
            assert!(matches!(VmName::new(name), Err(VmNameError::Character(..))), "{name:?}");
        }
        assert!(matches!(VmName::new(""), Err(VmNameError::Length(_))));
        assert!(matches!(VmName::new("x".repeat(49)), Err(VmNameError::Length(_))));
    }

    #[test]
    fn a_network_has_a_name_like_a_vms() {
        assert_eq!(NetworkName::new("lan").unwrap().as_str(), "lan");
        for name in ["", "../lan", ".lan", &"x".repeat(49)] {
            let error = NetworkName::new(name).unwrap_err().to_string();
            assert!(error.contains("no name of a network"), "{error}");
        }
    }

    #[test]
    fn a_bad_name_in_json_is_an_error() {
        assert!(serde_json::from_str::<VmName>("\"../x\"").is_err());
    }
}
