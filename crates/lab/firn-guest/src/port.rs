//! Virtio serial ports: the guest's end of a unix socket on the host.
//!
//! A port outlives its clients. While there is none, reading returns end of file and poll a
//! hang-up; after a restore the hypervisor's socket is a new one and the next client uses the same
//! open port. So end of file means "no client now", never "the end".

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

const SYSFS: &str = "/sys/class/virtio-ports";
/// Interval between checks for a client at the other end. Each check takes some tenths of a
/// millisecond in an emulated guest, and most guests of a test have no client for most of the time.
const CLIENT_CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Intervals between checks for a port: while drivers start, and later.
const PORT_CHECK_INTERVAL: Duration = Duration::from_millis(100);
const LATE_PORT_CHECK_INTERVAL: Duration = Duration::from_secs(30);
/// How long drivers may take to start.
const DRIVERS_LIMIT: Duration = Duration::from_secs(3);

/// The device of the port that the hypervisor calls `name`, if there is one.
pub fn find_port(name: &str) -> Option<PathBuf> {
    let entries = fs::read_dir(SYSFS).ok()?;
    let named = |path: &PathBuf| {
        fs::read_to_string(path.join("name")).is_ok_and(|found| found.trim() == name)
    };
    let port = entries.filter_map(|entry| Some(entry.ok()?.path())).find(named)?;
    Some(PathBuf::from("/dev").join(port.file_name()?))
}

/// Waits until there is a port called `name`. A program that ended instead would be started anew each
/// second, at another address each time; an emulator translates all of it again, and an idle guest
/// keeps a tenth of a processor busy.
pub fn await_port(name: &str) {
    let start = Instant::now();
    while !name.starts_with('/') && find_port(name).is_none() {
        let is_late = start.elapsed() > DRIVERS_LIMIT;
        sleep(if is_late { LATE_PORT_CHECK_INTERVAL } else { PORT_CHECK_INTERVAL });
    }
}

/// Opens the port called `name`, or the path itself where it is one. A port can be open only once.
///
/// `blocking`: whether a write waits while there is no client at the other end.
pub fn open_port(name: &str, blocking: bool) -> Result<File> {
    let path = if name.starts_with('/') { Some(PathBuf::from(name)) } else { find_port(name) };
    let Some(path) = path else { bail!("this guest has no virtio port called {name}") };
    let flags = if blocking { 0 } else { rustix::fs::OFlags::NONBLOCK.bits() as i32 };
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(flags)
        .open(&path)
        .with_context(|| format!("cannot open {}", path.display()))
}

/// Reads lines from a port for ever: see the module documentation on end of file.
pub struct PortLines {
    port: File,
    pending: Vec<u8>,
    bytes_max: usize,
}

impl PortLines {
    /// A reader of lines of at most `bytes_max` bytes; it drops longer ones.
    pub fn new(port: File, bytes_max: usize) -> Self {
        Self { port, pending: Vec::new(), bytes_max }
    }

    /// The next line, without its end. Waits without a limit.
    pub fn next_line(&mut self) -> io::Result<Vec<u8>> {
        loop {
            if let Some(end) = self.pending.iter().position(|&byte| byte == b'\n') {
                let mut line: Vec<u8> = self.pending.drain(..=end).collect();
                line.pop();
                return Ok(line);
            }
            self.fill_pending()?;
        }
    }

    fn fill_pending(&mut self) -> io::Result<()> {
        let mut chunk = [0; 4096];
        match self.port.read(&mut chunk) {
            // The next client starts with a new line.
            Ok(0) => {
                self.pending.clear();
                sleep(CLIENT_CHECK_INTERVAL);
            }
            Ok(bytes) => self.pending.extend_from_slice(&chunk[..bytes]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if self.pending.len() > self.bytes_max {
            self.pending.clear();
        }
        Ok(())
    }
}
