//! Observed restore: one restore with its run record.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use firn_report::ReportedRun;
use firn_restore::RestoreMode;

use super::subject::VM;
use crate::disk_profile::{DiskProfile, DiskThrottle, warm_file};
use crate::lab::Lab;

/// The window of TTR, in microseconds.
pub(super) const WINDOW_US: u64 = 1_000_000;
/// The utilization that counts as responsive.
const RESPONSIVE: f64 = 0.8;
/// Maximum time to observe a restore, in quick and in full runs.
const LIMIT: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(90));

/// Settings of a restore.
#[derive(Clone, Copy)]
pub(super) struct RestoreSettings<'a> {
    pub(super) mode: RestoreMode,
    pub(super) disk: &'a DiskThrottle,
    /// Count the prefetched pages that the guest uses; it waits for each of them.
    pub(super) account_use: bool,
    /// Use what earlier restores learned, and learn for later ones.
    pub(super) learn: bool,
    /// How long the guest continues to run once all memory is present.
    pub(super) afterwards: Duration,
}

impl<'a> RestoreSettings<'a> {
    /// The settings of a user's first restore of an image.
    pub(super) fn new(mode: RestoreMode, disk: &'a DiskThrottle) -> Self {
        Self { mode, disk, account_use: false, learn: false, afterwards: Duration::ZERO }
    }
}

/// A restore that is complete, or was observed for long enough.
pub(super) struct ObservedRestore {
    pub(super) run: ReportedRun,
    /// The time of the command.
    pub(super) since: Instant,
}

impl ObservedRestore {
    /// Restores, and waits until all memory is present or the time limit has passed. Without a
    /// throttle the image is cached, as on a host that has just restored it; otherwise it is cold.
    pub(super) fn run_restore(lab: &Lab, image: &Path, how: RestoreSettings<'_>) -> Result<Self> {
        match how.disk.profile() {
            DiskProfile::None => warm_file(image)?,
            profile => lab.make_cold(image, profile)?,
        }
        let mode = how.mode.to_string();
        let mut options = vec!["--mode", &mode];
        options.extend(how.account_use.then_some("--account-use"));
        let restore_output = match how.learn {
            true => lab.firn().restore_and_learn(image, VM, &options, how.disk)?,
            false => lab.firn().restore(image, VM, &options, how.disk)?,
        };
        let run = wait_for_record(lab);
        // Windows that begin at the end of the restore must be observed completely from outside as
        // well.
        std::thread::sleep(how.afterwards);
        lab.firn().stop(VM);
        Ok(Self { run: run?, since: restore_output.started })
    }

    /// TTR(1 s, 80 %) in seconds, from the waits of the vCPUs. If the guest was not responsive by
    /// the end of the record, about the time of that end, which is a lower bound.
    pub(super) fn ttr_s(&self) -> f64 {
        firn_measure::time_to_responsiveness(&self.run.vcpu_waiting_time(), WINDOW_US, RESPONSIVE)
    }

    /// TTR by utilization in percent.
    pub(super) fn ttr_curve(&self) -> Vec<(f64, f64)> {
        let curve = firn_measure::responsiveness_curve(&self.run.vcpu_waiting_time(), WINDOW_US);
        curve.into_iter().map(|point| (100.0 * point.utilization, point.ttr_s)).collect()
    }

    /// Whether all memory was present in the end.
    pub(super) fn is_complete(&self) -> bool {
        self.run.record.finished_us.is_some()
    }
}

/// Reads the run record once all memory is present, or the last one written within the time limit.
fn wait_for_record(lab: &Lab) -> Result<ReportedRun> {
    let (record, since) = (lab.firn().run_record(VM), Instant::now());
    let limit = lab.extent.pick(LIMIT.0, LIMIT.1);
    loop {
        std::thread::sleep(Duration::from_millis(100));
        let run = ReportedRun::read_file(&record);
        let is_complete = run.as_ref().is_ok_and(|run| run.record.finished_us.is_some());
        if is_complete || since.elapsed() > limit {
            return run.context("no run record");
        }
    }
}
