//! `peers-ttr`: time to responsiveness of all systems by one clock, measured by a client.
//!
//! Reproduces no figure of a paper; it asks the question of Zhang et al. (VEE 2011), section 2.3,
//! also for systems that keep no run record.
//!
//! **What varies**: the system that restores (`firn-MODE` for each of Firn's modes, and QEMU's own
//! methods, as in `peers-restore`) and the disk (`none`, `netssd`, `hdd15k`, `hdd7200`). On `none`
//! images are cached, as on a host that has just restored them; otherwise they are cold.
//!
//! **What is held equal**: the guest, its Redis, the client, as in `peers-restore`. All of Firn's
//! modes restore the same checkpoint.
//!
//! **What is measured**: `ttr_1s_90`: the earliest time since the restore command from which on
//! every window of a second has 90 % of the replies that came before the save; the client continues
//! its requests for some seconds after that. For Firn's modes, `inside_ttr_1s_90` is the same from
//! the waits of the vCPUs in the run record. `start_s` is the time that QEMU needs merely to load
//! its device state and start, with all memory present already: the floor of all systems.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use firn_measure::ReplyTimes;
use firn_report::ReportedRun;
use firn_restore::RestoreMode;
use serde_json::{Value, json};

use super::peers_restore::{ComparedSystem, GuestSetup, RECOVERED_SHARE, SavedGuest, VM, WINDOW};
use crate::disk_profile::{DiskProfile, DiskThrottle, warm_file};
use crate::lab::{Lab, run_interleaved, wait_for};
use crate::peer::SharedMemory;
use crate::prober::Prober;
use crate::report::Report;
use firn_report::plot::BarPlot;

const PROFILES: [DiskProfile; 4] =
    [DiskProfile::None, DiskProfile::NetSsd, DiskProfile::Hdd15k, DiskProfile::Hdd7200];
const MODES: [RestoreMode; 5] = [
    RestoreMode::Auto,
    RestoreMode::Eager,
    RestoreMode::Lazy,
    RestoreMode::Locality,
    RestoreMode::WorkingSet,
];
/// How long the client continues its requests once the guest has recovered: a later slowdown still
/// counts.
const SETTLE_TIME: Duration = Duration::from_secs(3);
/// How long a restored guest may take to recover.
const LIMIT: Duration = Duration::from_secs(90);
/// How long a restore may take after that until all memory is present.
const RECORD: Duration = Duration::from_secs(20);
const WINDOW_US: u64 = WINDOW.as_micros() as u64;

/// A system that restores.
struct RestoreSystem<'a> {
    name: String,
    image: &'a SavedGuest,
    mode: Option<RestoreMode>,
}

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("peers-ttr");
    let guest = GuestSetup::new(lab)?;
    let ours = guest.save_by_firn(&mut report)?;
    let theirs = guest.save_by_qemu(&mut report)?;
    measure_start(lab, &guest, &mut report)?;
    let modes = lab.extent.select_wanted(&MODES, |mode| mode.to_string());
    let (rows, all) = (list_systems(&modes, &ours, &theirs), modes.len() == MODES.len());
    let profiles = lab.extent.select_wanted(&PROFILES, |profile| profile.to_string());
    for &profile in &profiles {
        if let Some(throttle) = lab.throttle_disk(profile, &mut report) {
            run_interleaved(lab.extent.runs(1, 5), &rows, |round, row| {
                measure_restore(lab, &guest, row, &throttle, round, &mut report)
            })?;
        }
        add_numbers(profile, &rows, all, &mut report);
    }
    let drawing = draw_plot(&profiles, &rows, &report)?;
    report.add_drawing("peers-ttr", drawing);
    Ok(report)
}

fn list_systems<'a>(
    modes: &[RestoreMode],
    ours: &'a SavedGuest,
    theirs: &'a [SavedGuest],
) -> Vec<RestoreSystem<'a>> {
    let firn = modes.iter().map(|&mode| RestoreSystem {
        name: format!("firn-{mode}"),
        image: ours,
        mode: Some(mode),
    });
    let qemu = theirs.iter().map(|image| RestoreSystem {
        name: image.system.name().to_owned(),
        image,
        mode: None,
    });
    firn.chain(qemu).collect()
}

/// Measures how long QEMU takes to load its device state and start.
fn measure_start(lab: &Lab, guest: &GuestSetup<'_>, report: &mut Report) -> Result<()> {
    let saved = SharedMemory::boot_and_save(&guest.args, lab.dir())?;
    let starts = (0..lab.extent.runs(3, 9)).map(|_| saved.start());
    let starts = starts.collect::<Result<Vec<Duration>>>()?;
    report.add_sample("start_s", starts.iter().map(Duration::as_secs_f64));
    Ok(())
}

fn measure_restore(
    lab: &Lab,
    guest: &GuestSetup<'_>,
    row: &RestoreSystem<'_>,
    throttle: &DiskThrottle,
    round: usize,
    report: &mut Report,
) -> Result<()> {
    guest.prepare_caches(&row.image.file, throttle.profile())?;
    if throttle.profile() == DiskProfile::None {
        warm_file(&row.image.file)?;
    }
    let client = guest.start_client(lab.extent.seed + 100 + round as u64);
    let event = client.now();
    let running = guest.restore_guest(row.image, row.mode, throttle)?;
    let ttr = wait_for_recovery(&client, event, row.image.steady, &mut || ());
    let profile = throttle.profile();
    let inside = match row.image.system {
        ComparedSystem::Firn => {
            let run = wait_for_record(lab)?;
            let record = serde_json::to_string(&run.record)?;
            report.add_file(format!("peers-ttr-{profile}-{}-{round}.run.json", row.name), record);
            inside_ttr(&run)
        }
        ComparedSystem::Qemu(_) => None,
    };
    drop(running);
    let seconds = |it: Option<f64>| it.map_or("-".to_owned(), |it| format!("{it:.2} s"));
    let (from_outside, from_inside) = (seconds(ttr), seconds(inside));
    lab.log_progress(&format!(
        "{} on {profile}: TTR {from_outside}, inside {from_inside}",
        row.name
    ));
    if ttr.is_none() {
        report.add_remark(format!(
            "{} on {profile}: no recovery within {} s",
            row.name,
            LIMIT.as_secs()
        ));
    }
    report.add_repetition(json!({ "system": row.name, "profile": profile, "round": round,
        "ttr_1s_90": ttr, "inside_ttr_1s_90": inside }));
    Ok(())
}

