//! The control of a standby by commands: its status, the end of its primary, and its failover.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use firn_cluster::epoch::EpochProgress as Far;
use firn_epochs::backup::{BackupReceiveError, BackupReceiver};
use firn_epochs::endpoint::EpochStream;
use firn_epochs::protection_end::ProtectionEnd;
use firn_epochs::wire::PrimaryHello;
use serde::{Deserialize, Serialize};

use crate::records::control_protocol::{FailoverMember, FailoverRequest};
use crate::records::failure::{Failure, FailureKind};

/// The maximum time that the last message to a primary may take.
const LAST_MESSAGE_WAIT: Duration = Duration::from_millis(200);

/// The maximum time that a standby that ends waits until its primary is informed.
const DECLINE_WAIT: Duration = Duration::from_secs(1);

/// The part of `firn status` about a standby.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StandbyStatus {
    /// The newest epoch that the standby has completely.
    pub complete: u64,
    /// The newest epoch that a failover would run; 0 if there is none.
    pub committed: u64,
    /// Its primary continues alone: the VM will never run here.
    #[serde(default)]
    pub released: bool,
    /// It belongs to a cluster, which fails over as one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub member: bool,
    /// Hosts agree which of them runs it: a failover follows their record.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leased: bool,
    /// How its primary ended, as the primary reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<ProtectionEnd>,
    /// The reason why no more epochs arrive, if none do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
}

impl StandbyStatus {
    /// Whether its primary ended as its user or its guest wanted.
    pub fn is_over(&self) -> bool {
        self.released || self.end.as_ref().is_some_and(ProtectionEnd::is_intended)
    }
}

/// The control of a standby by commands.
#[derive(Debug)]
pub(crate) struct StandbyControl {
    stream: EpochStream,
    state: Mutex<ControlState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct ControlState {
    now: StandbyStatus,
    /// The failover request, if there is one.
    how: Option<FailoverRequest>,
    /// The reason why this standby will never run the VM, once that is decided here.
    declined: Option<&'static str>,
    /// No more messages are sent to the primary.
    has_parted: bool,
}

impl StandbyControl {
    pub(super) fn new(stream: EpochStream, hello: &PrimaryHello) -> Arc<Self> {
        let (member, leased) = (hello.member.is_some(), hello.leased);
        let now = StandbyStatus { member, leased, ..StandbyStatus::default() };
        let state = Mutex::new(ControlState { now, ..ControlState::default() });
        Arc::new(Self { stream, state, changed: Condvar::new() })
    }

    /// The current status.
    pub(crate) fn current_status(&self) -> StandbyStatus {
        self.lock_state().now.clone()
    }

    /// Begins a failover: no more epochs are received, and the newest committed one runs, or that
    /// of a global checkpoint.
    pub(crate) fn begin_failover(&self, how: FailoverRequest) -> Result<(), Failure> {
        let mut state = self.lock_state();
        if state.declined.is_some() {
            return Err(Failure::new(FailureKind::Busy, "the standby is being stopped"));
        }
        check_failover(&state.now, how)?;
        // Of two requests, the first counts.
        state.how.get_or_insert(how);
        self.stream.stop_reading();
        self.changed.notify_all();
        Ok(())
    }

