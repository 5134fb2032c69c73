//! Faults: drawn from a seed, and injected.

use std::time::Duration;

use anyhow::{Context as _, Result};
use firn_guest::stamp::mix;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::vms::{self, BACKUP_HOST};
use crate::site::HostSite;

/// The kind of component that is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LossKind {
    Vm,
    Supervisor,
    Agent,
    Keeper,
    Host,
    Link,
    Frozen,
}

impl LossKind {
    pub(super) const ALL: [Self; 7] = [
        Self::Host,
        Self::Vm,
        Self::Link,
        Self::Agent,
        Self::Frozen,
        Self::Supervisor,
        Self::Keeper,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Vm => "vm",
            Self::Supervisor => "supervisor",
            Self::Agent => "agent",
            Self::Keeper => "keeper",
            Self::Host => "host",
            Self::Link => "link",
            Self::Frozen => "frozen",
        }
    }
}

/// A fault, with the times of the fault and of the recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FaultPlan {
    pub(super) kind: LossKind,
    /// The VM, or its host.
    pub(super) which: usize,
    /// How long the clients are at work before.
    pub(super) after: Duration,
    /// How long a link is down, or a host is stopped; `None`: until another host has replaced it.
    pub(super) duration: Option<Duration>,
    /// How long until an operator reacts.
    pub(super) operator_delay: Duration,
    /// Whether VMs that continue unprotected are protected anew, rather than failed over.
    pub(super) is_reprotected: bool,
}

impl FaultPlan {
    /// Draws a plan. Kinds alternate from seed to seed, so that each is equally frequent; all else
    /// is random.
    pub(super) fn draw_plan(seed: u64) -> Self {
        let mut state = mix(seed);
        let mut any = |below: u64| {
            state = mix(state);
            state % below
        };
        let millis = Duration::from_millis;
        Self {
            kind: LossKind::ALL[(seed % LossKind::ALL.len() as u64) as usize],
            which: any(vms::COUNT as u64) as usize,
            after: millis(500 + any(2500)),
            duration: (any(2) == 0).then(|| millis(100 + any(2400))),
            operator_delay: millis(100 + any(900)),
            is_reprotected: any(2) == 0,
        }
    }

    /// Injects the fault.
    pub(super) fn inject_fault(&self, site: &HostSite) -> Result<()> {
        let host = site.host(self.which);
        match self.kind {
            LossKind::Vm => send_signal(&read_pids(site, self.which, &["pid"])?, Signal::SIGKILL),
            LossKind::Supervisor => {
                let pids =
                    read_pids(site, self.which, &["guard_pid", "watcher_pid", "supervisor_pid"])?;
                send_signal(&pids, Signal::SIGKILL)
            }
            LossKind::Agent => send_signal(&agent_pids(site, self.which)?, Signal::SIGKILL),
            LossKind::Keeper => send_signal(&agent_pids(site, BACKUP_HOST)?, Signal::SIGKILL),
            LossKind::Host => host.kill_all(),
            LossKind::Link => site.set_connected(self.which, false),
            LossKind::Frozen => send_signal(&host_pids(site, self.which)?, Signal::SIGSTOP),
        }
    }

    /// Connects a link again, or continues a host.
    pub(super) fn repair_fault(&self, site: &HostSite) -> Result<()> {
        match self.kind {
            LossKind::Link => site.set_connected(self.which, true),
            LossKind::Frozen => send_signal(&host_pids(site, self.which)?, Signal::SIGCONT),
            _ => Ok(()),
        }
    }

    /// Whether the fault may be over before an operator has to react.
    pub(super) fn is_transient(&self) -> bool {
        matches!(self.kind, LossKind::Link | LossKind::Frozen) && self.duration.is_some()
    }
}

fn read_pids(site: &HostSite, vm: usize, which: &[&str]) -> Result<Vec<i32>> {
    let status = site.host(vm).firn().status(&vms::vm_name(vm))?;
    let pid = |&it: &&str| {
        let pid = status[it].as_i64().with_context(|| format!("{}: no {it}", vms::vm_name(vm)))?;
        Ok(i32::try_from(pid)?)
    };
    which.iter().map(pid).collect()
}

fn host_pids(site: &HostSite, host: usize) -> Result<Vec<i32>> {
    Ok(site.host(host).list_processes()?.into_iter().map(|process| process.pid).collect())
}

fn agent_pids(site: &HostSite, host: usize) -> Result<Vec<i32>> {
    let processes = site.host(host).list_processes()?.into_iter();
    let agents = processes.filter(|process| process.name.starts_with("firn-agent"));
    Ok(agents.map(|process| process.pid).collect())
}

fn send_signal(pids: &[i32], signal: Signal) -> Result<()> {
    pids.iter().try_for_each(|&pid| match kill(Pid::from_raw(pid), signal) {
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("signal {signal} for process {pid}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_one_plan_and_all_kinds_of_faults_occur() {
        let kinds: Vec<LossKind> = (5..12).map(|seed| FaultPlan::draw_plan(seed).kind).collect();
        assert!(LossKind::ALL.iter().all(|kind| kinds.contains(kind)));
        assert_eq!(FaultPlan::draw_plan(7), FaultPlan::draw_plan(7));
        let links = (0..20).map(|turn| FaultPlan::draw_plan(7 * turn + 2));
        let passes: Vec<bool> = links.map(|plan| plan.is_transient()).collect();
        assert!(passes.contains(&true) && passes.contains(&false));
    }
}
