//! Synthetic workload of Halite, section 8.1, in a guest that is checkpointed in the middle of it.
//!
//! One thread for each vCPU walks in order through a working set that is spread over four times as
//! much memory. The run time is by the guest's own clock, which stops from the checkpoint until the
//! restored guest runs. So a restore lengthens the run time by the time that the guest has to wait.
//!
//! The work per page is calibrated so that 100,000 pages take 25 seconds. In the paper they took
//! 54, and the checkpoint was written to a disk with 100 MB/s; here the disk is several times as
//! fast. So the share of the working set that the guest reaches before the background sweep is
//! about the paper's.
//!
//! ```text
//!   fill memory | visits before        | visits after                       | done: seconds
//!                                      X checkpoint
//! ```

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;
use serde_json::Value;

use crate::firn::{CommandOutput, SaveArgs};
use crate::guest::{GuestControl, GuestImage, QemuArgs, accel};
use crate::lab::{Lab, wait_for};

/// Pages per second of all threads together, without a checkpoint or a restore.
const VISITS_PER_S: f64 = 100_000.0 / 25.0;
/// How long a guest may take to boot, or to fill its memory.
const BOOT: Duration = Duration::from_secs(180);
/// How long the workload may take after a restore.
const LIMIT: Duration = Duration::from_secs(900);
/// Name of the VM under Firn.
pub(super) const VM: &str = "synthetic";
/// Name of the workload in the guest.
const JOB: &str = "synthetic";
const VCPUS: u32 = 2;

/// Sizes of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct SyntheticScale {
    /// Memory allocated, in MiB.
    pub(super) mib: u32,
    /// The working set, which is part of it, in MiB.
    pub(super) working_set_mib: u32,
    /// Approximate number of pages visited before the checkpoint.
    pub(super) before: u64,
    /// Pages visited after the checkpoint.
    pub(super) after: u64,
}

/// The result of a run.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct SyntheticResult {
    /// From the end of the fill to the last visit, by the guest's clock.
    pub(super) seconds: f64,
    /// Pages with wrong content.
    pub(super) wrong: u64,
}

/// The guest with the workload, and the path of its agent's socket.
pub(super) struct SyntheticGuest<'a> {
    pub(super) lab: &'a Lab,
    scale: SyntheticScale,
    args: QemuArgs,
    agent: PathBuf,
}

impl<'a> SyntheticGuest<'a> {
    pub(super) fn new(lab: &'a Lab, scale: SyntheticScale) -> Result<Self> {
        let agent = lab.file("agent");
        let args = QemuArgs::new(&GuestImage::small()?, accel::choose_accel().accel)
            .memory_mib(scale.mib + 384)
            .vcpus(VCPUS)
            .with_console(&lab.file("console"))
            .with_agent_socket(&agent);
        Ok(Self { lab, scale, args, agent })
    }

    /// Boots the guest, and calibrates the work per visit.
    pub(super) fn boot_and_calibrate(&self) -> Result<u32> {
        self.lab.firn().run_vm(VM, &self.args)?;
        let mut control = GuestControl::connect(&self.agent, BOOT)?;
        let output = control.run_program(&split_words(
            "firn-guest synthetic --mib 64 --working-set-mib 16 --count 20000 --progress-ms 0",
        ))?;
        let done = last_line(&output)?;
        let rate = done["visits_per_s"].as_f64().context("no rate")?;
        let work = ((rate / VISITS_PER_S).round() as u32).clamp(1, 1000);
        self.lab.log_progress(&format!("the guest runs; {work} times work per page"));
        Ok(work)
    }

    /// Starts the workload and waits until it has reached its middle.
    pub(super) fn start_workload(&self, work: u32, compresses_to: u8) -> Result<()> {
        let mut control = GuestControl::connect(&self.agent, BOOT)?;
        let SyntheticScale { mib, working_set_mib, before, after } = self.scale;
        let count = before + after;
        let line = format!(
            "firn-guest synthetic --mib {mib} --working-set-mib {working_set_mib} --count {count} --work {work} \
             --compresses-to {compresses_to} --progress-ms 100"
        );
        control.spawn_job(JOB, &split_words(&line))?;
        control.wait_output(JOB, "\"ready\":true", BOOT)?;
        wait_for("the middle of the workload", LIMIT, || {
            let output = match control.poll_job(JOB)? {
                crate::guest::JobState::Running { stdout, .. } => stdout,
                crate::guest::JobState::Ended(ended) => ended.stdout,
            };
            let visits = last_line(&output)?["progress"].as_u64().unwrap_or(0);
            Ok((visits >= before).then_some(()))
        })
    }

    /// Checkpoints the guest; the workload continues to its end.
    pub(super) fn checkpoint(&self, image: &Path, how: &SaveArgs) -> Result<CommandOutput> {
        let save_output = self.lab.firn().checkpoint(VM, image, how)?;
        self.lab.log_progress(&format!("checkpointed in {:.1} s", save_output.took.as_secs_f64()));
        Ok(save_output)
    }

    /// Waits for the end of the workload, in the guest that has the agent now.
    pub(super) fn wait_for_result(&self) -> Result<SyntheticResult> {
        let mut control = GuestControl::connect(&self.agent, BOOT)?;
        let ended = control.wait_job(JOB, LIMIT)?;
        let done: SyntheticResult = serde_json::from_value(last_line(&ended.stdout)?)
            .with_context(|| format!("unexpected output of the workload: {:?}", ended.stdout))?;
        ensure!(done.wrong == 0, "{} pages of the restored guest are wrong", done.wrong);
        Ok(done)
    }

    /// Ends the guest under Firn.
    pub(super) fn stop(&self) {
        self.lab.firn().stop(VM);
    }
}

/// Splits a command line into words.
pub(super) fn split_words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// The last JSON line of a program's output.
pub(super) fn last_line(said: &str) -> Result<Value> {
    let complete = said.rfind('\n').map_or("", |end| &said[..end]);
    let line = complete.lines().next_back().context("the program has printed nothing")?;
    serde_json::from_str(line).with_context(|| format!("{line:?} is not JSON"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_is_not_whole_yet_does_not_count() {
        let said = "{\"ready\":true}\n{\"progress\":5}\n{\"progr";
        assert_eq!(last_line(said).unwrap()["progress"], 5);
        assert!(last_line("{\"ready\":true").is_err());
    }
}
