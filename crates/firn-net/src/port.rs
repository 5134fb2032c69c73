//! Card port: a card, its output buffer and its uplink, and the thread that carries frames between
//! them.
//!
//! ```text
//!                      .----------------------- poll -----------------------.
//!   card's socket -----+--> OutputPolicy --> uplink     no uplink: dropped   |
//!                 <----+------- frames <------- uplink                       |
//!   eventfd -----------'    cut, commit, open: from other threads            |
//! ```
//!
//! The thread that reads the card's socket holds the lock of the output until the frames that it
//! read are in the output. So frames keep their order, and each belongs to the epoch in which it
//! was read. A cut reads the socket by itself, while the VM is paused.

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

/// The maximum number of bytes that a card's output buffers: a quarter of a second at a gigabit per
/// second.
pub const BYTES_MAX: usize = 32 << 20;
/// The number of frames read from the card while the output is locked.
const BATCH: usize = 32;
/// The interval at which a missing uplink is tried, and a lease that is over is checked.
const RETRY: Duration = Duration::from_millis(100);
/// The interval at which a member checks whether others have received its frames.
const TICK: Duration = Duration::from_millis(50);
/// The time that a member's card gets, before the VM is stopped, to read the frames that it was
/// given. A card that does not read them in time is treated as one that has no room: its frames are
/// lost.
const READ_WAIT: Duration = Duration::from_millis(20);
/// The interval at which the port checks whether the card has read its frames.
const READ_LOOK: Duration = Duration::from_micros(200);

/// A frame with unused addresses, which a card drops. Once it is read, the frames that were given
/// before it are in the guest's memory, and not in a queue of QEMU.
const PROBE: [u8; 60] = {
    let mut frame = [0; 60];
    frame[0] = 2;
    frame[6] = 2;
    frame[12] = 0x88;
    frame[13] = 0xb5;
    frame
};

/// The state of a card.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Now {
    /// The port is connected to the uplink.
    pub is_connected: bool,
    /// Frames are released as they come.
    pub is_open: bool,
    /// The card needs a lease, and the lease is over: no frame leaves.
    pub waits_for_lease: bool,
    /// The buffered frames.
    pub held: Held,
    /// The number of frames that were sent.
    pub left: u64,
    /// The number of frames that the VM was given.
    pub came: u64,
    /// The delays from the VM to the uplink, of the newest thousand frames since the output was
    /// opened or closed.
    pub delays: Vec<Duration>,
}

/// Creates a pair of sockets: the first is for QEMU, the second is read by a port. QEMU must have
/// both open.
///
/// # Errors
/// If the system has no more descriptors.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (theirs, ours) = UnixDatagram::pair()?;
    Ok((theirs.into(), ours.into()))
}

/// A card's port, which passes frames until it is dropped.
#[derive(Debug)]
pub struct Port {
    shared: Arc<Shared>,
    relay: Option<JoinHandle<()>>,
}

impl Port {
    /// Begins to carry frames between a card and its uplink, which need not exist yet. `first` is a
    /// connection to it. Frames leave only once the uplink is [connected](Self::connect_uplink).
    /// `theirs` is QEMU's end of the socket pair; the port uses it to determine what QEMU has not
    /// read.
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

    /// Connects to the uplink, now or when a process listens there.
    pub fn plug(&self) {
        self.shared.is_plugged.store(true, Ordering::Relaxed);
        self.shared.wake();
    }

    /// Begins a protection: see [`OutputBuffer::begin_protection`].
    pub fn begin(&self) {
        self.shared.output().way.begin();
    }

    /// Prepares for a stop of the VM. When this returns, the card's socket is empty, and it is kept
    /// empty until [`Self::finish_stop`]; see [`OutputBuffer::input_flow`]. A member is given no
    /// frames from now on, and has read the frames that it was given.
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

    /// Ends the preparation, because the VM was not stopped, or runs again.
    pub fn goes_on(&self) {
        let mut output = self.shared.output();
        output.way.stopping(false);
        output.is_frozen = false;
        drop(output);
        self.shared.wake();
    }

