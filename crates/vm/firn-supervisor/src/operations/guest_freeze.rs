//! Frozen file systems of a guest, for the time of a cut: `firn checkpoint --freeze`.
//!
//! ```text
//!   journal: frozen      agent: freeze      cut      agent: thaw      journal: not frozen
//!   ------|------------------|---------------|------------|------------------|---------->
//!         '-- from here on, whatever ends: a thread, or a successor, thaws until the agent reports that
//! ```
//!
//! A guest that stays frozen is worse than a checkpoint that fails. So the journal has the freeze before the
//! agent is asked for it, and a thread that is started before it as well thaws the guest: after the cut, after
//! a failure, or when the time for it is over. Then there is no cut any more. The thread repeats its request
//! until the agent reports that the guest is thawed, or the VM ends. The successor of a supervisor that died
//! starts such a thread.
//!
//! The memory that an image has is that of a frozen guest. So the image records that, and each restore thaws
//! its guest as soon as the guest runs.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::operations::guest_agent;
use crate::operations::guest_program::{agent_failure, no_agent_failure};
use crate::records::failure::{Failure, FailureContext as _, FailureKind};
use crate::records::journal::{Journal, JournalFile};

/// How long one request to thaw may take.
const THAW_WAIT: Duration = Duration::from_secs(5);
/// The time between two requests, at first and at most.
const RETRY: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(5);
/// How long a save waits for the thaw when it is over.
const END_WAIT: Duration = Duration::from_secs(10);

/// The freeze of one save.
pub(crate) struct GuestFreeze {
    journal: Arc<JournalFile>,
    socket: PathBuf,
    pid: i32,
    time_limit: Duration,
    state: Mutex<Option<FrozenGuest>>,
}

/// A guest that is frozen, or is about to be.
struct FrozenGuest {
    since: Instant,
    /// How many; `None` if the agent did not report that it froze them.
    file_systems: Option<u64>,
    /// Ends the wait of the thread that thaws.
    done: Option<Sender<()>>,
    thaw: JoinHandle<Duration>,
    is_late: Arc<AtomicBool>,
}

impl GuestFreeze {
    /// The freeze of a VM that can be frozen. Nothing is asked of the guest yet.
    pub(crate) fn plan(
        journal: &Arc<JournalFile>,
        pid: i32,
        time_limit: Duration,
        was_running: bool,
    ) -> Result<Self, Failure> {
        let socket = guest_agent::find_socket(pid).ok_or_else(no_agent_failure)?;
        if !was_running {
            let text = "the VM is paused, so its guest agent can't freeze its file systems";
            let failure = Failure::new(FailureKind::Refused, text);
            return Err(failure.with_hint("save it without --freeze, or let it run"));
        }
        let (journal, state) = (Arc::clone(journal), Mutex::default());
        Ok(Self { journal, socket, pid, time_limit, state })
    }

    /// Freezes the guest. From here on it is thawed, whatever happens.
    pub(crate) fn begin(&self) -> Result<(), Failure> {
        let deadline = Instant::now() + self.time_limit;
        let mut agent = guest_agent::connect(&self.socket, deadline).map_err(agent_failure)?;
        if agent.is_frozen().map_err(agent_failure)? {
            let text = "the guest's file systems are frozen already";
            return Err(Failure::new(FailureKind::Busy, text).with_hint(
                "another program froze them, or an earlier checkpoint: `firn status` shows that",
            ));
        }
        self.journal.update(|journal| journal.frozen = true).while_doing("writing the journal")?;
        firn_fault::pass_point("freeze.recorded");
        let mut frozen = self.start_thaw()?;
        let asked = agent.freeze().map_err(agent_failure);
        // The socket has one client at a time.
        drop(agent);
        firn_fault::pass_point("freeze.frozen");
        frozen.file_systems = asked.as_ref().ok().copied();
        if asked.is_err() {
            frozen.done = None;
        }
        *self.state() = Some(frozen);
        asked.map(drop)
    }

    fn start_thaw(&self) -> Result<FrozenGuest, Failure> {
        let (done, is_done) = channel();
        let is_late = Arc::new(AtomicBool::new(false));
        let (journal, socket, pid) = (Arc::clone(&self.journal), self.socket.clone(), self.pid);
        let (since, time_limit, late) = (Instant::now(), self.time_limit, Arc::clone(&is_late));
        let work = move || {
            wait_for_cut(&is_done, time_limit, &late);
            thaw_until_done(&journal, &socket, pid);
            since.elapsed()
        };
        let thaw = thread::Builder::new().name("guest thaw".into()).spawn(work);
        let thaw = thaw.while_doing("starting the thread that thaws the guest")?;
        Ok(FrozenGuest { since, file_systems: None, done: Some(done), thaw, is_late })
    }

