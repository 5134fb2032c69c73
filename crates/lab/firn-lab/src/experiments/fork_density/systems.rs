//! The systems that start many guests from one saved VM.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::memory::{self, RamMapping};
use super::starts::start_each;
use crate::firn::SaveArgs;
use crate::guest::{
    GuestImage, QemuArgs, RedisClient, RedisLoad, accel, free_tcp_port, lean_virtio_options,
};
use crate::lab::{Lab, wait_for};
use crate::peer_template::{OwnedProcesses, PeerClone, QemuTemplate};
use crate::report::Report;

/// Guest memory, in MiB.
pub(super) const RAM_MIB: u32 = 256;
/// The memory of a hypervisor with one vCPU besides guest RAM, in MiB.
const HYPERVISOR_MIB: f64 = 150.0;
/// Bytes of a value of Redis.
const VALUE_BYTES: usize = 1000;
/// The port of Redis in a guest.
const REDIS: u16 = 6379;
/// How long a guest may take to boot.
const BOOT: Duration = Duration::from_secs(120);
/// How long all memory of the guests may take to be restored.
const RESTORE: Duration = Duration::from_secs(600);
/// The number of the source's address; those of clones begin at 1.
const SOURCE_NUMBER: usize = 250;
/// The number of the fork's address, while the source is measured.
const FORK_NUMBER: usize = 1;
/// The name of the VM that is saved by Firn.
const SOURCE: &str = "source";

/// A system that starts many guests from one saved VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DensitySystem {
    /// `firn restore --count N`.
    Clones,
    /// `firn restore`, once for each guest.
    Restores,
    /// QEMUs that map one RAM file privately.
    QemuTemplate,
    /// QEMUs that read one migration file.
    QemuFile,
}

impl DensitySystem {
    pub(super) const ALL: [Self; 4] =
        [Self::Clones, Self::Restores, Self::QemuTemplate, Self::QemuFile];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Clones => "firn-clones",
            Self::Restores => "firn-restores",
            Self::QemuTemplate => "qemu-template",
            Self::QemuFile => "qemu-file",
        }
    }

    /// The memory that a guest may take of the host, in MiB, before one was measured: the hypervisor with
    /// the code that it translates, and all RAM where it is not shared.
    pub(super) fn first_estimate_mib(self) -> f64 {
        match self {
            Self::Clones | Self::QemuTemplate => HYPERVISOR_MIB,
            Self::Restores | Self::QemuFile => HYPERVISOR_MIB + f64::from(RAM_MIB),
        }
    }

    /// Where a guest of this system has its RAM.
    pub(super) fn ram_mapping(self) -> RamMapping<'static> {
        match self {
            Self::Clones => RamMapping::File("firn-template"),
            Self::Restores => RamMapping::File("firn-ram"),
            Self::QemuTemplate => RamMapping::File(RAM_FILE),
            Self::QemuFile => RamMapping::Anonymous(u64::from(RAM_MIB) << 20),
        }
    }
}

/// The name of the file with the RAM of QEMU's template.
const RAM_FILE: &str = "firn-lab-template";

/// The saved VMs, and what their guests have in common.
pub(super) struct SavedSource<'a> {
    lab: &'a Lab,
    args: QemuArgs,
    port: u16,
    load: RedisLoad,
    image: PathBuf,
    template: Option<QemuTemplate>,
    processes: OwnedProcesses,
}

impl<'a> SavedSource<'a> {
    /// Boots, fills and saves the guest: for Firn, and for QEMU if one of these systems needs it.
    pub(super) fn create(
        lab: &'a Lab,
        systems: &[DensitySystem],
        report: &mut Report,
    ) -> Result<Self> {
        let image = GuestImage::small()?;
        let args = QemuArgs::new(&image, accel::choose_accel().accel).memory_mib(RAM_MIB).vcpus(1);
        let load = RedisLoad::new(lab.extent.pick(10_000, 40_000), VALUE_BYTES);
        let processes = OwnedProcesses::default();
        let ram = PathBuf::from(format!("/dev/shm/{RAM_FILE}-{}", std::process::id()));
        let (owned, file) = (processes.clone(), ram.clone());
        lab.when_interrupted(move || {
            owned.end_all();
            let _ = std::fs::remove_file(&file);
        });
        let mut source = Self {
            lab,
            args,
            port: free_tcp_port()?,
            load,
            image: lab.file("density.firn"),
            template: None,
            processes,
        };
        source.save_by_firn(report)?;
        let is_of_qemu =
            |system| [DensitySystem::QemuTemplate, DensitySystem::QemuFile].contains(system);
        if systems.iter().any(is_of_qemu) {
            lab.log_progress("saving by QEMU");
            let fill = || source.fill_source();
            let paths = (lab.dir(), &*ram);
            let args = source.guest_args(SOURCE_NUMBER);
            source.template = Some(QemuTemplate::save(&args, paths, &source.processes, fill)?);
        }
        Ok(source)
    }

