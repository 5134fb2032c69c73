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

use crate::key::{Key, KeyError};

/// The maximum count of pages of an application for which the policy has no value: 16 MiB.
const PAGES: u32 = 4096;

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
pub(crate) struct Application {
    pub(crate) key: Key,
    pub(crate) pages: u32,
}

/// The applications that may call. None by default.
#[derive(Clone, Debug, Default)]
pub struct Policy(BTreeMap<String, Application>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    applications: BTreeMap<String, Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    key: String,
    pages: Option<u32>,
}

impl Policy {
    /// Reads a policy file.
    ///
    /// # Errors
    /// If it is malformed; the error has the line.
    pub fn parse(text: &str) -> Result<Self, PolicyError> {
        let file: File = toml::from_str(text).map_err(|error| explain(text, &error))?;
        let read = |(name, entry): (String, Entry)| match entry.key.parse() {
            Ok(key) => Ok((name, Application { key, pages: entry.pages.unwrap_or(PAGES) })),
            Err(source) => Err(PolicyError::Key { name, source }),
        };
        Ok(Self(file.applications.into_iter().map(read).collect::<Result<_, _>>()?))
    }

    pub(crate) fn find(&self, name: &str) -> Option<&Application> {
        self.0.get(name)
    }
}

fn explain(text: &str, error: &toml::de::Error) -> PolicyError {
    let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
    PolicyError::Toml { line: before.matches('\n').count() + 1, reason: error.message().to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_who_may_call_and_how_much() {
        let key = "ab".repeat(32);
        let text = format!(
            "[applications.a]\nkey = \"{key}\"\n[applications.b]\nkey = \"{key}\"\npages = 7"
        );
        let policy = Policy::parse(&text).unwrap();
        assert_eq!(policy.find("a").unwrap().pages, PAGES);
        assert_eq!(policy.find("b").unwrap().pages, 7);
        assert!(policy.find("c").is_none());
        assert!(Policy::parse("").unwrap().find("").is_none());
    }

    #[test]
    fn what_is_wrong_is_named() {
        let said = |text: &str| {
            let error = Policy::parse(text).unwrap_err();
            std::error::Error::source(&error)
                .map_or(error.to_string(), |it| format!("{error}: {it}"))
        };
        assert!(said("[applications.a]\nkey = \"12\"").contains("\"a\": a key is 64"));
        assert!(said("[applications.a]\nkeys = \"12\"").contains("keys"));
        assert!(said("\n[application.a]").contains("line 2"));
    }
}
