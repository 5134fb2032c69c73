//! The lease of a single VM that is about to be protected.

use std::collections::BTreeMap;
use std::sync::Arc;

use firn_cluster::VmId;
use firn_cluster::failover::{FailoverRecord, VmPlacement};
use firn_control::api::ProtectVmRequest;
use firn_membership::{ClusterName, ClusterRecord, MembershipError, RecordView};
use firn_supervisor::{Failure, FailureKind, VmName};
use tokio::time::{Instant, sleep};

use super::manager::{LocalNode, RETRY_INTERVAL, lock_mutex};
use super::reconciler::ensure_reconciler;
use super::record::change_record;
use crate::agent::Agent;

/// Acquires the lease that is to cover a VM's frames, and returns its generation. By then the
/// record names this host as the primary. Returns `None` without membership.
pub(crate) async fn acquire_lease(
    agent: &Arc<Agent>,
    wanted: &ProtectVmRequest,
) -> Result<Option<u32>, Failure> {
    let Some((_, terms)) = agent.membership.store_and_terms() else { return Ok(None) };
    let vm = &wanted.vm;
    lock_mutex(&agent.failover.given_up).remove(vm);
    lock_mutex(&agent.failover.protect_requests).insert(vm.clone(), wanted.clone());
    // Two things may take long: the lease of an earlier generation has to expire, and the
    // membership servers may have to elect a leader.
    let (until, mut why) = (Instant::now() + 6 * terms.ttl, String::new());
    while Instant::now() < until {
        match record_primary(agent, vm).await {
            Ok(Some(generation)) => return Ok(Some(generation)),
            Ok(None) => "the lease is not held yet".clone_into(&mut why),
            Err(MembershipError::Refused(text)) => return Err(already_protected(vm, text)),
            Err(trouble) => why = trouble.to_string(),
        }
        sleep(RETRY_INTERVAL).await;
    }
    let failure = Failure::new(FailureKind::Host, format!("{vm} gets no lease: {why}"));
    Err(failure.with_hint("`firn cluster status` shows which hosts answer"))
}

fn already_protected(vm: &VmName, why: String) -> Failure {
    let failure = Failure::new(FailureKind::Busy, why);
    failure.with_hint(format!(
        "`firn release {vm}` there ends that; `firn cluster forget {vm}` does if that host and its backup's are gone"
    ))
}

/// Makes the record name this host as the primary; returns the generation once its lease is held.
async fn record_primary(agent: &Arc<Agent>, vm: &VmName) -> Result<Option<u32>, MembershipError> {
    let none =
        || MembershipError::Unreachable("this agent has not joined membership yet".to_owned());
    let LocalNode { members, host, .. } = agent.failover.local_node.get().ok_or_else(none)?.clone();
    let cluster = ClusterName::new(vm.as_str())?;
    let RecordView { known, names, .. } = members.read_view(&cluster).await?;
    let place = VmPlacement { primary: host, backup: None };
    let places = BTreeMap::from([(VmId(0), place)]);
    let vms = BTreeMap::from([(VmId(0), vm.to_string())]);
    let begun = |register| ClusterRecord { register, vms: vms.clone() };
    let next = match &known.record {
        None => begun(FailoverRecord::new(places)),
        Some(record) if record.register.is_ended() => begun(record.register.with_restart(places)),
        Some(record) => {
            let register = &record.register;
            let primary = register.primaries().first().copied().unwrap_or(host);
            if primary != host {
                let name = names.get(&primary).map_or("?", String::as_str);
                let text =
                    format!("{vm} is protected already, and runs at host {name} ({})", primary.0);
                return Err(MembershipError::Refused(text));
            }
            let member = ensure_reconciler(agent, vm).ok_or_else(none)?;
            let holds = register.fence.is_empty() && member.may_send();
            return Ok(holds.then_some(register.generation.0));
        }
    };
    change_record(&*members, &cluster, known.revision, &next).await?;
    ensure_reconciler(agent, vm);
    Ok(None)
}
