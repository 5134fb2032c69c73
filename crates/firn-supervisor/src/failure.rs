//! A failure: an error that is sent from the supervisor to the command that made the request.
//!
//! The command prints the chain once, from the requested operation down to the cause, then the
//! hint, and exits with the code of the [`FailureKind`]. The codes are a promise to scripts:
//!
//! ```text
//!   0  done
//!   1  failed for a reason not listed here (I/O, QEMU refused, ...)
//!   2  the command line is wrong
//!   3  there is no such VM, or it does not run
//!   4  the VM is busy, or the name is taken
//!   5  refused: QEMU's version or a disk is not as the image requires (--force continues)
//!   6  the image is damaged or is no image
//!   7  the host or the permissions lack something (see firn doctor)
//!   8  the operation was cut short: the VM ended, or a checkpoint was cancelled or aborted
//! ```

use std::error::Error;
use std::fmt;

use firn_image::ImageError;
use serde::{Deserialize, Serialize};

/// The kind of a failure, as far as a script may have to distinguish it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureKind {
    /// None of the other kinds.
    Other,
    /// The command line is wrong.
    Usage,
    /// There is no VM of that name, or it does not run.
    NoSuchVm,
    /// The VM's current operation excludes this one, or the name is taken.
    Busy,
    /// The image does not fit this host's QEMU or disks.
    Refused,
    /// The image is damaged.
    Damaged,
    /// The host, or this user's permissions, lack something.
    Host,
    /// The operation was cancelled, or its supervisor died, before it was done.
    Interrupted,
    /// The VM ended before the operation was done.
    Ended,
    /// The connection to a VM's backup ended, without a message about the reason.
    Lost,
}

impl FailureKind {
    /// Whether the only problem was that the operation could not continue.
    pub fn is_cut_short(self) -> bool {
        matches!(self, Self::Interrupted | Self::Ended)
    }

    /// The exit code of a command that fails this way.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Other | Self::Lost => 1,
            Self::Usage => 2,
            Self::NoSuchVm => 3,
            Self::Busy => 4,
            Self::Refused => 5,
            Self::Damaged => 6,
            Self::Host => 7,
            Self::Interrupted | Self::Ended => 8,
        }
    }
}

/// An error, with everything that a user sees of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The kind of the failure.
    pub kind: FailureKind,
    /// The messages, outermost first; never empty.
    pub chain: Vec<String>,
    /// What the user can try.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

impl Failure {
    /// A failure with one message and no cause.
    pub fn new(kind: FailureKind, message: impl Into<String>) -> Self {
        Self { kind, chain: vec![message.into()], hint: None }
    }

    /// A failure that has an error and its sources as its chain.
    pub fn from_error(kind: FailureKind, error: &(dyn Error + 'static)) -> Self {
        let chain = std::iter::successors(Some(error), |error| (*error).source())
            .map(ToString::to_string)
            .collect();
        Self { kind, chain, hint: None }
    }

    /// Puts the operation that failed in front of the chain.
    pub fn while_doing(mut self, what: impl Into<String>) -> Self {
        self.chain.insert(0, what.into());
        self
    }

    /// Adds a hint, unless a function closer to the cause has added one.
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint.get_or_insert_with(|| hint.into());
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.chain.join(": "))
    }
}

impl Error for Failure {}

/// Turns the error of a step into a [`Failure`] that names the step.
pub trait FailureContext<T> {
    /// Names the step; the kind is [`FailureKind::Other`].
    fn while_doing(self, what: impl Into<String>) -> Result<T, Failure>;

    /// Names the step and the kind of failure.
    fn while_doing_as(self, kind: FailureKind, what: impl Into<String>) -> Result<T, Failure>;
}

impl<T, E: Error + 'static> FailureContext<T> for Result<T, E> {
    fn while_doing(self, what: impl Into<String>) -> Result<T, Failure> {
        self.while_doing_as(FailureKind::Other, what)
    }

    fn while_doing_as(self, kind: FailureKind, what: impl Into<String>) -> Result<T, Failure> {
        self.map_err(|error| Failure::from_error(kind, &error).while_doing(what))
    }
}

/// The failure for an error of an image. A file that can't be opened or written is not a damaged
/// image.
pub fn image_failure(error: &ImageError) -> Failure {
    let kind = match error {
        ImageError::Io { .. } | ImageError::Read { .. } | ImageError::Write { .. } => {
            FailureKind::Other
        }
        ImageError::Busy { .. } => FailureKind::Busy,
        ImageError::Geometry(_)
        | ImageError::Path { .. }
        | ImageError::Output(_)
        | ImageError::OtherRam { .. }
        | ImageError::ChainTooLong { .. } => FailureKind::Usage,
        _ => FailureKind::Damaged,
    };
    Failure::from_error(kind, error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[test]
    fn the_chain_runs_from_what_was_asked_to_the_cause() {
        let io: Result<(), _> = Err(io::Error::from(io::ErrorKind::NotFound));
        let failure = io.while_doing("reading web.firn").unwrap_err().while_doing("restoring web");
        assert_eq!(failure.to_string(), "restoring web: reading web.firn: entity not found");
    }

    #[test]
    fn the_hint_nearest_to_the_cause_wins() {
        let failure = Failure::new(FailureKind::Host, "x").with_hint("first").with_hint("second");
        assert_eq!(failure.hint.as_deref(), Some("first"));
    }

    #[test]
    fn exit_codes_stay() {
        use FailureKind::*;
        let codes = [Other, Usage, NoSuchVm, Busy, Refused, Damaged, Host, Interrupted, Ended]
            .map(FailureKind::exit_code);
        assert_eq!(codes, [1, 2, 3, 4, 5, 6, 7, 8, 8]);
    }
}
