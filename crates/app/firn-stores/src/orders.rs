//! Orders of the supervisor, by a socket: one connection at a time. When the connection ends, all
//! recording ends.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use firn_calls::PluginOrder;
use nix::sys::signal::SigSet;

use crate::recorder;

/// The maximum size of an order in bytes.
const ORDER_BYTES_MAX: usize = 256 << 20;

/// The time to wait after no connection could be accepted.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The plugin's arguments on QEMU's command line.
#[derive(Debug)]
pub(crate) struct PluginPaths {
    /// The file of the call window's memory.
    pub(crate) window: PathBuf,
    /// The socket for orders.
    pub(crate) orders: PathBuf,
}

impl PluginPaths {
    /// Parses the arguments `window=FILE` and `orders=SOCKET`.
    pub(crate) fn parse_arguments<'a>(arguments: impl Iterator<Item = &'a str>) -> Option<Self> {
        let (mut window, mut orders) = (None, None);
        for argument in arguments {
            match argument.split_once('=')? {
                ("window", path) => window = Some(path.into()),
                ("orders", path) => orders = Some(path.into()),
                _ => return None,
            }
        }
        Some(Self { window: window?, orders: orders? })
    }
}

/// Listens for the supervisor, in a thread of the plugin's own that handles none of QEMU's signals.
pub(crate) fn start_listener(paths: PluginPaths) -> io::Result<()> {
    let _ = std::fs::remove_file(&paths.orders);
    let listener = UnixListener::bind(&paths.orders)?;
    let before = SigSet::all().thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_SETMASK)?;
    let thread = thread::Builder::new().name("firn-stores".into());
    let spawned = thread.spawn(move || serve_connections(&listener, &paths.window));
    before.thread_set_mask()?;
    spawned.map(drop)
}

fn serve_connections(listener: &UnixListener, window: &Path) {
    for supervisor in listener.incoming() {
        match supervisor {
            Ok(supervisor) => drop(serve_orders(supervisor, window)),
            // No descriptor may be free now, but later.
            Err(_) => thread::sleep(RETRY_INTERVAL),
        }
        recorder::stop_recording();
    }
}

fn serve_orders(mut supervisor: UnixStream, window: &Path) -> io::Result<()> {
    recorder::open_window(window)?;
    loop {
        if !recorder::carry_out_order(read_order(&mut supervisor)?) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        supervisor.write_all(&[1])?;
    }
}

fn read_order(supervisor: &mut UnixStream) -> io::Result<PluginOrder> {
    let mut len = [0; 4];
    supervisor.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > ORDER_BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; len];
    supervisor.read_exact(&mut bytes)?;
    PluginOrder::from_bytes(&bytes).ok_or_else(|| io::ErrorKind::InvalidData.into())
}
