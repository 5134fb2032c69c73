//! Primary: runs a VM's epochs, from the seed until the VM is released or lost.
//!
//! ```text
//!   seed ---> every interval: Cut ---> sender's thread ---> backup ---> Progress
//!              ^                            |                              |
//!              '--- Compared, spare buffers-'<-----------------------------'
//! ```
//!
//! One thread controls the VM. In each step it asks `PrimaryEpochs` for actions and carries them
//! out. Two more threads compare and send epochs, and read the replies of the backup. They end with
//! the connection, and the VM continues without protection.

use std::io::{self, BufWriter};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, select};
use firn_cluster::epoch::{Action, LimitsError, Pace, Primary};
use firn_cluster::member::EPOCHS_KEPT_MAX;
use firn_cluster::predict::Predictor;
use firn_cluster::{Epoch, Seq};
use firn_memory::heap;
use firn_types::PAGE_SIZE;
use thiserror::Error;

use crate::copy::EpochCopy;
use crate::endpoint::Stream;
use crate::guest::{Guest, GuestError};
use crate::primary_end::PrimaryEnd;
use crate::sender::{Event, Job, Sending, hear, writer};
use crate::wire::{Hello, WireError, Writer};

mod end;
mod options;
mod pause;
mod seed;

pub use options::{CutNumbers, Ending, Options, Told, Watch};
use pause::{Found, Inside, Stopping};
use seed::Seed;