    /// Ends an epoch while the VM is paused: see [`OutputBuffer::cut_epoch`]. Of a member, returns
    /// the state that belongs to the epoch.
    pub fn cut(&self, epoch: Epoch) -> Option<OfEpoch> {
        let mut output = self.shared.output();
        while self.shared.take(&mut output) {}
        let of = output.way.cut(epoch);
        drop(output);
        // The frames that were just read may leave at once, if the output was open until now.
        self.shared.wake();
        of
    }

    /// Commits an epoch: see [`OutputBuffer::commit_epoch`].
    pub fn committed(&self, epoch: Epoch) {
        self.shared.output().way.committed(epoch);
        self.shared.wake();
    }

    /// Releases buffered frames, and later frames as they come: see [`OutputBuffer::open_output`].
    pub fn let_out(&self) {
        self.shared.output().way.open();
        self.shared.wake();
    }

    /// Sets the lease during which frames may leave. `None`: they need no lease.
    pub fn obey(&self, lease: Option<Lease>) {
        *self.shared.lease() = lease;
        self.shared.wake();
    }

    /// Makes the VM a member of a cluster, or of a new generation. `false` if its output is
    /// buffered.
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

    /// Makes the VM a member that is about to run from the end of `base`. It sends frames that were
    /// in flight again.
    pub fn go_on(&self, of: Membership, base: Epoch, kept: Kept) {
        self.shared.output().way.become_member(Joined::going_on(of, base, kept));
        self.shared.wake();
    }

    /// Ends the VM's membership. `false` if its output is buffered.
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

    /// The VM's mark for the initiator of global checkpoints, if there is one.
    pub fn requested(&self, of: Generation, request: RequestNumber) -> Option<Answer> {
        self.shared.output().way.joined_mut()?.requested(of, request)
    }

    /// Whether a frame of another member waits for the running epoch to be cut.
    pub fn wants_cut(&self) -> bool {
        self.shared.output().way.joined().is_some_and(Joined::wants_cut)
    }

    /// Wakes the thread that cuts a member's epochs: [`Self::wants_cut`], [`Self::global_epoch`] or
    /// [`Self::released_up_to`] has changed.
    pub fn news(&self) -> Receiver<()> {
        self.shared.news.1.clone()
    }

    /// Records a global checkpoint, which includes this VM at that epoch. `false` if the VM is in
    /// no such generation.
    pub fn globally(&self, of: Generation, epoch: Epoch) -> bool {
        let mut output = self.shared.output();
        let joined = output.way.joined_mut().filter(|it| it.membership().generation == of);
        let is_heard = joined.map(|joined| joined.globally(epoch)).is_some();
        drop(output);
        self.shared.wake();
        self.shared.tell();
        is_heard
    }

    /// The newest epoch of a member that belongs to a global checkpoint.
    pub fn global(&self) -> Epoch {
        self.shared.output().way.joined().map_or(Epoch(0), Joined::global)
    }

    /// The newest frame of a member to the outside that has been sent.
    pub fn gone(&self) -> Seq {
        self.shared.gone()
    }

    /// The membership of the VM, if it is a member.
    pub fn membership(&self) -> Option<Membership> {
        self.shared.output().way.joined().map(|joined| joined.membership().clone())
    }

    /// Whether a protection can begin: a member must have joined since the last one.
    pub fn is_new(&self) -> bool {
        self.shared.output().way.joined().is_none_or(Joined::is_new)
    }

    /// Whether the receivers have the frames that were released when a member's output was opened,
    /// as far as it knows.
    pub fn is_settled(&self) -> bool {
        self.shared.output().way.joined().is_none_or(Joined::is_settled)
    }

    /// Whether frames are released as they come.
    pub fn is_open(&self) -> bool {
        self.shared.output().way.is_open()
    }

    /// The current state of the card.
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
            // A relay thread that panicked has reported it.
            let _ = relay.join();
        }
    }
}

#[derive(Debug)]
struct Output {
    way: Way,
    /// The VM is given no frames.
    is_frozen: bool,
    /// The VM had not read its frames when the port last waited for it.
    is_stuck: bool,
    buffer: Vec<u8>,
}

