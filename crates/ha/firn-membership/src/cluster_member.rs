//! A host that follows the record of one cluster: the shell around `HostGuard`.
//!
//! ```text
//!   at each host that the record names: ClusterMember
//!
//!     request_lease --- time, register ---> HostGuard
//!                                             |
//!     HostActions::limit_sending <------------+
//!     HostActions::stop_vms, run_vms <--------'  one after another; lease requests continue
//!
//!   at the leading host: run_controllers
//!
//!     read_view ---> FailoverController ---> change_record   (no state from one poll to the next)
//! ```
//!
//! The controller learns from a host only that it is alive: the host requests its lease, if the
//! record names it as a primary or a backup. Other hosts only read the record. A host that has
//! failed to run a VM requests no lease any more, as if it had died; so does one that
//! [yields](ClusterMember::yield_lease). A host that was fenced and has stopped its VMs is removed
//! from the fence when its lease has expired.

use std::collections::{BTreeMap, VecDeque};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use firn_cluster::failover::{FailoverRecord, GuardAction, HostGuard, LeaseTerms};
use firn_cluster::{Epoch, Generation, HostId, VmId};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use crate::{
    ClusterName, ClusterRecord, LeaseResult, MembershipError, MembershipFuture, MembershipStore,
    VersionedRecord, read_boot_clock,
};

/// Polls in the time of one lease: runs of a controller, and lease requests of a host.
pub(crate) const POLLS_PER_LEASE: u32 = 5;

/// The actions on the VMs of a host.
pub trait HostActions: Send + Sync + 'static {
    /// Ends the VMs of a generation, and drops their output that was not sent. Returns when they
    /// have ended.
    fn stop_vms<'a>(
        &'a self,
        cluster: &'a ClusterName,
        generation: Generation,
    ) -> MembershipFuture<'a, ()>;

    /// Runs these VMs from their copies of these epochs.
    fn run_vms<'a>(
        &'a self,
        cluster: &'a ClusterName,
        start: &'a StartRequest,
    ) -> MembershipFuture<'a, ()>;

    /// Allows frames of this generation to leave until then, and no others. It is called whenever
    /// that has changed, before any other action.
    fn limit_sending(&self, _cluster: &ClusterName, _until: Option<(Generation, Duration)>) {}
}

/// The VMs that a host has to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartRequest {
    /// The generation.
    pub generation: Generation,
    /// The VMs, and the epochs that they run from.
    pub vms: BTreeMap<VmId, Epoch>,
    /// The names of the VMs.
    pub names: BTreeMap<VmId, String>,
}

/// A host's part in one cluster.
pub struct ClusterMember {
    members: Arc<dyn MembershipStore>,
    hosts: Arc<dyn HostActions>,
    cluster: ClusterName,
    host: HostId,
    terms: LeaseTerms,
    guard: Mutex<HostGuard>,
    /// The newest record that was applied.
    known: Mutex<Option<VersionedRecord>>,
    /// The generation whose lease is not requested any more.
    yielded: Mutex<Option<Generation>>,
    wake: Notify,
}

/// An action that is being performed.
type PendingAction<'a> = Pin<Box<dyn Future<Output = Result<(), MembershipError>> + Send + 'a>>;

impl ClusterMember {
    /// A host that runs no VM yet.
    pub fn new(
        members: Arc<dyn MembershipStore>,
        hosts: Arc<dyn HostActions>,
        cluster: ClusterName,
        host: HostId,
        terms: LeaseTerms,
    ) -> Self {
        let guard = Mutex::new(HostGuard::new(host, terms));
        let (known, yielded, wake) = Default::default();
        Self { members, hosts, cluster, host, terms, guard, known, yielded, wake }
    }

    /// Requests no lease in this generation any more, as if the host had died, and continues to
    /// obey the record.
    pub fn yield_lease(&self, generation: Generation) {
        *self.yielded.lock().unwrap_or_else(PoisonError::into_inner) = Some(generation);
    }

    /// Gives up the lease in this generation, because nothing runs here any more that could send,
    /// and reports that: so its VMs fail over without waiting for the end of the lease.
    ///
    /// # Errors
    /// If no leader has noted it. The lease expires then.
    pub async fn report_loss(&self, register: &FailoverRecord) -> Result<(), MembershipError> {
        self.yield_lease(register.generation);
        self.give_up_lease(register);
        let report =
            self.members.report_lease_given_up(&self.cluster, self.host, register.generation);
        timeout(self.terms.ttl, report).await.unwrap_or(Ok(()))
    }

    /// Gives up the lease for a planned move: no frame leaves any more, until a later record than
    /// this one is there. See [`HostGuard::give_up_lease`].
    pub fn give_up_lease(&self, register: &FailoverRecord) {
        let mut guard = self.lock_guard();
        guard.give_up_lease(register);
        self.hosts.limit_sending(&self.cluster, guard.may_send_until());
    }

    /// Requests the lease, and obeys the newest record, at once instead of at the next poll.
    pub fn poll_now(&self) {
        self.wake.notify_one();
    }