/// The maximum number of jobs that wait for the sender. Parts of a large epoch are jobs as well.
const JOBS_MAX: usize = 16;
/// The minimum room of a buffer, in pages. A buffer is made a little larger than the last epoch
/// needed ahead of the pause, because growing takes page faults. A buffer that is far too large is
/// made smaller: the epoch that needed it may have been an exception.
const ROOM_MIN: usize = 1024;
const ROOM_TOO_LARGE: usize = 3;
/// The maximum number of buffers retained for later epochs. Two are in use if the sender keeps up:
/// one is filled while the next epoch is compared with the other. A third is needed now and then.
const SPARES_MAX: usize = 1;
/// The interval at which an end request is checked.
const LOOK: Duration = Duration::from_millis(20);
/// The same while a frame of another member waits for a cut.
const LOOK_OF_WANTED: Duration = Duration::from_millis(1);
/// The interval at which room is checked when there is none. A VM that is slowed is paused for as
/// long in each step.
const NO_ROOM: Duration = Duration::from_millis(5);
/// The length of each pause of a VM that is stopped. Between two pauses it runs for a moment, so
/// that other requests to stop or to query it are served.
const STOPPED: Duration = Duration::from_millis(50);
/// How long to wait for the backup's last message after sending has failed.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// How long a backup may take to acknowledge an epoch.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Why the protection of a VM ended.
#[derive(Debug, Error)]
pub enum PrimaryError {
    /// The interval or the buffer size is invalid.
    #[error(transparent)]
    Limits(#[from] LimitsError),
    /// The VM can't be tracked or paused.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The connection to the backup ended.
    #[error("the connection to the backup ended")]
    Wire(#[from] WireError),
    /// The connection could not be used.
    #[error("the connection to the backup can't be used")]
    Io(#[from] io::Error),
    /// The system can't start a thread.
    #[error("a thread for the connection to the backup can't be started")]
    Thread(#[source] io::Error),
    /// The backup refuses further epochs, with its reason.
    #[error("the backup takes nothing more: {0}")]
    Refused(String),
    /// The backup reports that it never runs the VM, and why.
    #[error("the backup never runs the VM: {0}")]
    Declined(String),
    /// The backup does not acknowledge what was sent.
    #[error("the backup has not answered for {} s", ANSWER_MAX.as_secs())]
    Silent,
    /// The peer sent a message that only a primary may send, or one that was not expected.
    #[error("protocol error: the peer sent a message that no backup may send here")]
    Confused,
}

/// Protects a VM until `ending` requests the end, which is no error, or until an error prevents it.
/// The VM then continues, if it still exists.
///
/// # Errors
/// If the connection ends, the backup refuses, or the VM can't be paused.
pub fn protect(
    mut guest: Guest,
    stream: &Stream,
    hello: &Hello,
    options: Options,
    ending: &Ending,
    told: &dyn Watch,
) -> Result<(), PrimaryError> {
    let ended = Connection { stream, hello, options, ending, told }.protect(&mut guest);
    let detached = match &ended {
        Err(PrimaryError::Guest(error)) if error.is_hang() => {
            guest.abandon();
            Ok(())
        }
        _ => guest.detach(),
    };
    heap::give_back();
    ended?;
    Ok(detached?)
}

/// A connection to a backup, and the parameters of the protection.
struct Connection<'a> {
    stream: &'a Stream,
    hello: &'a Hello,
    options: Options,
    ending: &'a Ending,
    told: &'a dyn Watch,
}

impl<'a> Connection<'a> {
    /// Runs the protection. The threads that read and send end with the connection.
    fn protect(&self, guest: &mut Guest) -> Result<(), PrimaryError> {
        let epochs = Primary::new(
            self.options.limits(self.hello.member.is_some())?,
            Epoch(0),
            Duration::ZERO,
        );
        let (tell, events) = crossbeam_channel::unbounded();
        let (reading, writer) = (self.stream.try_clone()?, writer(self.stream.try_clone()?));
        thread::scope(|scope| {
            let _closing = Closing(self.stream);
            let heard = tell.clone();
            let seeded = begin(scope, "hear", move || hear(reading, &heard))
                .and_then(|()| self.seeded(guest, writer, &events));
            let ended = seeded.and_then(|writer| {
                firn_fault::point("protect.seeded");
                let (jobs, taken) = crossbeam_channel::bounded(JOBS_MAX);
                let sending = Sending::new(writer, tell);
                begin(scope, "send", move || sending.run(&taken))?;
                self.protection(guest, epochs, jobs, events.clone())?.run()
            });
            ended.map_err(|error| said_by_backup(error, &events))
        })
    }

    fn seeded(
        &self,
        guest: &mut Guest,
        mut writer: Writer<BufWriter<Stream>>,
        events: &Receiver<Event>,
    ) -> Result<Writer<BufWriter<Stream>>, PrimaryError> {
        writer.hello(self.hello)?;
        let (ending, told) = (self.ending, self.told);
        Seed { guest, writer: &mut writer, events, ending, told }.run()?;
        Ok(writer)
    }

    fn protection<'g>(
        &self,
        guest: &'g mut Guest,
        epochs: Primary,
        jobs: Sender<Job>,
        events: Receiver<Event>,
    ) -> Result<Protection<'g>, PrimaryError>
    where
        'a: 'g,
    {
        let predicts = self.options.predicts && guest.can_be_copied_ahead()?;
        let options = Options { predicts, ..self.options };
        Ok(Protection {
            guest,
            epochs,
            predictor: Predictor::new(predicts).with_busy(options.busy_pages()),
            options,
            jobs,
            events,
            ending: self.ending,
            told: self.told,
            started: Instant::now(),
            spares: Vec::new(),
            copied: 0,
            heard: Duration::ZERO,
            cut: None,
            pace: Pace::Free,
            told_backup: self.hello.member.as_ref().map(|_| Default::default()),
        })
    }
}

/// Closes the connection in every case, because threads wait for that.
struct Closing<'a>(&'a Stream);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Starts a thread that ends with the connection.
fn begin<'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    name: &str,
    run: impl FnOnce() + Send + 'scope,
) -> Result<(), PrimaryError> {
    firn_fault::io("protect.thread").map_err(PrimaryError::Thread)?;
    let builder = thread::Builder::new().name(name.into());
    builder.spawn_scoped(scope, run).map(drop).map_err(PrimaryError::Thread)
}

/// Replaces a connection error by the reason that the backup reported. A backup that refuses
/// further epochs sends the reason and closes the connection, and the primary may notice the failed
/// write first.
pub(crate) fn said_by_backup(error: PrimaryError, events: &Receiver<Event>) -> PrimaryError {
    use PrimaryError::{Confused, Declined, Guest, Io, Refused, Wire};
    if !matches!(error, Wire(_) | Io(_) | Guest(GuestError::NobodyTakes)) {
        return error;
    }
    let deadline = Instant::now() + LAST_WORDS;
    while let Ok(event) = events.recv_deadline(deadline) {
        if let Event::Lost(said @ (Refused(_) | Declined(_) | Confused)) = event {
            return said;
        }
    }
    error
}

/// The loop that protects a VM.
struct Protection<'a> {
    guest: &'a mut Guest,
    epochs: Primary,
    predictor: Predictor,
    options: Options,
    jobs: Sender<Job>,
    events: Receiver<Event>,
    ending: &'a Ending,
    told: &'a dyn Watch,
    started: Instant,
    spares: Vec<Vec<u8>>,
    /// The number of pages that the last cut copied.
    copied: usize,
    /// The time at which the backup last sent a message, or had nothing to acknowledge.
    heard: Duration,
    /// The newest epoch that was cut, until it is sent.
    cut: Option<Box<EpochCopy>>,
    pace: Pace,
    /// For a member of a cluster: the newest epoch that the backup was ordered to fold, and the
    /// newest frame that it knows to have been sent.
    told_backup: Option<(Epoch, Seq)>,
}

