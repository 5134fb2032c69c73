//! Who may use which session of a backup server.
//!
//! ```text
//!   certificate, session ---> a table?  yes: the roles of all entries that fit both, or an error
//!                                       no:  the owner has every role, others get an error
//!   a writer that is not the owner ---> it becomes the owner if there is none, or by `take-over`
//! ```
//!
//! The owner of a session is the key that writes it: its fingerprint is in the file `NAME.owner`
//! beside the log.

mod certificate;
mod owner;
mod table;

pub(super) use certificate::PeerCertificate;
pub(super) use table::SessionTable;

use std::path::Path;

use super::error::BackupError;

/// The rights of a certificate in a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Roles {
    /// Fetch the state.
    pub(super) read: bool,
    /// Commit, and replace the state by one that is not older.
    pub(super) append: bool,
    /// Replace the state by an older one, and write a session that another certificate owns.
    pub(super) take_over: bool,
}

impl Roles {
    const ALL: Self = Self { read: true, append: true, take_over: true };
}

/// The rights of a connection, and whether its certificate is to become the owner of the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SessionAccess {
    pub(super) roles: Roles,
    pub(super) is_new_owner: bool,
}

/// Finds out whether a certificate may read, or write, a session.
pub(super) fn authorize(
    directory: &Path,
    table: Option<&Path>,
    session: &str,
    peer: &PeerCertificate,
    is_writer: bool,
) -> Result<SessionAccess, BackupError> {
    let owner = owner::read_owner(directory, session)?;
    let is_owner = owner.as_deref() == Some(peer.key());
    let refuse = |why: &str| {
        Err(BackupError::Refused(format!(
            "session {session:?}: {why} (this certificate is {peer})"
        )))
    };
    let roles = match table {
        Some(path) => SessionTable::read(path)?.roles_of(session, peer),
        None if is_owner => Roles::ALL,
        None if owner.is_some() => return refuse("it belongs to another certificate"),
        None if !is_writer => return refuse("there is none of this name"),
        None if directory.join(format!("{session}.log")).exists() => {
            return refuse("its log has no owner: a file NAME.owner beside it must name one");
        }
        None => Roles::ALL,
    };
    match is_writer {
        false if !roles.read => refuse("it has no entry with the role read for this certificate"),
        true if !roles.append && !roles.take_over => {
            refuse("it has no entry with the role append for this certificate")
        }
        true if owner.is_some() && !is_owner && !roles.take_over => {
            refuse("another certificate writes it, and this one lacks the role take-over")
        }
        _ => Ok(SessionAccess { roles, is_new_owner: is_writer && !is_owner }),
    }
}

pub(super) use owner::write_owner;
