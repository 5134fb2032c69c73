//! The progress of a restore on a terminal; without a terminal, nothing.
//!
//! ```text
//!   restoring ##########-------------------- 312 MiB of 1.0 GiB
//!   vCPUs     ▁▃▆▇████████████████████        98 % now, 91 % since the guest runs
//!   memory    48231 pages prefetched before a fault, 311 faults, 40 of them waited for storage
//! ```

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use firn_supervisor::{OperationProgress, RestoreProgress};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

const TEMPLATE: &str = "restoring {bar:40} {bytes} of {total_bytes}\n{msg}";

/// The maximum number of utilization samples on the screen.
const WIDTH: usize = 40;

/// A live view of a restore.
pub struct RestoreView {
    bar: ProgressBar,
    utilization: UtilizationGraph,
}

impl RestoreView {
    /// A view of a restore whose guest has just begun to run.
    pub fn new() -> Self {
        let target = match std::io::stderr().is_terminal() {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(None, target);
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            bar.set_style(style.progress_chars("##-"));
        }
        Self { bar, utilization: UtilizationGraph::new(Instant::now()) }
    }

    /// Shows the progress of the restore.
    pub fn show_progress(&mut self, progress: &OperationProgress) {
        self.bar.set_length(progress.total);
        self.bar.set_position(progress.done);
        if let Some(now) = &progress.restore {
            self.utilization.add_sample(Instant::now(), now);
            self.bar.set_message(format!(
                "{}\n{}",
                self.utilization.graph_line(),
                memory_line(now)
            ));
        }
    }
}

impl Drop for RestoreView {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

fn memory_line(now: &RestoreProgress) -> String {
    format!(
        "memory    {} pages prefetched before a fault, {} faults, {} of them waited for storage",
        now.prefetched_pages, now.faults, now.demand_reads
    )
}

/// The share of time in which vCPUs did not wait for pages.
struct UtilizationGraph {
    since: Instant,
    last: Option<(Instant, u64)>,
    samples: Vec<f64>,
    overall: f64,
}

impl UtilizationGraph {
    fn new(since: Instant) -> Self {
        Self { since, last: None, samples: Vec::new(), overall: 1.0 }
    }

    fn add_sample(&mut self, at: Instant, now: &RestoreProgress) {
        let (since, waited_us) = self.last.unwrap_or((self.since, 0));
        if at <= since {
            return;
        }
        self.samples.push(utilized_share(
            at - since,
            now.waited_us.saturating_sub(waited_us),
            now.vcpus,
        ));
        self.overall = utilized_share(at - self.since, now.waited_us, now.vcpus);
        self.last = Some((at, now.waited_us));
    }

    fn graph_line(&self) -> String {
        let newest = self.samples.len().saturating_sub(WIDTH);
        let graph: String =
            self.samples[newest..].iter().map(|&share| share_character(share)).collect();
        let now = self.samples.last().copied().unwrap_or(1.0);
        format!(
            "vCPUs     {graph:WIDTH$} {:.0} % now, {:.0} % since the guest runs",
            100.0 * now,
            100.0 * self.overall
        )
    }
}

fn utilized_share(time: Duration, waited_us: u64, vcpus: u32) -> f64 {
    let all_us = time.as_secs_f64() * 1e6 * f64::from(vcpus.max(1));
    (1.0 - waited_us as f64 / all_us).clamp(0.0, 1.0)
}

/// The character whose height shows a share.
fn share_character(share: f64) -> char {
    const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    BLOCKS[((share * 8.0) as usize).min(7)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now(waited_ms: u64) -> RestoreProgress {
        RestoreProgress {
            vcpus: 2,
            waited_us: waited_ms * 1000,
            faults: 7,
            demand_reads: 3,
            prefetched_pages: 9,
        }
    }

    #[test]
    fn utilization_is_the_time_without_waits() {
        let since = Instant::now();
        let mut utilization = UtilizationGraph::new(since);
        utilization.add_sample(since + Duration::from_millis(100), &now(200));
        utilization.add_sample(since + Duration::from_millis(200), &now(250));
        utilization.add_sample(since + Duration::from_millis(400), &now(250));
        assert_eq!(utilization.samples.len(), 3);
        assert!((utilization.samples[1] - 0.75).abs() < 1e-9);
        let line = utilization.graph_line();
        assert!(line.contains("▁▇█") && line.contains("100 % now, 69 % since"), "{line}");
        assert!(memory_line(&now(1)).contains("9 pages"));
    }
}
