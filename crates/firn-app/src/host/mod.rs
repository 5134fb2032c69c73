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
//! If the hypervisor emulates the guest's processor and has Firn's plugin, the plugin can note the
//! application's stores ([`HostTracker::noting_stores`]). Then a commit is one store and no call,
//! and its result is words. If the plugin cannot report an epoch, the host reports pages as above.

mod device;
mod noted;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use firn_calls::{
    AreaId, CallError, Caller, Changed, Key, Nonce, Proof, Refusal, Request, Run, WORD, WindowError,
};
use rustix::thread::{MembarrierCommand, membarrier};
use thiserror::Error;

use crate::error::Error;
use crate::options::Precision;
use crate::span::{PAGE, Span};
use crate::sys::fork::Owner;
use crate::sys::mapping::Mapping;
use crate::tracker::{Counts, Found, Kind, Tracker};
use device::Device;
use noted::Noted;

/// The maximum time that the host may take to reply.
const PATIENCE: Duration = Duration::from_secs(10);
/// The interval between attempts to reach a host that was lost: the first one, and the longest.
const AGAIN: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));

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
    #[error("the host does not answer within {} s", PATIENCE.as_secs())]
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
pub struct Host {
    name: String,
    key: Key,
    device: Device,
    /// The proof, by which the host finds the address space of this process.
    proof: Mapping,
    spans: Vec<Span>,
    line: Option<Line>,
    /// The time of the last attempt to reach the host, and the interval until the next.
    tried: Option<Instant>,
    again: Duration,
    /// The unit in which noted stores are reported; `None` if stores are not to be noted.
    notes: Option<Precision>,
    counts: Counts,
    owner: Owner,
}

/// A slot of the window that this process has claimed, and the service that serves it.
#[derive(Clone, Copy)]
struct Seat {
    slot: usize,
    owner: u32,
    service: u32,
}

/// An open session with the host.
struct Line {
    caller: Caller,
    seat: Seat,
    areas: BTreeMap<AreaId, Span>,
    noted: Noted,
}

impl Host {
    /// Calls as an application of this name, with its key (64 hexadecimal digits), through the
    /// device of this guest.
    ///
    /// # Errors
    /// If there is no such device, or the host refuses.
    pub fn open(name: &str, key: &str) -> Result<Self, HostError> {
        let device = Device::find()?;
        let owner = Owner::this_process().map_err(|errno| HostError::Fork(errno.into()))?;
        let proof = Mapping::anonymous(PAGE).map_err(|it| HostError::NoDevice(it.to_string()))?;
        let (name, key) = (name.to_owned(), key.parse()?);
        let (spans, line, tried) = (Vec::new(), None, None);
        let again = AGAIN.0;
        let (notes, counts) = (None, Counts::default());
        let mut host =
            Self { name, key, device, proof, spans, line, tried, again, notes, counts, owner };
        host.line = Some(host.connect()?);
        Ok(host)
    }

    /// Has the plugin note this process's stores, and report their words, or pages. A commit then
    /// costs one store. The plugin does not notice writes that are no stores at the areas' own
    /// addresses: devices that write into an area directly (`O_DIRECT`), a second mapping of the
    /// same memory, ptrace(2) and the like.
    ///
    /// # Errors
    /// If no plugin observes the stores of this guest (`firn run --stores`), or its kernel has no
    /// membarrier(2).
    pub fn noting_stores(mut self, told: Precision) -> Result<Self, HostError> {
        membarrier(MembarrierCommand::RegisterPrivateExpedited)
            .map_err(|errno| HostError::Barrier(errno.into()))?;
        self.notes = Some(told);
        if let Some(mut line) = self.line.take() {
            let begun = self.begin_noting(&mut line);
            self.line = Some(line);
            begun?;
        }
        Ok(self)
    }

    fn connect(&self) -> Result<Line, HostError> {
        let window = self.device.window()?;
        let service = window.service()?;
        let owner = u32::from_le_bytes(random()).max(1);
        let seat = Seat { slot: window.take(owner)?, owner, service };
        let line = self.take_up(seat);
        if line.is_err() {
            self.give_back(seat);
        }
        line
    }

