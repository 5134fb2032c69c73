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
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use firn_cluster::cut::MarkAnswer;
use firn_cluster::member::{ClusterMembership, NicEpoch, StandbyNic};
use firn_cluster::output::InputFlow;
use firn_cluster::switch::FRAME_BYTES_MAX;
use firn_cluster::{Epoch, FrameNumber, Generation, RequestNumber};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::card_socket::{CardSocket, FilterStream};
use crate::cluster_output::ClusterOutput;
use crate::lease::OutputLease;
use crate::output_buffer::{BufferUsage, OutputBuffer};
use crate::output_policy::OutputPolicy;
use crate::uplink::UplinkStream;

/// The maximum number of bytes that a card's output buffers: a quarter of a second at a gigabit per
/// second.
pub const BYTES_MAX: usize = 32 << 20;
/// The number of frames read from the card while the output is locked.
const BATCH: usize = 32;
/// The interval at which a missing uplink is tried.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// The interval at which a lease that is over is checked, while frames wait for it. A VM that was
/// moved waits for the lease of its new host.
const LEASE_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// The interval at which a member checks whether others have received its frames.
const TICK_INTERVAL: Duration = Duration::from_millis(50);
/// The time that a member's card gets, before the VM is paused, to read the frames that it was
/// given. A card that does not read them in time is treated as one that has no room: its frames are
/// lost.
const READ_TIMEOUT: Duration = Duration::from_millis(20);
/// The interval at which the port checks whether the card has read its frames.
const READ_POLL_INTERVAL: Duration = Duration::from_micros(200);

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
pub struct PortStatus {
    /// The port is connected to the uplink.
    pub is_connected: bool,
    /// Frames are released as they come.
    pub is_open: bool,
    /// The card needs a lease, and the lease is over: no frame leaves.
    pub waits_for_lease: bool,
    /// The buffered frames.
    pub held: BufferUsage,
    /// Whether released frames are still to be sent.
    pub has_released_frames: bool,
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
pub fn create_socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (theirs, ours) = UnixDatagram::pair()?;
    Ok((theirs.into(), ours.into()))
}

/// A card's port, which passes frames until it is dropped.
#[derive(Debug)]
pub struct NicPort {
    shared: Arc<PortState>,
    relay: Option<JoinHandle<()>>,
}

