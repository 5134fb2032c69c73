//! `firn cluster forget`

use std::fmt::Write as _;

use clap::Args as ClapArgs;
use firn_control::api::{CLUSTERS, ForgottenRecord};
use firn_control::client::{Method, send_cluster_request};
use firn_supervisor::{Failure, VmName};

use crate::output::FactPrinter;

/// Free the name of a cluster or of a protected VM after the loss of all its hosts.
///
/// Where hosts have consensus, a record names the hosts of the VMs of a cluster, or of one VM that
/// `firn protect` protects. When a host and its backup are lost at the same time, or power fails at
/// all hosts, no host changes that record any more. This command ends the record, from any host.
/// The command is refused while a host of the record holds a lease, has one of the VMs, or does not
/// list its VMs. If a VM of the record appears again later, its host ends the VM. The command
/// prints the reasons why it ended the record: for each host, why no VM runs there.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn cluster status
  firn cluster forget web")]
pub struct ClusterForgetArgs {
    /// The cluster, or the VM.
    name: VmName,
}

impl ClusterForgetArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let path = format!("{CLUSTERS}/{}/forget", self.name);
        let forgotten: ForgottenRecord =
            send_cluster_request(&base, Method::POST, &path, None::<&()>)
                .map_err(|failure| failure.while_doing(format!("can't forget {}", self.name)))?;
        out.print_facts(&forgotten, || describe_forgotten(&forgotten))
    }
}

fn describe_forgotten(forgotten: &ForgottenRecord) -> String {
    let mut text = format!("{} is forgotten: its name is free\n", forgotten.name);
    for (host, why) in &forgotten.hosts {
        let _ = writeln!(text, "  host {host} {why}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_host_is_named_with_the_reason() {
        let hosts = [("a (1)", "does not answer"), ("b (2)", "has none of the VMs")];
        let hosts = hosts.map(|(host, why)| (host.to_owned(), why.to_owned())).into();
        let name = VmName::new("web").unwrap();
        let text =
            describe_forgotten(&ForgottenRecord { name, vms: vec!["web".to_owned()], hosts });
        let wanted = "web is forgotten: its name is free\n  host a (1) does not answer\n  host b (2) has none of the VMs\n";
        assert_eq!(text, wanted);
    }
}
