//! `firn attach`

use std::path::PathBuf;

use clap::Args as ClapArgs;
use firn_supervisor::{
    Failure, FailureKind, MonitorAddress, RuntimeDir, SupervisorPlan, VmName, absolute_path,
    query_status, start_supervisor,
};
use firn_types::make_printable;

use crate::libvirt::{LibvirtArgs, name_of_domain};
use crate::output::FactPrinter;
use crate::run::{summarize_vm, supervisor_remarks};
use crate::units;
use crate::working_set::WorkingSetArgs;

/// Manage a VM that runs already.
///
/// Its QEMU needs a QMP monitor on a Unix socket (-qmp unix:PATH,server=on,wait=off). Firn changes
/// nothing in QEMU, and uses the monitor only while it executes commands.
///
/// If guest memory is in a shared file (a memory-backend-memfd or memory-backend-file with
/// share=on), Firn can trace reads and writes, which makes restores faster. If it is private to
/// QEMU, its default, Firn can trace writes only.
///
/// libvirt holds the only monitor of its domains, so it executes Firn's commands: --libvirt DOMAIN
/// needs neither a socket nor a process id, and works for a domain that runs already.
///
/// A VM that was started by `firn run` or `firn restore` and detached by `firn detach` is found by
/// its name alone.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn attach web --pid 4711 --qmp /run/web.qmp
  firn attach --libvirt web
  firn attach web")]
pub struct AttachArgs {
    /// The name to give the VM; with --libvirt, by default that of the domain.
    #[arg(required_unless_present = "libvirt")]
    name: Option<VmName>,
    #[command(flatten)]
    working_set: WorkingSetArgs,
    /// Attach even if the VM's disk file is an old state of the disk: a VM has written to a newer
    /// layer of that disk. Once the attached VM has written to the file, the newer layers are
    /// worthless, and so are images that need the file unchanged.
    #[arg(long)]
    old_disk: bool,
    /// QEMU's process id.
    #[arg(long, requires = "qmp", value_parser = units::parse_number::<i32>(1..=i32::MAX as u64))]
    pid: Option<i32>,
    /// QEMU's monitor socket.
    #[arg(long, requires = "pid", value_name = "SOCKET")]
    qmp: Option<PathBuf>,
    #[command(flatten)]
    domain: LibvirtArgs,
}

impl AttachArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let (name, pid, qmp) = self.find_target(&base)?;
        let (access_bits, old_disk) = (self.working_set.access_bits(), self.old_disk);
        let plan = SupervisorPlan::Attach { pid, qmp, access_bits, old_disk };
        let facts = start_supervisor(&base, &name, &plan, &mut |_| ())
            .map_err(|failure| failure.while_doing(format!("can't attach {name}")))?;
        out.print_facts(&facts, || {
            let notes: String = supervisor_remarks(&facts)
                .iter()
                .map(|note| make_printable(note).into_owned() + "\n")
                .collect();
            format!("{notes}{}\n", summarize_vm(&facts))
        })
    }

    /// The VM's name, its process and its monitor.
    fn find_target(&self, base: &RuntimeDir) -> Result<(VmName, i32, MonitorAddress), Failure> {
        if let Some((domain, pid, qmp)) = self.domain.find_vm()? {
            let name = self.name.clone().map_or_else(|| name_of_domain(&domain), Ok)?;
            return Ok((name, pid, qmp));
        }
        let unnamed = || Failure::new(FailureKind::Usage, "the VM has no name");
        let name = self.name.clone().ok_or_else(unnamed)?;
        if let (Some(pid), Some(qmp)) = (self.pid, &self.qmp) {
            return Ok((name, pid, absolute_path(qmp)?.into()));
        }
        let known = query_status(base, &base.vm_dir(&name)).ok();
        let detached = known.filter(|status| status.state == "detached");
        match detached.and_then(|status| Some((status.pid?, status.qmp?))) {
            Some((pid, qmp)) => Ok((name, pid, qmp)),
            None => {
                let text = format!("{name} is not a VM that Firn has detached from");
                let hint = "give the VM's QEMU: --pid PID --qmp SOCKET, or --libvirt DOMAIN";
                Err(Failure::new(FailureKind::Usage, text).with_hint(hint))
            }
        }
    }
}