    /// Saves by Firn, and compares the pause of a fork with that of a checkpoint.
    fn save_by_firn(&self, report: &mut Report) -> Result<()> {
        let (lab, firn) = (self.lab, self.lab.firn());
        lab.log_progress("saving by firn");
        firn.run_vm(SOURCE, &self.guest_args(SOURCE_NUMBER))?;
        self.fill_source()?;
        let (mut checkpoints, mut forks) = (Vec::new(), Vec::new());
        for round in 0..lab.extent.runs(2, 5) {
            let saved = firn.checkpoint(SOURCE, &self.image, &SaveArgs::default())?;
            checkpoints.extend(saved.number("/report/pause/downtime_ms"));
            let (image, card) = (format!("fork-{round}.firn"), self.card_word(&FORK_NUMBER));
            let image = lab.file(&image).display().to_string();
            let words = [SOURCE, "--count", "1", "--name", "fork", "-o", &image, "--netdev", &card];
            let forked = firn.run_verb("fork", &words)?;
            forks.extend(forked.number("/checkpoint/report/pause/downtime_ms"));
            firn.stop("fork");
            std::fs::remove_file(&image)?;
            std::fs::rename(&self.image, lab.file("density.kept"))?;
        }
        std::fs::rename(lab.file("density.kept"), &self.image)?;
        firn.stop(SOURCE);
        report.add_sample("pause_ms.checkpoint", checkpoints);
        report.add_sample("pause_ms.fork", forks);
        let pause =
            |kind: &str| report.figure_value(&format!("pause_ms.{kind}")).unwrap_or(f64::NAN);
        report.add_number("pause_of_fork_by_checkpoint", pause("fork") / pause("checkpoint"));
        Ok(())
    }

    fn fill_source(&self) -> Result<()> {
        let mut redis = RedisClient::connect(self.address_of(SOURCE_NUMBER), BOOT)?;
        self.load.write_all(&mut redis)?;
        Ok(())
    }

    /// The data that each guest has.
    pub(super) fn load(&self) -> &RedisLoad {
        &self.load
    }

    /// The address at which the guest with this number answers.
    pub(super) fn address_of(&self, number: usize) -> SocketAddr {
        (Ipv4Addr::new(127, 0, 1, number as u8), self.port).into()
    }

    fn back_end(&self, number: &dyn std::fmt::Display) -> String {
        format!("user,hostfwd=tcp:127.0.1.{number}:{}-:{REDIS}", self.port)
    }

    /// The value of `--netdev` for Firn; `{}` stands for the number of a clone.
    fn card_word(&self, number: &dyn std::fmt::Display) -> String {
        format!("net={}", self.back_end(number))
    }

    fn guest_args(&self, number: usize) -> QemuArgs {
        let card = format!("{},id=net", self.back_end(&number));
        let options = lean_virtio_options(accel::choose_accel().accel);
        let device = format!("virtio-net-pci,netdev=net,romfile=,{options}");
        self.args.clone().add_args(&["-netdev", &card, "-device", &device])
    }

    /// Starts guests with the numbers from 1 on. Returns the process numbers of their hypervisors.
    pub(super) fn start_guests(&self, system: DensitySystem, count: usize) -> Result<Vec<i32>> {
        match system {
            DensitySystem::Clones => self.start_clones(count),
            DensitySystem::Restores => start_each(count, |number| self.start_restore(number)),
            DensitySystem::QemuTemplate => self.start_peers(PeerClone::Template, count),
            DensitySystem::QemuFile => self.start_peers(PeerClone::MigrationFile, count),
        }
    }

    fn start_clones(&self, count: usize) -> Result<Vec<i32>> {
        let (image, card) = (self.image.display().to_string(), self.card_word(&"{}"));
        let count = count.to_string();
        let words =
            [&*image, "--count", &count, "--name", "guest-{}", "--netdev", &card, "--no-learn"];
        let started = self.lab.firn().run_verb("restore", &words)?;
        let clones = started.facts["clones"].as_array().context("no clones")?.iter();
        clones.map(pid_of).collect()
    }

    fn start_restore(&self, number: usize) -> Result<i32> {
        let (image, name) = (self.image.display().to_string(), format!("guest-{number}"));
        let card = self.card_word(&number);
        let words = [&*image, "--name", &name, "--netdev", &card, "--no-learn"];
        pid_of(&self.lab.firn().run_verb("restore", &words)?.facts)
    }

    fn start_peers(&self, kind: PeerClone, count: usize) -> Result<Vec<i32>> {
        let template = self.template.as_ref().context("no VM was saved by QEMU")?;
        start_each(count, |number| {
            let (args, name) = (self.guest_args(number), format!("guest-{number}"));
            template.start_clone(kind, &args, &name, &self.processes)
        })
    }

    /// Waits until Firn has restored all memory of its guests.
    pub(super) fn await_memory(&self, system: DensitySystem) -> Result<()> {
        if matches!(system, DensitySystem::QemuTemplate | DensitySystem::QemuFile) {
            return Ok(());
        }
        wait_for("restoring all memory", RESTORE, || {
            let listed = self.lab.firn().run_verb("ls", &[])?.facts;
            let vms = listed.as_array().context("no list of VMs")?;
            Ok(vms.iter().all(|vm| vm["state"] == "running").then_some(()))
        })
    }

    /// The memory that the saved guest occupies once, in MiB: what all guests share until they write
    /// it. `None` where they share nothing.
    pub(super) fn shared_mib(&self, system: DensitySystem, pid: i32) -> Result<Option<f64>> {
        match system {
            DensitySystem::Clones => memory::mapped_file_mib(pid, "firn-template").map(Some),
            DensitySystem::QemuTemplate => {
                let template = self.template.as_ref().context("no VM was saved by QEMU")?;
                memory::file_mib(template.ram_file()).map(Some)
            }
            DensitySystem::Restores | DensitySystem::QemuFile => Ok(None),
        }
    }

    /// Ends all guests.
    pub(super) fn end_guests(&self) {
        self.processes.end_all();
        self.lab.firn().stop_all();
    }
}

impl Drop for SavedSource<'_> {
    fn drop(&mut self) {
        self.end_guests();
    }
}

fn pid_of(facts: &Value) -> Result<i32> {
    facts["pid"].as_i64().map(|pid| pid as i32).context("a guest without a process")
}
