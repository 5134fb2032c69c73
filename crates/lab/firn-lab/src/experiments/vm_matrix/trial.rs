//! Matrix trial: all operations on one VM.
//!
//! ```text
//!   start by hand -> attach -> load: memory, disk -> doctor -> a checkpoint by each strategy -> an
//!   incremental one -> protection -> the guest checks itself -> its end
//!   for each image: restore -> the guest checks itself -> its end
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use super::configurations::{MatrixConfiguration, MatrixHost};
use super::events::{self, SaveEvent};
use crate::disk_profile::{DiskProfile, DiskThrottle};
use crate::experiments::exactness::trial::{count_wrong_pages, disk_report};
use crate::experiments::synthetic::{last_line, split_words};
use crate::firn::{Firn, FirnError, SaveArgs};
use crate::guest::{GuestControl, GuestImage, QemuArgs, UnmanagedGuest, VirtioDisk, accel};
use crate::lab::{Lab, wait_for};

/// How long a guest may take to boot, or to check itself.
const GUEST_TIMEOUT: Duration = Duration::from_secs(180);
/// Name of the VM under Firn.
pub(super) const VM: &str = "matrix";
/// Name of its standby.
const STANDBY: &str = "standby";
const WRITERS: &str = "writers";
const DISK: &str = "disk";
/// The exit code of a command that refuses a VM.
const REFUSED: &str = "exit status: 5";
/// The exit codes of `firn attach` for a VM that Firn can't manage: its memory, or a command line.
const ATTACH_REFUSED: [&str; 2] = ["exit status: 7", REFUSED];
/// Epochs that a protection has to commit.
const EPOCHS: u64 = 5;

/// The strategies, each with the row of `firn doctor` that is about it.
const SAVES: [(&str, &str); 4] = [
    ("trace", "checkpoint --strategy trace"),
    ("cow", "checkpoint --strategy cow"),
    ("pre-copy", "checkpoint --strategy pre-copy"),
    ("stop", "checkpoint --strategy stop"),
];

/// What came of an operation on a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum OperationOutcome {
    Ok,
    Refused(String),
    Unforeseen(String),
    Failed(String),
    Wrong(String),
}

impl OperationOutcome {
    pub(super) const VERDICTS: [&'static str; 5] =
        ["ok", "refused", "unforeseen", "failed", "wrong"];

    pub(super) fn verdict(&self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Refused(_) => "refused",
            Self::Unforeseen(_) => "unforeseen",
            Self::Failed(_) => "failed",
            Self::Wrong(_) => "wrong",
        }
    }

    pub(super) fn reason(&self) -> Option<&str> {
        match self {
            Self::Ok => None,
            Self::Refused(why) | Self::Unforeseen(why) | Self::Failed(why) | Self::Wrong(why) => {
                Some(why)
            }
        }
    }

    /// Whether no VM may have this outcome.
    pub(super) fn is_bad(&self) -> bool {
        matches!(self, Self::Unforeseen(_) | Self::Failed(_) | Self::Wrong(_))
    }

    fn is_ok(&self) -> bool {
        *self == Self::Ok
    }
}

impl fmt::Display for OperationOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reason() {
            Some(why) => write!(f, "{}: {why}", self.verdict()),
            None => write!(f, "{}", self.verdict()),
        }
    }
}

/// The outcome of an operation.
#[derive(Clone, Debug)]
pub(super) struct OperationResult {
    pub(super) operation: &'static str,
    pub(super) outcome: OperationOutcome,
}

/// The lab's part of all configurations, which are tried one after another.
pub(super) struct MatrixBench<'a> {
    lab: &'a Lab,
    image: GuestImage,
    throttle: DiskThrottle,
    /// Runs the standbys: a host of their own.
    other_host: Firn,
}

impl<'a> MatrixBench<'a> {
    pub(super) fn new(lab: &'a Lab) -> Result<Self> {
        let throttle = DiskThrottle::new(DiskProfile::None, lab.dir())?;
        let other = lab.file("other");
        std::fs::DirBuilder::new().mode(0o700).create(&other)?;
        Ok(Self { lab, image: GuestImage::small()?, throttle, other_host: Firn::new(&other) })
    }

