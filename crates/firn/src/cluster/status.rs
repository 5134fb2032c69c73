//! `firn cluster status`

use std::fmt::Write as _;

use clap::Args as ClapArgs;
use firn_agent::api::{ClusterView, MembershipView};
use firn_agent::client;
use firn_supervisor::Failure;

use crate::output::{Output, table};
use crate::units;

/// Show what hosts agree on: who leads, where the VMs of each cluster are, and which hosts hold a lease.
///
/// A host with a number is the agent of that host from one start to the next. A fenced host may still send in an older timeline;
/// while there is one, none of the cluster's VMs runs.
///
/// Examples:
///   firn cluster status
///   firn cluster status --json | jq -r .leader
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct Args {}

impl Args {
    /// Runs the verb.
    pub fn run(&self, out: Output) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let view = client::membership(&base)
            .map_err(|failure| failure.while_doing("can't ask this host's agent"))?;
        out.facts(&view, || describe(&view))
    }
}

fn describe(view: &MembershipView) -> String {
    let leader = view.leader.as_deref().unwrap_or("nobody");
    let lease = units::seconds(view.lease_ms / 1000);
    let mut text =
        format!("{}: {}\nleader: {leader}\nlease: {lease}\n", view.kind, view.servers.join(", "));
    if !view.clusters.is_empty() {
        let _ = write!(text, "\n{}", table(&places(&view.clusters)));
    }
    for cluster in &view.clusters {
        let _ = write!(text, "\n{}: leases: {}", cluster.name, list(&cluster.leases));
        if !cluster.fence.is_empty() {
            let _ = write!(text, "; waits for {}", list(&cluster.fence));
        }
        text.push('\n');
    }
    if let Some(trouble) = &view.trouble {
        let _ = write!(text, "\nnot known: {trouble}\n");
    }
    text
}

fn list(hosts: &[String]) -> String {
    if hosts.is_empty() { "none".to_owned() } else { hosts.join(", ") }
}

fn places(clusters: &[ClusterView]) -> Vec<Vec<String>> {
    let heading = ["CLUSTER", "VM", "PRIMARY", "BACKUP", "GENERATION"].map(str::to_owned).to_vec();
    let rows = clusters.iter().flat_map(|cluster| {
        cluster.vms.iter().map(|place| {
            let backup = place.backup.clone().unwrap_or_else(|| "-".to_owned());
            let generation = cluster.generation.to_string();
            vec![cluster.name.clone(), place.vm.clone(), place.primary.clone(), backup, generation]
        })
    });
    std::iter::once(heading).chain(rows).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_are_lined_up_and_leases_follow() {
        let view = serde_json::json!({
            "host": "b", "kind": "embedded", "servers": ["a", "b", "c"], "leader": "c", "lease_ms": 5000,
            "clusters": [{ "name": "web", "generation": 1, "checkpoint": 9, "leases": ["b (2)"], "fence": ["a (1)"],
                "vms": [{ "vm": "web", "primary": "b (2)" }] }],
        });
        let text = describe(&serde_json::from_value(view).unwrap());
        let wanted = "embedded: a, b, c\nleader: c\nlease: 5 s\n\n\
            CLUSTER  VM   PRIMARY  BACKUP  GENERATION\n\
            web      web  b (2)    -       1\n\n\
            web: leases: b (2); waits for a (1)\n";
        assert_eq!(text, wanted);
    }
}
