//! `firn run`

use std::fmt::Write;

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, RuntimeDir, SupervisorPlan, VmName, start_supervisor};
use firn_types::make_printable;

use crate::calls::CallsArgs;
use crate::output::FactPrinter;
use crate::units;
use crate::working_set::WorkingSetArgs;

/// Start a VM from a QEMU command line.
///
/// Firn adds three things to the command line, shared memory, a monitor of its own, and the device
/// vmgenid where the machine supports it, and prints the words that it added. By vmgenid a guest
/// notices that it was restored, so that copies of it do not draw the same random numbers. The VM
/// continues to run after this command ends; the VM has no terminal.
/// The output of QEMU itself (and of the guest's console, with `-serial stdio`) goes to qemu.log in
/// the VM's runtime directory, which only you can read. `firn status` shows the path of this log.
///
/// The frames of a network card that ends in `-netdev firn,id=ID,uplink=PATH` pass through Firn, to
/// a socket that speaks QEMU's stream framing, such as passt's; `firn protect` can then buffer what
/// the VM sends. If the card has `network=NAME` instead of `uplink=PATH`, its frames go to the
/// network of that name of this host's agent. After a failover they go to the network of that name
/// on the standby's host.
///
/// After a checkpoint a VM may write to a layer on top of its disk's file (see `firn checkpoint`).
/// Then Firn refuses a command line that names the old file, and the error names the newest layer.
/// When `firn stop` ends such a VM, it prints the command line that starts the VM again.
///
/// Firn serves a disk that is given as `-drive file=PATH,format=raw|qcow2,if=none,id=ID,firn=on`.
/// When the VM is protected, the disk is replicated to the standby together with memory. A qcow2
/// file may grow to twice the size of its disk, or with `size=BYTES` to that size. Such a VM cannot
/// be checkpointed yet.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = r"Examples:
  firn run web -- qemu-system-x86_64 -M q35 -m 1G \
    -drive file=web.qcow2
  firn run --working-set access-bits web -- \
    qemu-system-x86_64 -M q35 -m 1G -drive file=web.qcow2
  firn run web -- qemu-system-x86_64 ... \
    -netdev firn,id=net0,uplink=/run/passt.sock \
    -device virtio-net-pci,netdev=net0
  firn run --quiet test -- qemu-system-x86_64 -accel kvm \
    -m 512 -kernel vmlinuz -initrd initrd")]
pub struct RunVmArgs {
    /// The name to give the VM.
    name: VmName,
    #[command(flatten)]
    working_set: WorkingSetArgs,
    #[command(flatten)]
    calls: CallsArgs,
    /// Start on a disk file even if a VM has written to a newer layer of that disk since. Once the
    /// started VM has written to the file, the newer layers are worthless, and so are images that
    /// need the file unchanged.
    #[arg(long)]
    old_disk: bool,
    /// Do not add the device vmgenid.
    #[arg(long)]
    no_vmgenid: bool,
    /// Do not print what was added to the command line.
    #[arg(long, short)]
    quiet: bool,
    /// The QEMU command line, program first.
    #[arg(last = true, required = true, value_name = "QEMU")]
    command: Vec<String>,
}

impl RunVmArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let facts = self.start_vm(&base)?;
        out.print_facts(&facts, || self.describe_start(&facts))
    }

    fn start_vm(&self, base: &RuntimeDir) -> Result<serde_json::Value, Failure> {
        let plan = SupervisorPlan::Run {
            args: self.command.clone(),
            access_bits: self.working_set.access_bits(),
            calls: self.calls.policy_path()?,
            stores: self.calls.plugin_path()?,
            old_disk: self.old_disk,
            generation_id: !self.no_vmgenid,
        };
        start_supervisor(base, &self.name, &plan, &mut |_| ())
            .map_err(|failure| failure.while_doing(format!("can't run {}", self.name)))
    }

    fn describe_start(&self, facts: &serde_json::Value) -> String {
        let mut text = String::new();
        for note in supervisor_remarks(facts).into_iter().filter(|_| !self.quiet) {
            let _ = writeln!(text, "{}", make_printable(note));
        }
        let _ = writeln!(text, "{}", summarize_vm(facts));
        text
    }
}

/// The notes of the supervisor.
pub fn supervisor_remarks(facts: &serde_json::Value) -> Vec<&str> {
    let notes = facts["notes"].as_array();
    notes.into_iter().flatten().filter_map(serde_json::Value::as_str).collect()
}

/// A VM in one line.
pub fn summarize_vm(facts: &serde_json::Value) -> String {
    let text = |key: &str| make_printable(facts[key].as_str().unwrap_or("?"));
    let number = |key: &str| facts[key].as_u64().unwrap_or(0);
    format!(
        "{} runs: process {}, {}, {} vCPU, {}, QEMU {}",
        text("name"),
        number("pid"),
        units::format_bytes(number("memory_bytes")),
        number("vcpus"),
        text("accel"),
        text("qemu"),
    )
}
