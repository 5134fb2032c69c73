//! `peers-restore`: restores by Firn and by QEMU's own methods, measured by a client.
//!
//! Reproduces no figure of a paper; it answers the first question of a user.
//!
//! **What varies**: the system that saves and restores (`firn`; `qemu-file`: migration to and from
//! a file; `qemu-background-snapshot`; `qemu-mapped-ram` where this QEMU has it) and the disk
//! (`none`, `netssd`, `hdd15k`).
//!
//! **What is held equal**: the guest, its memory, the data in its Redis, the client. Each system
//! saves its own boot of the guest while the client sends requests. For QEMU's methods the guest
//! has the RAM backend that is QEMU's default; under Firn it has the one of `firn run`. The process
//! that reads the image is under the disk profile: Firn's supervisor, or the whole QEMU. The image
//! is cold; QEMU itself and the guest's kernel are warm, as on a host that has just run other
//! guests.
//!
//! **What is measured**: the client sends 100 requests a second, one at a time, for keys by Zipf's
//! law. From the restore command on: time to the first reply (`first_reply_s`), and time until the
//! client gets 90 % of its replies per second before the save, over a window of a second
//! (`steady_s`).

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use firn_restore::RestoreMode;
use firn_vmm::QmpClient;
use serde_json::json;

use crate::disk_profile::{DiskProfile, DiskThrottle, warm_file};
use crate::firn::SaveArgs;
use crate::guest::{
    GuestImage, HostForward, QemuArgs, RedisClient, RedisLoad, UnmanagedGuest, accel, free_tcp_port,
};
use crate::lab::{Lab, run_interleaved};
use crate::peer::{self, QemuRestore, QemuSaveMethod};
use crate::prober::Prober;
use crate::report::Report;
use crate::traffic::{KeyPopularity, RedisGets};

/// Requests per second.
const RATE: f64 = 100.0;
/// Share of the steady rate at which a guest has recovered.
pub(super) const RECOVERED_SHARE: f64 = 0.9;
/// The window of that rate.
pub(super) const WINDOW: Duration = Duration::from_secs(1);
/// How long the client sends requests before the save.
const STEADY: Duration = Duration::from_secs(5);
/// How long a restored guest may take to recover.
const LIMIT: Duration = Duration::from_secs(60);
/// How long a guest may take to boot.
const BOOT: Duration = Duration::from_secs(120);
const PROFILES: [DiskProfile; 3] = [DiskProfile::None, DiskProfile::NetSsd, DiskProfile::Hdd15k];
/// Name of the VM under Firn.
pub(super) const VM: &str = "peer";
const REDIS: u16 = 6379;
const VALUE_BYTES: usize = 1000;

/// A system that saves and restores: Firn, or one of QEMU's own methods, with which it is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ComparedSystem {
    Firn,
    Qemu(QemuSaveMethod),
}

impl ComparedSystem {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Firn => "firn",
            Self::Qemu(method) => method.name(),
        }
    }
}

/// A saved guest.
pub(super) struct SavedGuest {
    pub(super) system: ComparedSystem,
    pub(super) file: PathBuf,
    /// Replies per second before the save.
    pub(super) steady: f64,
}

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("peers-restore");
    let guest = GuestSetup::new(lab)?;
    let mut images = vec![guest.save_by_firn(&mut report)?];
    images.extend(guest.save_by_qemu(&mut report)?);
    for method in QemuSaveMethod::ALL.map(ComparedSystem::Qemu) {
        if !images.iter().any(|image| image.system == method) {
            report.add_remark(format!("this QEMU has no {}", method.name()));
        }
    }
    let rounds = lab.extent.runs(2, 7);
    for profile in PROFILES {
        if let Some(throttle) = lab.throttle_disk(profile, &mut report) {
            run_interleaved(rounds, &images, |round, image| {
                guest.measure_restore(image, &throttle, round, &mut report)
            })?;
        }
        add_numbers(profile, &images, &mut report);
    }
    Ok(report)
}