    /// Tries all operations. Leaves no VM and no file, whatever the result.
    ///
    /// # Errors
    /// If this host can't have such a VM; that is no result.
    pub(super) fn try_configuration(
        &self,
        configuration: &MatrixConfiguration,
    ) -> Result<Vec<OperationResult>> {
        let dir = self.lab.file(configuration.name);
        std::fs::create_dir(&dir)?;
        let mut host = MatrixHost::new(&dir);
        std::fs::create_dir(host.sockets())?;
        let args = self.base_args(configuration, &host)?;
        let args = (configuration.arrange)(&mut host, args)?;
        let mut trial = MatrixTrial { bench: self, configuration, host, results: Vec::new() };
        if let Err(error) = trial.run_operations(args) {
            trial.add_result("run", OperationOutcome::Failed(format!("{error:#}")));
        }
        self.lab.firn().stop(VM);
        self.other_host.stop(STANDBY);
        let results = std::mem::take(&mut trial.results);
        drop(trial);
        std::fs::remove_dir_all(&dir)?;
        Ok(results)
    }

    fn base_args(
        &self,
        configuration: &MatrixConfiguration,
        host: &MatrixHost,
    ) -> Result<QemuArgs> {
        let qmp = |name: &str| format!("unix:{},server=on,wait=off", host.socket(name).display());
        let args = QemuArgs::new(&self.image, accel::choose_accel().accel)
            .memory_mib(192)
            .append_kernel_arg("no_timer_check")
            .with_console(&host.file("console"))
            .with_agent_socket(&host.socket("agent"))
            .add_args(&["-qmp", &qmp("qmp"), "-qmp", &qmp("second")]);
        if !configuration.has_disk {
            return Ok(args);
        }
        let disk = host.create_disk("vda", "qcow2")?;
        Ok(args.add_disk(VirtioDisk { file: disk, format: "qcow2", read_only: false }))
    }
}

struct MatrixTrial<'a> {
    bench: &'a MatrixBench<'a>,
    configuration: &'a MatrixConfiguration,
    host: MatrixHost,
    results: Vec<OperationResult>,
}

