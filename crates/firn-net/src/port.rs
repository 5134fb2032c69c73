//! A card, its gate and its uplink, and the thread that carries frames between them.
//!
//! ```text
//!                      .----------------------- poll -----------------------.
//!   card's socket -----+--> Gate --(leaving)--> uplink      no uplink: lost  |
//!                 <----+------- frames <------- uplink                       |
//!   eventfd -----------'    cut, committed, open: from other threads         |
//! ```
//!
//! Whoever reads the card's socket has the gate locked until what was read is in it: so frames keep their order, and each is in the
//! epoch in which it was read. A cut reads the socket by itself, while the VM stands still.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use firn_cluster::Epoch;
use firn_cluster::output::Flow;
use firn_cluster::switch::FRAME_BYTES_MAX;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::gate::{Gate, Held};
use crate::lease::Lease;
use crate::uplink::Uplink;

/// Most bytes of frames that a card's gate holds: a quarter of a second at a gigabit a second.
pub const BYTES_MAX: usize = 32 << 20;
/// Frames read from the card while the gate is locked.
const BATCH: usize = 32;
/// How often an uplink that is not there is tried, and a lease that is over looked at.
const RETRY: Duration = Duration::from_millis(100);

/// What there is to say about a card.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Now {
    /// Somebody is at the uplink.
    pub is_connected: bool,
    /// Frames leave as they come.
    pub is_open: bool,
    /// It needs a lease, and that is over: nothing leaves.
    pub waits_for_lease: bool,
    /// What is held.
    pub held: Held,
    /// How many frames have left.
    pub left: u64,
    /// How many have come.
    pub came: u64,
    /// From the VM to the uplink, of the newest thousand frames since it was opened or closed.
    pub delays: Vec<Duration>,
}

/// A pair of sockets: the first is for QEMU, the second is read here. QEMU is to have both open.
///
/// # Errors
/// If the system has no more.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (theirs, ours) = UnixDatagram::pair()?;
    Ok((theirs.into(), ours.into()))
}

/// A card that frames pass through. Ends when it is dropped.
#[derive(Debug)]
pub struct Port {
    shared: Arc<Shared>,
    relay: Option<JoinHandle<()>>,
}

