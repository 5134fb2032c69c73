//! A connection to the cache's server, which is started if it does not run.

use std::io::{self, BufReader, Read as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::net::sockopt::socket_peercred;

use crate::PROGRAM;
use crate::layout::CacheDir;
use crate::messages::{CacheReply, CacheRequest, receive_message, send_message};

/// How long a server that was started may take until it listens.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// The environment variable with fault points of the process, which a server that replaces another
/// one does not get.
const FAULT_VARIABLE: &str = "FIRN_FAULT";

/// A connection to the server.
#[derive(Debug)]
pub struct CacheConnection {
    reader: BufReader<UnixStream>,
}

impl CacheConnection {
    /// Connects to the server of a cache, and starts it first if it does not run. `is_first`: this
    /// process starts it for a user, and not because another server has ended.
    ///
    /// # Errors
    /// If the server can't be started, or is that of another user.
    pub fn open(cache: &CacheDir, is_first: bool) -> io::Result<Self> {
        cache.check_owner().or_else(|error| match error.kind() {
            io::ErrorKind::NotFound if is_first => cache.create(),
            _ => Err(error),
        })?;
        if let Ok(stream) = connect(cache) {
            return Self::from_stream(stream);
        }
        start_server(cache, is_first)?;
        let begun = Instant::now();
        loop {
            match connect(cache) {
                Ok(stream) => return Self::from_stream(stream),
                Err(error) if begun.elapsed() > START_TIMEOUT => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Connects to the server of a cache, if it runs.
    ///
    /// # Errors
    /// If it does not run.
    pub fn to_running(cache: &CacheDir) -> io::Result<Self> {
        cache.check_owner()?;
        Self::from_stream(connect(cache)?)
    }

    fn from_stream(stream: UnixStream) -> io::Result<Self> {
        let peer = socket_peercred(&stream)?.uid;
        if peer != rustix::process::geteuid() {
            let text = "the server of the cache is of another user";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        Ok(Self { reader: BufReader::new(stream) })
    }

    /// Sends a request, and receives its reply. A reply [`CacheReply::Failed`] is an error here.
    ///
    /// # Errors
    /// If the connection fails, or the request does.
    pub fn request(&mut self, request: &CacheRequest) -> io::Result<CacheReply> {
        send_message(self.reader.get_mut(), request)?;
        receive_message(&mut self.reader)
    }

    /// Receives the bytes that follow a reply.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn receive_bytes(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        self.reader.read_exact(bytes)
    }
}

/// A path to a socket has at most 107 bytes, and a path by a descriptor of the directory is short.
fn connect(cache: &CacheDir) -> io::Result<UnixStream> {
    use std::os::fd::AsRawFd as _;
    let directory = std::fs::File::open(cache.path())?;
    let short = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
    UnixStream::connect(short.join("serve.sock"))
}

/// Starts a server, which leaves this process group. Returns when it listens, or another one does.
fn start_server(cache: &CacheDir, is_first: bool) -> io::Result<()> {
    let program = program_beside(&std::env::current_exe()?);
    let mut command = Command::new(&program);
    if !is_first {
        command.env_remove(FAULT_VARIABLE);
    }
    command.arg("serve").arg("--").arg(cache.path()).current_dir("/");
    let output = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).output();
    let output = output.map_err(|error| {
        io::Error::new(error.kind(), format!("cannot run {}: {error}", program.display()))
    })?;
    match output.status.success() {
        true => Ok(()),
        false => {
            let reason = String::from_utf8_lossy(&output.stderr);
            Err(io::Error::other(format!("the server of the cache has failed: {}", reason.trim())))
        }
    }
}

fn program_beside(this: &Path) -> PathBuf {
    this.with_file_name(PROGRAM)
}