    /// Whether a frame of this generation may leave now.
    pub fn may_send_in(&self, generation: Generation) -> bool {
        let guard = self.lock_guard();
        guard.running_generation() == Some(generation) && guard.may_send(read_boot_clock())
    }

    /// Whether a frame may leave now. Check it for every frame, right before it is sent.
    pub fn may_send(&self) -> bool {
        let guard = self.lock_guard();
        guard.may_send(read_boot_clock())
    }

    /// The newest record that was applied; `None` before the first one.
    pub fn newest_record(&self) -> Option<VersionedRecord> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Requests the lease and performs the actions of the record, until a VM could not be run or
    /// stopped. Lease requests continue during an action.
    ///
    /// # Errors
    /// The failure of that action.
    pub async fn follow_record(&self) -> Result<(), MembershipError> {
        let (mut waiting, mut work): (VecDeque<PendingAction<'_>>, Option<PendingAction<'_>>) =
            Default::default();
        loop {
            waiting.extend(self.request_lease().await);
            let mut next = std::pin::pin!(sleep(self.terms.ttl / POLLS_PER_LEASE));
            loop {
                work = work.or_else(|| waiting.pop_front());
                let Some(doing) = &mut work else {
                    tokio::select! {
                        () = &mut next => break,
                        () = self.wake.notified() => break,
                    }
                };
                tokio::select! {
                    done = doing => {
                        work = None;
                        done?;
                    }
                    () = &mut next => break,
                    () = self.wake.notified() => break,
                }
            }
        }
    }

    /// Requests the lease once; returns the actions that follow from the answer.
    async fn request_lease(&self) -> Vec<PendingAction<'_>> {
        let asked = read_boot_clock();
        let answer = async {
            match self.is_named() {
                true => self.members.request_lease(&self.cluster, self.host).await,
                false => self.members.read_record(&self.cluster).await.map(LeaseResult::Refused),
            }
        };
        // A later answer grants a lease that has expired already.
        match timeout(self.terms.ttl, answer).await {
            Ok(Ok(LeaseResult::Granted(known))) => {
                self.apply_record(known, |guard, register| guard.record_grant(asked, register))
            }
            Ok(Ok(LeaseResult::Refused(known))) => {
                self.apply_record(known, |guard, register| guard.learn_record(register))
            }
            Ok(Err(trouble)) => {
                tracing::debug!("no lease of {}: {trouble}", self.cluster);
                Vec::new()
            }
            Err(_) => {
                tracing::debug!("no lease of {}: no answer", self.cluster);
                Vec::new()
            }
        }
    }

    /// Whether the record names this host, and the host has not yielded.
    fn is_named(&self) -> bool {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let record = known.as_ref().and_then(|known| known.record.as_ref());
        let yielded = *self.yielded.lock().unwrap_or_else(PoisonError::into_inner);
        let asks = |record: &&ClusterRecord| yielded != Some(record.register.generation);
        record.filter(asks).is_some_and(|record| {
            let mut placements = record.register.placements.values();
            placements.any(|placement| {
                placement.primary == self.host || placement.backup == Some(self.host)
            })
        })
    }

    fn apply_record(
        &self,
        known: VersionedRecord,
        ask_guard: impl FnOnce(&mut HostGuard, &FailoverRecord) -> Vec<GuardAction>,
    ) -> Vec<PendingAction<'_>> {
        if let Some(Err(trouble)) = known.record.as_ref().map(ClusterRecord::check_rules) {
            tracing::warn!("cluster {} is not obeyed: {trouble}", self.cluster);
            return Vec::new();
        }
        let mut guard = self.lock_guard();
        let (actions, vms) = match &known.record {
            Some(ClusterRecord { register, vms }) => (ask_guard(&mut guard, register), vms.clone()),
            // A record stays after its cluster has ended, so there was none yet.
            None => (guard.lose_record().into_iter().collect(), BTreeMap::new()),
        };
        self.hosts.limit_sending(&self.cluster, guard.may_send_until());
        drop(guard);
        let mut newest = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if newest.as_ref().is_none_or(|it| it.revision <= known.revision) {
            *newest = Some(known);
        }
        drop(newest);
        actions.into_iter().filter_map(|action| self.host_action(action, &vms)).collect()
    }

    fn host_action(
        &self,
        action: GuardAction,
        names: &BTreeMap<VmId, String>,
    ) -> Option<PendingAction<'_>> {
        match action {
            GuardAction::Stop(generation) => Some(self.hosts.stop_vms(&self.cluster, generation)),
            // No report is needed: the host gets no lease, and its last one expires.
            GuardAction::Stopped(_) => None,
            GuardAction::Run { generation, vms } => {
                let start = StartRequest { generation, vms, names: names.clone() };
                Some(Box::pin(async move { self.hosts.run_vms(&self.cluster, &start).await }))
            }
        }
    }

    fn lock_guard(&self) -> MutexGuard<'_, HostGuard> {
        self.guard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
