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
use firn_cluster::epoch::{GuestSpeed, LimitsError, PrimaryAction, PrimaryEpochs};
use firn_cluster::member::EPOCHS_KEPT_MAX;
use firn_cluster::predict::DirtyPagePredictor;
use firn_cluster::{Epoch, FrameNumber};
use firn_memory::heap;
use firn_types::PAGE_SIZE;
use thiserror::Error;

use crate::copy::EpochCopy;
use crate::endpoint::EpochStream;
use crate::guest::{GuestError, ProtectedGuest};
use crate::protection_end::ProtectionEnd;
use crate::sender::{ConnectionEvent, EpochSender, SendJob, buffered_writer, read_messages};
use crate::wire::{EpochStreamError, EpochWriter, PrimaryHello};

mod end;
mod final_cut;
mod hold;
mod options;
mod pause;
mod seed;

pub use final_cut::{FinalCut, FinalCutControl};
use hold::HeldPause;
pub use options::{
    CutMeasurements, EndRequest, EpochOptions, ProtectionCallbacks, ProtectionEvent,
};
use pause::{CutResult, PauseNotice, PauseWork};
use seed::SeedSender;

/// The maximum number of jobs that wait for the sender. Parts of a large epoch are jobs as well.
const JOBS_MAX: usize = 16;
/// The minimum room of a buffer, in pages. A buffer is made a little larger than the last epoch
/// needed ahead of the pause, because growing takes page faults. A buffer that is far too large is
/// made smaller: the epoch that needed it may have been an exception.
const ROOM_PAGES_MIN: usize = 1024;
const ROOM_EXCESS_FACTOR: usize = 3;
/// The maximum number of buffers retained for later epochs. Two are in use if the sender keeps up:
/// one is filled while the next epoch is compared with the other. A third is needed now and then.
const SPARES_MAX: usize = 1;
/// The interval at which an end request is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The same while a frame of another member waits for a cut.
const WANTED_CUT_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// The interval at which room is checked when there is none. A VM that is slowed is paused for as
/// long in each step.
const SLOWED_PAUSE: Duration = Duration::from_millis(5);
/// The length of each pause of a VM that is stopped. Between two pauses it runs for a moment, so
/// that other requests to stop or to query it are served.
const STOPPED_PAUSE: Duration = Duration::from_millis(50);
/// How long to wait for the backup's last message after sending has failed.
const LAST_MESSAGE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a backup may take to acknowledge an epoch.
const ACKNOWLEDGE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why the protection of a VM ended.
#[derive(Debug, Error)]
pub enum ProtectionError {
    /// The interval or the buffer size is invalid.
    #[error(transparent)]
    Limits(#[from] LimitsError),
    /// The VM can't be tracked or paused.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The connection to the backup ended.
    #[error("the connection to the backup ended")]
    Wire(#[from] EpochStreamError),
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
    #[error("the backup has not answered for {} s", ACKNOWLEDGE_TIMEOUT.as_secs())]
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
pub fn protect_vm(
    mut guest: ProtectedGuest,
    stream: &EpochStream,
    hello: &PrimaryHello,
    options: EpochOptions,
    ending: &EndRequest,
    callbacks: &dyn ProtectionCallbacks,
) -> Result<(), ProtectionError> {
    let ended =
        BackupConnection { stream, hello, options, ending, callbacks }.run_protection(&mut guest);
    let detached = match &ended {
        Err(ProtectionError::Guest(error)) if error.is_hang() => {
            guest.abandon();
            Ok(())
        }
        _ => guest.detach(),
    };
    heap::trim_heap();
    ended?;
    Ok(detached?)
}

/// A connection to a backup, and the parameters of the protection.
struct BackupConnection<'a> {
    stream: &'a EpochStream,
    hello: &'a PrimaryHello,
    options: EpochOptions,
    ending: &'a EndRequest,
    callbacks: &'a dyn ProtectionCallbacks,
}

impl<'a> BackupConnection<'a> {
    /// Runs the protection. The threads that read and send end with the connection.
    fn run_protection(&self, guest: &mut ProtectedGuest) -> Result<(), ProtectionError> {
        let epochs = PrimaryEpochs::new(
            self.options.epoch_limits(self.hello.member.is_some())?,
            Epoch(0),
            Duration::ZERO,
        );
        let (event_sender, events) = crossbeam_channel::unbounded();
        let (reading, writer) =
            (self.stream.try_clone()?, buffered_writer(self.stream.try_clone()?));
        thread::scope(|scope| {
            let _closing = ConnectionCloser(self.stream);
            let sender = event_sender.clone();
            let seeded = spawn_thread(scope, "hear", move || read_messages(reading, &sender))
                .and_then(|()| self.send_seed(guest, writer, &events));
            let ended = seeded.and_then(|writer| {
                firn_fault::pass_point("protect.seeded");
                let (jobs, taken) = crossbeam_channel::bounded(JOBS_MAX);
                let sending = EpochSender::new(writer, event_sender);
                spawn_thread(scope, "send", move || sending.run(&taken))?;
                self.start_loop(guest, epochs, jobs, events.clone())?.run()
            });
            ended.map_err(|error| prefer_backup_reason(error, &events))
        })
    }

    fn send_seed(
        &self,
        guest: &mut ProtectedGuest,
        mut writer: EpochWriter<BufWriter<EpochStream>>,
        events: &Receiver<ConnectionEvent>,
    ) -> Result<EpochWriter<BufWriter<EpochStream>>, ProtectionError> {
        writer.write_hello(self.hello)?;
        let (ending, callbacks) = (self.ending, self.callbacks);
        SeedSender { guest, writer: &mut writer, events, ending, callbacks }.run()?;
        Ok(writer)
    }

    fn start_loop<'g>(
        &self,
        guest: &'g mut ProtectedGuest,
        epochs: PrimaryEpochs,
        jobs: Sender<SendJob>,
        events: Receiver<ConnectionEvent>,
    ) -> Result<ProtectionLoop<'g>, ProtectionError>
    where
        'a: 'g,
    {
        let predicts = self.options.predicts && guest.can_be_copied_ahead()?;
        let options = EpochOptions { predicts, ..self.options };
        Ok(ProtectionLoop {
            guest,
            epochs,
            predictor: DirtyPagePredictor::new(predicts)
                .with_busy_counts(options.busy_page_counts()),
            options,
            jobs,
            events,
            ending: self.ending,
            callbacks: self.callbacks,
            started: Instant::now(),
            spares: Vec::new(),
            copied: 0,
            last_heard: Duration::ZERO,
            cut: None,
            speed: GuestSpeed::Free,
            held: None,
            reported_to_backup: self.hello.member.as_ref().map(|_| Default::default()),
        })
    }
}

/// Closes the connection in every case, because threads wait for that.
struct ConnectionCloser<'a>(&'a EpochStream);

