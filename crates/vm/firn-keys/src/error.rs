//! Why a key can't be wrapped or unwrapped.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why a key can't be wrapped or unwrapped.
#[derive(Debug, Error)]
pub enum KeyError {
    /// A file of keys can't be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// Other users can read a file that has a secret.
    #[error("other users can access {path}, which has a secret key: `chmod 600` it")]
    Exposed {
        /// The file.
        path: PathBuf,
    },
    /// A line is neither a comment nor a key.
    #[error("line {line} of {path} is not {expected}")]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// What is expected there.
        expected: &'static str,
    },
    /// A file has no key at all.
    #[error("there is no {expected} in {path}")]
    Empty {
        /// The file.
        path: PathBuf,
        /// What is expected there.
        expected: &'static str,
    },
    /// A recipient is not one of age.
    #[error("{text:?} is not an age recipient (age1...): {problem}")]
    Recipient {
        /// What the user gave.
        text: String,
        /// The reason.
        problem: &'static str,
    },
    /// A file is not a key file.
    #[error(
        "{path} is not a key file: it should have 64 hexadecimal digits, as `openssl rand -hex 32` prints them"
    )]
    NoKeyFile {
        /// The file.
        path: PathBuf,
    },
    /// The command can't be started, or its output can't be read.
    #[error("cannot run the key command `{command}`")]
    Run {
        /// The command.
        command: String,
        /// The error of the system.
        source: io::Error,
    },
    /// The command has failed.
    #[error("the key command `{command} {action}` failed ({status}){output}")]
    Failed {
        /// The command.
        command: String,
        /// `wrap` or `unwrap`.
        action: &'static str,
        /// How it ended.
        status: std::process::ExitStatus,
        /// The end of what it wrote to standard error.
        output: String,
    },
    /// The command has printed something else.
    #[error(
        "the key command `{command} {action}` printed {found} bytes, and {expected} are expected"
    )]
    Output {
        /// The command.
        command: String,
        /// `wrap` or `unwrap`.
        action: &'static str,
        /// The bytes it has printed.
        found: usize,
        /// The bytes that are expected.
        expected: &'static str,
    },
    /// Encryption failed.
    #[error("the key can't be wrapped: {0}")]
    Wrap(String),
    /// The wrapped key was changed, or is of another kind.
    #[error("the wrapped key can't be unwrapped by {source_name}: {problem}")]
    Unwrap {
        /// The source of the key.
        source_name: String,
        /// The reason.
        problem: String,
    },
    /// The system has no random numbers.
    #[error("there are no random numbers")]
    Random(#[from] io::Error),
}

impl KeyError {
    /// The error with its causes, in one line.
    pub fn describe(&self) -> String {
        let causes = std::iter::successors(std::error::Error::source(self), |it| it.source());
        causes.fold(self.to_string(), |text, cause| format!("{text}: {cause}"))
    }
}
