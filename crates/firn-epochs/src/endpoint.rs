//! Where a backup listens: `unix:PATH`, or `tcp:HOST:PORT` for a network that is trusted, for nothing is encrypted.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
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

/// An address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Endpoint {
    /// A socket in the file system.
    Unix(PathBuf),
    /// A host and a port.
    Tcp(String),
}

/// Words that are no address.
#[derive(Debug, Error)]
#[error("{0:?} is no address: give unix:PATH or tcp:HOST:PORT")]
pub struct EndpointError(String);

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(words: &str) -> Result<Self, EndpointError> {
        match words.split_once(':') {
            Some(("unix", path)) if !path.is_empty() => Ok(Self::Unix(path.into())),
            Some(("tcp", address)) if address.contains(':') => Ok(Self::Tcp(address.to_owned())),
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
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

impl Endpoint {
    /// Connects to a backup that listens there.
    ///
    /// # Errors
    /// If nobody does.
    pub fn connect(&self) -> io::Result<Stream> {
        Stream::ready(match self {
            Self::Unix(path) => Stream::Unix(UnixStream::connect(path)?),
            Self::Tcp(address) => Stream::Tcp(TcpStream::connect(address)?),
        })
    }

    /// Listens there. A socket in the file system is for its owner alone.
    ///
    /// # Errors
    /// If the address can't be had.
    pub fn listen(&self) -> io::Result<Listener> {
        match self {
            Self::Unix(path) => {
                let listener = UnixListener::bind(path)?;
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
                Ok(Listener::Unix(listener, path.clone()))
            }
            Self::Tcp(address) => TcpListener::bind(address).map(Listener::Tcp),
        }
    }
}

/// Where a backup waits for its primary. A socket in the file system goes with it.
#[derive(Debug)]
pub enum Listener {
    /// Of [`Endpoint::Unix`].
    Unix(UnixListener, PathBuf),
    /// Of [`Endpoint::Tcp`].
    Tcp(TcpListener),
}

impl Listener {
    /// Waits for a connection.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn accept(&self) -> io::Result<Stream> {
        Stream::ready(match self {
            Self::Unix(listener, _) => Stream::Unix(listener.accept()?.0),
            Self::Tcp(listener) => Stream::Tcp(listener.accept()?.0),
        })
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(listener, _) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            // Somebody else may have removed it.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// A connection between a primary and its backup.
#[derive(Debug)]
pub enum Stream {
    /// On this host.
    Unix(UnixStream),
    /// Between hosts.
    Tcp(TcpStream),
}

impl Stream {
    fn ready(stream: Self) -> io::Result<Self> {
        match &stream {
            Self::Unix(unix) => unix.set_write_timeout(Some(WRITE_WAIT))?,
            Self::Tcp(tcp) => {
                tcp.set_write_timeout(Some(WRITE_WAIT))?;
                tcp.set_nodelay(true)?;
            }
        }
        Ok(stream)
    }

    /// A pair that is connected.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (one, other) = UnixStream::pair()?;
        Ok((Self::ready(Self::Unix(one))?, Self::ready(Self::Unix(other))?))
    }

    /// Another handle of the same connection.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Unix(stream) => Self::Unix(stream.try_clone()?),
            Self::Tcp(stream) => Self::Tcp(stream.try_clone()?),
        })
    }

    /// Ends the connection, for all of its handles. Whoever waits for it goes on.
    pub fn close(&self) {
        // The other side may have done so.
        let _ = match self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
            Self::Tcp(stream) => stream.shutdown(Shutdown::Both),
        };
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read(into),
            Self::Tcp(stream) => stream.read(into),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.write(from),
            Self::Tcp(stream) => stream.write(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.flush(),
            Self::Tcp(stream) => stream.flush(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_printed() {
        for words in ["unix:/run/x.sock", "tcp:backup:7000", "tcp:[::1]:7000"] {
            assert_eq!(words.parse::<Endpoint>().unwrap().to_string(), words);
        }
        for words in ["", "unix:", "tcp:backup", "http://x", "/run/x.sock"] {
            assert!(words.parse::<Endpoint>().is_err(), "{words}");
        }
    }

    #[test]
    fn a_socket_goes_with_its_listener() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("standby");
        let endpoint = Endpoint::Unix(path.clone());
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