impl Port {
    /// Begins to carry frames between a card and its uplink, which need not be there yet. `first` is a connection to it. Frames leave
    /// only once the port is [plugged in](Self::plug).
    ///
    /// # Errors
    /// If the system has no more descriptors or threads.
    pub fn open(
        card: OwnedFd,
        uplink: &Path,
        first: Option<Uplink>,
        is_open: bool,
    ) -> io::Result<Self> {
        let card = UnixDatagram::from(card);
        card.set_nonblocking(true)?;
        let output =
            Output { gate: Gate::new(BYTES_MAX, is_open), buffer: vec![0; FRAME_BYTES_MAX] };
        let shared = Arc::new(Shared {
            card,
            uplink: uplink.to_owned(),
            output: Mutex::new(output),
            lease: Mutex::default(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            is_plugged: AtomicBool::new(false),
            is_connected: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            came: AtomicU64::new(0),
            since: Instant::now(),
        });
        let (tried, inward) = (None, VecDeque::new());
        let relay = Relay { shared: Arc::clone(&shared), uplink: first, tried, inward };
        let relay = thread::Builder::new().name("card".into()).spawn(move || relay.run())?;
        Ok(Self { shared, relay: Some(relay) })
    }

    /// Connects to the uplink, now or when somebody is there.
    pub fn plug(&self) {
        self.shared.is_plugged.store(true, Ordering::Relaxed);
        self.shared.wake();
    }

    /// A protection begins: see [`Gate::begin`].
    pub fn begin(&self) {
        self.shared.output().gate.begin();
    }

    /// The VM is about to be stopped: its socket is empty when this returns, and kept so, until it goes on. See [`Gate::flow`].
    pub fn stopping(&self) {
        let mut output = self.shared.output();
        output.gate.stopping(true);
        while self.shared.take(&mut output) {}
        drop(output);
        self.shared.wake();
    }

    /// The VM was not stopped, or goes on.
    pub fn goes_on(&self) {
        self.shared.output().gate.stopping(false);
    }

    /// The VM stands still at the end of an epoch: see [`Gate::cut`].
    pub fn cut(&self, epoch: Epoch) {
        let mut output = self.shared.output();
        while self.shared.take(&mut output) {}
        // For tests that want to see what happens without.
        if firn_fault::io("net.hold").is_ok() {
            output.gate.cut(epoch);
        }
        drop(output);
        // What was read just now may leave at once, if the gate was open until now.
        self.shared.wake();
    }

    /// Nothing undoes an epoch any more: see [`Gate::committed`].
    pub fn committed(&self, epoch: Epoch) {
        self.shared.output().gate.committed(epoch);
        self.shared.wake();
    }

    /// Lets out what is held, and what comes: see [`Gate::open`].
    pub fn let_out(&self) {
        self.shared.output().gate.open();
        self.shared.wake();
    }

    /// From now on frames leave only while that lease is held, or need none.
    pub fn obey(&self, lease: Option<Lease>) {
        *self.shared.lease() = lease;
        self.shared.wake();
    }

    /// Whether frames leave as they come.
    pub fn is_open(&self) -> bool {
        self.shared.output().gate.is_open()
    }

    /// What there is to say about it now.
    pub fn now(&self) -> Now {
        let gate = &self.shared.output().gate;
        Now {
            is_connected: self.shared.is_connected.load(Ordering::Relaxed),
            is_open: gate.is_open(),
            waits_for_lease: !self.shared.may_send(),
            held: gate.held(),
            left: gate.left(),
            came: self.shared.came.load(Ordering::Relaxed),
            delays: gate.delays().collect(),
        }
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        self.shared.wake();
        if let Some(relay) = self.relay.take() {
            // One that panicked has said so.
            let _ = relay.join();
        }
    }
}

#[derive(Debug)]
struct Output {
    gate: Gate,
    buffer: Vec<u8>,
}

/// What other threads reach.
#[derive(Debug)]
struct Shared {
    card: UnixDatagram,
    uplink: PathBuf,
    output: Mutex<Output>,
    lease: Mutex<Option<Lease>>,
    wake: OwnedFd,
    is_plugged: AtomicBool,
    is_connected: AtomicBool,
    is_over: AtomicBool,
    came: AtomicU64,
    since: Instant,
}

impl Shared {
    fn output(&self) -> MutexGuard<'_, Output> {
        self.output.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lease(&self) -> MutexGuard<'_, Option<Lease>> {
        self.lease.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a frame may leave now, as far as the lease is concerned.
    fn may_send(&self) -> bool {
        self.lease().as_ref().is_none_or(Lease::is_held)
    }

