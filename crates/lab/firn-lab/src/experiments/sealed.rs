//! `sealed`: what it costs to seal an image.
//!
//! Reproduces no figure of a paper; it compares sealed images with those that are not.
//!
//! **What varies**: whether the image is sealed (by a key file), and the disk profile of the restore.
//!
//! **What is held equal**: the guest, its Redis and the client, as in `peers-restore`. Both kinds of
//! images are saved from one run of the guest, alternately, and restored alternately.
//!
//! **What is measured**: `save_cpu_s`, the processor time of the supervisor for one save, in user and
//! kernel mode; `ttr_1s_90` as in `peers-ttr`: from the command until every window of a second has 90 %
//! of the replies that came before the save; `image_bytes`. The ratios are of sealed to clear, with the
//! targets `save_cpu_s_ratio` at most 1.3 and `ttr_1s_90_ratio` at most 1.1.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use procfs::process::Process;
use serde_json::json;

use super::peers_restore::{GuestSetup, VM};
use super::peers_ttr::wait_for_recovery;
use crate::disk_profile::{DiskProfile, DiskThrottle};
use crate::firn::SaveArgs;
use crate::lab::{Lab, run_interleaved};
use crate::report::Report;

const PROFILES: [DiskProfile; 2] = [DiskProfile::None, DiskProfile::NetSsd];
const KINDS: [ImageKind; 2] = [ImageKind::Clear, ImageKind::Sealed];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ImageKind {
    Clear,
    Sealed,
}

impl ImageKind {
    fn name(self) -> &'static str {
        match self {
            Self::Clear => "clear",
            Self::Sealed => "sealed",
        }
    }

    fn image_file(self, lab: &Lab) -> PathBuf {
        lab.file(&format!("{}.firn", self.name()))
    }
}

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("sealed");
    let key = lab.file("wrapping.key");
    write_key(&key)?;
    let guest = GuestSetup::new(lab)?;
    let steady = save_both(lab, &guest, &key, &mut report)?;
    add_ratio("save_cpu_s", "save", &mut report);
    add_ratio("image_bytes", "save", &mut report);
    for profile in PROFILES {
        let Some(throttle) = lab.throttle_disk(profile, &mut report) else { continue };
        run_interleaved(lab.extent.runs(3, 15), &KINDS, |round, &kind| {
            let run = RestoreRun { lab, guest: &guest, key: &key, steady, throttle: &throttle };
            run.measure(kind, round, &mut report)
        })?;
        add_ratio("ttr_1s_90", profile.name(), &mut report);
    }
    Ok(report)
}

fn write_key(path: &Path) -> Result<()> {
    std::fs::write(path, "5a".repeat(32))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(())
}

/// Saves both kinds of images several times from one guest. Returns its steady rate of replies.
fn save_both(lab: &Lab, guest: &GuestSetup<'_>, key: &Path, report: &mut Report) -> Result<f64> {
    let firn = lab.firn();
    firn.run_vm(VM, &guest.args)?;
    let (client, steady) = guest.warm_up()?;
    let supervisor = firn.status(VM)?["supervisor_pid"].as_i64().context("no supervisor")?;
    run_interleaved(lab.extent.runs(3, 15), &KINDS, |round, &kind| {
        let how = match kind {
            ImageKind::Clear => SaveArgs::default(),
            ImageKind::Sealed => SaveArgs::default().with_option("--key-file", key),
        };
        let before = processor_time(supervisor)?;
        let saved = firn.checkpoint(VM, &kind.image_file(lab), &how)?;
        let cpu = processor_time(supervisor)? - before;
        let name = kind.name();
        lab.log_progress(&format!("{name}: saved with {cpu:.2} s of processor time"));
        report.add_repetition(json!({ "step": "save", "kind": name, "round": round,
            "save_cpu_s": cpu, "image_bytes": saved.number("/report/image_bytes") }));
        anyhow::Ok(())
    })?;
    drop(client);
    firn.stop(VM);
    Ok(steady)
}

/// Processor time of all threads of a process, in seconds.
fn processor_time(pid: i64) -> Result<f64> {
    let stat = Process::new(pid as i32)?.stat()?;
    Ok((stat.utime + stat.stime) as f64 / procfs::ticks_per_second() as f64)
}

struct RestoreRun<'a> {
    lab: &'a Lab,
    guest: &'a GuestSetup<'a>,
    key: &'a Path,
    steady: f64,
    throttle: &'a DiskThrottle,
}

impl RestoreRun<'_> {
    fn measure(&self, kind: ImageKind, round: usize, report: &mut Report) -> Result<()> {
        let (file, profile) = (kind.image_file(self.lab), self.throttle.profile());
        self.guest.prepare_caches(&file, profile)?;
        let client = self.guest.start_client(self.lab.extent.seed + 300 + round as u64);
        let event = client.now();
        let key = self.key.to_str().context("the path of the key")?;
        let how = ["--key-file", key];
        let how = if kind == ImageKind::Sealed { &how[..] } else { &[] };
        self.lab.firn().restore(&file, VM, how, self.throttle)?;
        let ttr = wait_for_recovery(&client, event, self.steady, &mut || ());
        self.lab.firn().stop(VM);
        let name = kind.name();
        let shown = ttr.map_or("-".to_owned(), |ttr| format!("{ttr:.2} s"));
        self.lab.log_progress(&format!("{name} on {profile}: TTR {shown}"));
        report.add_repetition(json!({ "step": profile.name(), "kind": name, "round": round,
            "ttr_1s_90": ttr }));
        Ok(())
    }
}

/// Adds the values of a measurement for both kinds, and their ratio.
fn add_ratio(key: &str, step: &str, report: &mut Report) {
    for kind in KINDS.map(ImageKind::name) {
        let is_it = |run: &&serde_json::Value| run["kind"] == kind && run["step"] == step;
        let values = report.repetitions().iter().filter(is_it);
        let values: Vec<f64> = values.filter_map(|run| run[key].as_f64()).collect();
        report.add_sample(format!("{key}.{step}.{kind}"), values);
    }
    let value =
        |kind: &str| report.figure_value(&format!("{key}.{step}.{kind}")).unwrap_or(f64::NAN);
    let ratio = value("sealed") / value("clear");
    report.add_number(format!("{key}_ratio.{step}"), ratio);
}
