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

use crossbeam_channel::{Receiver, Sender};
use firn_cluster::cut::Answer;
use firn_cluster::member::{Kept, Membership, OfEpoch};
use firn_cluster::output::Flow;
use firn_cluster::switch::FRAME_BYTES_MAX;
use firn_cluster::{Epoch, Generation, RequestNumber, Seq};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::gate::{Gate, Held};
use crate::joined::Joined;
use crate::lease::Lease;
use crate::uplink::Uplink;
use crate::way::Way;

/// Most bytes of frames that a card's gate holds: a quarter of a second at a gigabit a second.
pub const BYTES_MAX: usize = 32 << 20;
/// Frames read from the card while the gate is locked.
const BATCH: usize = 32;
/// How often an uplink that is not there is tried, and a lease that is over looked at.
const RETRY: Duration = Duration::from_millis(100);
/// How often a member is to look whether others have what it sent.
const TICK: Duration = Duration::from_millis(50);
/// How long a member that is about to be stopped may take to read what it was given, and how often that is looked at. One that does not
/// is as one whose card has no room: what it does not take is lost.
const READ_WAIT: Duration = Duration::from_millis(20);
const READ_LOOK: Duration = Duration::from_micros(200);

/// From nobody to nobody: a card drops it. Once it is read, what was given before is in the guest's memory, and not in a queue of QEMU's.
const PROBE: [u8; 60] = {
    let mut frame = [0; 60];
    frame[0] = 2;
    frame[6] = 2;
    frame[12] = 0x88;
    frame[13] = 0xb5;
    frame
};

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
    /// only once the port is [plugged in](Self::plug). `theirs` is QEMU's end, to see what it has not read.
    ///
    /// # Errors
    /// If the system has no more descriptors or threads.
    pub fn open(
        card: OwnedFd,
        theirs: Option<OwnedFd>,
        uplink: &Path,
        first: Option<Uplink>,
        is_open: bool,
    ) -> io::Result<Self> {
        let card = UnixDatagram::from(card);
        card.set_nonblocking(true)?;
        let way = Way::Alone(Gate::new(BYTES_MAX, is_open), None);
        let (is_frozen, buffer) = (false, vec![0; FRAME_BYTES_MAX]);
        let output = Output { way, is_frozen, is_stuck: false, buffer };
        let shared = Arc::new(Shared {
            card,
            theirs,
            uplink: uplink.to_owned(),
            output: Mutex::new(output),
            lease: Mutex::default(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            is_plugged: AtomicBool::new(false),
            is_connected: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            news: crossbeam_channel::bounded(1),
            came: AtomicU64::new(0),
            since: Instant::now(),
        });
        let (tried, inward, ticked) = (None, VecDeque::new(), Duration::ZERO);
        let relay = Relay { shared: Arc::clone(&shared), uplink: first, tried, inward, ticked };
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
        self.shared.output().way.begin();
    }

    /// The VM is about to be stopped: its socket is empty when this returns, and kept so, until it goes on. See [`Gate::flow`]. A member
    /// is given nothing from now on, and has read what it was given.
    pub fn stopping(&self) {
        let mut output = self.shared.output();
        output.way.stopping(true);
        output.is_frozen = output.way.joined().is_some();
        while self.shared.take(&mut output) {}
        let is_member = output.is_frozen;
        drop(output);
        self.shared.wake();
        if is_member {
            self.shared.wait_until_read();
        }
    }

    /// The VM was not stopped, or goes on.
    pub fn goes_on(&self) {
        let mut output = self.shared.output();
        output.way.stopping(false);
        output.is_frozen = false;
        drop(output);
        self.shared.wake();
    }

    /// The VM stands still at the end of an epoch: see [`Gate::cut`]. What goes with it, of a member.
    pub fn cut(&self, epoch: Epoch) -> Option<OfEpoch> {
        let mut output = self.shared.output();
        while self.shared.take(&mut output) {}
        let of = output.way.cut(epoch);
        drop(output);
        // What was read just now may leave at once, if the gate was open until now.
        self.shared.wake();
        of
    }

    /// Nothing undoes an epoch any more: see [`Gate::committed`].
    pub fn committed(&self, epoch: Epoch) {
        self.shared.output().way.committed(epoch);
        self.shared.wake();
    }

    /// Lets out what is held, and what comes: see [`Gate::open`].
    pub fn let_out(&self) {
        self.shared.output().way.open();
        self.shared.wake();
    }

    /// From now on frames leave only while that lease is held, or need none.
    pub fn obey(&self, lease: Option<Lease>) {
        *self.shared.lease() = lease;
        self.shared.wake();
    }

    /// The VM becomes a member of a cluster, or one of a new timeline. `false` if what it sends is being held.
    pub fn join(&self, of: Membership) -> bool {
        let mut output = self.shared.output();
        let is_open = output.way.is_open();
        if is_open {
            output.way.become_member(Joined::open(of));
        }
        drop(output);
        self.shared.wake();
        is_open
    }

    /// The VM is about to run as a member, from the end of `base`: what was under way is sent again.
    pub fn go_on(&self, of: Membership, base: Epoch, kept: Kept) {
        self.shared.output().way.become_member(Joined::going_on(of, base, kept));
        self.shared.wake();
    }

    /// The VM is no member any more. `false` if what it sends is being held.
    pub fn leave(&self) -> bool {
        let mut output = self.shared.output();
        let is_open = output.way.is_open();
        if is_open {
            output.way.become_alone(BYTES_MAX, self.shared.since.elapsed());
        }
        drop(output);
        self.shared.wake();
        is_open
    }

    /// The VM's mark, for the one who makes global checkpoints, if there is one to give.
    pub fn requested(&self, of: Generation, request: RequestNumber) -> Option<Answer> {
        self.shared.output().way.joined_mut()?.requested(of, request)
    }

    /// Whether what another member has sent waits for the epoch that runs to be cut.
    pub fn wants_cut(&self) -> bool {
        self.shared.output().way.joined().is_some_and(Joined::wants_cut)
    }

    /// Wakes whoever cuts epochs of a member: [`Self::wants_cut`], [`Self::globally`] or [`Self::gone`] has something new to say.
    pub fn news(&self) -> Receiver<()> {
        self.shared.news.1.clone()
    }

    /// A global checkpoint that has this VM at that epoch is on record. `false` if the VM is in no such timeline.
    pub fn globally(&self, of: Generation, epoch: Epoch) -> bool {
        let mut output = self.shared.output();
        let joined = output.way.joined_mut().filter(|it| it.membership().generation == of);
        let is_heard = joined.map(|joined| joined.globally(epoch)).is_some();
        drop(output);
        self.shared.wake();
        self.shared.tell();
        is_heard
    }

    /// The newest epoch of a member that a global checkpoint has.
    pub fn global(&self) -> Epoch {
        self.shared.output().way.joined().map_or(Epoch(0), Joined::global)
    }

    /// The newest frame of a member to the outside that has left.
    pub fn gone(&self) -> Seq {
        self.shared.gone()
    }

    /// What it was told, if the VM is a member.
    pub fn membership(&self) -> Option<Membership> {
        self.shared.output().way.joined().map(|joined| joined.membership().clone())
    }

    /// Whether a protection can begin: a member has to have joined since the last.
    pub fn is_new(&self) -> bool {
        self.shared.output().way.joined().is_none_or(Joined::is_new)
    }

    /// Whether others have what was let out when a member's gate was opened, as far as it knows.
    pub fn is_settled(&self) -> bool {
        self.shared.output().way.joined().is_none_or(Joined::is_settled)
    }

    /// Whether frames leave as they come.
    pub fn is_open(&self) -> bool {
        self.shared.output().way.is_open()
    }

    /// What there is to say about it now.
    pub fn now(&self) -> Now {
        let gate = &self.shared.output().way;
        Now {
            is_connected: self.shared.is_connected.load(Ordering::Relaxed),
            is_open: gate.is_open(),
            waits_for_lease: !self.shared.may_send(),
            held: gate.held(),
            left: gate.left(),
            came: self.shared.came.load(Ordering::Relaxed),
            delays: gate.delays(),
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
    way: Way,
    /// The VM is given nothing.
    is_frozen: bool,
    /// It has not read what it was given, when that was waited for last.
    is_stuck: bool,
    buffer: Vec<u8>,
}

/// What other threads reach.
#[derive(Debug)]
struct Shared {
    card: UnixDatagram,
    /// QEMU's end.
    theirs: Option<OwnedFd>,
    uplink: PathBuf,
    output: Mutex<Output>,
    lease: Mutex<Option<Lease>>,
    wake: OwnedFd,
    is_plugged: AtomicBool,
    is_connected: AtomicBool,
    is_over: AtomicBool,
    /// Somebody who cuts epochs has to hear something.
    news: (Sender<()>, Receiver<()>),
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
        let Output { way, buffer, .. } = output;
        for _ in 0..BATCH {
            if way.flow() == Flow::Stop {
                return false;
            }
            match self.card.recv(buffer) {
                Ok(bytes) => way.sent(&buffer[..bytes], self.since.elapsed()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        true
    }

    /// Returns when QEMU has given the guest what it was given, or doesn't.
    fn wait_until_read(&self) {
        if self.output().is_stuck && !self.is_read() {
            return;
        }
        // What has no room is not read by who does not read.
        let _ = self.card.send(&PROBE);
        let since = Instant::now();
        while !self.is_read() && since.elapsed() < READ_WAIT {
            thread::sleep(READ_LOOK);
        }
        let is_stuck = !self.is_read();
        self.output().is_stuck = is_stuck;
        if is_stuck {
            tracing::debug!("the VM does not take the frames that it is given");
        }
    }

    /// What of a frame from the uplink, and of what came before it, the VM is given now.
    fn arrived(&self, way: &mut Way, frame: Vec<u8>, now: Duration) -> Vec<Vec<u8>> {
        let given = way.arrived(frame, now);
        if way.joined().is_some_and(Joined::wants_cut) {
            self.tell();
        }
        given
    }

    /// The newest frame of a member to the outside that has left.
    fn gone(&self) -> Seq {
        self.output().way.joined().map_or(Seq(0), Joined::gone)
    }

    /// Wakes who cuts epochs. One who was told and has not looked yet need not be told again.
    fn tell(&self) {
        let _ = self.news.0.try_send(());
    }

    /// Whether nothing waits at QEMU's end.
    fn is_read(&self) -> bool {
        let theirs = self.theirs.as_ref();
        theirs.is_none_or(|theirs| rustix::io::ioctl_fionread(theirs).is_ok_and(|bytes| bytes == 0))
    }

    /// Whether the VM can be given a frame.
    fn has_room(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut all = [PollFd::new(&self.card, PollFlags::OUT)];
        let polled = rustix::io::retry_on_intr(|| poll(&mut all, Some(&now)));
        polled.is_ok() && !all[0].revents().is_empty()
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
    /// When a member was last told what time it is.
    ticked: Duration,
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
            self.ticked = tick(&mut output.way, self.ticked, self.shared.since.elapsed());
            drop(output);
            let gone = self.shared.gone();
            let carried = self.outward().and_then(|()| self.inward());
            if self.shared.gone() > gone {
                self.shared.tell();
            }
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
        let output = self.shared.output();
        let gate = &output.way;
        let mut card = PollFlags::empty();
        card.set(PollFlags::IN, gate.flow() == Flow::Go);
        let is_let_in = gate.joined().is_some_and(Joined::may_let_in);
        card.set(PollFlags::OUT, (is_let_in || !self.inward.is_empty()) && !output.is_frozen);
        let mut outside = PollFlags::empty();
        outside.set(PollFlags::IN, self.inward.is_empty());
        outside.set(PollFlags::OUT, gate.next().is_some() && self.shared.may_send());
        (card, outside)
    }

    /// Nobody says when a lease is held again.
    fn looks_again(&self, is_plugged: bool) -> bool {
        let waits = || self.shared.output().way.next().is_some() && !self.shared.may_send();
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
        let is_member = self.shared.output().way.joined().is_some();
        let retries = self.looks_again(is_plugged).then_some(RETRY);
        let timeout = retries.into_iter().chain(is_member.then_some(TICK)).min();
        let timeout = timeout.map(|it| Timespec { tv_sec: 0, tv_nsec: it.subsec_nanos().into() });
        rustix::io::retry_on_intr(|| poll(&mut all, timeout.as_ref()))?;
        // Nothing there is no error.
        let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
        Ok(())
    }

    /// From the gate to the uplink.
    fn outward(&mut self) -> io::Result<()> {
        let is_plugged = self.shared.is_plugged.load(Ordering::Relaxed);
        let Some(uplink) = self.uplink.as_mut().filter(|_| is_plugged) else {
            self.shared.output().way.lose();
            return Ok(());
        };
        while self.shared.may_send() {
            let Some(frame) = self.shared.output().way.next() else { return Ok(()) };
            uplink.give(&frame);
            match uplink.write()? {
                true => self.shared.output().way.has_left(self.shared.since.elapsed()),
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
        loop {
            // Locked until it is given: what counts as received at a cut, the VM has.
            let mut output = self.shared.output();
            if output.is_frozen || !self.shared.has_room() {
                break;
            }
            let now = self.shared.since.elapsed();
            // What has waited for a cut came before.
            let waited = output.way.joined_mut().filter(|joined| joined.may_let_in());
            let given = match waited.map(|joined| joined.let_in(now)) {
                Some(given) => given,
                None => match self.inward.pop_front() {
                    Some(frame) => self.shared.arrived(&mut output.way, frame, now),
                    None => break,
                },
            };
            for frame in given {
                // One that the socket does not take, or a VM that is gone, is no trouble.
                if self.shared.card.send(&frame).is_ok() {
                    self.shared.came.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        read
    }
}

/// Tells a member what time it is, not too often; when it was told last.
fn tick(way: &mut Way, before: Duration, now: Duration) -> Duration {
    let Some(joined) = way.joined_mut().filter(|_| now.saturating_sub(before) >= TICK) else {
        return before;
    };
    joined.tick(now);
    now
}

#[cfg(test)]
mod tests;
