//! Memcached server: the build from `examples/memcached`, as a child process.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use super::client::CacheConnection;
use crate::guest::free_tcp_port;
use crate::lab::{Lab, wait_for};

/// How long memcached may take until its first reply.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Size of its cache.
const CACHE_MIB: u32 = 64;

/// How memcached stores its items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CacheStorage {
    /// In memory only.
    Plain,
    /// In a file, which memcached reuses after an orderly end.
    Restartable,
    /// In a critical data area.
    Firn,
}

impl CacheStorage {
    pub(super) const ALL: [Self; 3] = [Self::Plain, Self::Restartable, Self::Firn];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Plain => "memcached",
            Self::Restartable => "memcached -e FILE",
            Self::Firn => "memcached -e firn:LOG",
        }
    }

    fn storage_option(self, lab: &Lab) -> Option<String> {
        match self {
            Self::Plain => None,
            Self::Restartable => Some(lab.file("cache").display().to_string()),
            Self::Firn => Some(format!("firn:{}", lab.file("cache.log").display())),
        }
    }
}

/// The memcached program, and the directory of the library that it loads.
pub(super) struct MemcachedProgram {
    path: PathBuf,
    libraries: PathBuf,
}

/// Memcached loads the library by its SONAME, which the file does not have where it is built.
fn link_soname(libraries: &Path) -> Result<()> {
    let link = libraries.join("libfirnapp.so.1");
    match symlink("libfirnapp.so", &link) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(error).with_context(|| format!("cannot make the link {}", link.display()))
        }
        _ => Ok(()),
    }
}

impl MemcachedProgram {
    pub(super) fn build_example() -> Result<Self> {
        let libraries = std::env::current_exe()?.parent().context("no folder")?.to_owned();
        ensure!(
            libraries.join("libfirnapp.so").exists(),
            "{} has no libfirnapp.so; build it: cargo build --release --workspace",
            libraries.display()
        );
        link_soname(&libraries)?;
        let script =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../examples/memcached/build");
        let output = Command::new(&script)
            .arg(&libraries)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .with_context(|| format!("cannot start {}", script.display()))?;
        ensure!(output.status.success(), "{} failed ({})", script.display(), output.status);
        let path = String::from_utf8_lossy(&output.stdout).trim().into();
        Ok(Self { path, libraries })
    }

    pub(super) fn start_server(&self, lab: &Lab, system: CacheStorage) -> Result<MemcachedServer> {
        let port = free_tcp_port()?;
        let mut command = Command::new(&self.path);
        // One thread and nothing in the background, for all rows.
        command
            .env("LD_LIBRARY_PATH", &self.libraries)
            .args([
                "-l",
                "127.0.0.1",
                "-p",
                &port.to_string(),
                "-m",
                &CACHE_MIB.to_string(),
                "-t",
                "1",
            ])
            .args(["-o", "no_lru_maintainer,no_lru_crawler,no_slab_reassign,no_hashexpand"])
            .args(
                system
                    .storage_option(lab)
                    .map(|place| ["-e".to_owned(), place])
                    .into_iter()
                    .flatten(),
            )
            .stdin(Stdio::null())
            .stderr(std::fs::File::create(lab.file("memcached.err"))?);
        if rustix::process::geteuid().is_root() {
            command.args(["-u", "root"]);
        }
        let child =
            command.spawn().with_context(|| format!("cannot start {}", self.path.display()))?;
        let (errors, since) = (lab.file("memcached.err"), Instant::now());
        Ok(MemcachedServer { child, address: (Ipv4Addr::LOCALHOST, port).into(), since, errors })
    }
}

/// A running memcached; dropping it kills the process.
pub(super) struct MemcachedServer {
    child: Child,
    address: SocketAddr,
    since: Instant,
    errors: PathBuf,
}

impl MemcachedServer {
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for the first reply, and returns the time since the start.
    pub(super) fn wait_for_reply(&mut self) -> Result<Duration> {
        let answered = wait_for("an answer of memcached", START_TIMEOUT, || {
            self.check_running()?;
            let asked = TcpStream::connect(self.address).map(|stream| {
                let mut connection = CacheConnection::new(stream)?;
                connection.send_request("version\r\n")
            });
            Ok(matches!(asked, Ok(Ok(_))).then(|| self.since.elapsed()))
        })?;
        Ok(answered)
    }

    /// Kills memcached at once. Fails if it has already ended by itself.
    pub(super) fn kill(mut self) -> Result<()> {
        self.check_running()
    }

    fn check_running(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            let errors = std::fs::read_to_string(&self.errors).unwrap_or_default();
            bail!("memcached ended ({status}): {}", errors.trim());
        }
        Ok(())
    }
}

impl Drop for MemcachedServer {
    fn drop(&mut self) {
        // Sends SIGKILL, and reaps a process that has already ended as well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
