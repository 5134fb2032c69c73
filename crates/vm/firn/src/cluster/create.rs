//! `firn cluster create`

use clap::Args as ClapArgs;
use firn_control::api::{CLUSTERS, CreateCluster};
use firn_control::client::{Method, send_cluster_request};
use firn_control::{HostName, StoredCluster};
use firn_supervisor::{Failure, VmName};

use crate::output::FactPrinter;

/// Make VMs of other hosts a virtual cluster, which fails over as one to this host.
///
/// Run this command on the host that is to be the backup of all these VMs; no VM of the cluster may
/// run there. Each VM has one network card of Firn's, `-netdev firn,id=ID,network=NAME`, and no
/// other card. All these cards are on the same network (`firn-agent --help`). A VM that is not
/// named here is outside of the cluster. This command does not protect the VMs yet.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Example:
  firn cluster create shop --vm web@host1 --vm db@host2")]
pub struct ClusterCreateArgs {
    /// The name of the cluster.
    name: VmName,
    /// A VM, and the host that it runs on; without a host, the command finds it.
    #[arg(long = "vm", value_name = "VM[@HOST]", required = true, value_parser = parse_vm)]
    vms: Vec<(VmName, Option<HostName>)>,
}

impl ClusterCreateArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let wanted = CreateCluster { name: self.name.clone(), vms: self.vms.clone() };
        let record: StoredCluster =
            send_cluster_request(&base, Method::POST, CLUSTERS, Some(&wanted))
                .map_err(|failure| failure.while_doing(format!("can't make {}", self.name)))?;
        out.print_facts(&record, || {
            let vms = record.vms.iter().map(|placed| format!("{} on {}", placed.vm, placed.host));
            let vms: Vec<String> = vms.collect();
            format!("{} is {}: `firn cluster protect {0}`\n", record.name, vms.join(", "))
        })
    }
}

fn parse_vm(words: &str) -> Result<(VmName, Option<HostName>), String> {
    let (vm, host) = match words.split_once('@') {
        Some((vm, host)) => (vm, Some(HostName::new(host).map_err(|error| error.to_string())?)),
        None => (words, None),
    };
    Ok((VmName::new(vm).map_err(|error| error.to_string())?, host))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_may_have_a_host() {
        let name = |words: &str| parse_vm(words).map(|(vm, host)| (vm.to_string(), host.is_some()));
        assert_eq!(name("web@a"), Ok(("web".to_owned(), true)));
        assert_eq!(name("web"), Ok(("web".to_owned(), false)));
        for words in ["", "@a", "web@", "web@A b", "a/b"] {
            assert!(parse_vm(words).is_err(), "{words}");
        }
    }
}
