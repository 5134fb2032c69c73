//! `firn agent status`

use std::fmt::Write as _;

use clap::Args as ClapArgs;
use firn_control::api::{AgentStatus, NetworkView, PeerView, TrafficView, VmView};
use firn_control::client;
use firn_supervisor::Failure;
use firn_types::make_printable;

use crate::output::{FactPrinter, format_table};
use crate::units;

/// Show the hosts, the VMs that each host runs or is a standby for, and this host's networks.
///
/// A host that has not answered for two seconds is suspected, after five it is lost. This command
/// starts no VM: where a standby's primary seems to be lost, it shows what to do.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = r#"Examples:
  firn agent status
  firn agent status --json \
    | jq -r '.peers[] | select(.health == "lost") | .name'"#)]
pub struct AgentStatusArgs {}

impl AgentStatusArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let cluster = client::read_status(&base)
            .map_err(|failure| failure.while_doing("cannot query this host's agent"))?;
        out.print_facts(&cluster, || describe_cluster(&cluster))
    }
}

fn describe_cluster(cluster: &AgentStatus) -> String {
    let mut text = format_table(&host_rows(cluster));
    if cluster.drained {
        let _ = writeln!(text, "\n{} is drained: it accepts no standbys", cluster.host);
    }
    if !cluster.vms.is_empty() {
        let _ = write!(text, "\n{}", format_table(&vm_rows(&cluster.vms)));
    }
    if !cluster.networks.is_empty() {
        let _ = write!(text, "\n{}", format_table(&network_rows(&cluster.networks)));
    }
    for peer in &cluster.peers {
        if let Some(trouble) = &peer.trouble {
            let _ = write!(text, "\n{}: {}\n", peer.name, make_printable(trouble));
        }
    }
    for network in &cluster.networks {
        let lanes = network.lanes.iter().filter_map(|lane| Some((lane, lane.trouble.as_ref()?)));
        for (lane, trouble) in lanes {
            let _ = write!(text, "\n{}, {}: {}\n", network.name, lane.to, make_printable(trouble));
        }
    }
    for vm in &cluster.vms {
        if let Some(advice) = &vm.advice {
            let _ = write!(text, "\n{} on {}: {}\n", vm.name, vm.host, make_printable(advice));
        }
    }
    text
}

fn host_rows(cluster: &AgentStatus) -> Vec<Vec<String>> {
    let heading = ["HOST", "STATE", "SINCE", "ROUND TRIP", "ADDRESS"].map(str::to_owned).to_vec();
    let host = cluster.host.to_string();
    let listen = cluster.listen.map_or_else(|| "-".to_owned(), |listen| listen.to_string());
    let own = vec![host, "this host".to_owned(), "-".to_owned(), "-".to_owned(), listen];
    [heading, own].into_iter().chain(cluster.peers.iter().map(host_row)).collect()
}

fn host_row(peer: &PeerView) -> Vec<String> {
    vec![
        peer.name.to_string(),
        peer.health.as_word().to_owned(),
        units::format_seconds(peer.since_s as u64),
        peer.round_trip_ms.map_or_else(|| "-".to_owned(), units::format_ms),
        peer.address.clone(),
    ]
}

fn vm_rows(vms: &[VmView]) -> Vec<Vec<String>> {
    let heading = ["VM", "HOST", "STATE", "EPOCHS"].map(str::to_owned).to_vec();
    let row = |vm: &VmView| {
        vec![vm.name.to_string(), vm.host.to_string(), vm.state.clone(), describe_epochs(vm)]
    };
    std::iter::once(heading).chain(vms.iter().map(row)).collect()
}

fn network_rows(networks: &[NetworkView]) -> Vec<Vec<String>> {
    let heading = ["NETWORK", "TO", "CONNECTED", "FRAMES IN", "FRAMES OUT", "DROPPED"];
    let row = |network: &NetworkView, lane: &TrafficView| {
        let counts = [lane.connected, lane.frames_in, lane.frames_out, lane.dropped];
        let names = [network.name.to_string(), lane.to.clone()];
        names.into_iter().chain(counts.map(|count| count.to_string())).collect()
    };
    let rows =
        networks.iter().flat_map(|network| network.lanes.iter().map(move |it| row(network, it)));
    [heading.map(str::to_owned).to_vec()].into_iter().chain(rows).collect()
}

/// The peer of a VM, and its newest committed epoch.
fn describe_epochs(vm: &VmView) -> String {
    let backup = vm.backup.as_ref().map(|host| format!("to {host}"));
    let primary = vm.primary.as_ref().map(|host| format!("from {host}"));
    let committed = vm.protection.as_ref().map(|it| it.committed).or(vm.committed);
    let committed = committed.map(|epoch| format!("{epoch} committed"));
    let words: Vec<String> = [backup, primary, committed].into_iter().flatten().collect();
    match words.is_empty() {
        true => "-".to_owned(),
        false => words.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_and_vms_are_lined_up_and_advice_follows() {
        let cluster = serde_json::json!({
            "host": "b", "listen": "10.0.0.2:7415", "refused": {},
            "peers": [{ "name": "a", "address": "10.0.0.1:7415", "health": "lost", "since_s": 12.3,
                "round_trip_ms": 0.31, "trouble": "no answer" }],
            "vms": [{ "host": "b", "name": "web", "state": "standby", "primary": "a", "committed": 7,
                "advice": "do it" }],
            "networks": [{ "name": "lan", "socket": "/s", "addresses": 2, "lanes": [
                { "to": "VMs", "connected": 2, "frames_in": 30, "frames_out": 4, "dropped": 0 },
                { "to": "host a", "connected": 0, "frames_in": 0, "frames_out": 0, "dropped": 1,
                    "trouble": "gone" },
            ] }],
        });
        let text = describe_cluster(&serde_json::from_value(cluster).unwrap());
        let wanted = "HOST  STATE      SINCE  ROUND TRIP  ADDRESS\n\
            b     this host  -      -           10.0.0.2:7415\n\
            a     lost       12 s   0.31 ms     10.0.0.1:7415\n\n\
            VM   HOST  STATE    EPOCHS\n\
            web  b     standby  from a, 7 committed\n\n\
            NETWORK  TO      CONNECTED  FRAMES IN  FRAMES OUT  DROPPED\n\
            lan      VMs     2          30         4           0\n\
            lan      host a  0          0          0           1\n\n\
            a: no answer\n\n\
            lan, host a: gone\n\n\
            web on b: do it\n";
        assert_eq!(text, wanted);
    }
}
