//! `firn cluster protect`, `checkpoint`, `failover` and `release`

use std::time::Duration;

use clap::Args as ClapArgs;
use firn_agent::api::{CLUSTERS, ProtectHere};
use firn_agent::client::{Method, clusters};
use firn_agent::together::Record;
use firn_supervisor::{Failure, VmName};

use crate::output::Output;

/// Protect all VMs of a cluster by this host, and mark them together.
///
/// Each is protected as by `firn protect`. All the while global checkpoints are made: an epoch of each VM, together one state in which
/// no VM has received what another has not sent. What a VM sends to another waits until its own epoch is here; what it sends to anybody
/// else, until a global checkpoint has it. So until all are here, nobody outside hears of any. Returns when there is a global checkpoint.
/// Where hosts agree who may run what, they fail over to this host by themselves from then on, and any host that none of them runs on
/// can protect them after that.
///
/// Example:
///   firn cluster protect shop --interval 50ms
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct Protect {
    /// The cluster.
    name: VmName,
    /// The time from one cut to the next, of each VM and of the cluster, 50ms to 500ms.
    #[arg(long, default_value = "100ms", value_parser = crate::protect::interval)]
    interval: Duration,
}

/// Make a global checkpoint of a cluster now.
///
/// Prints its number and each VM's epoch. It is what a failover goes back to, until the next.
///
/// Example:
///   firn cluster checkpoint shop --json
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct Checkpoint {
    /// The cluster.
    name: VmName,
}

/// Run all VMs of a cluster on this host, from the newest global checkpoint.
///
/// What they had sent each other and not received by then is sent again: nothing between them is lost. Where hosts agree who may run what
/// ([membership] of firn-agent), they do so first, and nobody is heard twice; it is done without being asked for when a host is lost. Where
/// they don't, make sure first that none of the VMs runs anywhere else: nobody looks after that for you. One that is cut short can be asked
/// for again.
///
/// Example:
///   firn cluster failover shop
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct Failover {
    /// The cluster.
    name: VmName,
}

/// Protect the VMs of a cluster no longer; they run on where they are.
///
/// Nobody goes back to its checkpoints from then on: the copies here agree that they never run, and what was held leaves. Where a copy
/// is out of reach, ask again, or `firn release VM` on its host says that it never runs.
///
/// Example:
///   firn cluster release shop
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct Release {
    /// The cluster.
    name: VmName,
}

impl Protect {
    /// Runs the verb.
    pub fn run(&self, out: Output) -> Result<(), Failure> {
        let interval_ms = self.interval.as_millis() as u64;
        let how = ProtectHere { interval_ms, predicts: true, cluster: None };
        ask(out, &self.name, "protect", Some(&how), |record| {
            format!("{} is protected: every {interval_ms} ms\n{}", record.name, marks(record))
        })
    }
}

impl Checkpoint {
    /// Runs the verb.
    pub fn run(&self, out: Output) -> Result<(), Failure> {
        ask(out, &self.name, "checkpoint", None, marks)
    }
}

impl Failover {
    /// Runs the verb.
    pub fn run(&self, out: Output) -> Result<(), Failure> {
        ask(out, &self.name, "failover", None, |record| {
            format!("{} runs here\n{}", record.name, marks(record))
        })
    }
}

impl Release {
    /// Runs the verb.
    pub fn run(&self, out: Output) -> Result<(), Failure> {
        ask(out, &self.name, "release", None, |record| {
            format!("the VMs of {} run on, and are not protected any more\n", record.name)
        })
    }
}

fn ask(
    out: Output,
    name: &VmName,
    verb: &str,
    body: Option<&ProtectHere>,
    describe: impl FnOnce(&Record) -> String,
) -> Result<(), Failure> {
    let base = crate::hidden::runtime_dir()?;
    let path = format!("{CLUSTERS}/{name}/{verb}");
    let record: Record = clusters(&base, Method::POST, &path, body)
        .map_err(|failure| failure.while_doing(format!("can't {verb} cluster {name}")))?;
    out.facts(&record, || describe(&record))
}

/// The newest global checkpoint.
pub fn marks(record: &Record) -> String {
    let Some(checkpoint) = &record.checkpoint else { return String::new() };
    let marks = record.marks().map(|(placed, epoch)| format!("{} at {epoch}", placed.vm));
    let marks: Vec<String> = marks.collect();
    format!("global checkpoint {}: {}\n", checkpoint.number, marks.join(", "))
}
