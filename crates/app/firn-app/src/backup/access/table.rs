//! Table of permissions: which certificates may use which sessions.
//!
//! ```toml
//! [[permissions]]
//! session = "ledger-*"                    # * is any text, ? any character
//! certificate = "ledger.example"          # a name of the certificate, sha256:FINGERPRINT, or key:FINGERPRINT
//! roles = ["read", "append", "take-over"]
//! ```
//!
//! The file is read for each connection.

use std::path::Path;

use serde::Deserialize;

use super::Roles;
use super::certificate::PeerCertificate;
use crate::backup::error::BackupError;

/// The maximum size of a table in bytes.
const TABLE_BYTES_MAX: u64 = 1 << 20;

/// The entries of a table.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::backup) struct SessionTable {
    #[serde(default)]
    permissions: Vec<TableEntry>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TableEntry {
    session: String,
    certificate: String,
    roles: Vec<Role>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
enum Role {
    Read,
    Append,
    TakeOver,
}

impl SessionTable {
    /// Reads a table.
    ///
    /// # Errors
    /// If it is malformed, or others can write it.
    pub(in crate::backup) fn read(path: &Path) -> Result<Self, BackupError> {
        let bad = |why: String| BackupError::Table { path: path.to_owned(), why };
        let bytes = firn_files::read_permissions(path, TABLE_BYTES_MAX)
            .map_err(|error| bad(error.to_string()))?;
        let text = std::str::from_utf8(&bytes).map_err(|_| bad("it is not UTF-8".to_owned()))?;
        toml::from_str(text).map_err(|error| {
            let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
            bad(format!("line {}: {}", before.matches('\n').count() + 1, error.message()))
        })
    }

    /// The roles that a certificate has in a session: those of all entries that fit both.
    pub(super) fn roles_of(&self, session: &str, peer: &PeerCertificate) -> Roles {
        let fits = |entry: &&TableEntry| {
            is_match(entry.session.as_bytes(), session.as_bytes())
                && peer.is_named(&entry.certificate)
        };
        let roles: Vec<_> =
            self.permissions.iter().filter(fits).flat_map(|entry| &entry.roles).collect();
        Roles {
            read: roles.contains(&&Role::Read),
            append: roles.contains(&&Role::Append),
            take_over: roles.contains(&&Role::TakeOver),
        }
    }
}

/// Whether a text fits a pattern in which `*` is any text, and `?` any character.
fn is_match(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut pos) = (0, 0);
    // After a mismatch the last star takes one more character.
    let mut star: Option<(usize, usize)> = None;
    while pos < text.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, pos));
                at += 1;
            }
            Some(char) if *char == b'?' || *char == text[pos] => (at, pos) = (at + 1, pos + 1),
            _ => {
                let Some((star_at, taken)) = star else { return false };
                star = Some((star_at, taken + 1));
                (at, pos) = (star_at + 1, taken + 1);
            }
        }
    }
    pattern[at..].iter().all(|char| *char == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (pattern, text, expected) in [
            ("ledger", "ledger", true),
            ("ledger", "ledger2", false),
            ("ledger", "Ledger", false),
            ("ledger-*", "ledger-", true),
            ("ledger-*", "ledger-7", true),
            ("ledger-*", "ledger", false),
            ("*", "", true),
            ("*-a", "b-a-a", true),
            ("*-a-*", "b-a", false),
            ("?", "", false),
            ("??", "ab", true),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("", "a", false),
        ] {
            let found = is_match(pattern.as_bytes(), text.as_bytes());
            assert_eq!(found, expected, "{pattern} {text}");
        }
    }

    #[test]
    fn a_malformed_table_is_refused_with_its_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("table");
        let read = |text: &str| {
            firn_files::replace_private(&path, text.as_bytes()).unwrap();
            SessionTable::read(&path)
        };
        assert!(read("").unwrap().permissions.is_empty());
        let entry = "[[permissions]]\nsession = \"a\"\ncertificate = \"b\"\n";
        assert_eq!(read(&format!("{entry}roles = [\"take-over\"]")).unwrap().permissions.len(), 1);
        for (text, expected) in [
            (format!("{entry}roles = [\"all\"]"), "line 4"),
            (format!("{entry}role = [\"read\"]"), "line 4"),
            (entry.to_owned(), "roles"),
            ("[permissions]".to_owned(), "line 1"),
        ] {
            let error = read(&text).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("table: "), "{text}: {error}");
        }
    }
}
