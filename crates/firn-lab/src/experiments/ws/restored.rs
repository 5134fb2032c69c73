//! Observed restore: one restore with its run record.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use firn_report::Run;
use firn_restore::Mode;

use super::subject::VM;
use crate::disk_profile::{DiskProfile, Throttle, warm};
use crate::lab::Lab;

/// The window of TTR, in microseconds.
pub(super) const WINDOW_US: u64 = 1_000_000;
/// The utilization that counts as responsive.
const RESPONSIVE: f64 = 0.8;
/// Maximum time to observe a restore, in quick and in full runs.
const LIMIT: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(90));

/// Settings of a restore.
#[derive(Clone, Copy)]
pub(super) struct How<'a> {
    pub(super) mode: Mode,
    pub(super) disk: &'a Throttle,
    /// Count the prefetched pages that the guest uses; it waits for each of them.
    pub(super) account_use: bool,
    /// Use what earlier restores learned, and learn for later ones.
    pub(super) learn: bool,
    /// How long the guest continues to run once all memory is present.
    pub(super) afterwards: Duration,
}

impl<'a> How<'a> {
    /// The settings of a user's first restore of an image.
    pub(super) fn new(mode: Mode, disk: &'a Throttle) -> Self {
        Self { mode, disk, account_use: false, learn: false, afterwards: Duration::ZERO }
    }
}

/// A restore that is complete, or was observed for long enough.
pub(super) struct Restored {
    pub(super) run: Run,
    /// The time of the command.
    pub(super) since: Instant,
}

impl Restored {
    /// Restores, and waits until all memory is present or the time limit has passed. Without a
    /// throttle the image is cached, as on a host that has just restored it; otherwise it is cold.
    pub(super) fn of(lab: &Lab, image: &Path, how: How<'_>) -> Result<Self> {
        match how.disk.profile() {
            DiskProfile::None => warm(image)?,
            profile => lab.make_cold(image, profile)?,
        }
        let mode = how.mode.to_string();
        let mut options = vec!["--mode", &mode];
        options.extend(how.account_use.then_some("--account-use"));
        let said = match how.learn {
            true => lab.firn().restore_and_learn(image, VM, &options, how.disk)?,
            false => lab.firn().restore(image, VM, &options, how.disk)?,
        };
        let run = look_on(lab);
        // Windows that begin at the end of the restore must be observed completely from outside as
        // well.
        std::thread::sleep(how.afterwards);
        lab.firn().stop(VM);
        Ok(Self { run: run?, since: said.started })
    }

    /// TTR(1 s, 80 %) in seconds, from the waits of the vCPUs. If the guest was not responsive by
    /// the end of the record, about the time of that end, which is a lower bound.
    pub(super) fn ttr(&self) -> f64 {
        firn_measure::responsiveness(&self.run.stalls(), WINDOW_US, RESPONSIVE)
    }

    /// TTR by utilization in percent.
    pub(super) fn curve(&self) -> Vec<(f64, f64)> {
        let curve = firn_measure::responsiveness_curve(&self.run.stalls(), WINDOW_US);
        curve.into_iter().map(|point| (100.0 * point.utilization, point.ttr_s)).collect()
    }

    /// Whether all memory was present in the end.
    pub(super) fn is_complete(&self) -> bool {
        self.run.record.finished_us.is_some()
    }
}

/// Reads the run record once all memory is present, or the last one written within the time limit.
fn look_on(lab: &Lab) -> Result<Run> {
    let (record, since) = (lab.firn().run_record(VM), Instant::now());
    let limit = lab.extent.pick(LIMIT.0, LIMIT.1);
    loop {
        std::thread::sleep(Duration::from_millis(100));
        let run = Run::read(&record);
        let is_complete = run.as_ref().is_ok_and(|run| run.record.finished_us.is_some());
        if is_complete || since.elapsed() > limit {
            return run.context("no run record");
        }
    }
}
