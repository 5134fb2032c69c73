//! What the agent has observed lately, for metrics and its page. [`watch`](crate::watch) observes.
//! All of it is in memory only.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use firn_control::api::{AgentStatus, VmView};
use firn_supervisor::VmName;

use crate::history::ProtectionHistory;
use crate::membership::MembershipHealth;
use crate::takeovers::TakeoverCounts;

/// How long after its last request a page counts as open.
const VIEW_WAIT: Duration = Duration::from_secs(30);

/// What the agent has observed.
pub(crate) struct Observations {
    began: Instant,
    state: Mutex<ObservedState>,
}

#[derive(Default)]
struct ObservedState {
    takeovers: TakeoverCounts,
    history: ProtectionHistory,
    membership: Option<MembershipHealth>,
    /// The status of all hosts, and when it was collected.
    all: Option<(Instant, Arc<AgentStatus>)>,
    viewed: Option<Instant>,
}

impl Default for Observations {
    fn default() -> Self {
        Self { began: Instant::now(), state: Mutex::default() }
    }
}

impl Observations {
    /// Adds the VMs of this host.
    pub(crate) fn add_local_vms(&self, vms: &[VmView]) {
        let at = self.began.elapsed();
        let mut state = self.lock_state();
        state.takeovers.observe_vms(vms);
        state.history.add_sample(at, vms);
    }

    /// Adds the status of all hosts. Its VMs of this host were added before.
    pub(crate) fn add_status(&self, status: Arc<AgentStatus>) {
        let at = self.began.elapsed();
        let remote: Vec<VmView> =
            status.vms.iter().filter(|vm| vm.host != status.host).cloned().collect();
        let mut state = self.lock_state();
        state.history.add_sample(at, &remote);
        state.all = Some((Instant::now(), status));
    }

    /// The newest status of all hosts, if it is not older than this.
    pub(crate) fn status_within(&self, age: Duration) -> Option<Arc<AgentStatus>> {
        let state = self.lock_state();
        let (at, status) = state.all.as_ref()?;
        (at.elapsed() <= age).then(|| Arc::clone(status))
    }

    /// Notes that a page was requested: while one is open, all hosts are observed.
    pub(crate) fn note_view(&self) {
        self.lock_state().viewed = Some(Instant::now());
    }

    /// Whether a page is open.
    pub(crate) fn is_viewed(&self) -> bool {
        self.lock_state().viewed.is_some_and(|at| at.elapsed() < VIEW_WAIT)
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

    /// The history, and the present time by its clock.
    pub(crate) fn history(&self) -> (ProtectionHistory, Duration) {
        (self.lock_state().history.clone(), self.began.elapsed())
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
