//! Held pause: the pause of a VM by its [final cut](super::final_cut), in the thread that protects
//! the VM.

use std::thread;
use std::time::{Duration, Instant};

use firn_cluster::Epoch;

use super::final_cut::FinalCutControl;
use super::options::EndRequest;
use crate::guest::{GuestError, ProtectedGuest};

/// The interval at which the end of the pause is checked, after the protection has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Why there can be no final cut now. `committed` is the newest epoch that the backup has committed.
pub(super) fn final_cut_obstacle(
    guest: &mut ProtectedGuest,
    is_member: bool,
    committed: Epoch,
) -> Result<Option<&'static str>, GuestError> {
    if is_member {
        return Ok(Some("it belongs to a cluster, which fails over as one"));
    }
    if committed == Epoch(0) {
        return Ok(Some("its backup has committed no epoch yet"));
    }
    Ok((!guest.is_running()?).then_some("it is paused: resume it first"))
}

/// A VM that its final cut keeps paused.
#[derive(Debug)]
pub(super) struct HeldPause {
    epoch: Epoch,
    until: Instant,
}

impl HeldPause {
    /// The pause for the final cut of this epoch, which begins with [`Self::stop_guest`].
    pub(super) fn new(epoch: Epoch, control: &FinalCutControl) -> Self {
        let hold = control.take_request().unwrap_or(Duration::ZERO);
        Self { epoch, until: Instant::now() + hold }
    }

    /// Stops the VM. It resumes with [`Self::resume_guest`], also after an error.
    pub(super) fn stop_guest(
        &self,
        guest: &mut ProtectedGuest,
        control: &FinalCutControl,
    ) -> Result<(), GuestError> {
        control.record_pause();
        guest.stop_for_move()?;
        firn_fault::pass_point("move.paused");
        Ok(())
    }

    /// Reports the final cut, once the backup has committed it.
    pub(super) fn report_commit(&self, committed: Epoch, control: &FinalCutControl) {
        if committed >= self.epoch && !control.is_committed() {
            firn_fault::pass_point("move.committed");
            control.record_commit(self.epoch);
        }
    }

    /// Whether the VM is to resume.
    pub(super) fn is_over(&self, control: &FinalCutControl) -> bool {
        Instant::now() >= self.until || control.is_resume_requested()
    }

    /// The protection has ended. A VM whose final cut is committed stays paused until a resume is
    /// requested or due, because it may run at its backup by now. Any other VM resumes at once.
    pub(super) fn wait_until_over(
        &self,
        guest: &mut ProtectedGuest,
        control: &FinalCutControl,
        ending: &EndRequest,
    ) {
        while control.is_committed()
            && !self.is_over(control)
            && !ending.is_end_requested()
            && guest.is_running().is_ok()
        {
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Resumes the VM.
    pub(super) fn resume_guest(
        self,
        guest: &mut ProtectedGuest,
        control: &FinalCutControl,
    ) -> Result<(), GuestError> {
        let resumed = guest.resume_stopped();
        control.record_resume();
        resumed
    }
}