impl Protection<'_> {
    fn run(mut self) -> Result<(), PrimaryError> {
        let ended = self.keep();
        if let Some(end) = self.end_of(&ended) {
            end::report(&self.jobs, &self.events, end);
        }
        ended
    }

    /// How the protection ended, if the backup can and should be informed.
    fn end_of(&mut self, ended: &Result<(), PrimaryError>) -> Option<PrimaryEnd> {
        let error = match ended {
            Ok(()) if self.ending.is_release() => return None,
            Ok(()) => None,
            Err(PrimaryError::Guest(GuestError::NobodyTakes)) => return None,
            Err(PrimaryError::Guest(error)) => Some(error),
            Err(_) => return None,
        };
        let words = self.guest.last_words();
        self.told.end(error, &words)
    }

    fn keep(&mut self) -> Result<(), PrimaryError> {
        let news = self.told.news();
        while !self.ending.is_asked() {
            select! {
                recv(self.events) -> event => self.on(event.map_err(|_| GuestError::NobodyTakes)?)?,
                recv(news) -> _ => {}
                default(self.until_next_look()) => {}
            }
            self.turn()?;
        }
        match self.ending.is_release() {
            true => self.released(),
            false => Ok(()),
        }
    }

    /// Waits until the backup has confirmed that it never runs the VM.
    fn released(&self) -> Result<(), PrimaryError> {
        self.jobs.send(Job::Release).map_err(|_| GuestError::NobodyTakes)?;
        let deadline = Instant::now() + ANSWER_MAX;
        loop {
            match self.events.recv_deadline(deadline) {
                Ok(Event::Released) => return Ok(()),
                Ok(Event::Lost(error)) => return Err(error),
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => return Err(PrimaryError::Silent),
                Err(RecvTimeoutError::Disconnected) => return Err(GuestError::NobodyTakes.into()),
            }
        }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn due(&self) -> Duration {
        self.epochs.due().unwrap_or_default()
    }

    fn until_next_look(&self) -> Duration {
        match self.due().saturating_sub(self.now()) {
            Duration::ZERO => NO_ROOM,
            until_due if self.told.wants_cut() => until_due.min(LOOK_OF_WANTED),
            until_due => until_due.min(LOOK),
        }
    }

    fn on(&mut self, event: Event) -> Result<(), PrimaryError> {
        match event {
            // A comparison that ends after the next cut is about pages that may have changed since.
            Event::Compared { epoch, plan, same } if epoch.next() == self.epochs.epoch() => {
                self.predictor.unchanged(&plan, &same);
                self.told.told(Told::Counts(self.predictor.counts()));
            }
            Event::Compared { .. } => {}
            Event::Sent { epoch, pages, bytes } => {
                tracing::trace!("{epoch} is sent: {pages} pages, {bytes} bytes");
                self.told.told(Told::Sent(epoch, pages, bytes));
            }
            Event::Spare(bytes) if self.spares.len() < SPARES_MAX => self.spares.push(bytes),
            Event::Spare(_) => {}
            Event::Progress(progress) => {
                // This progress releases output of the VM, so it is checked first.
                let is_cut = progress.complete < self.epochs.epoch();
                if !is_cut || progress.committed > progress.complete {
                    return Err(PrimaryError::Confused);
                }
                tracing::trace!(
                    "{} is complete, {} committed",
                    progress.complete,
                    progress.committed
                );
                self.told.told(Told::Progress(progress));
                self.heard = self.now();
                let actions = self.epochs.acknowledged(self.now(), progress);
                self.perform(actions)?;
            }
            // Not requested yet.
            Event::Released | Event::EndNoted => return Err(PrimaryError::Confused),
            Event::Lost(error) => return Err(error),
        }
        Ok(())
    }

    fn turn(&mut self) -> Result<(), PrimaryError> {
        if self.told.presses_power_button() {
            self.guest.press_power_button()?;
        }
        match self.epochs.buffered() {
            0 => self.heard = self.now(),
            _ if self.now().saturating_sub(self.heard) > ANSWER_MAX => {
                return Err(PrimaryError::Silent);
            }
            _ => {}
        }
        if self.is_far_ahead()? {
            return Ok(());
        }
        // The number of written pages matters only if room is scarce.
        let is_scarce = self.now() >= self.due() && self.epochs.buffered() > 0;
        let written = if is_scarce { self.guest.glance()?.len() as u64 } else { 0 };
        let mut actions = self.epochs.tick(self.now(), written);
        if self.told.wants_cut() {
            actions.extend(self.epochs.cut_now(self.now()));
        }
        self.perform(actions)?;
        match self.pace {
            Pace::Free => Ok(()),
            Pace::Slowed => self.stand_still(NO_ROOM),
            Pace::Stopped => self.stand_still(STOPPED),
        }
    }

    /// Reports to the backup of a member which epochs and frames can't be undone any more. The
    /// backup stores the epochs after the newest global checkpoint, up to a maximum number. Returns
    /// whether that is reached: then the running epoch is not cut until there is another global
    /// checkpoint.
    fn is_far_ahead(&mut self) -> Result<bool, PrimaryError> {
        let Some((global, gone)) = &mut self.told_backup else { return Ok(false) };
        let newest = self.told.globally();
        if newest > *global {
            *global = newest;
            self.jobs.send(Job::Globally(newest)).map_err(|_| GuestError::NobodyTakes)?;
        }
        let newest = self.told.gone();
        if newest > *gone {
            *gone = newest;
            self.jobs.send(Job::Gone(newest)).map_err(|_| GuestError::NobodyTakes)?;
        }
        Ok(self.epochs.epoch().0 - global.0 > EPOCHS_KEPT_MAX)
    }

    fn stand_still(&mut self, time: Duration) -> Result<(), PrimaryError> {
        let _stopping = Stopping::tell(self.told);
        Ok(self.guest.stand_still(time)?)
    }

    fn perform(&mut self, actions: Vec<Action>) -> Result<(), PrimaryError> {
        for action in actions {
            match action {
                Action::Cut(epoch) => self.cut(epoch)?,
                Action::Send { .. } => self.send()?,
                Action::Free(_) => {}
                Action::Committed(epoch) => self.told.told(Told::Committed(epoch)),
                Action::Pace(pace) => self.pace = pace,
            }
        }
        Ok(())
    }

    /// A buffer for the copies of an epoch that is likely to be as large as the last one.
    fn buffer(&mut self) -> Vec<u8> {
        let mut bytes = self.spares.pop().unwrap_or_default();
        let most = usize::try_from(self.options.buffer_pages).unwrap_or(usize::MAX);
        let pages = self.copied + self.copied / 32;
        let room = pages.max(ROOM_MIN).min(most) * PAGE_SIZE;
        if bytes.len() < room || bytes.len() > ROOM_TOO_LARGE * room {
            bytes.resize(room, 0);
            bytes.shrink_to_fit();
        }
        bytes
    }

    fn cut(&mut self, epoch: Epoch) -> Result<(), PrimaryError> {
        let mut bytes = self.buffer();
        tracing::trace!("{epoch} is to be cut");
        let trouble = self.guest.check()?;
        self.told.told(Told::Trouble(trouble));
        self.guest.prepare()?;
        let ahead = pause::ahead(self.guest, &mut self.predictor, &self.options, &mut bytes)?;
        tracing::trace!("{epoch} is being cut, {} pages are copied", ahead.len());
        let stopping = Stopping::tell(self.told);
        let mut inside = Inside {
            epoch,
            predictor: &mut self.predictor,
            options: &self.options,
            jobs: &self.jobs,
            ending: self.ending,
            told: self.told,
            bytes: &mut bytes,
            ahead: ahead.len(),
            numbers: CutNumbers { epoch, ..CutNumbers::default() },
        };
        let (found, pause) = self.guest.pause(|still| inside.run(still))?;
        drop(stopping);
        let Found { plan, pages, disks, card, numbers } = found;
        firn_fault::point("protect.cut");
        let numbers = CutNumbers {
            downtime_ms: ms(pause.downtime),
            device_bytes: pause.devices.len() as u64,
            ..numbers
        };
        tracing::trace!("{epoch} is cut, with {} pages", pages.len());
        self.copied = ahead.len() + pages.len();
        let (devices, aux) = (pause.devices, pause.aux);
        let last = false;
        let copy = EpochCopy { epoch, plan, ahead, pages, bytes, devices, aux, disks, card, last };
        let copied = copy.plan.pages() as u64 + copy.disk_pages();
        self.cut = Some(Box::new(copy));
        self.told.told(Told::Cut(numbers));
        let actions = self.epochs.copied(self.now(), copied);
        self.perform(actions)
    }

    fn send(&mut self) -> Result<(), PrimaryError> {
        let Some(copy) = self.cut.take() else { return Ok(()) };
        self.jobs.send(Job::Epoch(copy)).map_err(|_| GuestError::NobodyTakes.into())
    }
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