impl NicPort {
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
        first: Option<UplinkStream>,
        is_open: bool,
    ) -> io::Result<Self> {
        let card = UnixDatagram::from(card);
        card.set_nonblocking(true)?;
        Self::open_socket(CardSocket::Pair(card), theirs, uplink, first, is_open)
    }

    /// Begins to carry frames from one filter of a card to another: the first gives the frames that
    /// the VM sends (`captured`), the second transmits those that may leave (`released`, which is
    /// connected again by `uplink` if it ends).
    ///
    /// # Errors
    /// If the system has no more descriptors or threads.
    pub fn open_filters(
        captured: UnixStream,
        released: UnixStream,
        uplink: &Path,
        is_open: bool,
    ) -> io::Result<Self> {
        captured.set_nonblocking(true)?;
        released.set_nonblocking(true)?;
        let to_netdev = released.try_clone()?;
        let card = CardSocket::Filter(FilterStream::new(captured, released));
        let first = UplinkStream::from_stream(to_netdev);
        let port = Self::open_socket(card, None, uplink, Some(first), is_open)?;
        port.connect_uplink();
        Ok(port)
    }

    fn open_socket(
        card: CardSocket,
        theirs: Option<OwnedFd>,
        uplink: &Path,
        first: Option<UplinkStream>,
        is_open: bool,
    ) -> io::Result<Self> {
        let policy = OutputPolicy::Single(OutputBuffer::new(BYTES_MAX, is_open), None);
        let (is_frozen, buffer) = (false, vec![0; FRAME_BYTES_MAX]);
        let output = PortOutput { policy, is_frozen, is_stuck: false, buffer };
        let shared = Arc::new(PortState {
            card,
            theirs,
            uplink: uplink.to_owned(),
            output: Mutex::new(output),
            lease: Mutex::default(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            is_plugged: AtomicBool::new(false),
            is_connected: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            wakeups: crossbeam_channel::bounded(1),
            came: AtomicU64::new(0),
            since: Instant::now(),
        });
        let (tried, inward, ticked) = (None, VecDeque::new(), Duration::ZERO);
        let relay = FrameRelay {
            shared: Arc::clone(&shared),
            uplink: first,
            last_attempt: tried,
            inward,
            last_tick: ticked,
        };
        let relay = thread::Builder::new().name("card".into()).spawn(move || relay.run())?;
        Ok(Self { shared, relay: Some(relay) })
    }

    /// Connects to the uplink, now or when a process listens there.
    pub fn connect_uplink(&self) {
        self.shared.is_plugged.store(true, Ordering::Relaxed);
        self.shared.wake_relay();
    }

    /// Waits until every frame that the VM has sent so far has left, or until the time limit, for a
    /// card with filters whose output is open. Returns whether they all have.
    pub fn wait_until_sent(&self, limit: Duration) -> bool {
        let since = Instant::now();
        while !self.shared.is_all_sent() {
            if since.elapsed() >= limit {
                return false;
            }
            thread::sleep(READ_POLL_INTERVAL);
        }
        true
    }

    /// Ends a port with filters, of which the first gives no more frames. Waits, up to the time
    /// limit, until the second has transmitted all. Returns whether it has.
    pub fn finish_filters(mut self, limit: Duration) -> bool {
        let is_sent = self.wait_until_sent(limit);
        self.stop_relay();
        match &self.shared.card {
            CardSocket::Filter(filter) => filter.finish(limit) && is_sent,
            CardSocket::Pair(_) => is_sent,
        }
    }

    /// Begins a protection: see [`OutputBuffer::begin_protection`].
    pub fn begin_protection(&self) {
        self.shared.lock_output().policy.begin_protection();
    }

    /// Prepares for a pause of the VM. When this returns, the card's socket is empty, and it is kept
    /// empty until [`Self::finish_pause`]; see [`OutputBuffer::input_flow`]. A member is given no
    /// frames from now on, and has read the frames that it was given.
    pub fn prepare_pause(&self) {
        let mut output = self.shared.lock_output();
        output.policy.set_pausing(true);
        output.is_frozen = output.policy.cluster_output().is_some();
        while self.shared.read_card(&mut output) {}
        let is_member = output.is_frozen;
        drop(output);
        self.shared.wake_relay();
        if is_member {
            self.shared.wait_until_read();
        }
    }

    /// Ends the preparation, because the VM could not be paused, or runs again.
    pub fn finish_pause(&self) {
        let mut output = self.shared.lock_output();
        output.policy.set_pausing(false);
        output.is_frozen = false;
        drop(output);
        self.shared.wake_relay();
    }

    /// Ends an epoch while the VM is paused: see [`OutputBuffer::cut_epoch`]. Of a member, returns
    /// the state that belongs to the epoch.
    pub fn cut_epoch(&self, epoch: Epoch) -> Option<NicEpoch> {
        let mut output = self.shared.lock_output();
        while self.shared.read_card(&mut output) {}
        let of = output.policy.cut_epoch(epoch);
        drop(output);
        // The frames that were just read may leave at once, if the output was open until now.
        self.shared.wake_relay();
        of
    }

    /// Commits an epoch: see [`OutputBuffer::commit_epoch`].
    pub fn commit_epoch(&self, epoch: Epoch) {
        self.shared.lock_output().policy.commit_epoch(epoch);
        self.shared.wake_relay();
    }

    /// Releases buffered frames, and later frames as they come: see [`OutputBuffer::open_output`].
    pub fn release_output(&self) {
        self.shared.lock_output().policy.open_output();
        self.shared.wake_relay();
    }

    /// Sets the lease during which frames may leave. `None`: they need no lease.
    pub fn set_lease(&self, lease: Option<OutputLease>) {
        *self.shared.lock_lease() = lease;
        self.shared.wake_relay();
    }

    /// Makes the VM a member of a cluster, or of a new generation. `false` if its output is
    /// buffered.
    pub fn join_cluster(&self, of: ClusterMembership) -> bool {
        let mut output = self.shared.lock_output();
        let is_open = output.policy.is_open();
        if is_open {
            output.policy.become_member(ClusterOutput::without_backup(of));
        }
        drop(output);
        self.shared.wake_relay();
        is_open
    }

    /// Makes the VM a member that is about to run from the end of `base`. It sends frames that were
    /// in flight again.
    pub fn resume_member(&self, of: ClusterMembership, base: Epoch, kept: StandbyNic) {
        self.shared.lock_output().policy.become_member(ClusterOutput::resume_from(of, base, kept));
        self.shared.wake_relay();
    }

    /// Ends the VM's membership. `false` if its output is buffered.
    pub fn leave_cluster(&self) -> bool {
        let mut output = self.shared.lock_output();
        let is_open = output.policy.is_open();
        if is_open {
            output.policy.become_single(BYTES_MAX, self.shared.since.elapsed());
        }
        drop(output);
        self.shared.wake_relay();
        is_open
    }

    /// The VM's mark for the initiator of global checkpoints, if there is one.
    pub fn request_mark(&self, of: Generation, request: RequestNumber) -> Option<MarkAnswer> {
        self.shared.lock_output().policy.cluster_output_mut()?.request_mark(of, request)
    }

    /// Whether a frame of another member waits for the running epoch to be cut.
    pub fn is_cut_needed(&self) -> bool {
        self.shared.lock_output().policy.cluster_output().is_some_and(ClusterOutput::is_cut_needed)
    }

    /// Wakes the thread that cuts a member's epochs: [`Self::is_cut_needed`],
    /// [`Self::global_epoch`] or [`Self::released_up_to`] has changed.
    pub fn member_events(&self) -> Receiver<()> {
        self.shared.wakeups.1.clone()
    }

    /// Records a global checkpoint, which includes this VM at that epoch. `false` if the VM is in
    /// no such generation.
    pub fn record_global_checkpoint(&self, of: Generation, epoch: Epoch) -> bool {
        let mut output = self.shared.lock_output();
        let joined =
            output.policy.cluster_output_mut().filter(|it| it.membership().generation == of);
        let is_recorded = joined.map(|joined| joined.record_global_checkpoint(epoch)).is_some();
        drop(output);
        self.shared.wake_relay();
        self.shared.notify_member_events();
        is_recorded
    }

    /// The newest epoch of a member that belongs to a global checkpoint.
    pub fn global_epoch(&self) -> Epoch {
        self.shared
            .lock_output()
            .policy
            .cluster_output()
            .map_or(Epoch(0), ClusterOutput::global_epoch)
    }

    /// The newest frame of a member to the outside that has been sent.
    pub fn released_up_to(&self) -> FrameNumber {
        self.shared.released_up_to()
    }

    /// The membership of the VM, if it is a member.
    pub fn membership(&self) -> Option<ClusterMembership> {
        self.shared.lock_output().policy.cluster_output().map(|joined| joined.membership().clone())
    }

    /// Whether a protection can begin: a member must have joined since the last one.
    pub fn is_new(&self) -> bool {
        self.shared.lock_output().policy.cluster_output().is_none_or(ClusterOutput::is_new)
    }

    /// Whether the receivers have the frames that were released when a member's output was opened,
    /// as far as it knows.
    pub fn is_output_received(&self) -> bool {
        self.shared
            .lock_output()
            .policy
            .cluster_output()
            .is_none_or(ClusterOutput::is_output_received)
    }

    /// Whether frames are released as they come.
    pub fn is_open(&self) -> bool {
        self.shared.lock_output().policy.is_open()
    }

    /// The current state of the card.
    pub fn port_status(&self) -> PortStatus {
        let policy = &self.shared.lock_output().policy;
        PortStatus {
            is_connected: self.shared.is_connected.load(Ordering::Relaxed),
            is_open: policy.is_open(),
            waits_for_lease: !self.shared.may_send(),
            held: policy.buffer_usage(),
            has_released_frames: policy.next_frame().is_some(),
            left: policy.sent_count(),
            came: self.shared.came.load(Ordering::Relaxed),
            delays: policy.release_delays(),
        }
    }
}