impl Drop for ConnectionCloser<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Starts a thread that ends with the connection.
fn spawn_thread<'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    name: &str,
    run: impl FnOnce() + Send + 'scope,
) -> Result<(), ProtectionError> {
    firn_fault::pass_io_point("protect.start-thread").map_err(ProtectionError::Thread)?;
    let builder = thread::Builder::new().name(name.into());
    builder.spawn_scoped(scope, run).map(drop).map_err(ProtectionError::Thread)
}

/// Replaces a connection error by the reason that the backup reported. A backup that refuses
/// further epochs sends the reason and closes the connection, and the primary may notice the failed
/// write first.
pub(crate) fn prefer_backup_reason(
    error: ProtectionError,
    events: &Receiver<ConnectionEvent>,
) -> ProtectionError {
    use ProtectionError::{Confused, Declined, Guest, Io, Refused, Wire};
    if !matches!(error, Wire(_) | Io(_) | Guest(GuestError::SenderStopped)) {
        return error;
    }
    let deadline = Instant::now() + LAST_MESSAGE_TIMEOUT;
    while let Ok(event) = events.recv_deadline(deadline) {
        if let ConnectionEvent::Lost(said @ (Refused(_) | Declined(_) | Confused)) = event {
            return said;
        }
    }
    error
}

/// The loop that protects a VM.
struct ProtectionLoop<'a> {
    guest: &'a mut ProtectedGuest,
    epochs: PrimaryEpochs,
    predictor: DirtyPagePredictor,
    options: EpochOptions,
    jobs: Sender<SendJob>,
    events: Receiver<ConnectionEvent>,
    ending: &'a EndRequest,
    callbacks: &'a dyn ProtectionCallbacks,
    started: Instant,
    spares: Vec<Vec<u8>>,
    /// The number of pages that the last cut copied.
    copied: usize,
    /// The time at which the backup last sent a message, or had nothing to acknowledge.
    last_heard: Duration,
    /// The newest epoch that was cut, until it is sent.
    cut: Option<Box<EpochCopy>>,
    speed: GuestSpeed,
    /// The pause of a final cut, while the VM is paused.
    held: Option<HeldPause>,
    /// For a member of a cluster: the newest epoch that the backup was ordered to fold, and the
    /// newest frame that it knows to have been sent.
    reported_to_backup: Option<(Epoch, FrameNumber)>,
}