/// Waits until the replies since `event` are as frequent as before the save, and for some seconds
/// more; returns the time to responsiveness in seconds. Calls `poll` meanwhile.
pub(super) fn wait_for_recovery(
    client: &Prober,
    event: Duration,
    steady: f64,
    poll: &mut dyn FnMut(),
) -> Option<f64> {
    let outside = || {
        let observed = client.now().saturating_sub(event);
        let replies = client.timeline();
        let after = replies.replies().iter().filter_map(|reply| reply.checked_sub(event));
        let times = after.map(|time| time.as_micros() as u64).collect();
        ReplyTimes::new(times, observed.as_micros() as u64, steady)
    };
    let since = Instant::now();
    let is_settled = || {
        let back = outside().time_to_responsiveness(WINDOW_US, RECOVERED_SHARE);
        let settled =
            Duration::from_secs_f64(back.unwrap_or(f64::from(u16::MAX))) + WINDOW + SETTLE_TIME;
        since.elapsed() >= settled
    };
    while !is_settled() && since.elapsed() < LIMIT {
        poll();
        std::thread::sleep(Duration::from_millis(50));
    }
    outside().time_to_responsiveness(WINDOW_US, RECOVERED_SHARE)
}

/// Reads the run record, once all memory is present if that is soon.
fn wait_for_record(lab: &Lab) -> Result<ReportedRun> {
    let record = lab.firn().run_record(VM);
    let whole = || Ok(ReportedRun::read_file(&record).ok().filter(is_complete));
    Ok(wait_for("the run record", RECORD, whole).or_else(|_| ReportedRun::read_file(&record))?)
}

fn is_complete(run: &ReportedRun) -> bool {
    run.record.finished_us.is_some()
}

/// TTR by the waits of the vCPUs. `None` if the restore is incomplete, unless it was observed for
/// long enough after that time.
fn inside_ttr(run: &ReportedRun) -> Option<f64> {
    let ttr =
        firn_measure::time_to_responsiveness(&run.vcpu_waiting_time(), WINDOW_US, RECOVERED_SHARE);
    let is_seen = run.record.recorded_us >= (ttr * 1e6) as u64 + WINDOW_US;
    (is_complete(run) || is_seen).then_some(ttr)
}

fn add_numbers(profile: DiskProfile, rows: &[RestoreSystem<'_>], all: bool, report: &mut Report) {
    for row in rows {
        for key in ["ttr_1s_90", "inside_ttr_1s_90"] {
            if key == "ttr_1s_90" || row.mode.is_some() {
                let values = measured_values(report, &row.name, profile, key);
                report.add_sample(format!("{key}.{profile}.{}", row.name), values);
            }
        }
    }
    let ttr = |name: &str| report.figure_value(&format!("ttr_1s_90.{profile}.{name}"));
    let best = |rows: &mut dyn Iterator<Item = &RestoreSystem<'_>>| {
        rows.filter_map(|row| ttr(&row.name)).fold(f64::INFINITY, f64::min)
    };
    let auto = ttr("firn-auto").unwrap_or(f64::NAN);
    let peers = best(&mut rows.iter().filter(|row| row.mode.is_none()));
    let others =
        best(&mut rows.iter().filter(|row| row.mode.is_some_and(|it| it != RestoreMode::Auto)));
    let to_start = auto / report.figure_value("start_s").unwrap_or(f64::NAN);
    report.add_number(format!("auto_ahead_of_peers.{profile}"), peers / auto);
    if all {
        report.add_number(format!("auto_to_best_mode.{profile}"), auto / others);
    }
    report.add_number(format!("auto_to_start.{profile}"), to_start);
}

fn measured_values(report: &Report, system: &str, profile: DiskProfile, key: &str) -> Vec<f64> {
    let is_it = |run: &&Value| {
        run["system"] == system && run["profile"] == profile.name() && run[key].is_number()
    };
    report.repetitions().iter().filter(is_it).filter_map(|run| run[key].as_f64()).collect()
}

fn draw_plot(
    profiles: &[DiskProfile],
    rows: &[RestoreSystem<'_>],
    report: &Report,
) -> Result<String> {
    let of = |profile: DiskProfile| {
        let ttr = |row: &RestoreSystem<'_>| {
            report.figure_value(&format!("ttr_1s_90.{profile}.{}", row.name))
        };
        (profile.to_string(), rows.iter().map(|row| ttr(row).unwrap_or(0.0)).collect())
    };
    let plot = BarPlot {
        title: "Time to responsiveness, seen by a client: TTR(1 s, 90 %)".into(),
        y: "seconds since the command".into(),
        groups: rows.iter().map(|row| row.name.clone()).collect(),
        series: profiles.iter().copied().map(of).collect(),
    };
    plot.to_svg().context("the figure")
}
