//! Backup endpoint: the address of a backup, `unix:PATH`, a socket that only its owner can use.
//!
//! The stream is not encrypted, and the peer that connects determines how a hypervisor is started.
//! So between hosts the socket has to be forwarded by a program that authenticates its peers, such
//! as ssh(1) with `-L PATH:PATH`.

use std::fmt;
use std::fs;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// How long a write may wait for the peer before the connection counts as lost.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// The address of a backup: a socket in the file system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BackupEndpoint(PathBuf);

/// A text that is no address.
#[derive(Debug, Error)]
#[error("{0:?} is no address: give unix:PATH")]
pub struct EndpointError(String);

impl FromStr for BackupEndpoint {
    type Err = EndpointError;

    /// A relative path is made absolute: the supervisor has another current directory.
    fn from_str(words: &str) -> Result<Self, EndpointError> {
        let path = words.strip_prefix("unix:").and_then(|path| std::path::absolute(path).ok());
        path.map(Self).ok_or_else(|| EndpointError(words.to_owned()))
    }
}

impl TryFrom<String> for BackupEndpoint {
    type Error = EndpointError;

    fn try_from(words: String) -> Result<Self, EndpointError> {
        words.parse()
    }
}

impl From<BackupEndpoint> for String {
    fn from(endpoint: BackupEndpoint) -> Self {
        endpoint.to_string()
    }
}

impl fmt::Display for BackupEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unix:{}", self.0.display())
    }
}

impl BackupEndpoint {
    /// Connects to a backup that listens at this address.
    ///
    /// # Errors
    /// If no process listens there, or the one that listens accepts no connection in time.
    pub fn connect(&self) -> io::Result<EpochStream> {
        let connected = connect_within(&self.0, WRITE_TIMEOUT);
        let named = |error| name_timeout(error, "the process that listens has not answered");
        EpochStream::from_socket(connected.map_err(named)?)
    }

    /// Listens at this address. Only the owner can use the socket.
    ///
    /// # Errors
    /// If the socket can't be created.
    pub fn listen(&self) -> io::Result<BackupListener> {
        let listener = bind_private(&self.0)?;
        Ok(BackupListener { listener, path: self.0.clone() })
    }
}

/// A connection that waits for a place in the listener's queue no longer than this (`socket(7)`,
/// `SO_SNDTIMEO`).
fn connect_within(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
    rustix::net::connect(&socket, &address)?;
    Ok(UnixStream::from(socket))
}

/// Binds a socket that only its owner can connect to, at any instant: it gets its name when its mode
/// is set. A socket that is there already is not replaced.
fn bind_private(path: &Path) -> io::Result<UnixListener> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    // A short name: the path of a socket has at most 107 bytes (unix(7)).
    let hidden = path.with_file_name(format!(".{}.{count}", std::process::id()));
    // A process that had this number may have left one.
    let _ = fs::remove_file(&hidden);
    let listener = UnixListener::bind(&hidden)?;
    let placed = fs::set_permissions(&hidden, fs::Permissions::from_mode(0o600))
        .and_then(|()| Ok(renameat_with(CWD, &hidden, CWD, path, RenameFlags::NOREPLACE)?));
    if placed.is_err() {
        let _ = fs::remove_file(&hidden);
    }
    match placed {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            Err(io::ErrorKind::AddrInUse.into())
        }
        placed => placed.map(|()| listener),
    }
}

/// The socket at which a backup waits for its primary. Dropping it removes the socket.
#[derive(Debug)]
pub struct BackupListener {
    listener: UnixListener,
    path: PathBuf,
}

impl BackupListener {
    /// Waits for a connection.
    ///
    /// # Errors
    /// If the system reports an error.
    pub fn accept(&self) -> io::Result<EpochStream> {
        EpochStream::from_socket(self.listener.accept()?.0)
    }
}

impl AsFd for BackupListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for BackupListener {
    fn drop(&mut self) {
        // Another process may have removed it.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// A connection between a primary and its backup.
#[derive(Debug)]
pub struct EpochStream(UnixStream);

impl EpochStream {
    fn from_socket(stream: UnixStream) -> io::Result<Self> {
        stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
        Ok(Self(stream))
    }

    /// A pair of connected streams.
    ///
    /// # Errors
    /// If the system reports an error.
    pub fn connected_pair() -> io::Result<(Self, Self)> {
        let (one, other) = UnixStream::pair()?;
        Ok((Self::from_socket(one)?, Self::from_socket(other)?))
    }

    /// Another handle of the same connection.
    ///
    /// # Errors
    /// If the system reports an error.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Sets how long a read may wait; `None` for no limit.
    ///
    /// # Errors
    /// If the system reports an error.
    pub fn set_read_timeout(&self, patience: Option<Duration>) -> io::Result<()> {
        self.0.set_read_timeout(patience)
    }

    /// Ends reading for all handles. Bytes that have arrived can still be read.
    pub fn stop_reading(&self) {
        // The peer may have closed the connection.
        let _ = self.0.shutdown(Shutdown::Read);
    }

    /// Sets how long each further write may wait.
    ///
    /// # Errors
    /// If the system reports an error.
    pub fn set_write_timeout(&self, patience: Duration) -> io::Result<()> {
        self.0.set_write_timeout(Some(patience))
    }

    /// Closes the connection, for all of its handles. Threads that wait for it wake up.
    pub fn close(&self) {
        // The peer may have closed it.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

impl Read for EpochStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into).map_err(|error| name_timeout(error, "the peer has sent no data"))
    }
}

impl Write for EpochStream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.0.write(from).map_err(|error| name_timeout(error, "the peer has accepted no data"))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// The kernel reports a socket's timeout as EAGAIN (`socket(7)`, `SO_RCVTIMEO`), whose text names no
/// timeout.
fn name_timeout(error: io::Error, text: &str) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => io::Error::new(
            io::ErrorKind::TimedOut,
            format!("{text} for as long as this connection may wait"),
        ),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_printed() {
        let words = "unix:/run/x.sock";
        assert_eq!(words.parse::<BackupEndpoint>().unwrap().to_string(), words);
        for words in ["", "unix:", "tcp:backup:7000", "http://x", "/run/x.sock"] {
            assert!(words.parse::<BackupEndpoint>().is_err(), "{words}");
        }
    }

    #[test]
    fn a_socket_goes_with_its_listener() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("standby");
        let endpoint = BackupEndpoint(path.clone());
        let listener = endpoint.listen().unwrap();
        let mut primary = endpoint.connect().unwrap();
        let mut backup = listener.accept().unwrap();
        primary.write_all(b"x").unwrap();
        let mut byte = [0];
        backup.read_exact(&mut byte).unwrap();
        drop(listener);
        assert!(byte == *b"x" && !path.exists());
    }

    #[test]
    fn a_listener_that_accepts_nothing_is_an_error_in_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("standby");
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let wait = Duration::from_millis(50);
        let connected: Vec<_> = (0..3).map(|_| connect_within(&path, wait)).collect();
        let kind = connected.last().unwrap().as_ref().unwrap_err().kind();
        assert_eq!(kind, io::ErrorKind::WouldBlock);
    }

    #[test]
    fn a_silent_peer_is_named_as_such() {
        let (mut one, _other) = EpochStream::connected_pair().unwrap();
        one.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        one.set_write_timeout(Duration::from_millis(10)).unwrap();
        let read = one.read(&mut [0]).unwrap_err().to_string();
        assert!(read.contains("sent no data"), "{read}");
        let written = one.write_all(&vec![0; 64 << 20]).unwrap_err().to_string();
        assert!(written.contains("accepted no data"), "{written}");
    }
}
