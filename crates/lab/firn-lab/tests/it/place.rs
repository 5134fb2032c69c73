//! Test place of one guest: its sockets, its ports, and the lock for one guest at a time.

use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use firn_lab::guest::{QemuArgs, free_tcp_port};

/// How long a guest may take to boot on a busy machine.
pub const BOOT: Duration = Duration::from_secs(180);

/// Lock for one guest at a time: one is enough load for two cores.
static TURN: Mutex<()> = Mutex::new(());

/// A directory for sockets, and ports of the host that are forwarded to the guest.
pub struct GuestPlace {
    directory: tempfile::TempDir,
    pub redis: SocketAddr,
    pub echo: SocketAddr,
    pub web: SocketAddr,
    _turn: MutexGuard<'static, ()>,
}

impl GuestPlace {
    pub fn new() -> Self {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let port = || SocketAddr::from(([127, 0, 0, 1], free_tcp_port().unwrap()));
        let directory = tempfile::tempdir().unwrap();
        Self { directory, redis: port(), echo: port(), web: port(), _turn }
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Adds the agent's port and a monitor.
    pub fn common(&self, args: QemuArgs) -> QemuArgs {
        let monitor = format!("unix:{},server=on,wait=off", self.at("monitor").display());
        args.with_agent_socket(&self.at("agent")).add_args(&["-monitor", &monitor])
    }

    /// Sends one line to QEMU's monitor; returns the reply.
    pub fn monitor(&self, line: &str) -> String {
        let mut stream = UnixStream::connect(self.at("monitor")).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        stream.write_all(format!("{line}\n").as_bytes()).unwrap();
        let mut said = Vec::new();
        let mut chunk = [0; 4096];
        while let Ok(bytes @ 1..) = stream.read(&mut chunk) {
            said.extend_from_slice(&chunk[..bytes]);
        }
        String::from_utf8_lossy(&said).into_owned()
    }
}
