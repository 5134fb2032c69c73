//! `cold-store`: restores from object storage, against a local disk and against a pull before the
//! restore.
//!
//! Reproduces no figure of a paper; it asks how much of a local restore's speed is left where the
//! image is in a store.
//!
//! **What varies**: which keys the client requests (`hot`: a hot set, a hundred keys of 400,000, with 99 % of the
//! requests; `zipf`: by Zipf's law, so that most of the memory is used within seconds), the round
//! trip to the store (0, 5 and 20 ms added), and the system: `lazy` (`firn
//! restore s3://...` with an empty cache), `pull` (`firn image pull`, then the restore of a file that is
//! cached by the page cache), `second` (as `lazy`, with what the first restore left in the cache, and
//! nothing of it in the page cache), and `local` (the image on the disk profile `netssd`, cold).
//!
//! The image is a golden image, as the manual says how to make one: it was restored once where it was saved,
//! with `--fill after-learning`, from a cold disk, so each page that the guest touches in ten seconds is learned. Then `firn image
//! reorder --by learned` has stored together what that restore needed. All systems restore that image.
//!
//! **What is held equal**: the guest, its Redis, the client, the image, as in `peers-ttr`; the
//! bandwidth: 125 MB/s of the disk profile, and of the proxy before the server. The server itself, a real
//! one, reads from the page cache.
//!
//! **What is measured**: `ttr_1s_90` as in `peers-ttr`: the earliest time since the command (for `pull`,
//! since the pull) from which on every window of a second has 90 % of the replies that came before the
//! save; and for `lazy` `fetched_share`, the bytes that came from the store until then, of those of the
//! image. With the targets for `hot`: `lazy_to_local` at most 2, `pull_to_lazy` at least 3 at 20 ms,
//! `second_to_local` at most 1.2, `fetched_share` at most 0.1. The working set of `zipf` is most of the
//! image, so nothing can bring it sooner than a pull; the question is how much later it comes.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use firn_cache::{
    CACHE_DIR_VARIABLE, CacheConnection, CacheDir, CacheReply, CacheReport, CacheRequest,
};
use serde_json::json;

use super::peers_restore::{GuestSetup, SavedGuest, VM};
use super::peers_ttr::wait_for_recovery;
use crate::disk_profile::{DiskProfile, DiskThrottle, warm_file};
use crate::firn::Firn;
use crate::lab::{Lab, run_interleaved};
use crate::object_server::{S3Server, object_environment};
use crate::report::Report;
use crate::slow_link::{LinkSpeed, SlowLink};
use crate::traffic::KeyPopularity;

/// The clients, by name.
const CLIENTS: [(&str, KeyPopularity); 2] =
    [("hot", KeyPopularity::HotSet), ("zipf", KeyPopularity::Zipf)];
/// Keys of a thousand bytes: half of the guest's memory.
const KEYS: u64 = 400_000;
const QUICK_KEYS: u64 = 200_000;
/// How long the first restore of an image runs: ten seconds of it are recorded.
const LEARNING_TIME: Duration = Duration::from_secs(11);
const ROUND_TRIPS_MS: [u64; 3] = [0, 5, 20];
/// That of the disk profile.
const BYTES_PER_SECOND: f64 = 125e6;
const PROFILE: DiskProfile = DiskProfile::NetSsd;

/// A system that restores.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum StoreSystem {
    Local,
    Lazy,
    Second,
    Pull,
}

impl StoreSystem {
    fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Lazy => "lazy",
            Self::Second => "second",
            Self::Pull => "pull",
        }
    }
}

/// What all restores have in common.
struct StoreLab<'a> {
    lab: &'a Lab,
    /// Which client, and where its image is.
    client: &'a str,
    location: String,
    guest: &'a GuestSetup<'a>,
    saved: &'a SavedGuest,
    throttle: &'a DiskThrottle,
    cache: CacheDir,
}

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("cold-store");
    let server = S3Server::start(&lab.file("objects"))?;
    let Some(throttle) = lab.throttle_disk(PROFILE, &mut report) else { return Ok(report) };
    let is_wanted = |client: &&(&str, _)| {
        lab.extent.only.is_empty() || lab.extent.only.iter().any(|word| word == client.0)
    };
    for (client, popularity) in CLIENTS.iter().filter(is_wanted) {
        let keys = lab.extent.pick(QUICK_KEYS, KEYS);
        let guest = GuestSetup::with_keys(lab, keys, *popularity)?;
        measure_client(lab, client, &guest, (&server, &throttle), &mut report)?;
    }
    Ok(report)
}

