//! The reconcile loop of one VM: its cluster member, and the actions that are planned for it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use firn_cluster::Host;
use firn_membership::{Cluster, Post, Record, Trouble, View};
use firn_supervisor::{FailureKind, VmName};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::due::{Deed, Here, due, is_sure};
use super::{LOOKS, Ours, change, hosts, lock, newest};
use crate::agent::Agent;
use crate::api::Protect;
use crate::detect::Health;
use crate::host::HostName;

/// Epoch interval after a failover, unless this host has a request for the VM: the default of
/// `firn protect`.
const INTERVAL_MS: u64 = 100;

/// Follows the record of a VM until the VM could not be run here, or has no record any more.
pub async fn keep(agent: Arc<Agent>, vm: VmName, post: Arc<Post>) {
    tokio::select! {
        done = post.keep() => {
            if let Err(trouble) = done {
                tracing::error!("{vm} can't run here, so this host does nothing more for it: {trouble}");
                lock(&agent.failover.given_up).insert(vm.clone());
            }
        }
        () = tend(&agent, &vm, &post) => {}
    }
    // A later VM of the same name must not use this lease.
    agent.vms.grant(&vm, None);
}

async fn tend(agent: &Arc<Agent>, vm: &VmName, post: &Post) {
    let Some(ours) = agent.failover.ours.get() else { return };
    let mut tender = Tender { agent, vm, post, ours, protecting: None, tried: None, before: None };
    loop {
        match tender.look().await {
            Ok(true) => {}
            Ok(false) => return,
            Err(trouble) => tracing::debug!("no action is planned for {vm}: {trouble}"),
        }
        sleep(ours.terms.ttl / LOOKS).await;
    }
}

struct Tender<'a> {
    agent: &'a Arc<Agent>,
    vm: &'a VmName,
    post: &'a Post,
    ours: &'a Ours,
    protecting: Option<JoinHandle<()>>,
    /// The host that was tried last.
    tried: Option<HostName>,
    /// The action that the previous run planned.
    before: Option<Deed>,
}

