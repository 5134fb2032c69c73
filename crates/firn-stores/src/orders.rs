//! Orders of the supervisor, by a socket: one connection at a time. When the connection ends, all
//! noting ends.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use firn_calls::Order;
use nix::sys::signal::SigSet;

use crate::noter;

/// The maximum size of an order in bytes.
const ORDER_MAX: usize = 256 << 20;

/// The time to wait after no connection could be accepted.
const REST: Duration = Duration::from_secs(1);

/// The plugin's arguments on QEMU's command line.
#[derive(Debug)]
pub(crate) struct Places {
    /// The file of the call window's memory.
    pub(crate) window: PathBuf,
    /// The socket for orders.
    pub(crate) orders: PathBuf,
}

impl Places {
    /// Parses the arguments `window=FILE` and `orders=SOCKET`.
    pub(crate) fn parse<'a>(arguments: impl Iterator<Item = &'a str>) -> Option<Self> {
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
pub(crate) fn listen(places: Places) -> io::Result<()> {
    let _ = std::fs::remove_file(&places.orders);
    let listener = UnixListener::bind(&places.orders)?;
    let before = SigSet::all().thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_SETMASK)?;
    let thread = thread::Builder::new().name("firn-stores".into());
    let spawned = thread.spawn(move || serve(&listener, &places.window));
    before.thread_set_mask()?;
    spawned.map(drop)
}

fn serve(listener: &UnixListener, window: &Path) {
    for supervisor in listener.incoming() {
        match supervisor {
            Ok(supervisor) => drop(obey(supervisor, window)),
            // No descriptor may be free now, but later.
            Err(_) => thread::sleep(REST),
        }
        noter::end();
    }
}

fn obey(mut supervisor: UnixStream, window: &Path) -> io::Result<()> {
    noter::begin(window)?;
    loop {
        if !noter::carry_out(order(&mut supervisor)?) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        supervisor.write_all(&[1])?;
    }
}

fn order(supervisor: &mut UnixStream) -> io::Result<Order> {
    let mut len = [0; 4];
    supervisor.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > ORDER_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; len];
    supervisor.read_exact(&mut bytes)?;
    Order::from_bytes(&bytes).ok_or_else(|| io::ErrorKind::InvalidData.into())
}
