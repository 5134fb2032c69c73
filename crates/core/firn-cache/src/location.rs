//! Where an image is in object storage, as a user writes it.
//!
//! ```text
//!   s3://bucket/prefix/web.firn          https://host:port/path/web.firn      (https: read only)
//!        ^container ^key                         ^container  ^key
//! ```
//!
//! A location names no user, no password and no query: credentials come from the environment, so
//! that neither a list of processes nor a log has them.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// The kind of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StoreScheme {
    /// S3, or a store with the same interface.
    S3,
    /// A web server, which is only read. Without TLS if the flag is not set.
    Web {
        /// Whether requests are encrypted.
        has_tls: bool,
    },
}

/// The location of an object, or of several that begin with the same prefix.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoreLocation {
    /// The kind of the store.
    pub scheme: StoreScheme,
    /// The bucket, or the host with its port.
    pub container: String,
    /// Without a slash at its beginning or end; empty for a whole bucket.
    pub key: String,
}

/// Why a text is no location.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum LocationError {
    /// The text has no scheme that Firn knows.
    #[error("{0:?} is no location in object storage: write s3://BUCKET/KEY or https://HOST/PATH")]
    Scheme(String),
    /// The scheme is that of a store which this Firn does not use.
    #[error(
        "Firn has no access to {0}: stores: use the S3 interface of the store, with s3:// and AWS_ENDPOINT_URL"
    )]
    UnknownStore(&'static str),
    /// There is no bucket or host.
    #[error("{0:?} names no bucket")]
    NoContainer(String),
    /// It names a user or a password, which must not be repeated.
    #[error(
        "a location has no user and no password: give credentials in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
    )]
    Credentials,
    /// A character or a part of the key would not name the same object everywhere.
    #[error("{text:?} has {problem}")]
    Key {
        /// The location.
        text: String,
        /// The part.
        problem: &'static str,
    },
}

const UNKNOWN_STORES: [&str; 6] = ["gs", "az", "azure", "abfs", "abfss", "s3a"];

/// The maximum length of a key in bytes (S3).
const KEY_BYTES_MAX: usize = 1024;

/// Whether a text is meant as a location in object storage, and not as a path.
pub fn is_location(text: &str) -> bool {
    let scheme = text.split_once("://").map(|(scheme, _)| scheme);
    scheme.is_some_and(|it| ["s3", "http", "https"].contains(&it) || UNKNOWN_STORES.contains(&it))
}

impl FromStr for StoreLocation {
    type Err = LocationError;

    fn from_str(text: &str) -> Result<Self, LocationError> {
        let unknown = || LocationError::Scheme(text.to_owned());
        let (scheme, rest) = text.split_once("://").ok_or_else(unknown)?;
        let scheme = match scheme {
            "s3" => StoreScheme::S3,
            "https" => StoreScheme::Web { has_tls: true },
            "http" => StoreScheme::Web { has_tls: false },
            other => {
                let known = UNKNOWN_STORES.into_iter().find(|it| *it == other);
                return Err(known.map_or_else(unknown, LocationError::UnknownStore));
            }
        };
        let (container, key) = rest.split_once('/').unwrap_or((rest, ""));
        if container.contains('@') {
            return Err(LocationError::Credentials);
        }
        if container.is_empty() {
            return Err(LocationError::NoContainer(text.to_owned()));
        }
        let key = key.strip_suffix('/').unwrap_or(key);
        match find_problem(container, key) {
            Some(problem) => Err(LocationError::Key { text: text.to_owned(), problem }),
            None => Ok(Self { scheme, container: container.to_owned(), key: key.to_owned() }),
        }
    }
}