    /// Whether frames were read from the card's socket, of which there may be more. None are at the bound.
    fn take(&self, output: &mut Output) -> bool {
        let Output { gate, buffer } = output;
        for _ in 0..BATCH {
            if gate.flow() == Flow::Stop {
                return false;
            }
            match self.card.recv(buffer) {
                Ok(bytes) => gate.sent(&buffer[..bytes], self.since.elapsed()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        true
    }

    /// Has the thread look at everything anew. A counter that is full wakes as well.
    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}

/// The thread.
struct Relay {
    shared: Arc<Shared>,
    uplink: Option<Uplink>,
    /// When it was tried to connect last.
    tried: Option<Instant>,
    /// Frames for the VM.
    inward: VecDeque<Vec<u8>>,
}

impl Relay {
    fn run(mut self) {
        while !self.shared.is_over.load(Ordering::Relaxed) {
            self.connect();
            if let Err(error) = self.wait() {
                tracing::warn!("waiting for frames: {error}");
                thread::sleep(RETRY);
            }
            let mut output = self.shared.output();
            self.shared.take(&mut output);
            drop(output);
            let carried = self.outward().and_then(|()| self.inward());
            if let Err(error) = carried {
                tracing::warn!("the uplink {} is lost: {error}", self.shared.uplink.display());
                self.uplink = None;
            }
        }
    }

    fn connect(&mut self) {
        let is_plugged = self.shared.is_plugged.load(Ordering::Relaxed);
        let is_due = self.tried.is_none_or(|tried| tried.elapsed() >= RETRY);
        if self.uplink.is_none() && is_plugged && is_due {
            self.tried = Some(Instant::now());
            self.uplink = Uplink::connect(&self.shared.uplink).ok();
        }
        let is_connected = self.uplink.is_some() && is_plugged;
        let was_connected = self.shared.is_connected.swap(is_connected, Ordering::Relaxed);
        if is_connected && !was_connected {
            tracing::info!("connected to the uplink {}", self.shared.uplink.display());
        }
    }

    /// What is waited for at the card and at the uplink. What nothing can be done about now isn't looked at.
    fn awaited(&self) -> (PollFlags, PollFlags) {
        let gate = &self.shared.output().gate;
        let mut card = PollFlags::empty();
        card.set(PollFlags::IN, gate.flow() == Flow::Go);
        card.set(PollFlags::OUT, !self.inward.is_empty());
        let mut outside = PollFlags::empty();
        outside.set(PollFlags::IN, self.inward.is_empty());
        outside.set(PollFlags::OUT, gate.next().is_some() && self.shared.may_send());
        (card, outside)
    }

    /// Nobody says when a lease is held again.
    fn looks_again(&self, is_plugged: bool) -> bool {
        let waits = || self.shared.output().gate.next().is_some() && !self.shared.may_send();
        is_plugged && (self.uplink.is_none() || waits())
    }

    /// Waits until there is something to do.
    fn wait(&self) -> io::Result<()> {
        let is_plugged = self.shared.is_plugged.load(Ordering::Relaxed);
        let (card, outside) = self.awaited();
        let mut all = vec![PollFd::new(&self.shared.wake, PollFlags::IN)];
        if !card.is_empty() {
            all.push(PollFd::new(&self.shared.card, card));
        }
        if let Some(uplink) = self.uplink.as_ref().filter(|_| is_plugged && !outside.is_empty()) {
            all.push(PollFd::from_borrowed_fd(uplink.as_fd(), outside));
        }
        let retry = Timespec { tv_sec: 0, tv_nsec: RETRY.subsec_nanos().into() };
        let timeout = self.looks_again(is_plugged).then_some(&retry);
        rustix::io::retry_on_intr(|| poll(&mut all, timeout))?;
        // Nothing there is no error.
        let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
        Ok(())
    }

    /// From the gate to the uplink.
    fn outward(&mut self) -> io::Result<()> {
        let is_plugged = self.shared.is_plugged.load(Ordering::Relaxed);
        let Some(uplink) = self.uplink.as_mut().filter(|_| is_plugged) else {
            self.shared.output().gate.lose();
            return Ok(());
        };
        while self.shared.may_send() {
            let Some(frame) = self.shared.output().gate.next() else { return Ok(()) };
            uplink.give(&frame);
            match uplink.write()? {
                true => self.shared.output().gate.has_left(self.shared.since.elapsed()),
                false => return Ok(()),
            }
        }
        Ok(())
    }

    /// From the uplink to the card. One that has no room is waited for.
    fn inward(&mut self) -> io::Result<()> {
        let is_plugged = self.shared.is_plugged.load(Ordering::Relaxed);
        let read = match self.uplink.as_mut().filter(|_| is_plugged && self.inward.is_empty()) {
            Some(uplink) => uplink.read(&mut self.inward),
            None => Ok(()),
        };
        while let Some(frame) = self.inward.front() {
            match self.shared.card.send(frame) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Ok(_) => drop(self.shared.came.fetch_add(1, Ordering::Relaxed)),
                // One that the socket does not take, or a VM that is gone.
                Err(_) => {}
            }
            self.inward.pop_front();
        }
        read
    }
}

#[cfg(test)]
mod tests;
