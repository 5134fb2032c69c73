//! Orders of the supervisor, by a socket: one connection at a time. Where it ends, so does all noting.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use firn_calls::Order;
use nix::sys::signal::SigSet;

use crate::noter;

/// Bytes of an order at most.
const ORDER_MAX: usize = 256 << 20;

/// How long it waits where nobody can be listened to.
const REST: Duration = Duration::from_secs(1);

/// What the plugin is told on QEMU's command line.
#[derive(Debug)]
pub(crate) struct Places {
    /// The memory of the device for calls.
    pub(crate) window: PathBuf,
    /// The socket.
    pub(crate) orders: PathBuf,
}

impl Places {
    /// From arguments `window=FILE` and `orders=SOCKET`.
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

/// Listens, in a thread of its own that takes none of QEMU's signals.
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
            // Of descriptors there may be more in a while.
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