/// The state that other threads share with the relay thread.
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
    /// Wakes the thread that cuts epochs.
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

    /// Whether the lease allows a frame to leave now.
    fn may_send(&self) -> bool {
        self.lease().as_ref().is_none_or(Lease::is_held)
    }

    /// Reads a batch of frames from the card's socket. Returns whether there may be more. At the
    /// bound none are read.
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

    /// Waits until QEMU has given the guest the frames that it was given, or until the time limit.
    fn wait_until_read(&self) {
        if self.output().is_stuck && !self.is_read() {
            return;
        }
        // If there is no room for it, the card does not read, and the wait below times out.
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

    /// Receives a frame from the uplink, and returns the frames that the VM is to be given now.
    /// These include frames that came earlier.
    fn arrived(&self, way: &mut Way, frame: Vec<u8>, now: Duration) -> Vec<Vec<u8>> {
        let given = way.arrived(frame, now);
        if way.joined().is_some_and(Joined::wants_cut) {
            self.tell();
        }
        given
    }

    /// The newest frame of a member to the outside that has been sent.
    fn gone(&self) -> Seq {
        self.output().way.joined().map_or(Seq(0), Joined::gone)
    }

    /// Wakes the thread that cuts epochs, unless a wakeup is pending.
    fn tell(&self) {
        let _ = self.news.0.try_send(());
    }

    /// Whether QEMU's end of the socket pair is empty.
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

    /// Wakes the relay thread, which checks everything again. A counter that is full wakes it as
    /// well.
    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}

/// The relay thread: it carries frames between the card and the uplink.
struct Relay {
    shared: Arc<Shared>,
    uplink: Option<Uplink>,
    /// The time of the last attempt to connect.
    tried: Option<Instant>,
    /// Frames for the VM.
    inward: VecDeque<Vec<u8>>,
    /// The time at which a member's time was last advanced.
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

    /// The events to poll for at the card and at the uplink. Events that can't be handled now are
    /// left out.
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

    /// Whether to poll with a timeout: no event signals that a lease is held again.
    fn looks_again(&self, is_plugged: bool) -> bool {
        let waits = || self.shared.output().way.next().is_some() && !self.shared.may_send();
        is_plugged && (self.uplink.is_none() || waits())
    }

    /// Waits for an event or a timeout.
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
        // An empty counter is no error.
        let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
        Ok(())
    }

    /// Carries frames from the output to the uplink.
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

    /// Carries frames from the uplink to the card, as far as the card has room.
    fn inward(&mut self) -> io::Result<()> {
        let is_plugged = self.shared.is_plugged.load(Ordering::Relaxed);
        let read = match self.uplink.as_mut().filter(|_| is_plugged && self.inward.is_empty()) {
            Some(uplink) => uplink.read(&mut self.inward),
            None => Ok(()),
        };
        loop {
            // Locked until the frame is given: at a cut the VM has all frames that count as
            // received.
            let mut output = self.shared.output();
            if output.is_frozen || !self.shared.has_room() {
                break;
            }
            let now = self.shared.since.elapsed();
            // Frames that have waited for a cut came earlier.
            let waited = output.way.joined_mut().filter(|joined| joined.may_let_in());
            let given = match waited.map(|joined| joined.let_in(now)) {
                Some(given) => given,
                None => match self.inward.pop_front() {
                    Some(frame) => self.shared.arrived(&mut output.way, frame, now),
                    None => break,
                },
            };
            for frame in given {
                // A frame that the socket does not take, or a VM that has ended, is no error.
                if self.shared.card.send(&frame).is_ok() {
                    self.shared.came.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        read
    }
}

/// Advances a member's time, at most once per interval. Returns when it was last advanced.
fn tick(way: &mut Way, before: Duration, now: Duration) -> Duration {
    let Some(joined) = way.joined_mut().filter(|_| now.saturating_sub(before) >= TICK) else {
        return before;
    };
    joined.tick(now);
    now
}

#[cfg(test)]
mod tests;
