//! `firn ls`

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, FamilyRecord, RestoreOutage, VmStatus, list_statuses};
use firn_types::make_printable;

use crate::output::{FactPrinter, format_table};
use crate::units;

/// List the VMs that Firn manages.
///
/// Clones that share memory are listed by family below the table.
///
/// VMs that have ended by themselves are listed, with how they ended, until `firn rm` or until
/// their name is used again. If a VM's supervisor does not answer, or the VM waits for storage, the
/// list shows the reason, and which command helps.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = r#"Examples:
  firn ls
  firn ls --json \
    | jq -r '.[] | select(.state == "running") | .name'"#)]
pub struct LsArgs {}

impl LsArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let statuses = list_statuses(&crate::hidden::runtime_dir()?)?;
        out.print_facts(&statuses, || describe_vms(&statuses))
    }
}

fn describe_vms(statuses: &[VmStatus]) -> String {
    if statuses.is_empty() {
        return "no VMs\n".to_owned();
    }
    let heading = ["NAME", "STATE", "PID", "MEMORY", "VCPUS", "ACCEL", "SINCE"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    rows.extend(statuses.iter().map(vm_row));
    let troubles = statuses.iter().filter_map(describe_trouble);
    format_table(&rows)
        + &describe_families(statuses)
        + &describe_forwards(statuses)
        + &troubles.collect::<String>()
}

/// The families of clones, in a line each.
fn describe_families(statuses: &[VmStatus]) -> String {
    let mut families: BTreeMap<&str, (&FamilyRecord, Vec<&str>)> = BTreeMap::new();
    for status in statuses.iter().filter(|status| status.exit.is_none()) {
        let Some(family) = &status.family else { continue };
        let (_, names) = families.entry(&family.id).or_insert_with(|| (family, Vec::new()));
        names.push(status.name.as_str());
    }
    let line = |(family, names): &(&FamilyRecord, Vec<&str>)| {
        let image = make_printable(&family.image.to_string_lossy()).into_owned();
        format!("family of {image}: {}\n", names.join(", "))
    };
    families.values().map(line).collect()
}

/// The ports of the host that lead to guests, in a line for each VM that has some.
fn describe_forwards(statuses: &[VmStatus]) -> String {
    let has_some = statuses.iter().filter(|status| !status.forwards.is_empty());
    let line = |status: &VmStatus| {
        format!("ports of {}: {}\n", status.name, make_printable(&status.forwards.join(", ")))
    };
    has_some.map(line).collect()
}

fn vm_row(status: &VmStatus) -> Vec<String> {
    vec![
        status.name.to_string(),
        describe_state(status),
        status.pid.map_or_else(|| "-".into(), |pid| pid.to_string()),
        units::format_bytes(status.memory_bytes),
        status.vcpus.to_string(),
        status.accel.clone(),
        format_since(status.since),
    ]
}

/// The trouble of a VM, and the remedy.
fn describe_trouble(status: &VmStatus) -> Option<String> {
    if let Some(unattended) = &status.unattended {
        return Some(format!("{}: {}\n  try: {}\n", status.name, unattended.why, unattended.hint));
    }
    let waiting = status.waiting.as_ref()?;
    Some(format!("{}: {}\n", status.name, describe_outage(waiting)))
}

/// The effect of unreadable memory on the guest.
pub fn describe_outage(waiting: &RestoreOutage) -> String {
    let waiter = match (&waiting.address, waiting.guest_waits) {
        (Some(address), _) => format!("the guest waits for memory at {address}"),
        (None, true) => "the guest waits for memory".to_owned(),
        (None, false) => "the guest runs, but some of its memory is missing".to_owned(),
    };
    let since = units::format_seconds(seconds_since(waiting.since));
    format!("{waiter} since {since}: {} (tried again until it succeeds)", waiting.error)
}

/// The state of a VM, in a few words.
pub fn describe_state(status: &VmStatus) -> String {
    if status.unattended.is_some() {
        return format!("{}, not answering", status.state);
    }
    if status.waiting.as_ref().is_some_and(|waiting| waiting.guest_waits) {
        return "waiting for storage".to_owned();
    }
    match (&status.exit, &status.progress) {
        (Some(exit), _) => format!("ended: {exit}"),
        (None, Some(progress)) if progress.total > 0 => {
            format!("{} {} %", status.state, progress.done * 100 / progress.total)
        }
        _ => match state_detail(status) {
            Some(detail) => format!("{}, {detail}", status.state),
            None => status.state.clone(),
        },
    }
}

/// The detail that its user needs at once: how the primary of a standby ended, or why a protected
/// VM does not run.
fn state_detail(status: &VmStatus) -> Option<String> {
    let end = status.standby.as_ref().and_then(|standby| standby.end.as_ref());
    let trouble = status.protection.as_ref().and_then(|protection| protection.trouble);
    let of_primary = end.map(|end| format!("its VM {}", end.short_name()));
    of_primary.or_else(|| trouble.map(|trouble| trouble.description().to_owned()))
}

/// The time since a moment; a dash if the moment is unknown.
fn format_since(time: u64) -> String {
    if time == 0 { "-".to_owned() } else { units::format_seconds(seconds_since(time)) }
}

/// The number of seconds since a moment.
pub fn seconds_since(since: u64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    now.saturating_sub(since)
}
