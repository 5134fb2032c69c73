//! `firn attach`

use std::path::PathBuf;

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, FailureKind, Plan, RuntimeDir, VmName, absolute, start, status};

use crate::output::Output;
use crate::run::{notes, summary};
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
///
/// Examples:
///   firn attach web --pid 4711 --qmp /run/web.qmp
///   firn attach web
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The name to give the VM.
    name: VmName,
    #[command(flatten)]
    working_set: WorkingSetArgs,
    /// Attach although the VM runs on a disk file that is an old state of the disk: see `firn run
    /// --old-disk`.
    #[arg(long)]
    old_disk: bool,
    /// QEMU's process id.
    #[arg(long, requires = "qmp")]
    pid: Option<i32>,
    /// QEMU's monitor socket.
    #[arg(long, requires = "pid", value_name = "SOCKET")]
    qmp: Option<PathBuf>,
}

impl Args {
    /// Runs the verb.
    pub fn run(&self, out: Output) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let (pid, qmp) = self.target(&base)?;
        let (access_bits, old_disk) = (self.working_set.access_bits(), self.old_disk);
        let plan = Plan::Attach { pid, qmp, access_bits, old_disk };
        let facts = start(&base, &self.name, &plan, &mut |_| ())
            .map_err(|failure| failure.while_doing(format!("can't attach {}", self.name)))?;
        out.facts(&facts, || {
            let notes: String = notes(&facts).iter().map(|note| format!("{note}\n")).collect();
            format!("{notes}{}\n", summary(&facts))
        })
    }

    fn target(&self, base: &RuntimeDir) -> Result<(i32, PathBuf), Failure> {
        if let (Some(pid), Some(qmp)) = (self.pid, &self.qmp) {
            return Ok((pid, absolute(qmp)?));
        }
        let known = status(base, &base.vm(&self.name)).ok();
        let detached = known.filter(|status| status.state == "detached");
        let found = detached.and_then(|status| Some((status.pid?, status.qmp?)));
        found.ok_or_else(|| {
            let text = format!("{} is not a VM that Firn has detached from", self.name);
            Failure::new(FailureKind::Usage, text)
                .hint("give the VM's QEMU: --pid PID --qmp SOCKET")
        })
    }
}