    /// Opens a session in this slot, with all areas that are followed.
    fn take_up(&self, seat: Seat) -> Result<Line, HostError> {
        let own: Nonce = random();
        let mut caller = Caller::new(&self.name, self.key.clone(), seat.slot as u32, own);
        self.introduce(&mut caller, seat)?;
        let mut line = Line { caller, seat, areas: BTreeMap::new(), noted: Noted::default() };
        self.spans.iter().try_for_each(|&span| self.follow(&mut line, span))?;
        Ok(line)
    }

    fn introduce(&self, caller: &mut Caller, seat: Seat) -> Result<(), HostError> {
        let hello = caller.hello();
        let proof = caller.challenged(&self.ask(caller, seat, &hello)?)?;
        self.lay_down(&proof);
        let at = self.proof.address() as u64;
        let prove = caller.request(&Request::Prove { at });
        Ok(caller.done(&self.ask(caller, seat, &prove)?)?)
    }

    /// Writes the proof to the address where the host searches for it.
    fn lay_down(&self, proof: &Proof) {
        let words = self.proof.words(0, proof.len() / 8);
        for (word, bytes) in words.iter().zip(proof.chunks_exact(8)) {
            let value = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
            word.store(value, std::sync::atomic::Ordering::Release);
        }
    }

    fn follow(&self, line: &mut Line, span: Span) -> Result<(), HostError> {
        // The host can follow only pages that are present.
        Mapping::touch(span);
        let (start, pages) = (span.start() as u64, span.pages() as u32);
        let request = line.caller.request(&Request::Follow { start, pages });
        let id = line.caller.following(&self.ask(&line.caller, line.seat, &request)?)?;
        line.areas.insert(id, span);
        // The notes are of the areas as they were.
        line.noted.lost();
        Ok(())
    }

    fn ask(&self, caller: &Caller, seat: Seat, request: &[u8]) -> Result<Vec<u8>, HostError> {
        let window = self.device.window()?;
        let slot = window.slot(seat.slot).ok_or(WindowError::NotServed)?;
        // The guest's kernel may reclaim a page that no process touches.
        Mapping::touch(self.proof.span());
        let since = Instant::now();
        slot.ask(caller.asked(), request);
        while !slot.is_answered(caller.asked()) {
            let waited = since.elapsed();
            if waited > PATIENCE {
                return Err(HostError::Silent);
            }
            match waited < Duration::from_millis(2) {
                true => std::hint::spin_loop(),
                // A service that has started since does not know this session.
                false if window.service()? != seat.service => {
                    return Err(CallError::NotTheHosts.into());
                }
                false => std::thread::sleep(Duration::from_micros(200)),
            }
        }
        slot.answer_bytes().ok_or(HostError::Call(CallError::NotTheHosts))
    }

    fn give_back(&self, seat: Seat) {
        if let Some(slot) = self.device.window().ok().and_then(|window| window.slot(seat.slot)) {
            slot.release(seat.owner);
        }
    }

    /// Requests the written pages from the host. Retries once if another program has overwritten
    /// the reply.
    fn collect_by(&self, line: &mut Line) -> Result<Changed, HostError> {
        let mut last = HostError::Silent;
        for _ in 0..2 {
            let request = line.caller.collect();
            let answer = self.ask(&line.caller, line.seat, &request)?;
            match line.caller.collected(&answer) {
                Ok(changed) => return Ok(changed),
                Err(CallError::NotTheHosts) => last = CallError::NotTheHosts.into(),
                Err(error) => return Err(error.into()),
            }
        }
        Err(last)
    }

    /// The writes as the plugin noted them. `None` if only a call can report them.
    fn collect_noted(&self, line: &mut Line, found: &mut Found) -> Option<()> {
        let unit = match self.notes? {
            Precision::Words => WORD as usize,
            Precision::Pages => PAGE,
        };
        // The plugin notes a store just after it is done. After this barrier it has noted all
        // stores of other threads that this thread knows of.
        membarrier(MembarrierCommand::PrivateExpedited).ok()?;
        let window = self.device.window().ok()?;
        let runs = line.noted.collect(window.slot(line.seat.slot)?)?;
        for run in runs {
            let Some(span) = line.areas.get(&run.area) else { continue };
            let from = run.first as usize * WORD as usize;
            let to = (from + run.words as usize * WORD as usize).next_multiple_of(unit);
            let (from, to) = ((from / unit * unit).min(span.bytes()), to.min(span.bytes()));
            found.push(span.start() + from, to - from);
        }
        Some(())
    }