/// Restores one client's guest by all systems.
fn measure_client(
    lab: &Lab,
    client: &str,
    guest: &GuestSetup<'_>,
    (server, throttle): (&S3Server, &DiskThrottle),
    report: &mut Report,
) -> Result<()> {
    let saved = guest.save_by_firn(report)?;
    restore_first(lab, guest, &saved, throttle)?;
    let golden = lab.file("golden.firn");
    let reorder = [saved.file.as_os_str(), "--by".as_ref(), "learned".as_ref(), "-o".as_ref()];
    lab.firn().run_image_verb("reorder", &[&reorder[..], &[golden.as_os_str()]].concat())?;
    let saved = SavedGuest { file: golden, ..saved };
    let direct = lab.firn().with_environment(object_environment(server.address()));
    let location = format!("s3://vms/{client}.firn");
    direct.run_image_verb("push", &[saved.file.as_os_str(), location.as_ref()])?;
    let cache = CacheDir::at(&lab.file("store-cache"));
    let setup = StoreLab { lab, client, location, guest, saved: &saved, throttle, cache };
    for ms in ROUND_TRIPS_MS {
        let speed =
            LinkSpeed { round_trip: Duration::from_millis(ms), bytes_per_second: BYTES_PER_SECOND };
        let link = SlowLink::start(server.address(), speed)?;
        let systems =
            [StoreSystem::Local, StoreSystem::Lazy, StoreSystem::Second, StoreSystem::Pull];
        run_interleaved(lab.extent.runs(1, 5), &systems, |round, &system| {
            setup.measure(system, &link, (ms, round), report)
        })?;
        add_numbers(client, ms, report);
    }
    setup.end_server();
    Ok(())
}

/// The first restore of the image, which learns. It is cold: a guest whose vCPUs are held up runs
/// code of its kernel that it does not need otherwise.
fn restore_first(
    lab: &Lab,
    guest: &GuestSetup<'_>,
    saved: &SavedGuest,
    throttle: &DiskThrottle,
) -> Result<()> {
    guest.prepare_caches(&saved.file, PROFILE)?;
    let client = guest.start_client(lab.extent.seed + 199);
    let event = client.now();
    let fill = ["--fill", "after-learning"];
    lab.firn().restore_and_learn(&saved.file, VM, &fill, throttle)?;
    wait_for_recovery(&client, event, saved.steady, &mut || ());
    std::thread::sleep(LEARNING_TIME);
    lab.firn().stop(VM);
    Ok(())
}

