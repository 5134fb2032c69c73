//! Faults: drawn from a seed, and injected.

use std::time::Duration;

use anyhow::{Context as _, Result};
use firn_guest::stamp::mix;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::vms::{self, KEEPER};
use crate::site::Site;

/// The kind of component that is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Vm,
    Supervisor,
    Agent,
    Keeper,
    Host,
    Link,
    Frozen,
}

impl Kind {
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
pub(super) struct Plan {
    pub(super) kind: Kind,
    /// The VM, or its host.
    pub(super) which: usize,
    /// How long the clients are at work before.
    pub(super) after: Duration,
    /// How long a link is down, or a host is stopped; `None`: until another host has replaced it.
    pub(super) lasts: Option<Duration>,
    /// How long until an operator reacts.
    pub(super) looked_after: Duration,
    /// Whether VMs that continue unprotected are protected anew, rather than failed over.
    pub(super) goes_on: bool,
}

impl Plan {
    /// Draws a plan. Kinds alternate from seed to seed, so that each is equally frequent; all else
    /// is random.
    pub(super) fn draw(seed: u64) -> Self {
        let mut state = mix(seed);
        let mut any = |below: u64| {
            state = mix(state);
            state % below
        };
        let millis = Duration::from_millis;
        Self {
            kind: Kind::ALL[(seed % Kind::ALL.len() as u64) as usize],
            which: any(vms::COUNT as u64) as usize,
            after: millis(500 + any(2500)),
            lasts: (any(2) == 0).then(|| millis(100 + any(2400))),
            looked_after: millis(100 + any(900)),
            goes_on: any(2) == 0,
        }
    }

    /// Injects the fault.
    pub(super) fn strike(&self, site: &Site) -> Result<()> {
        let host = site.host(self.which);
        match self.kind {
            Kind::Vm => signal(&pids(site, self.which, &["pid"])?, Signal::SIGKILL),
            Kind::Supervisor => {
                let pids = pids(site, self.which, &["guard_pid", "watcher_pid", "supervisor_pid"])?;
                signal(&pids, Signal::SIGKILL)
            }
            Kind::Agent => signal(&agents(site, self.which)?, Signal::SIGKILL),
            Kind::Keeper => signal(&agents(site, KEEPER)?, Signal::SIGKILL),
            Kind::Host => host.kill(),
            Kind::Link => site.connect(self.which, false),
            Kind::Frozen => signal(&all(site, self.which)?, Signal::SIGSTOP),
        }
    }

    /// Connects a link again, or continues a host.
    pub(super) fn mend(&self, site: &Site) -> Result<()> {
        match self.kind {
            Kind::Link => site.connect(self.which, true),
            Kind::Frozen => signal(&all(site, self.which)?, Signal::SIGCONT),
            _ => Ok(()),
        }
    }

    /// Whether the fault may be over before an operator has to react.
    pub(super) fn may_pass(&self) -> bool {
        matches!(self.kind, Kind::Link | Kind::Frozen) && self.lasts.is_some()
    }
}

fn pids(site: &Site, vm: usize, which: &[&str]) -> Result<Vec<i32>> {
    let status = site.host(vm).firn().status(&vms::name(vm))?;
    let pid = |&it: &&str| {
        let pid = status[it].as_i64().with_context(|| format!("{}: no {it}", vms::name(vm)))?;
        Ok(i32::try_from(pid)?)
    };
    which.iter().map(pid).collect()
}

fn all(site: &Site, host: usize) -> Result<Vec<i32>> {
    Ok(site.host(host).processes()?.into_iter().map(|process| process.pid).collect())
}

fn agents(site: &Site, host: usize) -> Result<Vec<i32>> {
    let processes = site.host(host).processes()?.into_iter();
    let agents = processes.filter(|process| process.name.starts_with("firn-agent"));
    Ok(agents.map(|process| process.pid).collect())
}

fn signal(pids: &[i32], signal: Signal) -> Result<()> {
    pids.iter().try_for_each(|&pid| match kill(Pid::from_raw(pid), signal) {
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("signal {signal} for process {pid}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_plan_and_all_kinds_come() {
        let kinds: Vec<Kind> = (5..12).map(|seed| Plan::draw(seed).kind).collect();
        assert!(Kind::ALL.iter().all(|kind| kinds.contains(kind)));
        assert_eq!(Plan::draw(7), Plan::draw(7));
        let links = (0..20).map(|turn| Plan::draw(7 * turn + 2));
        let passes: Vec<bool> = links.map(|plan| plan.may_pass()).collect();
        assert!(passes.contains(&true) && passes.contains(&false));
    }
}