    /// Begins to note stores. A call must report what was written before.
    fn begin_noting(&self, line: &mut Line) -> Result<(), HostError> {
        let window = self.device.window()?;
        let end = window.slot(line.seat.slot).ok_or(WindowError::NotServed)?.end_address();
        let request = line.caller.request(&Request::Note { end });
        line.noted.tried();
        line.noted.begin(line.caller.noting(&self.ask(&line.caller, line.seat, &request)?)?);
        Ok(())
    }

    /// Reconnects to the host, if the session was lost and the retry interval is over.
    fn reconnect(&mut self) {
        if self.tried.is_some_and(|tried| tried.elapsed() < self.again) {
            return;
        }
        self.line = self.connect().ok();
        self.tried = Some(Instant::now());
        self.again = match self.line {
            Some(_) => AGAIN.0,
            None => (2 * self.again).min(AGAIN.1),
        };
    }

    /// Gives up a session that cannot be used any more.
    fn lose(&mut self, line: &Line) {
        self.give_back(line.seat);
        self.tried = None;
    }
}

impl Line {
    /// Adds pages by their areas. A run lies within its area; what the host sealed is clipped to
    /// the area all the same.
    fn tell(&self, runs: &[Run], found: &mut Found) {
        for run in runs {
            if let Some(span) = self.areas.get(&run.area) {
                let first = run.first as usize;
                let part = span.part(first..first.saturating_add(run.pages as usize));
                found.push(part.start(), part.bytes());
            }
        }
    }
}

/// Whether the host will never follow this area, as opposed to not now.
fn is_about_the_area(error: &HostError) -> bool {
    let HostError::Call(CallError::Refused(refusal)) = error else { return false };
    !matches!(refusal, Refusal::Unavailable | Refusal::Gone(_) | Refusal::Early | Refusal::Garbled)
}

fn unavailable(error: &HostError) -> Error {
    let because = std::error::Error::source(error).map(|it| format!(": {it}"));
    let why = format!("{error}{}", because.unwrap_or_default());
    Error::Unavailable { kind: Kind::Host, why }
}

impl Tracker for Host {
    fn kind(&self) -> Kind {
        match self.notes {
            Some(Precision::Words) => Kind::Stores,
            _ => Kind::Host,
        }
    }

    fn tells_words(&self) -> bool {
        self.notes == Some(Precision::Words)
    }

    fn watch(&mut self, span: Span) -> Result<(), Error> {
        if let Some(mut line) = self.line.take() {
            match self.follow(&mut line, span) {
                Ok(()) => self.line = Some(line),
                Err(error) if is_about_the_area(&error) => {
                    self.line = Some(line);
                    return Err(unavailable(&error));
                }
                // The host cannot follow any area just now: everything counts as written until it
                // can.
                Err(_) => self.lose(&line),
            }
        }
        self.spans.push(span);
        Ok(())
    }

    fn collect(&mut self, found: &mut Found) -> Result<(), Error> {
        if let Some(mut line) = self.line.take() {
            if self.notes.is_some() {
                if self.collect_noted(&mut line, found).is_some() {
                    self.line = Some(line);
                    return Ok(());
                }
                self.counts.called += 1;
                // Notes begin before the call, so that no write falls between the two.
                if line.noted.is_due() {
                    let _ = self.begin_noting(&mut line);
                }
            }
            match self.collect_by(&mut line) {
                Ok(Changed::Runs(runs)) => {
                    line.tell(&runs, found);
                    self.line = Some(line);
                    return Ok(());
                }
                Ok(Changed::Anything) => self.line = Some(line),
                Err(_) => self.lose(&line),
            }
        }
        self.counts.blind += 1;
        self.spans.iter().for_each(|span| found.push(span.start(), span.bytes()));
        if self.line.is_none() {
            self.reconnect();
        }
        Ok(())
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // The host knows one process by this slot: a child sends nothing there.
        let line = self.line.take().filter(|_| self.owner.is_here());
        if let Some(mut line) = line {
            let bye = line.caller.request(&Request::Bye);
            let _ = self.ask(&line.caller, line.seat, &bye);
            self.give_back(line.seat);
        }
    }
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostTracker").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Random bytes that no other process can guess (getrandom(2)).
fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        let flags = rustix::rand::GetRandomFlags::empty();
        // It fails only if it is interrupted.
        filled += rustix::rand::getrandom(&mut bytes[filled..], flags).unwrap_or(0);
    }
    bytes
}
