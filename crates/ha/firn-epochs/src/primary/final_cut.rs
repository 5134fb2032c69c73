//! Final cut: the last epoch before a planned move of the VM to its backup. The VM stays paused
//! after the cut, and the backup commits that epoch at once. So nothing is lost if the VM continues
//! there.
//!
//! ```text
//!   idle --request--> requested --stop, cut--> cut --the backup has it--> committed
//!    ^                    |                     |                             |
//!    |                    '--- refused <--------' the protection ends         |
//!    '---------- the VM resumes: by request, or when the hold is over --------'
//! ```
//!
//! The hold is bounded, so a VM whose move is forgotten resumes by itself. That is safe at any time:
//! what it sends then stays buffered, because no later epoch is committed, or because its host has
//! given up the lease. After a resume the next epoch follows the final one like any other.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use firn_cluster::Epoch;

/// How long a resume may take to be performed.
const RESUME_WAIT: Duration = Duration::from_secs(2);

/// A committed final cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FinalCut {
    /// Its epoch.
    pub epoch: Epoch,
    /// The time from when the VM was paused until the backup had committed the epoch.
    pub commit_time: Duration,
}

#[derive(Clone, Debug, Default)]
enum FinalCutState {
    #[default]
    Idle,
    Requested {
        hold: Duration,
    },
    Cut {
        since: Instant,
    },
    Committed(FinalCut),
    Refused(String),
}

/// The request for a final cut, its result, and the request to resume the VM. Shared by the thread
/// that protects the VM and the one that answers the request.
#[derive(Debug, Default)]
pub struct FinalCutControl {
    state: Mutex<(FinalCutState, bool)>,
    changed: Condvar,
}

impl FinalCutControl {
    /// Requests a final cut, after which the VM stays paused for `hold` at most; returns when the
    /// backup has committed it.
    ///
    /// # Errors
    /// Why there is no final cut. The VM then runs, or resumes at once.
    pub fn request_cut(&self, hold: Duration) -> Result<FinalCut, String> {
        let mut state = self.lock_state();
        // A refusal that nothing waits for any more does not count.
        if !matches!(state.0, FinalCutState::Idle | FinalCutState::Refused(_)) {
            return Err("it is being moved already".to_owned());
        }
        *state = (FinalCutState::Requested { hold }, false);
        let is_open = |state: &mut (FinalCutState, bool)| {
            matches!(state.0, FinalCutState::Requested { .. } | FinalCutState::Cut { .. })
        };
        let waited = self.changed.wait_timeout_while(state, hold, is_open);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match std::mem::take(&mut state.0) {
            FinalCutState::Committed(cut) => {
                state.0 = FinalCutState::Committed(cut);
                Ok(cut)
            }
            FinalCutState::Refused(why) => Err(why),
            cut @ FinalCutState::Cut { .. } => {
                *state = (cut, true);
                Err(format!("its backup has not committed the final epoch within {hold:?}"))
            }
            FinalCutState::Requested { .. } | FinalCutState::Idle => {
                Err(format!("its final epoch was not cut within {hold:?}"))
            }
        }
    }

    /// Resumes a VM that a final cut keeps paused; returns when it runs.
    pub fn resume_vm(&self) {
        let mut state = self.lock_state();
        state.1 = true;
        let is_held = |state: &mut (FinalCutState, bool)| {
            matches!(state.0, FinalCutState::Cut { .. } | FinalCutState::Committed(_))
        };
        drop(self.changed.wait_timeout_while(state, RESUME_WAIT, is_held));
    }

    pub(super) fn take_request(&self) -> Option<Duration> {
        match self.lock_state().0 {
            FinalCutState::Requested { hold } => Some(hold),
            _ => None,
        }
    }

    pub(super) fn record_pause(&self) {
        self.lock_state().0 = FinalCutState::Cut { since: Instant::now() };
    }

    pub(super) fn record_commit(&self, epoch: Epoch) {
        let mut state = self.lock_state();
        if let FinalCutState::Cut { since } = state.0 {
            let commit_time = since.elapsed();
            state.0 = FinalCutState::Committed(FinalCut { epoch, commit_time });
            self.changed.notify_all();
        }
    }

    /// Whether the backup has committed the final cut.
    pub(super) fn is_committed(&self) -> bool {
        matches!(self.lock_state().0, FinalCutState::Committed(_))
    }

    pub(super) fn is_resume_requested(&self) -> bool {
        self.lock_state().1
    }

    /// The VM runs again.
    pub(super) fn record_resume(&self) {
        let mut state = self.lock_state();
        if !matches!(state.0, FinalCutState::Refused(_)) {
            state.0 = FinalCutState::Idle;
        }
        self.changed.notify_all();
    }

    /// Answers an open request: there is no final cut.
    pub(super) fn refuse(&self, why: String) {
        let mut state = self.lock_state();
        if matches!(state.0, FinalCutState::Requested { .. } | FinalCutState::Cut { .. }) {
            state.0 = FinalCutState::Refused(why);
            self.changed.notify_all();
        }
    }

    fn lock_state(&self) -> MutexGuard<'_, (FinalCutState, bool)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const HOLD: Duration = Duration::from_secs(10);

    fn requested(control: &FinalCutControl) {
        while control.take_request().is_none() {
            thread::yield_now();
        }
    }

    #[test]
    fn a_request_waits_for_the_commit_and_the_vm_for_a_resume() {
        let control = FinalCutControl::default();
        thread::scope(|scope| {
            let cut = scope.spawn(|| control.request_cut(HOLD));
            requested(&control);
            control.record_pause();
            control.record_commit(Epoch(7));
            assert_eq!(cut.join().unwrap().unwrap().epoch, Epoch(7));
            assert!(control.request_cut(HOLD).unwrap_err().contains("moved already"));
            assert!(control.is_committed() && !control.is_resume_requested());
            let resuming = scope.spawn(|| control.resume_vm());
            while !control.is_resume_requested() {
                thread::yield_now();
            }
            control.record_resume();
            resuming.join().unwrap();
            assert!(!control.is_committed());
        });
    }

    #[test]
    fn a_protection_that_ends_refuses() {
        let control = FinalCutControl::default();
        thread::scope(|scope| {
            let cut = scope.spawn(|| control.request_cut(HOLD));
            requested(&control);
            control.record_pause();
            control.refuse("the connection ended".to_owned());
            assert_eq!(cut.join().unwrap(), Err("the connection ended".to_owned()));
        });
        assert!(control.take_request().is_none());
    }

    #[test]
    fn a_cut_that_is_never_committed_is_resumed() {
        let control = FinalCutControl::default();
        thread::scope(|scope| {
            let cut = scope.spawn(|| control.request_cut(Duration::from_millis(50)));
            requested(&control);
            control.record_pause();
            assert!(cut.join().unwrap().unwrap_err().contains("not committed"));
        });
        assert!(control.is_resume_requested());
    }
}
