//! What the agent has observed lately, for metrics. [`watch`](crate::watch) observes. All of it is in
//! memory only.

use std::sync::{Mutex, MutexGuard, PoisonError};

use firn_control::api::VmView;
use firn_supervisor::VmName;

use crate::membership::MembershipHealth;
use crate::takeovers::TakeoverCounts;

/// What the agent has observed.
#[derive(Default)]
pub(crate) struct Observations {
    state: Mutex<ObservedState>,
}

#[derive(Default)]
struct ObservedState {
    takeovers: TakeoverCounts,
    membership: Option<MembershipHealth>,
}

impl Observations {
    /// Adds the VMs of this host.
    pub(crate) fn add_local_vms(&self, vms: &[VmView]) {
        self.lock_state().takeovers.observe_vms(vms);
    }

    pub(crate) fn set_membership(&self, health: Option<MembershipHealth>) {
        self.lock_state().membership = health;
    }

    pub(crate) fn membership(&self) -> Option<MembershipHealth> {
        self.lock_state().membership.clone()
    }

    pub(crate) fn takeovers(&self) -> TakeoverCounts {
        self.lock_state().takeovers.clone()
    }

    /// A planned move is about to run this standby here.
    pub(crate) fn begin_move(&self, vm: &VmName) {
        self.lock_state().takeovers.begin_move(vm);
    }

    /// That move has failed.
    pub(crate) fn end_move(&self, vm: &VmName) {
        self.lock_state().takeovers.end_move(vm);
    }

    fn lock_state(&self) -> MutexGuard<'_, ObservedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
