//! The lease of a cluster, for a VM that is about to be protected with it.

use std::sync::Arc;

use firn_membership::ClusterRecord;
use firn_supervisor::{Failure, FailureKind, VmName};

use super::cluster_record::{cluster_name, has_membership, retry_attempt, store_cluster_of};
use super::reconciler::ensure_reconciler;
use crate::agent::Agent;

/// Acquires the lease that is to cover the frames of a VM of a cluster, and returns its generation.
/// By then the record names this host as the VM's primary.
pub(crate) async fn acquire_lease(
    agent: &Arc<Agent>,
    name: &VmName,
    vm: &VmName,
) -> Result<u32, Failure> {
    if !has_membership(agent) {
        let text = format!(
            "host {} has no membership, and {name} is a cluster of hosts that have",
            agent.config.name
        );
        let hint = "give its agent's configuration the [membership] of the others";
        return Err(Failure::new(FailureKind::Host, text).with_hint(hint));
    }
    store_cluster_of(agent, vm, name)?;
    agent.clusters.clear_given_up(name);
    retry_attempt(agent, &format!("{vm} gets no lease"), |ours| async move {
        let cluster = cluster_name(name)?;
        let known = ours.members.read_record(&cluster).await?;
        let Some(ClusterRecord { register, vms }) = known.record else { return Ok(None) };
        let number = vms.iter().find(|(_, it)| *it == vm.as_str()).map(|(number, _)| number);
        let place = number.and_then(|number| register.places.get(number));
        let is_here = place.is_some_and(|place| place.primary == ours.host);
        let member = ensure_reconciler(agent, name);
        let holds = member.is_some_and(|post| post.may_send_in(register.generation));
        Ok((is_here && holds).then_some(register.generation.0))
    })
    .await
}