impl StoreLab<'_> {
    /// Restores once.
    fn measure(
        &self,
        system: StoreSystem,
        link: &SlowLink,
        (ms, round): (u64, usize),
        report: &mut Report,
    ) -> Result<()> {
        let firn = self.firn(link);
        self.prepare(system, link)?;
        let before = self.report().map_or(0, |it| it.fetched_bytes);
        let client = self.guest.start_client(self.lab.extent.seed + 200 + round as u64);
        let event = client.now();
        self.restore(system, &firn)?;
        let mut fetched = Vec::new();
        let ttr = wait_for_recovery(&client, event, self.saved.steady, &mut || {
            let bytes = self.report().map_or(0, |it| it.fetched_bytes) - before;
            fetched.push((client.now().saturating_sub(event).as_secs_f64(), bytes));
        });
        self.lab.firn().stop(VM);
        let until = ttr.unwrap_or(f64::INFINITY);
        let bytes = fetched.iter().find(|(time, _)| *time >= until).or(fetched.last());
        let len = std::fs::metadata(&self.saved.file)?.len();
        let share = bytes.map_or(0.0, |(_, bytes)| *bytes as f64 / len as f64);
        let name = system.name();
        let shown = ttr.map_or("-".to_owned(), |ttr| format!("{ttr:.2} s"));
        let percent = share * 100.0;
        let client = self.client;
        self.lab.log_progress(&format!(
            "{client}: {name} at {ms} ms: TTR {shown}, {percent:.0} % fetched"
        ));
        report.add_repetition(json!({ "client": client, "system": name,
            "round_trip_ms": ms, "round": round, "ttr_1s_90": ttr, "fetched_share": share, "image_bytes": len }));
        Ok(())
    }

    fn firn(&self, link: &SlowLink) -> Firn {
        let mut variables = object_environment(link.address());
        variables.push((CACHE_DIR_VARIABLE.to_owned(), self.cache.path().display().to_string()));
        self.lab.firn().with_environment(variables)
    }

    /// Brings cache and page cache into the state from which the system restores.
    fn prepare(&self, system: StoreSystem, link: &SlowLink) -> Result<()> {
        self.guest.prepare_caches(&self.saved.file, PROFILE)?;
        // The store has its object in memory.
        warm_file(&self.lab.file(&format!("objects/vms/{}.firn", self.client)))?;
        match system {
            StoreSystem::Local => {
                // What the restore before has learned.
                let _ = std::fs::remove_file(self.saved.file.with_extension("firn.learned"));
                Ok(())
            }
            StoreSystem::Pull => Ok(()),
            StoreSystem::Lazy => {
                self.end_server();
                let _ = std::fs::remove_dir_all(self.cache.path());
                self.start_server(link)
            }
            StoreSystem::Second => {
                for entry in std::fs::read_dir(self.cache.objects())?.flatten() {
                    if entry.path().extension().is_none() {
                        self.lab.make_cold(&entry.path(), PROFILE)?;
                    }
                }
                Ok(())
            }
        }
    }

    fn restore(&self, system: StoreSystem, firn: &Firn) -> Result<()> {
        match system {
            StoreSystem::Local => {
                firn.restore_and_learn(&self.saved.file, VM, &[], self.throttle)?;
            }
            StoreSystem::Lazy | StoreSystem::Second => {
                firn.restore_and_learn(Path::new(&self.location), VM, &[], self.throttle)?;
            }
            StoreSystem::Pull => {
                let pulled = self.lab.file("pulled.firn");
                firn.run_image_verb("pull", &[self.location.as_ref(), pulled.as_os_str()])?;
                firn.restore_and_learn(&pulled, VM, &[], self.throttle)?;
            }
        }
        Ok(())
    }

    /// Starts the server of the cache outside of the throttle: its disk is not what is measured.
    fn start_server(&self, link: &SlowLink) -> Result<()> {
        let program = self.lab.firn().program().with_file_name(firn_cache::PROGRAM);
        let mut command = Command::new(&program);
        command.arg("serve").arg(self.cache.path()).envs(object_environment(link.address()));
        let status = command.status().with_context(|| program.display().to_string())?;
        ensure!(status.success(), "the server of the cache does not start: {status}");
        Ok(())
    }

    fn report(&self) -> Option<CacheReport> {
        let mut connection = CacheConnection::to_running(&self.cache).ok()?;
        match connection.request(&CacheRequest::Report).ok()? {
            CacheReply::Report(report) => Some(report),
            _ => None,
        }
    }

    fn end_server(&self) {
        let pid = self.report().and_then(|it| rustix::process::Pid::from_raw(it.pid as i32));
        let Some(pid) = pid else { return };
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        let begun = Instant::now();
        while self.report().is_some() && begun.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn add_numbers(client: &str, ms: u64, report: &mut Report) {
    for system in ["local", "lazy", "second", "pull"] {
        for key in ["ttr_1s_90", "fetched_share"] {
            let is_it = |run: &&serde_json::Value| {
                run["client"] == client
                    && run["system"] == system
                    && run["round_trip_ms"] == ms
                    && run[key].is_number()
            };
            let values = report.repetitions().iter().filter(is_it);
            let values: Vec<f64> = values.filter_map(|run| run[key].as_f64()).collect();
            report.add_sample(format!("{client}.{key}.{ms}ms.{system}"), values);
        }
    }
    let ttr = |system: &str| {
        report.figure_value(&format!("{client}.ttr_1s_90.{ms}ms.{system}")).unwrap_or(f64::NAN)
    };
    let (local, lazy, second, pull) = (ttr("local"), ttr("lazy"), ttr("second"), ttr("pull"));
    report.add_number(format!("{client}.lazy_to_local.{ms}ms"), lazy / local);
    report.add_number(format!("{client}.pull_to_lazy.{ms}ms"), pull / lazy);
    report.add_number(format!("{client}.second_to_local.{ms}ms"), second / local);
}
