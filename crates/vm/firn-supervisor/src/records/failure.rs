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
use std::io;

use firn_image::ImageError;
use firn_types::make_printable;
use firn_vmm::command_line::CommandLineError;
use serde::{Deserialize, Serialize};
use serde_json::error::Category;

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
    /// The guest gave memory back that a save had not copied yet. Another save may succeed.
    Discarded,
}

impl FailureKind {
    /// Whether the only problem was that the operation could not continue.
    pub fn is_cut_short(self) -> bool {
        matches!(self, Self::Interrupted | Self::Ended)
    }

    /// The exit code of a command that fails this way.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Other | Self::Lost | Self::Discarded => 1,
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

    /// A failure that has an error and its sources as its chain. If no kind is known, an operation
    /// that this user may not do is of the kind [`FailureKind::Host`].
    pub fn from_error(kind: FailureKind, error: &(dyn Error + 'static)) -> Self {
        let chain = std::iter::successors(Some(error), |error| (*error).source())
            .map(plain_message)
            .collect();
        let kind =
            if is_denied(error) && kind == FailureKind::Other { FailureKind::Host } else { kind };
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

impl Failure {
    /// The messages, outermost first, without those that an outer one repeats.
    pub fn distinct_messages(&self) -> Vec<&str> {
        let mut messages: Vec<&str> = Vec::new();
        for message in &self.chain {
            if !messages.iter().any(|outer| outer.contains(message.as_str())) {
                messages.push(message);
            }
        }
        messages
    }

    /// The failure as a program prints it: a line for each message, then the hint.
    pub fn describe(&self, program: &str) -> String {
        let mut text = String::new();
        for (depth, message) in self.distinct_messages().into_iter().enumerate() {
            match depth {
                0 => text += &format!("{program}: {}\n", make_printable(message)),
                _ => text += &format!("  because: {}\n", make_printable(message)),
            }
        }
        if let Some(hint) = &self.hint {
            text += &format!("  try: {}\n", make_printable(hint));
        }
        text
    }
}

/// Whether the system denied permission.
fn is_denied(error: &(dyn Error + 'static)) -> bool {
    std::iter::successors(Some(error), |error| (*error).source())
        .filter_map(|error| error.downcast_ref::<io::Error>())
        .any(|error| error.kind() == io::ErrorKind::PermissionDenied)
}

/// The message of an error in plain words. The numbers and forms of Rust's own errors do not help a
/// user.
fn plain_message(error: &(dyn Error + 'static)) -> String {
    if let Some(error) = error.downcast_ref::<serde_json::Error>() {
        let (line, column) = (error.line(), error.column());
        match error.classify() {
            Category::Syntax => return format!("line {line}, column {column} is not JSON"),
            Category::Eof => return format!("the JSON ends too early, in line {line}"),
            Category::Io | Category::Data => {}
        }
    }
    let text = error.to_string();
    match text.rsplit_once(" (os error ") {
        Some((text, number)) if number.ends_with(')') => text.to_owned(),
        _ => text,
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
    if let Some(text) = find_lock(error) {
        return Failure::new(FailureKind::Refused, text).with_hint(KEY_HINT);
    }
    let kind = match error {
        ImageError::Read { source, .. } if is_denied_by_store(source) => FailureKind::Host,
        ImageError::Io { .. } | ImageError::Read { .. } | ImageError::Write { .. } => {
            FailureKind::Other
        }
        ImageError::Busy { .. } => FailureKind::Busy,
        ImageError::Geometry(_)
        | ImageError::Path { .. }
        | ImageError::Output(_)
        | ImageError::OtherRam { .. }
        | ImageError::MixedSeals { .. }
        | ImageError::ChainTooLong { .. } => FailureKind::Usage,
        _ => FailureKind::Damaged,
    };
    Failure::from_error(kind, error)
}

/// Whether a store denied access, or there are no credentials for it. The system's own errors have a number.
fn is_denied_by_store(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied && error.raw_os_error().is_none()
}

/// The text of the error of an image whose key is missing: the image itself, or one it builds on.
fn find_lock(error: &ImageError) -> Option<String> {
    match error {
        ImageError::Locked { .. } => Some(error.to_string()),
        ImageError::Parent { source, .. } => find_lock(source),
        _ => None,
    }
}

/// What to try if an image's key is missing.
const KEY_HINT: &str = "give its key: --identity FILE, --key-file FILE or --key-command COMMAND";

/// The failure of a command line that Firn can't use.
pub(crate) fn command_line_failure(error: CommandLineError) -> Failure {
    Failure::from_error(FailureKind::Usage, &error).while_doing("this command line can't be used")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_chain_begins_with_the_request_and_ends_with_the_cause() {
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
    fn a_lack_of_permission_has_a_kind() {
        let kind = |error: io::ErrorKind, kind| {
            let done: Result<(), _> = Err(io::Error::from(error));
            done.while_doing_as(kind, "x").unwrap_err().kind
        };
        assert_eq!(kind(io::ErrorKind::PermissionDenied, FailureKind::Other), FailureKind::Host);
        assert_eq!(kind(io::ErrorKind::PermissionDenied, FailureKind::Usage), FailureKind::Usage);
        assert_eq!(kind(io::ErrorKind::NotFound, FailureKind::Other), FailureKind::Other);
    }

    #[test]
    fn no_reason_is_given_twice() {
        let failure = Failure::new(FailureKind::Other, "b").while_doing("a: b").while_doing("a");
        assert_eq!(failure.distinct_messages(), ["a", "a: b"]);
        let text = failure.with_hint("c").describe("firn");
        assert_eq!(text, "firn: a\n  because: a: b\n  try: c\n");
    }

    #[test]
    fn messages_have_no_numbers_and_forms_of_rust() {
        let message = |error: &(dyn Error + 'static)| {
            Failure::from_error(FailureKind::Other, error).chain.remove(0)
        };
        assert_eq!(message(&io::Error::from_raw_os_error(2)), "No such file or directory");
        let json = |text: &str| serde_json::from_str::<u32>(text).unwrap_err();
        assert_eq!(message(&json("1\nx")), "line 2, column 1 is not JSON");
        assert_eq!(message(&json("")), "the JSON ends too early, in line 1");
        assert_eq!(message(&json("{}")), "invalid type: map, expected u32 at line 1 column 0");
    }

    #[test]
    fn exit_codes_stay() {
        use FailureKind::*;
        let codes = [Other, Usage, NoSuchVm, Busy, Refused, Damaged, Host, Interrupted, Ended]
            .map(FailureKind::exit_code);
        assert_eq!(codes, [1, 2, 3, 4, 5, 6, 7, 8, 8]);
    }
}
