//! Hold: the pause of a VM by its [final cut](super::final_cut), in the thread that protects it.

use std::thread;
use std::time::{Duration, Instant};

use firn_cluster::Epoch;

use super::{POLL_INTERVAL, ProtectionError, ProtectionLoop};

/// A VM that its final cut keeps paused.
#[derive(Debug)]
pub(super) struct HeldPause {
    epoch: Epoch,
    until: Instant,
}

impl ProtectionLoop<'_> {
    /// Makes the final cut if it is requested; ends its pause if that is requested or due.
    pub(super) fn step_final_cut(&mut self) -> Result<(), ProtectionError> {
        let Some(control) = self.callbacks.final_cut() else { return Ok(()) };
        match &self.held {
            Some(held) if Instant::now() >= held.until || control.is_resume_requested() => {
                tracing::warn!("the VM resumes after its final cut: it is not moved");
                self.resume_held()?;
                self.epochs.cancel_final_cut(self.elapsed_time());
            }
            // A hypervisor that has ended is an error.
            Some(_) => drop(self.guest.is_running()?),
            None if control.take_request().is_some() => match self.final_cut_obstacle()? {
                Some(why) => control.refuse(why.to_owned()),
                None => {
                    let actions = self.epochs.begin_final_cut(self.elapsed_time());
                    self.perform_actions(actions)?;
                }
            },
            None => {}
        }
        Ok(())
    }

    /// Why there can be no final cut now.
    fn final_cut_obstacle(&mut self) -> Result<Option<&'static str>, ProtectionError> {
        if self.reported_to_backup.is_some() {
            return Ok(Some("it belongs to a cluster, which fails over as one"));
        }
        if self.epochs.committed_epoch() == Epoch(0) {
            return Ok(Some("its backup has committed no epoch yet"));
        }
        Ok((!self.guest.is_running()?).then_some("it is paused: resume it first"))
    }

    /// Stops the VM for the final cut of this epoch.
    pub(super) fn hold_guest(&mut self, epoch: Epoch) -> Result<(), ProtectionError> {
        let Some(control) = self.callbacks.final_cut() else { return Ok(()) };
        let hold = control.take_request().unwrap_or(Duration::ZERO);
        self.held = Some(HeldPause { epoch, until: Instant::now() + hold });
        control.record_pause();
        self.guest.stop_for_move()?;
        firn_fault::pass_point("move.paused");
        Ok(())
    }

    /// Reports the final cut, once the backup has committed it.
    pub(super) fn report_final_commit(&self) {
        let Some(held) = &self.held else { return };
        if self.epochs.committed_epoch() >= held.epoch {
            if let Some(control) = self.callbacks.final_cut() {
                firn_fault::pass_point("move.committed");
                control.record_commit(held.epoch);
            }
        }
    }

    fn resume_held(&mut self) -> Result<(), ProtectionError> {
        self.held = None;
        let resumed = self.guest.resume_stopped();
        if let Some(control) = self.callbacks.final_cut() {
            control.record_resume();
        }
        Ok(resumed?)
    }

    /// The protection has ended. A VM whose final cut is committed stays paused, because it may run
    /// at its backup by now, until a resume is requested or due. Any other VM resumes at once.
    pub(super) fn end_hold(&mut self, ended: &Result<(), ProtectionError>) {
        let Some(control) = self.callbacks.final_cut() else { return };
        let why = match ended {
            Ok(()) => "its protection was ended".to_owned(),
            Err(error) => format!("its protection has ended: {error}"),
        };
        control.refuse(why);
        let Some(until) = self.held.as_ref().map(|held| held.until) else { return };
        while control.is_committed()
            && !control.is_resume_requested()
            && !self.ending.is_end_requested()
            && Instant::now() < until
            && self.guest.is_running().is_ok()
        {
            thread::sleep(POLL_INTERVAL);
        }
        if let Err(error) = self.resume_held() {
            tracing::info!("the VM does not resume after its final cut: {error}");
        }
    }
}