/// What the guests of all systems have in common: image, command line, load, and the address of
/// Redis. Each system starts its own guest from it.
pub(super) struct GuestSetup<'a> {
    lab: &'a Lab,
    image: GuestImage,
    pub(super) args: QemuArgs,
    address: SocketAddr,
    load: RedisLoad,
    popularity: KeyPopularity,
}

impl<'a> GuestSetup<'a> {
    pub(super) fn new(lab: &'a Lab) -> Result<Self> {
        Self::with_keys(lab, lab.extent.pick(50_000, 100_000), KeyPopularity::Zipf)
    }

    /// With so many keys, and a client that chooses them so.
    pub(super) fn with_keys(lab: &'a Lab, keys: u64, popularity: KeyPopularity) -> Result<Self> {
        let image = GuestImage::small()?;
        let port = free_tcp_port()?;
        let args = QemuArgs::new(&image, accel::choose_accel().accel)
            .memory_mib(lab.extent.pick(512, 1024))
            .vcpus(2)
            .with_console(&lab.file("console"))
            .add_network(&[HostForward::tcp(port, REDIS)]);
        let load = RedisLoad::new(keys, VALUE_BYTES);
        let address = (Ipv4Addr::LOCALHOST, port).into();
        Ok(Self { lab, image, args, address, load, popularity })
    }

    pub(super) fn start_client(&self, seed: u64) -> Prober {
        let keys = self.load.keys.end;
        Prober::start(RedisGets::new(self.address, keys, self.popularity, seed), RATE)
    }

    /// Loads data into a guest that has just been started. Returns a client that keeps it busy, and
    /// its steady rate.
    pub(super) fn warm_up(&self) -> Result<(Prober, f64)> {
        let mut redis = RedisClient::connect(self.address, BOOT)?;
        self.load.write_all(&mut redis)?;
        let client = self.start_client(self.lab.extent.seed);
        std::thread::sleep(WINDOW + STEADY);
        let now = client.now();
        let steady = client.timeline().rate_in(now - STEADY..now);
        Ok((client, steady))
    }

    pub(super) fn save_by_firn(&self, report: &mut Report) -> Result<SavedGuest> {
        self.lab.log_progress("saving by firn");
        let firn = self.lab.firn();
        firn.run_vm(VM, &self.args)?;
        let (client, steady) = self.warm_up()?;
        let file = self.lab.file("peer.firn");
        let save_output = firn.checkpoint(VM, &file, &SaveArgs::default())?;
        drop(client);
        firn.stop(VM);
        report.add_repetition(
            json!({ "system": "firn", "save": save_output.facts, "steady": steady }),
        );
        Ok(SavedGuest { system: ComparedSystem::Firn, file, steady })
    }

    pub(super) fn save_by_qemu(&self, report: &mut Report) -> Result<Vec<SavedGuest>> {
        let socket = self.lab.file("source.qmp");
        let monitor = format!("unix:{},server=on,wait=off", socket.display());
        let mut machine = UnmanagedGuest::start(self.args.clone().add_args(&["-qmp", &monitor]))?;
        machine.wait_ready(BOOT)?;
        let mut qmp = QmpClient::connect(&socket, Duration::from_secs(20))?;
        let (_client, steady) = self.warm_up()?;
        let mut images = Vec::new();
        for method in QemuSaveMethod::ALL {
            if !method.is_supported_by(&mut qmp)? {
                continue;
            }
            self.lab.log_progress(&format!("saving by {method}"));
            let file = self.lab.file(&format!("{method}.image"));
            let saved = peer::save_vm(&mut qmp, method, &file)?;
            report.add_repetition(
                json!({ "system": method.name(), "save": saved, "steady": steady }),
            );
            images.push(SavedGuest { system: ComparedSystem::Qemu(method), file, steady });
        }
        Ok(images)
    }