/// What a location may not have.
fn find_problem(container: &str, key: &str) -> Option<&'static str> {
    let is_of_name = |it: char| it.is_ascii_alphanumeric() || "-._:[]".contains(it);
    if !container.chars().all(is_of_name) {
        return Some("a character that no bucket or host has");
    }
    if key.chars().any(|it| it.is_control() || "?#\\".contains(it)) {
        return Some("a character that not every store accepts (?, #, \\ or a control character)");
    }
    if key.len() > KEY_BYTES_MAX {
        return Some("a key of more than 1024 bytes");
    }
    let is_empty_part = |part: &str| part.is_empty() || part == "." || part == "..";
    (!key.is_empty() && key.split('/').any(is_empty_part))
        .then_some("a part between slashes that is empty, `.` or `..`")
}

impl StoreLocation {
    /// The location of another object of the same store.
    pub fn with_key(&self, key: impl Into<String>) -> Self {
        Self { key: key.into(), ..self.clone() }
    }

    /// The location of an object beside this one.
    pub fn with_name(&self, name: &str) -> Self {
        match self.prefix() {
            "" => self.with_key(name),
            prefix => self.with_key(format!("{prefix}/{name}")),
        }
    }

    /// The location of another object whose key has this at its end.
    pub fn with_suffix(&self, suffix: &str) -> Self {
        self.with_key(format!("{}{suffix}", self.key))
    }

    /// The key up to its last slash.
    pub fn prefix(&self) -> &str {
        self.key.rsplit_once('/').map_or("", |(prefix, _)| prefix)
    }

    /// The key after its last slash.
    pub fn name(&self) -> &str {
        self.key.rsplit_once('/').map_or(&self.key, |(_, name)| name)
    }
}

impl fmt::Display for StoreLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.scheme {
            StoreScheme::S3 => "s3",
            StoreScheme::Web { has_tls: true } => "https",
            StoreScheme::Web { has_tls: false } => "http",
        };
        write!(f, "{scheme}://{}/{}", self.container, self.key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<StoreLocation, LocationError> {
        text.parse()
    }

    #[test]
    fn a_location_is_printed_as_it_was_written() {
        for text in ["s3://vms/web.firn", "s3://vms/a/b/web.firn", "https://h:8/x/web 1.firn"] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
        assert_eq!(parse("s3://vms").unwrap(), parse("s3://vms/").unwrap());
        assert_eq!(parse("s3://vms/a/").unwrap(), parse("s3://vms/a").unwrap());
    }

    #[test]
    fn neighbours_have_the_same_prefix() {
        let location = parse("s3://vms/a/web.firn").unwrap();
        assert_eq!((location.prefix(), location.name()), ("a", "web.firn"));
        assert_eq!(location.with_name("base.firn").to_string(), "s3://vms/a/base.firn");
        assert_eq!(location.with_suffix(".sig").to_string(), "s3://vms/a/web.firn.sig");
        assert_eq!(parse("s3://vms/x").unwrap().with_name("y").to_string(), "s3://vms/y");
    }

    #[test]
    fn texts_that_name_no_object_are_refused() {
        for text in ["web.firn", "ftp://a/b", "s3:/a/b", "s3://", "s3:///key", "gs://a/b", ""] {
            assert!(parse(text).is_err(), "{text}");
        }
        for key in ["a//b", "./a", "a/../b", "a?b", "a#b", "a\\b", "a\nb", &"x".repeat(1025)] {
            assert!(parse(&format!("s3://vms/{key}")).is_err(), "{key}");
        }
        assert!(parse("s3://bu cket/key").is_err());
    }

    #[test]
    fn a_password_is_not_repeated() {
        let error = parse("https://user:topsecret@host/web.firn").unwrap_err();
        assert_eq!(error, LocationError::Credentials);
        assert!(!format!("{error} {error:?}").contains("topsecret"));
    }

    #[test]
    fn locations_and_paths_are_distinguished() {
        assert!(is_location("s3://a/b") && is_location("gs://a/b") && is_location("https://a"));
        assert!(!is_location("web.firn") && !is_location("./s3:/a") && !is_location("x://y"));
    }
}
