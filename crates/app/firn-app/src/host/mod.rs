//! PT assisted by the hypervisor layer: Firn on the host reports which pages were written.
//!
//! The application calls Firn through the memory of a device, around the guest's kernel (see
//! `firn_calls`): no system call, no page fault in the guest. Only a process that may write to that
//! memory can call (by default root, as the device is a PCI device), and Firn accepts calls only
//! from applications with a key.
//!
//! Firn reports what it could not observe: while it saves the VM, or after Firn was restarted,
//! everything counts as written. A session that compares with the last committed copy then still
//! finds what changed. The same holds if Firn is gone altogether. That takes longer, and
//! [`TrackerCounts`](crate::TrackerCounts) counts such commits.
//!
//! If the hypervisor emulates the guest's processor and has Firn's plugin, the plugin can record
//! the application's stores ([`HostTracker::recording_stores`]). Then a commit is one store and no
//! call, and its result is words. If the plugin cannot report an epoch, the host reports pages as
//! above.

mod device;
mod store_recording;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use firn_calls::{
    ApplicationKey, CallError, CallRefusal, CallRequest, Caller, FollowedAreaId, Nonce, PageRun,
    Proof, WORD, WindowError, WrittenPages,
};
use rustix::thread::{MembarrierCommand, membarrier};
use thiserror::Error;

use crate::error::Error;
use crate::options::Precision;
use crate::span::{PAGE, PageSpan};
use crate::sys::fork::OwnerProcess;
use crate::sys::mapping::OwnedMapping;
use crate::tracker::interface::{Tracker, TrackerCounts, WrittenRuns};
use crate::tracker::kind::TrackerKind;
use device::IvshmemDevice;
use store_recording::StoreRecording;

/// The maximum time that the host may take to reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// The interval between attempts to reach a host that was lost: the first one, and the longest.
const RECONNECT_INTERVALS: (Duration, Duration) =
    (Duration::from_millis(100), Duration::from_secs(60));

