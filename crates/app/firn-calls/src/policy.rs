//! Policy file of the host: the applications that may call.
//!
//! ```toml
//! [applications.ledger]
//! key = "6f1d...64 hexadecimal digits"
//! pages = 16384            # the maximum count of pages to follow; 4096 by default
//! ```

use std::collections::BTreeMap;

use serde::Deserialize;
use thiserror::Error;

use crate::key::{ApplicationKey, KeyError};

/// The maximum count of pages of an application for which the policy has no value: 16 MiB.
const PAGES_DEFAULT: u32 = 4096;

/// The policy file is malformed.
#[derive(Debug, Error)]
pub enum PolicyError {
    /// The file is not valid TOML, or has unexpected entries.
    #[error("line {line}: {reason}")]
    Toml {
        /// The line of the error.
        line: usize,
        /// The error, without the line itself, which may contain a key.
        reason: String,
    },
    /// A key is malformed.
    #[error("application {name:?}")]
    Key {
        /// The application that it belongs to.
        name: String,
        /// The error.
        source: KeyError,
    },
}

/// The permissions of one application.
#[derive(Clone, Debug)]
pub(crate) struct ApplicationPolicy {
    pub(crate) key: ApplicationKey,
    pub(crate) pages: u32,
}

/// The applications that may call. None by default.
#[derive(Clone, Debug, Default)]
pub struct CallPolicy(BTreeMap<String, ApplicationPolicy>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyFile {
    #[serde(default)]
    applications: BTreeMap<String, PolicyEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyEntry {
    key: String,
    pages: Option<u32>,
}

impl CallPolicy {
    /// Reads a policy file.
    ///
    /// # Errors
    /// If it is malformed; the error has the line.
    pub fn parse(text: &str) -> Result<Self, PolicyError> {
        let file: PolicyFile = toml::from_str(text).map_err(|error| toml_error(text, &error))?;
        let read = |(name, entry): (String, PolicyEntry)| match entry.key.parse() {
            Ok(key) => {
                Ok((name, ApplicationPolicy { key, pages: entry.pages.unwrap_or(PAGES_DEFAULT) }))
            }
            Err(source) => Err(PolicyError::Key { name, source }),
        };
        Ok(Self(file.applications.into_iter().map(read).collect::<Result<_, _>>()?))
    }

    pub(crate) fn find_application(&self, name: &str) -> Option<&ApplicationPolicy> {
        self.0.get(name)
    }
}

fn toml_error(text: &str, error: &toml::de::Error) -> PolicyError {
    let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
    PolicyError::Toml { line: before.matches('\n').count() + 1, reason: error.message().to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_lists_callers_and_their_limits() {
        let key = "ab".repeat(32);
        let text = format!(
            "[applications.a]\nkey = \"{key}\"\n[applications.b]\nkey = \"{key}\"\npages = 7"
        );
        let policy = CallPolicy::parse(&text).unwrap();
        assert_eq!(policy.find_application("a").unwrap().pages, PAGES_DEFAULT);
        assert_eq!(policy.find_application("b").unwrap().pages, 7);
        assert!(policy.find_application("c").is_none());
        assert!(CallPolicy::parse("").unwrap().find_application("").is_none());
    }

    #[test]
    fn a_mistake_is_named() {
        let said = |text: &str| {
            let error = CallPolicy::parse(text).unwrap_err();
            std::error::Error::source(&error)
                .map_or(error.to_string(), |it| format!("{error}: {it}"))
        };
        assert!(said("[applications.a]\nkey = \"12\"").contains("\"a\": a key is 64"));
        assert!(said("[applications.a]\nkeys = \"12\"").contains("keys"));
        assert!(said("\n[application.a]").contains("line 2"));
    }
}