impl Tender<'_> {
    /// Observes once, and performs the planned action. Returns whether the loop continues.
    async fn look(&mut self) -> Result<bool, Trouble> {
        let is_busy = self.protecting.as_ref().is_some_and(|it| !it.is_finished());
        if is_busy || self.agent.is_claimed(self.vm) {
            return Ok(true);
        }
        if self.agent.place.cluster_of(self.vm).is_some() {
            // It has joined a cluster of several VMs, whose lease it obeys.
            return Ok(false);
        }
        let cluster = Cluster::new(self.vm.as_str())?;
        let View { known, names, .. } = self.ours.members.view(&cluster).await?;
        let Some(here) = self.here(&names).await else { return Ok(true) };
        // A command may have claimed the VM meanwhile.
        let Some(record) = known.record.filter(|_| !self.agent.is_claimed(self.vm)) else {
            return Ok(true);
        };
        let name = self.agent.config.name.as_str();
        let mine = names.iter().filter(|(host, it)| **host < self.ours.host && *it == name);
        let mine: BTreeSet<Host> = mine.map(|(host, _)| *host).collect();
        let deed = due(self.ours.host, &mine, &record, here);
        let before = self.before.replace(deed);
        if !is_sure(deed, before) {
            return Ok(true);
        }
        if deed != Deed::Nothing && !(deed == Deed::Relinquish && before == Some(deed)) {
            tracing::info!("{}: {deed:?}, for {here:?}", self.vm);
        }
        let register = &record.register;
        let next = match deed {
            Deed::Record(backup) => register.backed_by(backup),
            Deed::TakeUp(before) => register.taken_up(before, self.ours.host),
            Deed::End => register.ended(),
            other => return Ok(self.perform(other, &record, &names).await),
        };
        let vms = if next.is_ended() { BTreeMap::new() } else { record.vms };
        let to = Record { register: next, vms };
        let is_done = change(&*self.ours.members, &cluster, known.revision, &to).await?;
        let is_over = is_done && deed == Deed::End;
        if is_over {
            lock(&self.agent.failover.troubles).remove(self.vm);
        }
        Ok(!is_over)
    }

    async fn perform(
        &mut self,
        deed: Deed,
        record: &Record,
        names: &BTreeMap<Host, String>,
    ) -> bool {
        match deed {
            Deed::Yield => {
                tracing::warn!("{} has died here: its backup has to run it", self.vm);
                return false;
            }
            Deed::Fence => {
                let primary = record.register.primaries().first().copied();
                let host = primary.and_then(|host| names.get(&host)).map_or("?", String::as_str);
                let generation = record.register.generation.0;
                let why = format!("it runs at host {host} since its timeline {generation} began");
                hosts::end(self.agent, self.vm, &why).await;
            }
            Deed::Relinquish => self.post.yields(record.register.generation),
            Deed::GoOn => self.ask("release its output", |vms, vm| vms.go_on(vm)).await,
            Deed::Tidy => {
                // Another standby of this name may be about to start, or have just started.
                if let Ok(_claim) = self.agent.claim(self.vm) {
                    self.ask("end as a standby", stop_if_ended).await;
                }
            }
            Deed::Protect => self.protect(),
            _ => {}
        }
        true
    }

    async fn ask(
        &self,
        what: &str,
        work: fn(&dyn crate::Vms, &VmName) -> Result<(), firn_supervisor::Failure>,
    ) {
        let vm = self.vm.clone();
        if let Err(failure) = self.agent.blocking(move |vms| work(vms, &vm)).await {
            tracing::warn!("{} should {what}, and does not: {failure}", self.vm);
        }
    }

    /// Observes the VM on this host; `None` if its state cannot be read now.
    async fn here(&self, names: &BTreeMap<Host, String>) -> Option<Here> {
        let (agent, vm) = (self.agent, self.vm.clone());
        let backup = agent.backup_of(&vm).and_then(|host| newest(names, &host));
        match agent.blocking(move |vms| vms.status(&vm)).await {
            Ok(status) => Some(Here::of(&status, backup)),
            Err(failure) if failure.kind == FailureKind::NoSuchVm => Some(Here::Nothing),
            Err(_) => None,
        }
    }

    /// Starts to protect the VM by the next host that is alive.
    fn protect(&mut self) {
        let alive = |peer: &HostName| {
            self.agent.peers.health(peer).is_some_and(|it| *it.borrow() == Health::Alive)
        };
        let peers: Vec<&HostName> = self.agent.config.peers.keys().filter(|it| alive(it)).collect();
        let after = |host: &&&HostName| self.tried.as_ref().is_none_or(|tried| **host > tried);
        let Some(host) = peers.iter().find(after).or(peers.first()) else {
            return note(self.agent, self.vm, "no other host answers".to_owned());
        };
        self.tried = Some((*host).clone());
        let wanted = lock(&self.agent.failover.wanted).get(self.vm).cloned();
        let wanted = wanted.unwrap_or_else(|| Protect {
            vm: self.vm.clone(),
            backup: (*host).clone(),
            interval_ms: INTERVAL_MS,
            predicts: true,
        });
        let wanted = Protect { backup: (*host).clone(), ..wanted };
        self.protecting = Some(tokio::spawn(protect(Arc::clone(self.agent), wanted)));
    }
}

fn stop_if_ended(vms: &dyn crate::Vms, vm: &VmName) -> Result<(), firn_supervisor::Failure> {
    match vms.status(vm)?.standby {
        Some(standby) if standby.ended.is_some() => vms.stop(vm),
        _ => Ok(()),
    }
}

async fn protect(agent: Arc<Agent>, wanted: Protect) {
    let (vm, backup) = (wanted.vm.clone(), wanted.backup.clone());
    // Boxed: protecting acquires the lease, and so may start the reconcile loop that contains this.
    let done = Box::pin(crate::protect::protect(&agent, wanted, |_| ())).await;
    match done {
        Ok(_) => tracing::info!("{vm} is protected again, by host {backup}"),
        Err(failure) => note(&agent, &vm, format!("host {backup} can't: {failure}")),
    }
}

fn note(agent: &Agent, vm: &VmName, why: String) {
    let text = format!("{vm} is not protected: {why}");
    let before = lock(&agent.failover.troubles).insert(vm.clone(), text.clone());
    if before.as_ref() != Some(&text) {
        tracing::warn!("{text}");
    }
}