    /// Ends the standby, which never runs the VM: the primary is informed, if it still receives.
    pub(crate) fn decline_vm(&self, why: &'static str) {
        let mut state = self.lock_state();
        if state.how.is_some() || state.has_parted {
            return;
        }
        state.declined = Some(why);
        self.stream.stop_reading();
        let waits = |state: &mut ControlState| !state.has_parted;
        let waited = self.changed.wait_timeout_while(state, DECLINE_WAIT, waits);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Ends the connection. A primary that still runs is informed whether the standby will run the
    /// VM.
    pub(super) fn part_from_primary(&self, receiver: &mut BackupReceiver) {
        let (is_run, declined) = {
            let state = self.lock_state();
            (state.how.is_some(), state.declined)
        };
        if (is_run || declined.is_some())
            && self.stream.set_write_timeout(LAST_MESSAGE_WAIT).is_ok()
        {
            match declined {
                Some(why) => receiver.send_decline(why),
                None => receiver.send_refusal("the VM is about to run here"),
            }
        }
        self.stream.close();
        self.lock_state().has_parted = true;
        self.changed.notify_all();
    }

    /// Records how the primary ended, as it reports. Returns whether that is recorded: after a
    /// wanted end the VM does not run here without a user's request, from now on.
    pub(super) fn record_protection_end(&self, end: &ProtectionEnd) -> bool {
        let mut state = self.lock_state();
        if state.how.is_some() {
            return false;
        }
        state.now.released = *end == ProtectionEnd::Released;
        state.now.end = Some(end.clone());
        true
    }

    pub(super) fn record_progress(&self, progress: Far) {
        let mut state = self.lock_state();
        (state.now.complete, state.now.committed) = (progress.complete.0, progress.committed.0);
    }

    /// Waits for a failover request.
    pub(super) fn wait_for_failover(&self, ended: &BackupReceiveError) -> FailoverRequest {
        let mut state = self.lock_state();
        if state.how.is_none() {
            let failure = Failure::from_error(FailureKind::Other, ended);
            tracing::warn!("no more epochs come: {failure}");
            state.now.ended = Some(failure.to_string());
        }
        loop {
            match state.how {
                Some(how) => return how,
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn lock_state(&self) -> MutexGuard<'_, ControlState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Checks whether a standby in this state may fail over as requested.
fn check_failover(now: &StandbyStatus, how: FailoverRequest) -> Result<(), Failure> {
    check_member(now, how.member)?;
    if now.released {
        let text = "the VM's primary has released it, and continues alone";
        let failure = Failure::new(FailureKind::Refused, text);
        return Err(failure.with_hint("`firn stop` ends this standby"));
    }
    // A cluster is rolled back with all its VMs, including those that were stopped since.
    let accepts = how.accept_stopped || how.member.is_some();
    if let Some(end) = now.end.as_ref().filter(|end| end.is_intended() && !accepts) {
        let failure = Failure::new(FailureKind::Refused, format!("the VM was not lost: {end}"));
        return Err(failure.with_hint(
            "`firn stop` ends this standby; `firn failover --accept-stopped` runs the VM from its last committed epoch",
        ));
    }
    if now.leased && how.lease.is_none() {
        let text = "hosts agree who runs this VM, and their record does not name this host";
        let failure = Failure::new(FailureKind::Refused, text);
        return Err(
            failure.with_hint("`firn failover` asks this host's agent, which goes by the record")
        );
    }
    if now.committed == 0 {
        let none = Failure::new(FailureKind::Refused, "no epoch of the VM is committed here");
        return Err(none
            .with_hint("`firn status` shows the committed epochs; the first takes two intervals"));
    }
    Ok(())
}

/// Checks the epoch: only a member of a cluster continues from a global checkpoint, and it must.
fn check_member(now: &StandbyStatus, to: Option<FailoverMember>) -> Result<(), Failure> {
    let committed = now.committed;
    match to {
        None if now.member => {
            let text = "the VM belongs to a cluster, and fails over with all of it";
            Err(Failure::new(FailureKind::Refused, text).with_hint("`firn cluster failover`"))
        }
        Some(_) if !now.member => {
            Err(Failure::new(FailureKind::Refused, "the VM belongs to no cluster"))
        }
        Some(FailoverMember { epoch, .. }) if epoch.0 > committed => {
            let text = format!("{epoch} is not here: {committed} is the newest that is committed");
            Err(Failure::new(FailureKind::Refused, text))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use firn_cluster::{Epoch, Generation};

    use super::*;

    fn ready(end: Option<ProtectionEnd>) -> StandbyStatus {
        StandbyStatus { complete: 8, committed: 7, end, ..StandbyStatus::default() }
    }

    fn refusal(now: &StandbyStatus, how: FailoverRequest) -> String {
        check_failover(now, how).unwrap_err().to_string()
    }

    #[test]
    fn a_vm_that_was_lost_is_run_and_one_that_was_stopped_is_not() {
        let plain = FailoverRequest::default();
        for end in [None, Some(ProtectionEnd::Lost("killed".into())), Some(ProtectionEnd::Panicked)]
        {
            check_failover(&ready(end), plain).unwrap();
        }
        for end in [ProtectionEnd::Stopped, ProtectionEnd::ShutDown] {
            let stopped = ready(Some(end));
            assert!(refusal(&stopped, plain).contains("was not lost"));
            let accepts = FailoverRequest { accept_stopped: true, ..plain };
            check_failover(&stopped, accepts).unwrap();
        }
    }

    #[test]
    fn a_member_that_was_stopped_goes_back_with_its_cluster() {
        let stopped = StandbyStatus { member: true, ..ready(Some(ProtectionEnd::Stopped)) };
        let (epoch, generation) = (Epoch(7), Generation(1));
        let member = Some(FailoverMember { epoch, generation });
        let how = FailoverRequest { member, ..FailoverRequest::default() };
        check_failover(&stopped, how).unwrap();
    }

    #[test]
    fn a_released_vm_is_not_run_by_its_standby() {
        let released = StandbyStatus { released: true, ..ready(Some(ProtectionEnd::Released)) };
        let accepts = FailoverRequest { accept_stopped: true, ..FailoverRequest::default() };
        assert!(refusal(&released, accepts).contains("released it"));
    }

    #[test]
    fn where_hosts_agree_only_their_record_runs_it() {
        let leased = StandbyStatus { leased: true, ..ready(None) };
        assert!(refusal(&leased, FailoverRequest::default()).contains("hosts agree"));
        let by_record = FailoverRequest { lease: Some(1), ..FailoverRequest::default() };
        check_failover(&leased, by_record).unwrap();
    }
}
