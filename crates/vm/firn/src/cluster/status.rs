//! `firn cluster status`

use std::fmt::Write as _;

use clap::Args as ClapArgs;
use firn_control::api::{CLUSTERS, ClusterView, MembershipView};
use firn_control::client::{Method, send_cluster_request};
use firn_control::{ClusterState, StoredCluster, client};
use firn_supervisor::Failure;
use firn_types::make_printable;
use serde::Serialize;

use super::verbs::describe_global_checkpoint;
use crate::output::{FactPrinter, format_table};
use crate::units;

/// Show the clusters that this host is the backup of, and the hosts' consensus: its leader, the
/// hosts of each cluster's VMs, and the hosts that hold a lease.
///
/// If a host is shown with a number, the number stands for one run of that host's agent. A fenced
/// host may still send in an older generation; while any host is fenced, none of the cluster's VMs
/// runs.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn cluster status
  firn cluster status --json | jq -r .leader
  firn cluster status --json | jq '.kept[0].checkpoint'")]
pub struct ClusterStatusArgs {}

impl ClusterStatusArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let doing = |failure: Failure| failure.while_doing("cannot query this host's agent");
        let kept: Vec<StoredCluster> =
            send_cluster_request(&base, Method::GET, CLUSTERS, None::<&()>).map_err(doing)?;
        // A host that is a backup of clusters need not take part in consensus.
        let agreed = match client::read_records(&base) {
            Err(failure) if kept.is_empty() => return Err(doing(failure)),
            agreed => agreed.ok(),
        };
        let view = ClusterStatus { agreed, kept };
        out.print_facts(&view, || view.describe_all())
    }
}

#[derive(Serialize)]
struct ClusterStatus {
    #[serde(flatten)]
    agreed: Option<MembershipView>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    kept: Vec<StoredCluster>,
}

impl ClusterStatus {
    fn describe_all(&self) -> String {
        let kept = self.kept.iter().map(describe_record);
        kept.chain(self.agreed.as_ref().map(describe_membership)).collect::<Vec<_>>().join("\n")
    }
}

fn describe_record(record: &StoredCluster) -> String {
    let vms: Vec<String> =
        record.vms.iter().map(|placed| format!("{} on {}", placed.vm, placed.host)).collect();
    let state = match record.state {
        ClusterState::Made => "not protected",
        ClusterState::Protected => "protected",
        ClusterState::FailingOver => {
            "failing over to this host: repeat `firn cluster failover` to finish"
        }
        ClusterState::FailedOver => "failed over",
    };
    let mut text = format!(
        "{}: {state}; {}\n{}",
        record.name,
        vms.join(", "),
        describe_global_checkpoint(record)
    );
    if let Some(trouble) = &record.trouble {
        let _ = writeln!(text, "no new global checkpoint: {}", make_printable(trouble));
    }
    text
}

fn describe_membership(view: &MembershipView) -> String {
    let leader = view.leader.as_deref().unwrap_or("none");
    let lease = units::format_ms(view.lease_ms as f64);
    let mut text =
        format!("{}: {}\nleader: {leader}\nlease: {lease}\n", view.kind, view.servers.join(", "));
    if !view.clusters.is_empty() {
        let _ = write!(text, "\n{}", format_table(&placement_rows(&view.clusters)));
    }
    for cluster in &view.clusters {
        let _ = write!(text, "\n{}: leases: {}", cluster.name, join_hosts(&cluster.leases));
        if !cluster.fence.is_empty() {
            let _ = write!(text, "; waits for {}", join_hosts(&cluster.fence));
        }
        text.push('\n');
    }
    if let Some(trouble) = &view.trouble {
        let _ = write!(text, "\nnot known: {}\n", make_printable(trouble));
    }
    text
}

fn join_hosts(hosts: &[String]) -> String {
    if hosts.is_empty() { "none".to_owned() } else { hosts.join(", ") }
}

fn placement_rows(clusters: &[ClusterView]) -> Vec<Vec<String>> {
    let heading = ["CLUSTER", "VM", "PRIMARY", "BACKUP", "GENERATION"].map(str::to_owned).to_vec();
    let rows = clusters.iter().flat_map(|cluster| {
        cluster.vms.iter().map(|placement| {
            let backup = placement.backup.clone().unwrap_or_else(|| "-".to_owned());
            let generation = cluster.generation.to_string();
            vec![
                cluster.name.clone(),
                placement.vm.clone(),
                placement.primary.clone(),
                backup,
                generation,
            ]
        })
    });
    std::iter::once(heading).chain(rows).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_standbys_are_listed_first() {
        let record = serde_json::json!({
            "name": "shop", "id": 1, "state": "protected", "interval_ms": 100, "term": 1, "generation": 2,
            "vms": [{ "vm": "web", "host": "a", "mac": [2, 0, 0, 0, 0, 1] }], "trouble": "no word from a",
            "checkpoint": { "number": 9, "generation": 2, "layout": 0, "request": { "term": 1, "count": 9 }, "marks": { "0": 7 } },
        });
        let record = serde_json::from_value(record).unwrap();
        let text = ClusterStatus { agreed: None, kept: vec![record] }.describe_all();
        let wanted = "shop: protected; web on a\nglobal checkpoint 9: web at epoch 7\n\
            no new global checkpoint: no word from a\n";
        assert_eq!(text, wanted);
    }

    #[test]
    fn clusters_are_lined_up_and_leases_follow() {
        let view = serde_json::json!({
            "host": "b", "kind": "embedded", "servers": ["a", "b", "c"], "leader": "c", "lease_ms": 5000,
            "clusters": [{ "name": "web", "generation": 1, "checkpoint": 9, "leases": ["b (2)"], "fence": ["a (1)"],
                "vms": [{ "vm": "web", "primary": "b (2)" }] }],
        });
        let text = describe_membership(&serde_json::from_value(view).unwrap());
        let wanted = "embedded: a, b, c\nleader: c\nlease: 5.00 s\n\n\
            CLUSTER  VM   PRIMARY  BACKUP  GENERATION\n\
            web      web  b (2)    -       1\n\n\
            web: leases: b (2); waits for a (1)\n";
        assert_eq!(text, wanted);
    }
}