    /// The cut is made: the guest is thawed now, while this save continues. An error if it was thawed before.
    pub(crate) fn end(&self) -> Result<(), Failure> {
        let mut state = self.state();
        let Some(frozen) = state.as_mut() else { return Ok(()) };
        frozen.done = None;
        match frozen.is_late.load(Ordering::SeqCst) {
            false => Ok(()),
            true => Err(late_failure(self.time_limit)),
        }
    }

    /// The failure of the save, or that the cut came too late, if that is the reason.
    pub(crate) fn explain_failure(&self, failure: Failure) -> Failure {
        if self.is_late() { late_failure(self.time_limit) } else { failure }
    }

    /// Whether the time for the cut is over.
    pub(crate) fn is_late(&self) -> bool {
        let is_late =
            |it: &FrozenGuest| it.file_systems.is_some() && it.is_late.load(Ordering::SeqCst);
        self.state().as_ref().is_some_and(is_late)
    }

    /// The save is over, in whatever way. Waits a moment for the thaw, and returns its facts.
    pub(crate) fn finish(&self) -> Option<Value> {
        let _ = self.end();
        let frozen = self.state().take()?;
        let until = Instant::now() + END_WAIT;
        while !frozen.thaw.is_finished() && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
        let is_thawed = frozen.thaw.is_finished() && !self.journal.current_journal().frozen;
        let elapsed = match is_thawed {
            true => frozen.thaw.join().unwrap_or_default(),
            false => frozen.since.elapsed(),
        };
        let ms = (elapsed.as_secs_f64() * 1e6).round() / 1e3;
        Some(json!({ "file_systems": frozen.file_systems, "ms": ms, "thawed": is_thawed }))
    }

    fn state(&self) -> std::sync::MutexGuard<'_, Option<FrozenGuest>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The failure of a save whose cut came too late.
fn late_failure(time_limit: Duration) -> Failure {
    let seconds = time_limit.as_secs_f64();
    let text = format!("the guest was thawed before the cut: it was frozen for {seconds} s");
    Failure::new(FailureKind::Other, text).with_hint("give it more time: --hook-timeout 5m")
}

/// Waits until the guest is to be thawed.
fn wait_for_cut(is_done: &Receiver<()>, time_limit: Duration, is_late: &AtomicBool) {
    if is_done.recv_timeout(time_limit) == Err(RecvTimeoutError::Timeout) {
        is_late.store(true, Ordering::SeqCst);
        let seconds = time_limit.as_secs_f64();
        tracing::warn!("the guest is thawed: the cut was not made within {seconds} s");
    }
}

/// Thaws a guest that an earlier supervisor, or the VM that was saved, has left frozen. Returns the thread
/// that does so; `None` if there is nothing to thaw, or nothing that could.
pub(crate) fn thaw_in_background(journal: &Arc<JournalFile>, pid: i32) -> Option<JoinHandle<()>> {
    if !journal.current_journal().frozen {
        return None;
    }
    let Some(socket) = guest_agent::find_socket(pid) else {
        tracing::error!("the guest's file systems are frozen, and it has no agent to thaw them");
        return None;
    };
    let journal = Arc::clone(journal);
    let work = move || thaw_until_done(&journal, &socket, pid);
    let thread = thread::Builder::new().name("guest thaw".into()).spawn(work);
    thread.inspect_err(|error| tracing::error!("the guest stays frozen: {error}")).ok()
}

/// Repeats the request to thaw, until the guest is thawed or its QEMU has ended.
fn thaw_until_done(journal: &JournalFile, socket: &Path, pid: i32) {
    let mut wait = RETRY;
    firn_fault::pass_point("freeze.thawing");
    loop {
        let failure = match thaw_once(journal, socket) {
            Ok(()) => return,
            Err(failure) => failure,
        };
        let is_over = journal.current_journal().phase.is_over();
        if is_over || guest_agent::find_socket(pid).is_none() {
            return;
        }
        tracing::warn!("the guest's file systems are frozen still: {failure}");
        thread::sleep(wait);
        wait = (2 * wait).min(RETRY_MAX);
    }
}

fn thaw_once(journal: &JournalFile, socket: &Path) -> Result<(), Failure> {
    let deadline = Instant::now() + THAW_WAIT;
    let mut agent = guest_agent::connect(socket, deadline).map_err(agent_failure)?;
    agent.thaw().map_err(agent_failure)?;
    firn_fault::pass_point("freeze.thawed");
    let change = |journal: &mut Journal| journal.frozen = false;
    journal.update(change).while_doing("writing the journal")
}

/// One attempt to thaw a guest that Firn is about to leave.
pub(crate) fn thaw_before_detach(journal: &JournalFile, pid: i32) {
    if !journal.current_journal().frozen {
        return;
    }
    let Some(socket) = guest_agent::find_socket(pid) else { return };
    if let Err(failure) = thaw_once(journal, &socket) {
        tracing::error!("the guest's file systems are frozen still: {failure}");
    }
}