impl ProtectionLoop<'_> {
    fn run(mut self) -> Result<(), ProtectionError> {
        let ended = self.run_loop();
        self.end_hold(&ended);
        if let Some(end) = self.end_to_report(&ended) {
            end::report_end(&self.jobs, &self.events, end);
        }
        ended
    }

    /// How the protection ended, if the backup can and should be informed.
    fn end_to_report(&mut self, ended: &Result<(), ProtectionError>) -> Option<ProtectionEnd> {
        let error = match ended {
            Ok(()) if self.ending.is_release_requested() => return None,
            Ok(()) => None,
            Err(ProtectionError::Guest(GuestError::SenderStopped)) => return None,
            Err(ProtectionError::Guest(error)) => Some(error),
            Err(_) => return None,
        };
        let exit_report = self.guest.exit_report();
        self.callbacks.describe_end(error, &exit_report)
    }

    fn run_loop(&mut self) -> Result<(), ProtectionError> {
        let member_events = self.callbacks.member_events();
        while !self.ending.is_end_requested() {
            select! {
                recv(self.events) -> event => self.handle_event(event.map_err(|_| GuestError::SenderStopped)?)?,
                recv(member_events) -> _ => {}
                default(self.poll_timeout()) => {}
            }
            self.run_step()?;
        }
        match self.ending.is_release_requested() {
            true => self.wait_for_release(),
            false => Ok(()),
        }
    }

    /// Waits until the backup has confirmed that it never runs the VM.
    fn wait_for_release(&self) -> Result<(), ProtectionError> {
        self.jobs.send(SendJob::Release).map_err(|_| GuestError::SenderStopped)?;
        let deadline = Instant::now() + ACKNOWLEDGE_TIMEOUT;
        loop {
            match self.events.recv_deadline(deadline) {
                Ok(ConnectionEvent::Released) => return Ok(()),
                Ok(ConnectionEvent::Lost(error)) => return Err(error),
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => return Err(ProtectionError::Silent),
                Err(RecvTimeoutError::Disconnected) => return Err(GuestError::SenderStopped.into()),
            }
        }
    }

    fn elapsed_time(&self) -> Duration {
        self.started.elapsed()
    }

    fn next_due(&self) -> Duration {
        self.epochs.next_cut().unwrap_or_default()
    }

    fn poll_timeout(&self) -> Duration {
        match self.next_due().saturating_sub(self.elapsed_time()) {
            Duration::ZERO => SLOWED_PAUSE,
            until_due if self.callbacks.is_cut_needed() => until_due.min(WANTED_CUT_POLL_INTERVAL),
            until_due => until_due.min(POLL_INTERVAL),
        }
    }

    fn handle_event(&mut self, event: ConnectionEvent) -> Result<(), ProtectionError> {
        match event {
            // A comparison that ends after the next cut is about pages that may have changed since.
            ConnectionEvent::Compared { epoch, plan, same }
                if epoch.next() == self.epochs.running_epoch() =>
            {
                self.predictor.record_unchanged(&plan, &same);
                self.callbacks.on_event(ProtectionEvent::Prediction(self.predictor.counts()));
            }
            ConnectionEvent::Compared { .. } => {}
            ConnectionEvent::Sent { epoch, pages, bytes } => {
                tracing::trace!("{epoch} is sent: {pages} pages, {bytes} bytes");
                self.callbacks.on_event(ProtectionEvent::Sent(epoch, pages, bytes));
            }
            ConnectionEvent::Spare(bytes) if self.spares.len() < SPARES_MAX => {
                self.spares.push(bytes)
            }
            ConnectionEvent::Spare(_) => {}
            ConnectionEvent::Progress(progress) => {
                // This progress releases output of the VM, so it is checked first.
                let is_cut = progress.complete < self.epochs.running_epoch();
                if !is_cut || progress.committed > progress.complete {
                    return Err(ProtectionError::Confused);
                }
                tracing::trace!(
                    "{} is complete, {} committed",
                    progress.complete,
                    progress.committed
                );
                self.callbacks.on_event(ProtectionEvent::Progress(progress));
                self.last_heard = self.elapsed_time();
                let actions = self.epochs.record_progress(self.elapsed_time(), progress);
                self.perform_actions(actions)?;
                if let (Some(held), Some(control)) = (&self.held, self.callbacks.final_cut()) {
                    held.report_commit(self.epochs.committed_epoch(), control);
                }
            }
            // Not requested yet.
            ConnectionEvent::Released | ConnectionEvent::EndRecorded => {
                return Err(ProtectionError::Confused);
            }
            ConnectionEvent::Lost(error) => return Err(error),
        }
        Ok(())
    }

    fn run_step(&mut self) -> Result<(), ProtectionError> {
        if self.callbacks.take_power_button_press() {
            self.guest.press_power_button()?;
        }
        self.step_final_cut()?;
        match self.epochs.buffered_pages() {
            0 => self.last_heard = self.elapsed_time(),
            _ if self.elapsed_time().saturating_sub(self.last_heard) > ACKNOWLEDGE_TIMEOUT => {
                return Err(ProtectionError::Silent);
            }
            _ => {}
        }
        if self.report_to_member_backup()? {
            return Ok(());
        }
        // The number of written pages matters only if room is scarce.
        let is_scarce = self.elapsed_time() >= self.next_due() && self.epochs.buffered_pages() > 0;
        let written = if is_scarce { self.guest.scan_written()?.len() as u64 } else { 0 };
        let mut actions = self.epochs.advance_time(self.elapsed_time(), written);
        if self.callbacks.is_cut_needed() {
            actions.extend(self.epochs.request_cut(self.elapsed_time()));
        }
        self.perform_actions(actions)?;
        match self.speed {
            GuestSpeed::Free => Ok(()),
            GuestSpeed::Slowed => self.pause_guest(SLOWED_PAUSE),
            GuestSpeed::Stopped => self.pause_guest(STOPPED_PAUSE),
        }
    }

    /// Makes the final cut if it is requested; ends its pause if that is requested or due.
    fn step_final_cut(&mut self) -> Result<(), ProtectionError> {
        let Some(control) = self.callbacks.final_cut() else { return Ok(()) };
        if self.held.is_some() {
            // A hypervisor that has ended is an error.
            self.guest.is_running()?;
        }
        if let Some(held) = self.held.take_if(|held| held.is_over(control)) {
            tracing::warn!("the VM resumes after its final cut: it is not moved");
            held.resume_guest(self.guest, control)?;
            self.epochs.cancel_final_cut(self.elapsed_time());
        }
        if self.held.is_some() || control.take_request().is_none() {
            return Ok(());
        }
        let (is_member, committed) =
            (self.reported_to_backup.is_some(), self.epochs.committed_epoch());
        if let Some(why) = hold::final_cut_obstacle(self.guest, is_member, committed)? {
            control.refuse(why.to_owned());
            return Ok(());
        }
        let actions = self.epochs.begin_final_cut(self.elapsed_time());
        self.perform_actions(actions)
    }

    /// The protection has ended: so does the pause of a final cut, if there is one, now or later.
    fn end_hold(&mut self, ended: &Result<(), ProtectionError>) {
        let Some(control) = self.callbacks.final_cut() else { return };
        control.refuse(match ended {
            Ok(()) => "its protection was ended".to_owned(),
            Err(error) => format!("its protection has ended: {error}"),
        });
        let Some(held) = self.held.take() else { return };
        held.wait_until_over(self.guest, control, self.ending);
        if let Err(error) = held.resume_guest(self.guest, control) {
            tracing::info!("the VM does not resume after its final cut: {error}");
        }
    }

    /// Reports to the backup of a member which epochs and frames can't be undone any more. The
    /// backup stores the epochs after the newest global checkpoint, up to a maximum number. Returns
    /// whether that is reached: then the running epoch is not cut until there is another global
    /// checkpoint.
    fn report_to_member_backup(&mut self) -> Result<bool, ProtectionError> {
        let Some((global, gone)) = &mut self.reported_to_backup else { return Ok(false) };
        let newest = self.callbacks.global_epoch();
        if newest > *global {
            *global = newest;
            self.jobs.send(SendJob::Globally(newest)).map_err(|_| GuestError::SenderStopped)?;
        }
        let newest = self.callbacks.released_up_to();
        if newest > *gone {
            *gone = newest;
            self.jobs.send(SendJob::Gone(newest)).map_err(|_| GuestError::SenderStopped)?;
        }
        Ok(self.epochs.running_epoch().0 - global.0 > EPOCHS_KEPT_MAX)
    }

    fn pause_guest(&mut self, time: Duration) -> Result<(), ProtectionError> {
        let _pause = PauseNotice::announce_pause(self.callbacks);
        Ok(self.guest.pause_for(time)?)
    }

    fn perform_actions(&mut self, actions: Vec<PrimaryAction>) -> Result<(), ProtectionError> {
        for action in actions {
            match action {
                PrimaryAction::Cut(epoch) => self.cut_epoch(epoch)?,
                PrimaryAction::Send { .. } => self.send_epoch()?,
                PrimaryAction::Free(_) => {}
                PrimaryAction::Committed(epoch) => {
                    self.callbacks.on_event(ProtectionEvent::Committed(epoch))
                }
                PrimaryAction::SetSpeed(speed) => self.speed = speed,
            }
        }
        Ok(())
    }

    /// A buffer for the copies of an epoch that is likely to be as large as the last one.
    fn take_buffer(&mut self) -> Vec<u8> {
        let mut bytes = self.spares.pop().unwrap_or_default();
        let most = usize::try_from(self.options.buffer_pages).unwrap_or(usize::MAX);
        let pages = self.copied + self.copied / 32;
        let room = pages.max(ROOM_PAGES_MIN).min(most) * PAGE_SIZE;
        if bytes.len() < room || bytes.len() > ROOM_EXCESS_FACTOR * room {
            bytes.resize(room, 0);
            bytes.shrink_to_fit();
        }
        bytes
    }

    fn cut_epoch(&mut self, epoch: Epoch) -> Result<(), ProtectionError> {
        let mut bytes = self.take_buffer();
        tracing::trace!("{epoch} is to be cut");
        let trouble = self.guest.check_before_cut()?;
        self.callbacks.on_event(ProtectionEvent::Trouble(trouble));
        self.guest.prepare_pause()?;
        let ahead = pause::copy_ahead(self.guest, &mut self.predictor, &self.options, &mut bytes)?;
        tracing::trace!("{epoch} is being cut, {} pages are copied", ahead.len());
        if let (true, Some(control)) = (self.epochs.is_finishing(), self.callbacks.final_cut()) {
            self.held.insert(HeldPause::new(epoch, control)).stop_guest(self.guest, control)?;
            // The backup commits this epoch without another one after it.
            self.guest.check_before_cut()?;
        }
        let notice = PauseNotice::announce_pause(self.callbacks);
        let mut inside = PauseWork {
            epoch,
            predictor: &mut self.predictor,
            options: &self.options,
            jobs: &self.jobs,
            ending: self.ending,
            callbacks: self.callbacks,
            bytes: &mut bytes,
            ahead: ahead.len(),
            measurements: CutMeasurements { epoch, ..CutMeasurements::default() },
        };
        let (found, pause) = self.guest.pause_and_save(|paused| inside.cut_guest(paused))?;
        drop(notice);
        let CutResult { plan, pages, disks, card, measurements } = found;
        firn_fault::pass_point("protect.cut");
        let measurements = CutMeasurements {
            downtime_ms: as_millis(pause.downtime),
            device_bytes: pause.devices.len() as u64,
            ..measurements
        };
        tracing::trace!("{epoch} is cut, with {} pages", pages.len());
        self.copied = ahead.len() + pages.len();
        let (devices, aux) = (pause.devices, pause.aux);
        let last = self.epochs.is_finishing();
        let copy = EpochCopy { epoch, plan, ahead, pages, bytes, devices, aux, disks, card, last };
        let copied = copy.plan.page_count() as u64 + copy.disk_pages();
        self.cut = Some(Box::new(copy));
        self.callbacks.on_event(ProtectionEvent::Cut(measurements));
        let actions = self.epochs.finish_cut(self.elapsed_time(), copied);
        self.perform_actions(actions)
    }

    fn send_epoch(&mut self) -> Result<(), ProtectionError> {
        let Some(copy) = self.cut.take() else { return Ok(()) };
        self.jobs.send(SendJob::Epoch(copy)).map_err(|_| GuestError::SenderStopped.into())
    }
}

fn as_millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