impl MatrixTrial<'_> {
    fn firn(&self) -> &Firn {
        self.bench.lab.firn()
    }

    fn add_result(&mut self, operation: &'static str, outcome: OperationOutcome) {
        self.results.push(OperationResult { operation, outcome });
    }

    fn run_operations(&mut self, args: QemuArgs) -> Result<()> {
        let machine = self.start_guest(args)?;
        if !self.attach_guest(&machine)? {
            return Ok(());
        }
        let foreseen = self.ask_doctor()?;
        let mut images = Vec::new();
        // The first save of a guest that ends is the only one.
        let ends = self.configuration.event.ends_guest();
        for (strategy, row) in SAVES.into_iter().filter(|(it, _)| !ends || *it == "cow") {
            let how = SaveArgs::default().with_option("--strategy", strategy);
            images.extend(self.save_guest(strategy, how, &foreseen[row])?);
        }
        if let Some((_, parent)) = images.first().cloned().filter(|_| !ends) {
            let how = SaveArgs::default().with_option("--parent", parent);
            let row = &foreseen["checkpoint --parent IMAGE"];
            images.extend(self.save_guest("incremental", how, row)?);
        }
        if !ends {
            let outcome = self.protect_guest(&foreseen["protect"])?;
            self.add_result("protect", outcome);
            let wrong = self.check_guest(false).context("the guest that was saved")?;
            ensure!(wrong == 0, "the guest that was saved found {wrong} pages wrong");
        }
        self.firn().stop(VM);
        drop(machine);
        self.restore_images(&images);
        self.add_live_checkpoint();
        Ok(())
    }

    /// `checkpoint` is the best of the live strategies.
    fn add_live_checkpoint(&mut self) {
        let live = |it: &&OperationResult| ["trace", "cow", "pre-copy"].contains(&it.operation);
        let bad = self.results.iter().filter(live).find(|it| it.outcome.is_bad());
        let good = self.results.iter().filter(live).find(|it| it.outcome.is_ok());
        let any = self.results.iter().find(live);
        if let Some(chosen) = bad.or(good).or(any) {
            let outcome = chosen.outcome.clone();
            self.add_result("checkpoint", outcome);
        }
    }

    fn start_guest(&self, args: QemuArgs) -> Result<UnmanagedGuest> {
        let mut machine = UnmanagedGuest::start(args)?;
        machine.wait_ready(GUEST_TIMEOUT)?;
        let mut control = self.connect_control()?;
        let writers = "firn-guest writers --mib 24 --rate 500 --compresses-to 50 --order random";
        control.spawn_job(WRITERS, &split_words(writers))?;
        control.wait_output(WRITERS, "\"ready\":true", GUEST_TIMEOUT)?;
        if self.configuration.has_disk {
            let disk =
                "firn-guest disk-dma write --mib 16 --block-kib 16 --device /dev/vda --rate 50";
            control.spawn_job(DISK, &split_words(disk))?;
            control.wait_output(DISK, "\"ready\":true", GUEST_TIMEOUT)?;
        }
        events::prepare_vm(self.configuration.event, &self.host)?;
        Ok(machine)
    }

    /// Attaches Firn to the VM. Firn may refuse that, as `firn doctor` does then.
    fn attach_guest(&mut self, machine: &UnmanagedGuest) -> Result<bool> {
        let (pid, qmp) = (machine.pid().to_string(), self.host.socket("qmp").display().to_string());
        let of_vm = ["--pid", &pid, "--qmp", &qmp];
        match self.firn().attach(VM, &of_vm) {
            Ok(_) => Ok(true),
            Err(FirnError::Failed { status, said, .. }) if ATTACH_REFUSED.contains(&&*status) => {
                let outcome = match self.firn().run_verb("doctor", &of_vm) {
                    Err(_) => OperationOutcome::Refused(said),
                    Ok(_) => OperationOutcome::Unforeseen(said),
                };
                self.add_result("attach", outcome);
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn connect_control(&self) -> Result<GuestControl> {
        Ok(GuestControl::connect(&self.host.socket("agent"), GUEST_TIMEOUT)?)
    }

    /// The verdict of `firn doctor` on each operation.
    fn ask_doctor(&self) -> Result<BTreeMap<String, String>> {
        let verdict = |row: &Value| {
            let text = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
            (text("operation"), text("verdict"))
        };
        Ok(self.firn().doctor_rows(VM)?.iter().map(verdict).collect())
    }

    /// Makes a checkpoint while the event of the configuration happens. Returns its image.
    fn save_guest(
        &mut self,
        operation: &'static str,
        how: SaveArgs,
        foreseen: &str,
    ) -> Result<Option<(&'static str, PathBuf)>> {
        let image = self.host.file(&format!("{operation}.firn"));
        let (event, host) = (self.configuration.event, &self.host);
        let (saved, after) = thread::scope(|scope| {
            let event = scope.spawn(|| events::cause_event(event, operation, host));
            let saved = self.firn().checkpoint(VM, &image, &how);
            (saved, event.join())
        });
        match after {
            Ok(happened) => happened.context("the event during the save")?,
            Err(_) => bail!("the event during the save panicked"),
        }
        match saved {
            Ok(_) => {
                self.add_result(operation, OperationOutcome::Ok);
                return Ok(Some((operation, image)));
            }
            Err(error) => {
                ensure!(!image.exists(), "a failed save has left {}: {error}", image.display());
                let outcome = self.judge_error(&error, foreseen);
                self.add_result(operation, outcome);
            }
        }
        Ok(None)
    }

    /// A VM that ends during its save has no image, and that is right. A job of the user, which did
    /// not run when `firn doctor` was asked, is a reason to refuse.
    fn judge_error(&self, error: &FirnError, foreseen: &str) -> OperationOutcome {
        match error {
            FirnError::Failed { status, said, .. } if status == REFUSED => match foreseen {
                "refused" => OperationOutcome::Refused(said.clone()),
                _ if said.contains("by-user") => OperationOutcome::Refused(said.clone()),
                _ => OperationOutcome::Unforeseen(said.clone()),
            },
            _ if self.configuration.event == SaveEvent::PowerOff => OperationOutcome::Ok,
            _ => OperationOutcome::Failed(error.to_string()),
        }
    }

    fn protect_guest(&self, foreseen: &str) -> Result<OperationOutcome> {
        let socket = self.host.file("epochs");
        let address = format!("unix:{}", socket.display());
        let mut standby = self.standby_command(&address).spawn().context("cannot run unshare")?;
        let is_listening = || Ok((socket.exists() || standby.try_wait()?.is_some()).then_some(()));
        let listened = wait_for("the standby", GUEST_TIMEOUT, is_listening);
        let protected = self.firn().run_verb("protect", &["--to", &address, VM]);
        let outcome = match (listened, protected) {
            (Err(error), _) => OperationOutcome::Failed(format!("{error:#}")),
            (_, Err(error)) => self.judge_error(&error, foreseen),
            (Ok(()), Ok(_)) => match self.wait_for_epochs() {
                Ok(()) => OperationOutcome::Ok,
                Err(error) => OperationOutcome::Failed(format!("{error:#}")),
            },
        };
        let released = self.firn().run_verb("release", &[VM]);
        self.bench.other_host.stop(STANDBY);
        let _ = standby.kill();
        standby.wait()?;
        Ok(match (&outcome, released) {
            (OperationOutcome::Ok, Err(error)) => OperationOutcome::Failed(error.to_string()),
            _ => outcome,
        })
    }

    /// A standby on the same host, but with a directory of its own for the sockets of its QEMU.
    fn standby_command(&self, address: &str) -> Command {
        let other_host = &self.bench.other_host;
        let script = r#"mount -t tmpfs tmpfs "$1" && shift && exec "$@""#;
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]);
        command.arg(self.host.sockets()).arg(other_host.program());
        command.args(["standby", "--listen", address, STANDBY]);
        command.env("FIRN_RUNTIME_DIR", other_host.runtime_dir()).stdout(Stdio::null());
        command
    }

    fn wait_for_epochs(&self) -> Result<()> {
        wait_for("epochs", GUEST_TIMEOUT, || {
            let status = self.bench.other_host.status(STANDBY)?;
            let standby = &status["standby"];
            ensure!(standby["ended"].is_null(), "the protection has ended: {standby}");
            Ok((standby["committed"].as_u64() >= Some(EPOCHS)).then_some(()))
        })
    }

    fn restore_images(&mut self, images: &[(&'static str, PathBuf)]) {
        let mut worst = (!images.is_empty()).then_some(OperationOutcome::Ok);
        for (operation, image) in images {
            let outcome = match self.restore_image(image) {
                Ok(0) => OperationOutcome::Ok,
                Ok(wrong) => OperationOutcome::Wrong(format!("{wrong} pages after {operation}")),
                Err(error) => OperationOutcome::Failed(format!("after {operation}: {error:#}")),
            };
            let made = self.results.iter_mut().filter(|it| it.operation == *operation);
            if !outcome.is_ok() {
                made.for_each(|it| it.outcome = outcome.clone());
                worst = Some(outcome);
            }
        }
        worst.into_iter().for_each(|outcome| self.add_result("restore", outcome));
    }

    /// Restores an image, and returns the count of pages that the guest finds wrong.
    fn restore_image(&self, image: &std::path::Path) -> Result<u64> {
        self.firn().restore(image, VM, &[], &self.bench.throttle)?;
        let wrong = self.check_guest(true);
        let said = self.firn().status(VM).map(|status| status["state"].to_string());
        let _ = self.firn().run_verb("stop", &[VM, "--force", "--discard"]);
        wrong.with_context(|| format!("the restored VM is {said:?}"))
    }

    /// Lets a guest check its memory and its disk. A restored guest is checked at once, and again
    /// when all of its memory is present.
    fn check_guest(&self, is_restored: bool) -> Result<u64> {
        let mut control = self.connect_control()?;
        let mut wrong = 0;
        if is_restored {
            wrong = count_wrong_pages(&mut control)?;
            wait_for("the end of the restore", GUEST_TIMEOUT, || {
                let status = self.firn().status(VM)?;
                ensure!(status["state"] != "ended", "the VM has ended: {status}");
                Ok((status["state"] == "running").then_some(()))
            })?;
        }
        control.run_within(&split_words("firn-guest verify stop"), "", GUEST_TIMEOUT)?;
        let writers = last_line(&control.wait_job(WRITERS, GUEST_TIMEOUT)?.stdout)?;
        wrong = wrong.max(writers["wrong"].as_u64().context("no count")?);
        if !self.configuration.has_disk {
            return Ok(wrong);
        }
        let of_disk = wait_for("a report about the disk", GUEST_TIMEOUT, || {
            Ok(disk_report(&mut control, DISK)?["wrong"].as_u64())
        })?;
        Ok(wrong + of_disk)
    }
}