impl NicPort {
    fn stop_relay(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        self.shared.wake_relay();
        if let Some(relay) = self.relay.take() {
            // A relay thread that panicked has reported it.
            let _ = relay.join();
        }
    }
}

impl Drop for NicPort {
    fn drop(&mut self) {
        self.stop_relay();
    }
}

#[derive(Debug)]
struct PortOutput {
    policy: OutputPolicy,
    /// The VM is given no frames.
    is_frozen: bool,
    /// The VM had not read its frames when the port last waited for it.
    is_stuck: bool,
    buffer: Vec<u8>,
}

/// The state that other threads share with the relay thread.
#[derive(Debug)]
struct PortState {
    card: CardSocket,
    /// QEMU's end.
    theirs: Option<OwnedFd>,
    uplink: PathBuf,
    output: Mutex<PortOutput>,
    lease: Mutex<Option<OutputLease>>,
    wake: OwnedFd,
    is_plugged: AtomicBool,
    is_connected: AtomicBool,
    is_over: AtomicBool,
    /// Wakes the thread that cuts epochs.
    wakeups: (Sender<()>, Receiver<()>),
    came: AtomicU64,
    since: Instant,
}

impl PortState {
    fn lock_output(&self) -> MutexGuard<'_, PortOutput> {
        self.output.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_lease(&self) -> MutexGuard<'_, Option<OutputLease>> {
        self.lease.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the lease allows a frame to leave now.
    fn may_send(&self) -> bool {
        self.lock_lease().as_ref().is_none_or(OutputLease::is_held)
    }

