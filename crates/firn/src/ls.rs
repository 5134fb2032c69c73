//! `firn ls`

use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args as ClapArgs;
use firn_supervisor::{Context, Failure, RuntimeDir, Status, status};

use crate::output::{Output, table};
use crate::units;

/// List the VMs that Firn looks after.
///
/// VMs that have ended by themselves are shown, with how they ended, until `firn rm` or until their name is used again.
///
/// Examples:
///   firn ls
///   firn ls --json | jq -r '.[] | select(.state == "running") | .name'
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct Args {}

impl Args {
    /// Runs the verb.
    pub fn run(&self, out: Output) -> Result<(), Failure> {
        let statuses = statuses(&crate::hidden::runtime_dir()?)?;
        out.facts(&statuses, || describe(&statuses))
    }
}

/// A VM that went away while it was being looked at is left out.
fn statuses(base: &RuntimeDir) -> Result<Vec<Status>, Failure> {
    let vms = base.vms().doing("looking for VMs")?;
    Ok(vms.iter().filter_map(|vm| status(base, vm).ok()).collect())
}

fn describe(statuses: &[Status]) -> String {
    if statuses.is_empty() {
        return "no VMs\n".to_owned();
    }
    let heading = ["NAME", "STATE", "PID", "MEMORY", "VCPUS", "ACCEL", "SINCE"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    rows.extend(statuses.iter().map(row));
    table(&rows)
}

fn row(status: &Status) -> Vec<String> {
    vec![
        status.name.to_string(),
        state(status),
        status.pid.map_or_else(|| "-".into(), |pid| pid.to_string()),
        units::bytes(status.memory_bytes),
        status.vcpus.to_string(),
        status.accel.clone(),
        units::seconds(age(status.since)),
    ]
}

/// What a VM is doing, in a few words.
pub fn state(status: &Status) -> String {
    match (&status.exit, &status.progress) {
        (Some(exit), _) => format!("ended: {exit}"),
        (None, Some(progress)) if progress.total > 0 => {
            format!("{} {} %", status.state, progress.done * 100 / progress.total)
        }
        _ => match detail(status) {
            Some(detail) => format!("{}, {detail}", status.state),
            None => status.state.clone(),
        },
    }
}

/// What its user should see at once: how the primary of a standby ended, or why a protected VM does not run.
fn detail(status: &Status) -> Option<String> {
    let end = status.standby.as_ref().and_then(|standby| standby.end.as_ref());
    let trouble = status.protection.as_ref().and_then(|protection| protection.trouble);
    let of_primary = end.map(|end| format!("its VM {}", end.word()));
    of_primary.or_else(|| trouble.map(|trouble| trouble.word().to_owned()))
}

/// Seconds since a time.
pub fn age(since: u64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    now.saturating_sub(since)
}
