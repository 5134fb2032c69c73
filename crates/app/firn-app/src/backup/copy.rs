//! Copies the state of a session from a backup server, without becoming its writer.

use std::io;
use std::path::Path;
use std::time::Duration;

use super::error::BackupError;
use super::log::ApplicationLog;
use super::remote::RemoteTarget;
use super::settings::Compression;
use super::tls::TlsIdentity;

/// How long to wait for each reply.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Writes the last state of a session on a backup server to a new log, and returns the number of
/// its last transaction. The session continues undisturbed; the role `read` is enough.
///
/// # Errors
/// If the server cannot be reached or refuses, or there is a log with a state already.
pub fn copy_session(
    address: &str,
    session: &str,
    identity: &TlsIdentity,
    to: &Path,
) -> Result<u64, BackupError> {
    let mut remote =
        RemoteTarget::new(address, session, identity, TIMEOUT, Compression::default())?;
    remote.open(0)?;
    let state = remote.fetch_state()?;
    let (mut log, found) = ApplicationLog::open(to, session)?;
    if found.sequence() > 0 {
        let (path, source) = (to.to_owned(), io::ErrorKind::AlreadyExists.into());
        return Err(BackupError::File { what: "cannot copy a state to", path, source });
    }
    log.replace_by_state(&state, Compression::None)?;
    Ok(state.sequence())
}
