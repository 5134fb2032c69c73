//! Where a backup listens: `unix:PATH`, a socket for its owner alone.
//!
//! Nothing is encrypted, and whoever connects says how a hypervisor is to be started: between hosts the socket has to be carried
//! by something that knows who is there, such as ssh(1) with `-L PATH:PATH`.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// How long a write may wait for the other side before the connection counts as lost.
const WRITE_WAIT: Duration = Duration::from_secs(10);

/// An address: a socket in the file system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Endpoint(PathBuf);

/// Words that are no address.
#[derive(Debug, Error)]
#[error("{0:?} is no address: give unix:PATH")]
pub struct EndpointError(String);

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(words: &str) -> Result<Self, EndpointError> {
        match words.split_once(':') {
            Some(("unix", path)) if !path.is_empty() => Ok(Self(path.into())),
            _ => Err(EndpointError(words.to_owned())),
        }
    }
}

impl TryFrom<String> for Endpoint {
    type Error = EndpointError;

    fn try_from(words: String) -> Result<Self, EndpointError> {
        words.parse()
    }
}

impl From<Endpoint> for String {
    fn from(endpoint: Endpoint) -> Self {
        endpoint.to_string()
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unix:{}", self.0.display())
    }
}

impl Endpoint {
    /// Connects to a backup that listens there.
    ///
    /// # Errors
    /// If nobody does.
    pub fn connect(&self) -> io::Result<Stream> {
        Stream::ready(UnixStream::connect(&self.0)?)
    }

    /// Listens there. The socket is for its owner alone.
    ///
    /// # Errors
    /// If the address can't be had.
    pub fn listen(&self) -> io::Result<Listener> {
        let listener = UnixListener::bind(&self.0)?;
        std::fs::set_permissions(&self.0, std::fs::Permissions::from_mode(0o600))?;
        Ok(Listener { listener, path: self.0.clone() })
    }
}

/// Where a backup waits for its primary. The socket goes with it.
#[derive(Debug)]
pub struct Listener {
    listener: UnixListener,
    path: PathBuf,
}

impl Listener {
    /// Waits for a connection.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn accept(&self) -> io::Result<Stream> {
        Stream::ready(self.listener.accept()?.0)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Somebody else may have removed it.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// A connection between a primary and its backup.
#[derive(Debug)]
pub struct Stream(UnixStream);

impl Stream {
    fn ready(stream: UnixStream) -> io::Result<Self> {
        stream.set_write_timeout(Some(WRITE_WAIT))?;
        Ok(Self(stream))
    }

    /// A pair that is connected.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (one, other) = UnixStream::pair()?;
        Ok((Self::ready(one)?, Self::ready(other)?))
    }

    /// Another handle of the same connection.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// How long reading may wait; `None` is for ever.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn set_patience(&self, patience: Option<Duration>) -> io::Result<()> {
        self.0.set_read_timeout(patience)
    }

    /// Nothing more is read from it, by any of its handles, but for what has come.
    pub fn hear_no_more(&self) {
        // The other side may have ended it.
        let _ = self.0.shutdown(Shutdown::Read);
    }

    /// How long writing may wait, from now on.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn set_write_patience(&self, patience: Duration) -> io::Result<()> {
        self.0.set_write_timeout(Some(patience))
    }

    /// Ends the connection, for all of its handles. Whoever waits for it goes on.
    pub fn close(&self) {
        // The other side may have done so.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl Write for Stream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.0.write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_printed() {
        let words = "unix:/run/x.sock";
        assert_eq!(words.parse::<Endpoint>().unwrap().to_string(), words);
        for words in ["", "unix:", "tcp:backup:7000", "http://x", "/run/x.sock"] {
            assert!(words.parse::<Endpoint>().is_err(), "{words}");
        }
    }

    #[test]
    fn a_socket_goes_with_its_listener() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("standby");
        let endpoint = Endpoint(path.clone());
        let listener = endpoint.listen().unwrap();
        let mut primary = endpoint.connect().unwrap();
        let mut backup = listener.accept().unwrap();
        primary.write_all(b"x").unwrap();
        let mut byte = [0];
        backup.read_exact(&mut byte).unwrap();
        drop(listener);
        assert!(byte == *b"x" && !path.exists());
    }
}
