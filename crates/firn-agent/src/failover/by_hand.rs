//! A failover that a user requests, decided by the record
//! ([`firn_cluster::failover::decide_manual_failover`]).
//!
//! ```text
//!   firn failover web, at b                 the record               at b
//!     |                                     { a, backup b }
//!     |-- the lease of a has expired, ----> { b, generation + 1, --> its ClusterMember runs the VM
//!     |   or a is declared dead               fence a }              when the fence is empty
//!     '-- the lease of a is held: refused
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use firn_cluster::Host;
use firn_cluster::failover::{HandDecision, HandRefusal, by_hand};
use firn_membership::{Cluster, Record, Trouble, View};
use firn_supervisor::{Failure, FailureKind, Status, VmName};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::{Ours, RETRY, change, lock, tend};
use crate::agent::Agent;
use crate::api::FailOver;

/// Runs a standby's VM on this host; returns when it runs.
pub(crate) async fn fail_over(agent: &Arc<Agent>, wanted: &FailOver) -> Result<Value, Failure> {
    let ours = agent.failover.ours().ok_or_else(no_agreement)?;
    let vm = wanted.vm.clone();
    let status = agent.blocking(move |vms| vms.status(&vm)).await?;
    check(&status)?;
    lock(&agent.failover.given_up).remove(&wanted.vm);
    let hand = Hand { agent, wanted, ours: &ours };
    let deadlines = Deadlines::from(ours.terms.ttl, &status);
    hand.fail_over(&deadlines).await
}

fn no_agreement() -> Failure {
    let text = "this host's agent has no record of who runs what";
    Failure::new(FailureKind::Host, text).hint("`firn cluster status` shows why")
}

/// Refuses a VM that is no standby, or that belongs to a cluster of several VMs.
fn check(status: &Status) -> Result<(), Failure> {
    match &status.standby {
        Some(standby) if standby.member => {
            let text = "the VM belongs to a cluster, and fails over with all of it";
            Err(Failure::new(FailureKind::Refused, text).hint("`firn cluster failover`"))
        }
        Some(_) => Ok(()),
        None => {
            let failure = Failure::new(FailureKind::Usage, "the VM is no standby");
            Err(failure.hint("`firn ls` shows what it is"))
        }
    }
}

/// How long to wait.
struct Deadlines {
    /// For the lease of its primary, if the epochs have ended. While epochs arrive, there is no
    /// wait.
    lease: Instant,
    /// For everything.
    last: Instant,
}

impl Deadlines {
    fn from(ttl: Duration, status: &Status) -> Self {
        let now = Instant::now();
        let comes = status.standby.as_ref().is_some_and(|standby| standby.ended.is_none());
        let lease = if comes { now } else { now + 2 * ttl };
        // Time for the fence, an election, and another lease.
        Self { lease, last: now + 10 * ttl }
    }
}

struct Hand<'a> {
    agent: &'a Arc<Agent>,
    wanted: &'a FailOver,
    ours: &'a Ours,
}

