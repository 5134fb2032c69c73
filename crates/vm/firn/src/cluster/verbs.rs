//! `firn cluster protect`, `checkpoint`, `failover` and `release`

use std::time::Duration;

use clap::Args as ClapArgs;
use firn_control::StoredCluster;
use firn_control::api::{CLUSTERS, ProtectionOptions};
use firn_control::client::{Method, send_cluster_request};
use firn_supervisor::{Failure, VmName};

use crate::output::FactPrinter;

/// Protect all VMs of a cluster by this host, with common global checkpoints.
///
/// Each VM is protected as by `firn protect`. The agents make global checkpoints continuously. A
/// global checkpoint has one epoch of each VM. Together these epochs are one consistent state: in
/// them no VM has received a frame that another VM has not sent. A frame from one VM to another
/// waits until the sender's epoch is on this host. A frame to any host outside waits until a global
/// checkpoint includes the epoch that sent it. So until all VMs are protected, none of their output
/// leaves. The command returns when there is a global checkpoint. Where hosts have consensus, the
/// VMs fail over to this host automatically from then on. After a failover, any host that runs no
/// VM of the cluster can protect the cluster.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Example:
  firn cluster protect shop --interval 50ms")]
pub struct ClusterProtectArgs {
    /// The cluster.
    name: VmName,
    /// The time from one cut to the next, of each VM and of the cluster, 50ms to 500ms.
    #[arg(long, default_value = "100ms", value_parser = crate::protect::parse_interval)]
    interval: Duration,
}

/// Make a global checkpoint of a cluster now.
///
/// Prints its number and each VM's epoch. Until the next global checkpoint, a failover returns to
/// this one.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Example:
  firn cluster checkpoint shop --json")]
pub struct ClusterCheckpointArgs {
    /// The cluster.
    name: VmName,
}

/// Run all VMs of a cluster on this host, from the newest global checkpoint.
///
/// If a VM had sent a frame to another VM, which had not received it at that checkpoint, Firn sends
/// the frame again: no frame between the VMs is lost. Where hosts have consensus ([membership] of
/// firn-agent), the hosts change the record first, so that no VM sends from two hosts; when a host
/// is lost, the failover happens automatically. Where the hosts have no consensus, make sure first
/// that none of the VMs runs on another host: Firn cannot check that. If the command is
/// interrupted, it can be repeated.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Example:
  firn cluster failover shop")]
pub struct ClusterFailoverArgs {
    /// The cluster.
    name: VmName,
}

/// End the protection of a cluster; its VMs continue to run where they are.
///
/// No VM goes back to a checkpoint of the cluster from then on: the standbys here confirm that they
/// never run, and buffered output leaves. If a standby cannot be reached, repeat the command, or
/// run `firn release VM` on the host of the VM: with that you declare that the standby never runs.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Example:
  firn cluster release shop")]
pub struct ClusterReleaseArgs {
    /// The cluster.
    name: VmName,
}

impl ClusterProtectArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let interval_ms = self.interval.as_millis() as u64;
        let how = ProtectionOptions { interval_ms, predicts: true, cluster: None };
        request_verb(out, &self.name, "protect", Some(&how), |record| {
            format!(
                "{} is protected: every {interval_ms} ms\n{}",
                record.name,
                describe_global_checkpoint(record)
            )
        })
    }
}

impl ClusterCheckpointArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        request_verb(out, &self.name, "checkpoint", None, describe_global_checkpoint)
    }
}

impl ClusterFailoverArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        request_verb(out, &self.name, "failover", None, |record| {
            format!("{} runs here\n{}", record.name, describe_global_checkpoint(record))
        })
    }
}

impl ClusterReleaseArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        request_verb(out, &self.name, "release", None, |record| {
            format!("the VMs of {} continue to run, and are not protected any more\n", record.name)
        })
    }
}

fn request_verb(
    out: FactPrinter,
    name: &VmName,
    verb: &str,
    body: Option<&ProtectionOptions>,
    describe: impl FnOnce(&StoredCluster) -> String,
) -> Result<(), Failure> {
    let base = crate::hidden::runtime_dir()?;
    let path = format!("{CLUSTERS}/{name}/{verb}");
    let record: StoredCluster = send_cluster_request(&base, Method::POST, &path, body)
        .map_err(|failure| failure.while_doing(format!("can't {verb} cluster {name}")))?;
    out.print_facts(&record, || describe(&record))
}

/// The newest global checkpoint: its number, and the epoch of each VM.
pub fn describe_global_checkpoint(record: &StoredCluster) -> String {
    let Some(checkpoint) = &record.checkpoint else { return String::new() };
    let marks = record.marked_vms().map(|(placed, epoch)| format!("{} at {epoch}", placed.vm));
    let marks: Vec<String> = marks.collect();
    format!("global checkpoint {}: {}\n", checkpoint.number, marks.join(", "))
}