    /// Reads a batch of frames from the card's socket. Returns whether there may be more. At the
    /// bound none are read, or with filters, they are dropped.
    fn read_card(&self, output: &mut PortOutput) -> bool {
        let now = || self.since.elapsed();
        let PortOutput { policy, buffer, .. } = output;
        match &self.card {
            CardSocket::Pair(socket) => self.read_pair(socket, policy, buffer),
            CardSocket::Filter(filter) => filter.read_frames(buffer, |frame| {
                let has_room = policy.input_flow() == InputFlow::Go;
                if has_room {
                    policy.push_frame(frame, now());
                }
                has_room
            }),
        }
    }

    fn read_pair(&self, card: &UnixDatagram, policy: &mut OutputPolicy, buffer: &mut [u8]) -> bool {
        for _ in 0..BATCH {
            if policy.input_flow() == InputFlow::Stop {
                return false;
            }
            match card.recv(buffer) {
                Ok(bytes) => policy.push_frame(&buffer[..bytes], self.since.elapsed()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        true
    }

    /// Waits until QEMU has given the guest the frames that it was given, or until the time limit.
    fn wait_until_read(&self) {
        if self.lock_output().is_stuck && !self.is_card_queue_empty() {
            return;
        }
        // If there is no room for it, the card does not read, and the wait below times out.
        self.card.give_frame(&PROBE);
        let since = Instant::now();
        while !self.is_card_queue_empty() && since.elapsed() < READ_TIMEOUT {
            thread::sleep(READ_POLL_INTERVAL);
        }
        let is_stuck = !self.is_card_queue_empty();
        self.lock_output().is_stuck = is_stuck;
        if is_stuck {
            tracing::debug!("the VM does not take the frames that it is given");
        }
    }

    /// Receives a frame from the uplink, and returns the frames that the VM is to be given now.
    /// These include frames that came earlier.
    fn receive_frame(
        &self,
        policy: &mut OutputPolicy,
        frame: Vec<u8>,
        now: Duration,
    ) -> Vec<Vec<u8>> {
        let given = policy.receive_frame(frame, now);
        if policy.cluster_output().is_some_and(ClusterOutput::is_cut_needed) {
            self.notify_member_events();
        }
        given
    }

    /// The newest frame of a member to the outside that has been sent.
    fn released_up_to(&self) -> FrameNumber {
        self.lock_output()
            .policy
            .cluster_output()
            .map_or(FrameNumber(0), ClusterOutput::released_up_to)
    }

    /// Wakes the thread that cuts epochs, unless a wakeup is pending.
    fn notify_member_events(&self) {
        let _ = self.wakeups.0.try_send(());
    }

    /// Whether QEMU's end of the socket pair is empty.
    fn is_card_queue_empty(&self) -> bool {
        let theirs = self.theirs.as_ref();
        theirs.is_none_or(|theirs| rustix::io::ioctl_fionread(theirs).is_ok_and(|bytes| bytes == 0))
    }

    /// Whether nothing that a VM with filters has sent is left here.
    fn is_all_sent(&self) -> bool {
        let output = self.lock_output();
        let is_read = match &self.card {
            CardSocket::Filter(filter) => filter.is_read(),
            CardSocket::Pair(_) => true,
        };
        is_read && output.policy.next_frame().is_none()
    }

    /// Whether the VM can be given a frame.
    fn has_room(&self) -> bool {
        let CardSocket::Pair(card) = &self.card else { return false };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut all = [PollFd::new(card, PollFlags::OUT)];
        let polled = rustix::io::retry_on_intr(|| poll(&mut all, Some(&now)));
        polled.is_ok() && !all[0].revents().is_empty()
    }

    /// Wakes the relay thread, which checks everything again. A counter that is full wakes it as
    /// well.
    fn wake_relay(&self) {
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}

/// The relay thread: it carries frames between the card and the uplink.
struct FrameRelay {
    shared: Arc<PortState>,
    uplink: Option<UplinkStream>,
    /// The time of the last attempt to connect.
    last_attempt: Option<Instant>,
    /// Frames for the VM.
    inward: VecDeque<Vec<u8>>,
    /// The time at which a member's time was last advanced.
    last_tick: Duration,
}

impl FrameRelay {
    fn run(mut self) {
        while !self.shared.is_over.load(Ordering::Relaxed) {
            self.try_connect();
            if let Err(error) = self.wait_for_event() {
                tracing::warn!("waiting for frames: {error}");
                thread::sleep(RETRY_INTERVAL);
            }
            let mut output = self.shared.lock_output();
            self.shared.read_card(&mut output);
            self.last_tick = advance_member_time(
                &mut output.policy,
                self.last_tick,
                self.shared.since.elapsed(),
            );
            drop(output);
            let gone = self.shared.released_up_to();
            let carried = self.send_outward().and_then(|()| self.send_inward());
            if self.shared.released_up_to() > gone {
                self.shared.notify_member_events();
            }
            if let Err(error) = carried {
                tracing::warn!("the uplink {} is lost: {error}", self.shared.uplink.display());
                self.uplink = None;
            }
        }
    }

    fn try_connect(&mut self) {
        let is_plugged = self.shared.is_plugged.load(Ordering::Relaxed);
        let is_due = self.last_attempt.is_none_or(|tried| tried.elapsed() >= RETRY_INTERVAL);
        if self.uplink.is_none() && is_plugged && is_due {
            self.last_attempt = Some(Instant::now());
            self.uplink = UplinkStream::connect(&self.shared.uplink).ok();
        }
        let is_connected = self.uplink.is_some() && is_plugged;
        let was_connected = self.shared.is_connected.swap(is_connected, Ordering::Relaxed);
        if is_connected && !was_connected {
            tracing::info!("connected to the uplink {}", self.shared.uplink.display());
        }
    }

    /// The events to poll for at the card and at the uplink. Events that can't be handled now are
    /// left out.
    fn poll_flags(&self) -> (PollFlags, PollFlags) {
        let output = self.shared.lock_output();
        let policy = &output.policy;
        let mut card = PollFlags::empty();
        card.set(PollFlags::IN, self.shared.card.is_read_at(policy.input_flow()));
        let is_let_in = policy.cluster_output().is_some_and(ClusterOutput::has_deliverable);
        card.set(PollFlags::OUT, (is_let_in || !self.inward.is_empty()) && !output.is_frozen);
        let mut outside = PollFlags::empty();
        outside.set(PollFlags::IN, self.inward.is_empty());
        outside.set(PollFlags::OUT, policy.next_frame().is_some() && self.shared.may_send());
        (card, outside)
    }

    /// The timeout of a poll: no event signals that there is an uplink, or that a lease is held
    /// again.
    fn retry_interval(&self, is_plugged: bool) -> Option<Duration> {
        let waits =
            || self.shared.lock_output().policy.next_frame().is_some() && !self.shared.may_send();
        match self.uplink {
            _ if !is_plugged => None,
            None => Some(RETRY_INTERVAL),
            Some(_) => waits().then_some(LEASE_POLL_INTERVAL),
        }
    }

    /// Waits for an event or a timeout.
    fn wait_for_event(&self) -> io::Result<()> {
        let is_plugged = self.shared.is_plugged.load(Ordering::Relaxed);
        let (card, outside) = self.poll_flags();
        let mut all = vec![PollFd::new(&self.shared.wake, PollFlags::IN)];
        if !card.is_empty() {
            all.push(PollFd::new(&self.shared.card, card));
        }
        if let Some(uplink) = self.uplink.as_ref().filter(|_| is_plugged && !outside.is_empty()) {
            all.push(PollFd::from_borrowed_fd(uplink.as_fd(), outside));
        }
        let is_member = self.shared.lock_output().policy.cluster_output().is_some();
        let retries = self.retry_interval(is_plugged);
        let timeout = retries.into_iter().chain(is_member.then_some(TICK_INTERVAL)).min();
        let timeout = timeout
            .map(|it| Timespec { tv_sec: it.as_secs() as i64, tv_nsec: it.subsec_nanos().into() });
        rustix::io::retry_on_intr(|| poll(&mut all, timeout.as_ref()))?;
        // An empty counter is no error.
        let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
        Ok(())
    }

    /// Carries frames from the output to the uplink.
    fn send_outward(&mut self) -> io::Result<()> {
        let is_plugged = self.shared.is_plugged.load(Ordering::Relaxed);
        let Some(uplink) = self.uplink.as_mut().filter(|_| is_plugged) else {
            self.shared.lock_output().policy.drop_released();
            return Ok(());
        };
        while self.shared.may_send() {
            let Some(frame) = self.shared.lock_output().policy.next_frame() else { return Ok(()) };
            uplink.queue_frame(&frame);
            match uplink.write_pending()? {
                true => self.shared.lock_output().policy.confirm_sent(self.shared.since.elapsed()),
                false => return Ok(()),
            }
        }
        Ok(())
    }

    /// Carries frames from the uplink to the card, as far as the card has room.
    fn send_inward(&mut self) -> io::Result<()> {
        let is_plugged = self.shared.is_plugged.load(Ordering::Relaxed);
        let read = match self.uplink.as_mut().filter(|_| is_plugged && self.inward.is_empty()) {
            Some(uplink) => uplink.read_frames(&mut self.inward),
            None => Ok(()),
        };
        loop {
            // Locked until the frame is given: at a cut the VM has all frames that count as
            // received.
            let mut output = self.shared.lock_output();
            if output.is_frozen || !self.shared.has_room() {
                break;
            }
            let now = self.shared.since.elapsed();
            // Frames that have waited for a cut came earlier.
            let waited =
                output.policy.cluster_output_mut().filter(|joined| joined.has_deliverable());
            let given = match waited.map(|joined| joined.deliver_waiting(now)) {
                Some(given) => given,
                None => match self.inward.pop_front() {
                    Some(frame) => self.shared.receive_frame(&mut output.policy, frame, now),
                    None => break,
                },
            };
            for frame in given {
                // A frame that the socket does not take, or a VM that has ended, is no error.
                if self.shared.card.give_frame(&frame) {
                    self.shared.came.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        read
    }
}

/// Advances a member's time, at most once per interval. Returns when it was last advanced.
fn advance_member_time(policy: &mut OutputPolicy, before: Duration, now: Duration) -> Duration {
    let Some(joined) =
        policy.cluster_output_mut().filter(|_| now.saturating_sub(before) >= TICK_INTERVAL)
    else {
        return before;
    };
    joined.advance_time(now);
    now
}

#[cfg(test)]
mod tests;