impl Hand<'_> {
    async fn fail_over(&self, deadlines: &Deadlines) -> Result<Value, Failure> {
        let mut why = "no majority of the hosts' servers answers".to_owned();
        while Instant::now() < deadlines.last {
            match self.check_record(deadlines).await {
                Ok(Some(facts)) => return Ok(facts),
                Ok(None) => {
                    "its record waits for the lease of its old primary".clone_into(&mut why)
                }
                Err(Hindrance::Refused(failure)) => return Err(failure),
                Err(Hindrance::Trouble(trouble)) => why = trouble.to_string(),
            }
            sleep(RETRY).await;
        }
        let text = format!("{} does not run here yet: {why}", self.wanted.vm);
        let failure = Failure::new(FailureKind::Interrupted, text);
        Err(failure.hint("`firn cluster status` shows the record and the leases"))
    }

    /// Reads the record once and acts on it; returns the facts if the VM runs.
    async fn check_record(&self, deadlines: &Deadlines) -> Result<Option<Value>, Hindrance> {
        let (vm, Ours { members, host, .. }) = (&self.wanted.vm, self.ours);
        let cluster = Cluster::new(vm.as_str())?;
        let View { known, leases, names } = members.view(&cluster).await?;
        let record = known.record.ok_or_else(|| no_record(vm))?;
        let dead = self.dead(&record, &names)?;
        // The loop requests this host's lease, and runs the VM.
        tend(self.agent, vm);
        match by_hand(&record.register, &leases, *host, &dead) {
            HandDecision::Runs => self.result(record.register.generation.0).await,
            HandDecision::Wait => Ok(None),
            HandDecision::Propose(register) => {
                let generation = register.generation.0;
                let next = Record { register, ..record };
                if change(&**members, &cluster, known.revision, &next).await? {
                    tracing::warn!(
                        "{vm} is failed over by hand: generation {generation}, {dead:?} declared dead"
                    );
                }
                Ok(None)
            }
            HandDecision::Refused(HandRefusal::Held(_)) if Instant::now() < deadlines.lease => {
                Ok(None)
            }
            HandDecision::Refused(refusal) => Err(self.refused(refusal, &names)),
        }
    }

    /// Returns the numbers of the host that is declared dead, among the primaries of the record.
    fn dead(
        &self,
        record: &Record,
        names: &BTreeMap<Host, String>,
    ) -> Result<BTreeSet<Host>, Hindrance> {
        let Some(dead) = &self.wanted.dead else { return Ok(BTreeSet::new()) };
        let primaries = record.register.primaries();
        let is_dead = |host: &Host| names.get(host).is_some_and(|name| name == dead.as_str());
        let hosts: BTreeSet<Host> = primaries.iter().copied().filter(is_dead).collect();
        let runs_here = primaries.contains(&self.ours.host);
        match (hosts.is_empty() && !runs_here, primaries.first()) {
            (true, Some(primary)) => Err(self.refused(HandRefusal::OtherPrimary(*primary), names)),
            _ => Ok(hosts),
        }
    }

    /// Returns the supervisor's answer, once the VM runs in this generation.
    async fn result(&self, generation: u32) -> Result<Option<Value>, Hindrance> {
        let vm = self.wanted.vm.clone();
        if lock(&self.agent.failover.given_up).contains(&vm) {
            let text = format!("{vm} could not be run here");
            let failure = Failure::new(FailureKind::Other, text);
            return Err(Hindrance::Refused(failure.hint("the log of the agent shows why")));
        }
        let status = self.agent.blocking(move |vms| vms.status(&vm)).await?;
        if status.standby.is_some() || status.lease != Some(generation) {
            return Ok(None);
        }
        let ran = lock(&self.agent.failover.ran).get(&self.wanted.vm).cloned();
        let mut facts = ran.unwrap_or_else(|| json!({}));
        facts["generation"] = generation.into();
        Ok(Some(facts))
    }

    fn refused(&self, refusal: HandRefusal, names: &BTreeMap<Host, String>) -> Hindrance {
        let vm = &self.wanted.vm;
        let name = |host: Host| names.get(&host).map_or("?", String::as_str);
        let lease_s = self.ours.terms.ttl.as_secs_f64();
        let (text, hint) = match refusal {
            HandRefusal::Ended => return no_record(vm).into(),
            HandRefusal::Held(host) => (
                format!(
                    "host {} holds the lease of {vm}, and so runs it: until {lease_s} s after its last request for the lease",
                    name(host)
                ),
                format!(
                    "`firn stop {vm}` there ends it; if the VM is dead there though its host is not, \
                     `firn failover {vm} --i-know-it-is-dead {}` fences that host",
                    name(host)
                ),
            ),
            HandRefusal::OtherPrimary(host) => (
                format!(
                    "the record says that {vm} runs at host {}, not at the one that is declared dead",
                    name(host)
                ),
                "`firn cluster status` shows the record".to_owned(),
            ),
            HandRefusal::OtherBackup(Some(host)) => (
                format!(
                    "the record names host {} as the backup of {vm}, not this host",
                    name(host)
                ),
                format!("`firn failover {vm}` there"),
            ),
            HandRefusal::OtherBackup(None) | HandRefusal::NoCopy => (
                format!(
                    "the record names no backup of {vm}: the copy here may be older than output that has left the VM"
                ),
                "`firn cluster status` shows the record".to_owned(),
            ),
        };
        Failure::new(FailureKind::Refused, text).hint(hint).into()
    }
}

fn no_record(vm: &VmName) -> Failure {
    let text = format!("the record of {vm} has ended: it was stopped or released, and not lost");
    let failure = Failure::new(FailureKind::Refused, text);
    failure.hint(format!("`firn stop {vm}` ends this standby"))
}

/// Why one read of the record did not lead to a result.
enum Hindrance {
    /// The failover is refused.
    Refused(Failure),
    /// The next try may succeed.
    Trouble(Trouble),
}

impl From<Failure> for Hindrance {
    fn from(failure: Failure) -> Self {
        Self::Refused(failure)
    }
}

impl From<Trouble> for Hindrance {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Refused(why) => Self::Refused(Failure::new(FailureKind::Refused, why)),
            trouble => Self::Trouble(trouble),
        }
    }
}
