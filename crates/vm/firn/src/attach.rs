//! `firn attach`

use std::path::PathBuf;

use clap::Args as ClapArgs;
use firn_supervisor::{
    Failure, FailureKind, RuntimeDir, SupervisorPlan, VmName, absolute_path, query_status,
    start_supervisor,
};
use firn_types::make_printable;

use crate::output::FactPrinter;
use crate::run::{summarize_vm, supervisor_notes};
use crate::units;
use crate::working_set::WorkingSetArgs;

/// Manage a VM that runs already.
///
/// Its QEMU needs a QMP monitor on a unix socket (-qmp unix:PATH,server=on,wait=off). Nothing in it
/// is changed. Firn uses the monitor only while it has work to do there.
///
/// If guest memory is in a shared file (a memory-backend-memfd or memory-backend-file with
/// share=on), Firn can trace reads and writes, which makes restores faster. If it is private to
/// QEMU, its default, Firn can trace writes only.
///
/// A VM that was started by `firn run` or `firn restore` and detached by `firn detach` is found by
/// its name alone.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn attach web --pid 4711 --qmp /run/web.qmp
  firn attach web")]
pub struct AttachArgs {
    /// The name to give the VM.
    name: VmName,
    #[command(flatten)]
    working_set: WorkingSetArgs,
    /// Attach although the VM runs on a disk file that is an old state of the disk: see `firn run
    /// --old-disk`.
    #[arg(long)]
    old_disk: bool,
    /// QEMU's process id.
    #[arg(long, requires = "qmp", value_parser = units::parse_number::<i32>(1..=i32::MAX as u64))]
    pid: Option<i32>,
    /// QEMU's monitor socket.
    #[arg(long, requires = "pid", value_name = "SOCKET")]
    qmp: Option<PathBuf>,
}

impl AttachArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let (pid, qmp) = self.find_target(&base)?;
        let (access_bits, old_disk) = (self.working_set.access_bits(), self.old_disk);
        let plan = SupervisorPlan::Attach { pid, qmp, access_bits, old_disk };
        let facts = start_supervisor(&base, &self.name, &plan, &mut |_| ())
            .map_err(|failure| failure.while_doing(format!("can't attach {}", self.name)))?;
        out.print_facts(&facts, || {
            let notes: String = supervisor_notes(&facts)
                .iter()
                .map(|note| make_printable(note).into_owned() + "\n")
                .collect();
            format!("{notes}{}\n", summarize_vm(&facts))
        })
    }

    fn find_target(&self, base: &RuntimeDir) -> Result<(i32, PathBuf), Failure> {
        if let (Some(pid), Some(qmp)) = (self.pid, &self.qmp) {
            return Ok((pid, absolute_path(qmp)?));
        }
        let known = query_status(base, &base.vm_dir(&self.name)).ok();
        let detached = known.filter(|status| status.state == "detached");
        let found = detached.and_then(|status| Some((status.pid?, status.qmp?)));
        found.ok_or_else(|| {
            let text = format!("{} is not a VM that Firn has detached from", self.name);
            Failure::new(FailureKind::Usage, text)
                .with_hint("give the VM's QEMU: --pid PID --qmp SOCKET")
        })
    }
}