    /// Restores once, and lets the client send requests until the guest has recovered.
    fn measure_restore(
        &self,
        image: &SavedGuest,
        throttle: &DiskThrottle,
        round: usize,
        report: &mut Report,
    ) -> Result<()> {
        self.prepare_caches(&image.file, throttle.profile())?;
        let client = self.start_client(self.lab.extent.seed + 1 + round as u64);
        let (event, start) = (client.now(), Instant::now());
        let _running = self.restore_guest(image, None, throttle)?;
        let steady = self.wait_until_recovered(&client, event, image.steady, start)?;
        let first = client.timeline().first_after(event).context("no reply")?.as_secs_f64();
        let (system, profile) = (image.system.name(), throttle.profile());
        self.lab.log_progress(&format!(
            "{system} on {profile}: first {first:.2} s, back {steady:.2} s"
        ));
        report.add_repetition(json!({ "system": system, "profile": profile, "round": round,
            "first_reply_s": first, "steady_s": steady }));
        Ok(())
    }

    /// Evicts the image from the page cache, and reads the guest's kernel and initrd into it.
    pub(super) fn prepare_caches(&self, file: &Path, profile: DiskProfile) -> Result<()> {
        self.lab.make_cold(file, profile)?;
        [&self.image.kernel, &self.image.initrd]
            .into_iter()
            .try_for_each(|file| warm_file(file))?;
        Ok(())
    }

    /// Restores in a mode, or in Firn's default mode.
    pub(super) fn restore_guest(
        &self,
        image: &SavedGuest,
        mode: Option<RestoreMode>,
        throttle: &DiskThrottle,
    ) -> Result<RestoredGuest<'_>> {
        match image.system {
            ComparedSystem::Firn => {
                let mode = mode.unwrap_or_default().to_string();
                self.lab.firn().restore(&image.file, VM, &["--mode", &mode], throttle)?;
                Ok(RestoredGuest::Firn(self.lab))
            }
            ComparedSystem::Qemu(method) => {
                let dir = self.lab.dir();
                let peer = QemuRestore::start(&self.args, method, &image.file, throttle, dir)?;
                Ok(RestoredGuest::Qemu(peer))
            }
        }
    }

    fn wait_until_recovered(
        &self,
        client: &Prober,
        event: Duration,
        steady: f64,
        start: Instant,
    ) -> Result<f64> {
        while start.elapsed() < LIMIT {
            if let Some(back) =
                client.timeline().recovery_after(event, steady * RECOVERED_SHARE, WINDOW)
            {
                return Ok(back.as_secs_f64());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Err(anyhow!("the client's rate did not recover within {} s", LIMIT.as_secs()))
    }
}

/// A restored guest; dropping it ends the guest.
pub(super) enum RestoredGuest<'a> {
    Firn(&'a Lab),
    Qemu(#[expect(dead_code, reason = "it is held to be dropped")] QemuRestore),
}

impl Drop for RestoredGuest<'_> {
    fn drop(&mut self) {
        if let Self::Firn(lab) = self {
            lab.firn().stop(VM);
        }
    }
}

fn add_numbers(profile: DiskProfile, images: &[SavedGuest], report: &mut Report) {
    for image in images {
        let system = image.system.name();
        for key in ["first_reply_s", "steady_s"] {
            let values = measured_values(report, system, profile, key);
            report.add_sample(format!("{key}.{system}.{profile}"), values);
        }
    }
    let steady = |system: ComparedSystem| {
        report.figure_value(&format!("steady_s.{}.{profile}", system.name()))
    };
    let peers =
        images.iter().map(|image| image.system).filter(|system| *system != ComparedSystem::Firn);
    let best = peers.filter_map(steady).fold(f64::INFINITY, f64::min);
    let firn = steady(ComparedSystem::Firn).unwrap_or(f64::NAN);
    report.add_number(format!("firn_faster_than_best_peer.{profile}"), best / firn);
}

fn measured_values(report: &Report, system: &str, profile: DiskProfile, key: &str) -> Vec<f64> {
    let is_it = |run: &&serde_json::Value| {
        run["system"] == system && run["profile"] == profile.name() && run[key].is_number()
    };
    report.repetitions().iter().filter(is_it).filter_map(|run| run[key].as_f64()).collect()
}