/// Why Firn on the host can't be called.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HostError {
    /// The guest has no such device, or this process may not use it.
    #[error("no device to call the host through ({0})")]
    NoDevice(String),
    /// The device is not as expected, or no host serves it.
    #[error(transparent)]
    Window(#[from] WindowError),
    /// The host refuses, or another program disturbs the call.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The host does not reply.
    #[error("the host does not answer within {} s", REPLY_TIMEOUT.as_secs())]
    Silent,
    /// The kernel cannot guarantee that all threads have completed their stores.
    #[error("the guest's kernel has no membarrier(2)")]
    Barrier(#[source] std::io::Error),
    /// The kernel cannot mark a page for forks.
    #[error("a page cannot be marked for forks")]
    Fork(#[source] std::io::Error),
    /// The key is malformed.
    #[error(transparent)]
    Key(#[from] firn_calls::KeyError),
}

/// The tracker on the host. Pass it to [`crate::Session::open_with`].
///
/// ```no_run
/// use firn_app::{HostTracker, Session, SessionOptions};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let key = std::fs::read_to_string("/etc/ledger.key")?;
/// let host = HostTracker::open("ledger", &key)?;
/// let session = Session::open_with(SessionOptions::new("ledger"), Box::new(host))?;
/// # Ok(())
/// # }
/// ```
pub struct HostTracker {
    name: String,
    key: ApplicationKey,
    device: IvshmemDevice,
    /// The proof, by which the host finds the address space of this process.
    proof: OwnedMapping,
    spans: Vec<PageSpan>,
    session: Option<HostSession>,
    /// The time of the last attempt to reach the host, and the interval until the next.
    last_attempt: Option<Instant>,
    retry_interval: Duration,
    /// The unit in which recorded stores are reported; `None` if stores are not to be recorded.
    store_unit: Option<Precision>,
    counts: TrackerCounts,
    owner: OwnerProcess,
}

/// A slot of the window that this process has claimed, and the service that serves it.
#[derive(Clone, Copy)]
struct SlotClaim {
    slot: usize,
    owner: u32,
    service: u32,
}

/// An open session with the host.
struct HostSession {
    caller: Caller,
    claim: SlotClaim,
    areas: BTreeMap<FollowedAreaId, PageSpan>,
    recording: StoreRecording,
}

impl HostTracker {
    /// Calls as an application of this name, with its key (64 hexadecimal digits), through the
    /// device of this guest.
    ///
    /// # Errors
    /// If there is no such device, or the host refuses.
    pub fn open(name: &str, key: &str) -> Result<Self, HostError> {
        let device = IvshmemDevice::find_served()?;
        let owner = OwnerProcess::this_process().map_err(|errno| HostError::Fork(errno.into()))?;
        let proof =
            OwnedMapping::map_anonymous(PAGE).map_err(|it| HostError::NoDevice(it.to_string()))?;
        let (name, key) = (name.to_owned(), key.parse()?);
        let (spans, line, tried) = (Vec::new(), None, None);
        let again = RECONNECT_INTERVALS.0;
        let (store_unit, counts) = (None, TrackerCounts::default());
        let mut host = Self {
            name,
            key,
            device,
            proof,
            spans,
            session: line,
            last_attempt: tried,
            retry_interval: again,
            store_unit,
            counts,
            owner,
        };
        host.session = Some(host.connect()?);
        Ok(host)
    }

    /// Has the plugin record this process's stores, and report their words, or pages. A commit then
    /// costs one store. The plugin does not notice writes that are no stores at the areas' own
    /// addresses: devices that write into an area directly (`O_DIRECT`), a second mapping of the
    /// same memory, ptrace(2) and the like.
    ///
    /// # Errors
    /// If no plugin observes the stores of this guest (`firn run --stores`), or its kernel has no
    /// membarrier(2).
    pub fn recording_stores(mut self, unit: Precision) -> Result<Self, HostError> {
        membarrier(MembarrierCommand::RegisterPrivateExpedited)
            .map_err(|errno| HostError::Barrier(errno.into()))?;
        self.store_unit = Some(unit);
        if let Some(mut line) = self.session.take() {
            let begun = self.begin_recording(&mut line);
            self.session = Some(line);
            begun?;
        }
        Ok(self)
    }

    fn connect(&self) -> Result<HostSession, HostError> {
        let window = self.device.window()?;
        let service = window.service_number()?;
        let owner = u32::from_le_bytes(random_bytes()).max(1);
        let seat = SlotClaim { slot: window.claim_slot(owner)?, owner, service };
        let line = self.open_session(seat);
        if line.is_err() {
            self.release_slot(seat);
        }
        line
    }

    /// Opens a session in this slot, with all areas that are followed.
    fn open_session(&self, seat: SlotClaim) -> Result<HostSession, HostError> {
        let own: Nonce = random_bytes();
        let mut caller = Caller::new(&self.name, self.key.clone(), seat.slot as u32, own);
        self.authenticate(&mut caller, seat)?;
        let mut line = HostSession {
            caller,
            claim: seat,
            areas: BTreeMap::new(),
            recording: StoreRecording::default(),
        };
        self.spans.iter().try_for_each(|&span| self.follow_span(&mut line, span))?;
        Ok(line)
    }

    fn authenticate(&self, caller: &mut Caller, seat: SlotClaim) -> Result<(), HostError> {
        let hello = caller.hello_request();
        let proof = caller.accept_challenge(&self.call_host(caller, seat, &hello)?)?;
        self.write_proof(&proof);
        let at = self.proof.address() as u64;
        let prove = caller.seal_request(&CallRequest::Prove { at });
        Ok(caller.accept_done(&self.call_host(caller, seat, &prove)?)?)
    }

    /// Writes the proof to the address where the host searches for it.
    fn write_proof(&self, proof: &Proof) {
        let words = self.proof.atomic_words(0, proof.len() / 8);
        for (word, bytes) in words.iter().zip(proof.chunks_exact(8)) {
            let value = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
            word.store(value, std::sync::atomic::Ordering::Release);
        }
    }

    fn follow_span(&self, line: &mut HostSession, span: PageSpan) -> Result<(), HostError> {
        // The host can follow only pages that are present.
        OwnedMapping::touch_pages(span);
        let (start, pages) = (span.start() as u64, span.page_count() as u32);
        let request = line.caller.seal_request(&CallRequest::Follow { start, pages });
        let id =
            line.caller.accept_following(&self.call_host(&line.caller, line.claim, &request)?)?;
        line.areas.insert(id, span);
        // The recorded stores are of the areas as they were.
        line.recording.end_recording();
        Ok(())
    }

    fn call_host(
        &self,
        caller: &Caller,
        seat: SlotClaim,
        request: &[u8],
    ) -> Result<Vec<u8>, HostError> {
        let window = self.device.window()?;
        let slot = window.slot(seat.slot).ok_or(WindowError::NotServed)?;
        // The guest's kernel may reclaim a page that no process touches.
        OwnedMapping::touch_pages(self.proof.span());
        let since = Instant::now();
        slot.write_request(caller.request_number(), request);
        while !slot.is_answered(caller.request_number()) {
            let waited = since.elapsed();
            if waited > REPLY_TIMEOUT {
                return Err(HostError::Silent);
            }
            match waited < Duration::from_millis(2) {
                true => std::hint::spin_loop(),
                // A service that has started since does not know this session.
                false if window.service_number()? != seat.service => {
                    return Err(CallError::NotTheHosts.into());
                }
                false => std::thread::sleep(Duration::from_micros(200)),
            }
        }
        slot.read_reply().ok_or(HostError::Call(CallError::NotTheHosts))
    }

    fn release_slot(&self, seat: SlotClaim) {
        if let Some(slot) = self.device.window().ok().and_then(|window| window.slot(seat.slot)) {
            slot.release_from(seat.owner);
        }
    }

    /// Requests the written pages from the host. Retries once if another program has overwritten
    /// the reply.
    fn collect_by_call(&self, line: &mut HostSession) -> Result<WrittenPages, HostError> {
        let mut last = HostError::Silent;
        for _ in 0..2 {
            let request = line.caller.collect_request();
            let answer = self.call_host(&line.caller, line.claim, &request)?;
            match line.caller.accept_written(&answer) {
                Ok(changed) => return Ok(changed),
                Err(CallError::NotTheHosts) => last = CallError::NotTheHosts.into(),
                Err(error) => return Err(error.into()),
            }
        }
        Err(last)
    }

    /// The writes as the plugin recorded them. `None` if only a call can report them.
    fn collect_recorded(&self, line: &mut HostSession, found: &mut WrittenRuns) -> Option<()> {
        let unit = match self.store_unit? {
            Precision::Words => WORD as usize,
            Precision::Pages => PAGE,
        };
        // The plugin records a store just after it is done. After this barrier it has recorded all
        // stores of other threads that this thread knows of.
        membarrier(MembarrierCommand::PrivateExpedited).ok()?;
        let window = self.device.window().ok()?;
        let runs = line.recording.collect_epoch(window.slot(line.claim.slot)?)?;
        for run in runs {
            let Some(span) = line.areas.get(&run.area) else { continue };
            let from = run.first as usize * WORD as usize;
            let to = (from + run.words as usize * WORD as usize).next_multiple_of(unit);
            let (from, to) =
                ((from / unit * unit).min(span.byte_count()), to.min(span.byte_count()));
            found.push_run(span.start() + from, to - from);
        }
        Some(())
    }

    /// Begins to record stores. A call must report what was written before.
    fn begin_recording(&self, line: &mut HostSession) -> Result<(), HostError> {
        let window = self.device.window()?;
        let end = window.slot(line.claim.slot).ok_or(WindowError::NotServed)?.end_address();
        let request = line.caller.seal_request(&CallRequest::RecordStores { end });
        line.recording.record_attempt();
        line.recording.begin_recording(line.caller.accept_recording(&self.call_host(
            &line.caller,
            line.claim,
            &request,
        )?)?);
        Ok(())
    }

    /// Reconnects to the host, if the session was lost and the retry interval is over.
    fn reconnect(&mut self) {
        if self.last_attempt.is_some_and(|tried| tried.elapsed() < self.retry_interval) {
            return;
        }
        self.session = self.connect().ok();
        self.last_attempt = Some(Instant::now());
        self.retry_interval = match self.session {
            Some(_) => RECONNECT_INTERVALS.0,
            None => (2 * self.retry_interval).min(RECONNECT_INTERVALS.1),
        };
    }

    /// Gives up a session that cannot be used any more.
    fn drop_session(&mut self, line: &HostSession) {
        self.release_slot(line.claim);
        self.last_attempt = None;
    }
}

impl HostSession {
    /// Adds pages by their areas. A run lies within its area; what the host sealed is clipped to
    /// the area all the same.
    fn push_runs(&self, runs: &[PageRun], found: &mut WrittenRuns) {
        for run in runs {
            if let Some(span) = self.areas.get(&run.area) {
                let first = run.first as usize;
                let part = span.sub_span(first..first.saturating_add(run.pages as usize));
                found.push_run(part.start(), part.byte_count());
            }
        }
    }
}

/// Whether the host will never follow this area, as opposed to not now.
fn is_about_the_area(error: &HostError) -> bool {
    let HostError::Call(CallError::Refused(refusal)) = error else { return false };
    !matches!(
        refusal,
        CallRefusal::Unavailable | CallRefusal::Gone(_) | CallRefusal::Early | CallRefusal::Garbled
    )
}

fn unavailable(error: &HostError) -> Error {
    let because = std::error::Error::source(error).map(|it| format!(": {it}"));
    let why = format!("{error}{}", because.unwrap_or_default());
    Error::Unavailable { kind: TrackerKind::Host, why }
}

impl Tracker for HostTracker {
    fn kind(&self) -> TrackerKind {
        match self.store_unit {
            Some(Precision::Words) => TrackerKind::Stores,
            _ => TrackerKind::Host,
        }
    }

    fn reports_words(&self) -> bool {
        self.store_unit == Some(Precision::Words)
    }

    fn watch_span(&mut self, span: PageSpan) -> Result<(), Error> {
        if let Some(mut line) = self.session.take() {
            match self.follow_span(&mut line, span) {
                Ok(()) => self.session = Some(line),
                Err(error) if is_about_the_area(&error) => {
                    self.session = Some(line);
                    return Err(unavailable(&error));
                }
                // The host cannot follow any area just now: everything counts as written until it
                // can.
                Err(_) => self.drop_session(&line),
            }
        }
        self.spans.push(span);
        Ok(())
    }

    fn forget_span(&mut self, span: PageSpan) -> Result<(), Error> {
        span.remove_from(&mut self.spans);
        // The host follows what a session has; a new one has what is left.
        if let Some(line) = self.session.take() {
            self.drop_session(&line);
        }
        Ok(())
    }

    fn collect_writes(&mut self, found: &mut WrittenRuns) -> Result<(), Error> {
        if let Some(mut line) = self.session.take() {
            if self.store_unit.is_some() {
                if self.collect_recorded(&mut line, found).is_some() {
                    self.session = Some(line);
                    return Ok(());
                }
                self.counts.called += 1;
                // Recording begins before the call, so that no write falls between the two.
                if line.recording.is_due() {
                    let _ = self.begin_recording(&mut line);
                }
            }
            match self.collect_by_call(&mut line) {
                Ok(WrittenPages::Runs(runs)) => {
                    line.push_runs(&runs, found);
                    self.session = Some(line);
                    return Ok(());
                }
                Ok(WrittenPages::Anything) => self.session = Some(line),
                Err(_) => self.drop_session(&line),
            }
        }
        self.counts.blind += 1;
        self.spans.iter().for_each(|span| found.push_run(span.start(), span.byte_count()));
        if self.session.is_none() {
            self.reconnect();
        }
        Ok(())
    }

    fn counts(&self) -> TrackerCounts {
        self.counts
    }
}

impl Drop for HostTracker {
    fn drop(&mut self) {
        // The host knows one process by this slot: a child sends nothing there.
        let line = self.session.take().filter(|_| self.owner.is_this_process());
        if let Some(mut line) = line {
            let bye = line.caller.seal_request(&CallRequest::Bye);
            let _ = self.call_host(&line.caller, line.claim, &bye);
            self.release_slot(line.claim);
        }
    }
}

impl std::fmt::Debug for HostTracker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostTracker").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Random bytes that no other process can guess (getrandom(2)).
fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        let flags = rustix::rand::GetRandomFlags::empty();
        // It fails only if it is interrupted.
        filled += rustix::rand::getrandom(&mut bytes[filled..], flags).unwrap_or(0);
    }
    bytes
}
