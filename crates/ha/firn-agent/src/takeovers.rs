//! Counts the standbys of this host that began to run: by a failover, or by a planned move. Pure.
//!
//! A standby that runs is seen in the list of VMs, whichever process has run it: this agent by the
//! record, or a user's command where hosts have no consensus. So the count needs no report.

use std::collections::{BTreeMap, BTreeSet};

use firn_control::api::VmView;
use firn_supervisor::VmName;

/// The standbys that have run, since the agent began.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TakeoverCounts {
    standbys: BTreeSet<VmName>,
    /// VMs that a planned move runs here.
    moving: BTreeSet<VmName>,
    failovers: BTreeMap<VmName, u64>,
    moves: BTreeMap<VmName, u64>,
}

impl TakeoverCounts {
    /// Compares this host's VMs with those of the last time.
    pub fn observe_vms(&mut self, vms: &[VmView]) {
        for vm in vms {
            if vm.committed.is_some() {
                self.standbys.insert(vm.name.clone());
            } else if self.standbys.remove(&vm.name) && has_run(&vm.state) {
                let counts = match self.moving.remove(&vm.name) {
                    true => &mut self.moves,
                    false => &mut self.failovers,
                };
                *counts.entry(vm.name.clone()).or_default() += 1;
            }
        }
        self.standbys.retain(|name| vms.iter().any(|vm| vm.name == *name));
    }

    /// A planned move is about to run this standby.
    pub fn begin_move(&mut self, vm: &VmName) {
        self.moving.insert(vm.clone());
    }

    /// That move has failed.
    pub fn end_move(&mut self, vm: &VmName) {
        self.moving.remove(vm);
    }

    /// How often each VM was run here by a failover.
    pub fn failovers(&self) -> impl Iterator<Item = (&VmName, u64)> {
        self.failovers.iter().map(|(vm, count)| (vm, *count))
    }

    /// How often each VM was moved here.
    pub fn moves(&self) -> impl Iterator<Item = (&VmName, u64)> {
        self.moves.iter().map(|(vm, count)| (vm, *count))
    }
}

/// Whether a VM that was a standby runs, and has not just ended.
fn has_run(state: &str) -> bool {
    !matches!(state, "ended" | "detached" | "starting" | "unknown")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn view(name: &str, state: &str) -> VmView {
        let committed = (state == "standby").then_some(7);
        let view = json!({ "host": "b", "name": name, "state": state, "committed": committed });
        serde_json::from_value(view).unwrap()
    }

    fn counts(of: &TakeoverCounts) -> (Vec<String>, Vec<String>) {
        let text = |(vm, count): (&VmName, u64)| format!("{vm} {count}");
        (of.failovers().map(text).collect(), of.moves().map(text).collect())
    }

    #[test]
    fn a_standby_that_runs_was_failed_over() {
        let mut takeovers = TakeoverCounts::default();
        takeovers.observe_vms(&[view("web", "standby"), view("db", "running")]);
        takeovers.observe_vms(&[view("web", "standby"), view("db", "protected")]);
        assert_eq!(counts(&takeovers), (vec![], vec![]));
        takeovers.observe_vms(&[view("web", "running"), view("db", "protected")]);
        takeovers.observe_vms(&[view("web", "protected")]);
        assert_eq!(counts(&takeovers), (vec!["web 1".to_owned()], vec![]));
        takeovers.observe_vms(&[view("web", "standby")]);
        takeovers.observe_vms(&[view("web", "protected")]);
        assert_eq!(counts(&takeovers).0, ["web 2"]);
    }

    #[test]
    fn a_standby_that_ends_was_not() {
        let mut takeovers = TakeoverCounts::default();
        takeovers.observe_vms(&[view("web", "standby"), view("db", "standby")]);
        takeovers.observe_vms(&[view("web", "ended")]);
        takeovers.observe_vms(&[view("db", "running")]);
        assert_eq!(counts(&takeovers), (vec![], vec![]), "db is another VM of that name");
    }

    #[test]
    fn a_planned_move_is_no_failover() {
        let (mut takeovers, web) = (TakeoverCounts::default(), VmName::new("web").unwrap());
        takeovers.observe_vms(&[view("web", "standby")]);
        takeovers.begin_move(&web);
        takeovers.observe_vms(&[view("web", "standby")]);
        takeovers.observe_vms(&[view("web", "running")]);
        assert_eq!(counts(&takeovers), (vec![], vec!["web 1".to_owned()]));
        // A move that failed, and then a failover.
        takeovers.observe_vms(&[view("web", "standby")]);
        takeovers.begin_move(&web);
        takeovers.end_move(&web);
        takeovers.observe_vms(&[view("web", "running")]);
        assert_eq!(counts(&takeovers).0, ["web 1"]);
    }
}
