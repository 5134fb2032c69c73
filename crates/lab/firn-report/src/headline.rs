//! Headline of a run: from when on the VM had most of its speed, in one sentence.

use firn_measure::time_to_responsiveness;
use firn_restore::RunRecord;

use crate::run::{ReportedRun, to_seconds};

/// The window and the utilization of [`crate::RunFacts::responsive_s`].
const RESPONSIVE: (u64, f64) = (1_000_000, 0.9);

impl ReportedRun {
    /// The earliest time from which on the VM had 90 % of its speed in *every* window of a second:
    /// [`crate::RunFacts::responsive_s`]. Earlier windows may have had it, too, before a longer wait.
    ///
    /// A window of TTR may begin before the vCPUs run, but the VM has no speed then. If the record was
    /// written during the restore, it must contain the whole first window. If it does not list all
    /// faults, the time is unknown (`None`).
    pub fn responsive_s(&self) -> Option<f64> {
        let (record, (window_us, utilization)) = (&self.record, RESPONSIVE);
        let resumed_s = to_seconds(record.resumed_us?);
        let ttr_s = time_to_responsiveness(&self.vcpu_waiting_time(), window_us, utilization);
        let responsive_s = ttr_s.max(resumed_s);
        let seen_s = responsive_s + to_seconds(window_us);
        let is_seen = record.finished_us.is_some() || to_seconds(record.recorded_us) >= seen_s;
        (is_seen && record.faults_left_out == 0).then_some(responsive_s)
    }

    /// From when on the VM had 90 % of its speed, or why that is unknown.
    pub(crate) fn headline(&self) -> String {
        match self.responsive_s() {
            Some(seconds) => {
                format!("90 % of its speed from {} on", format_seconds_rounded_up(seconds))
            }
            None => format!("90 % of its speed: {}", reason_unknown(&self.record)),
        }
    }

    /// When the VM ran and had its memory.
    pub(crate) fn subline(&self) -> String {
        let record = &self.record;
        let ran = record
            .resumed_us
            .map(|us| format!("ran from {} on", format_seconds_rounded_up(to_seconds(us))));
        let memory = match record.finished_us {
            Some(us) => format!("all memory after {}", format_seconds_rounded_up(to_seconds(us))),
            None => "not all memory when the record was written".to_owned(),
        };
        let mut parts: Vec<String> = ran.into_iter().chain([memory]).collect();
        if record.counts.diverged {
            parts.push("prefetch ended: the guest used other pages than predicted".to_owned());
        }
        parts.join(", ")
    }
}

fn reason_unknown(record: &RunRecord) -> String {
    let written = format_seconds_rounded_up(to_seconds(record.recorded_us));
    if record.resumed_us.is_none() {
        return "unknown, the record has no time at which the VM began to run".to_owned();
    }
    match record.faults_left_out {
        0 => format!("not yet when the record was written, after {written}"),
        faults => format!("unknown, the record does not list {faults} more faults"),
    }
}

/// Formats a time in seconds, rounded up, because the record supports no claim about an earlier
/// instant. No line ends between the number and its unit.
pub(crate) fn format_seconds_rounded_up(seconds: f64) -> String {
    let hundredths = ((seconds * 1e6).round() / 1e4).ceil();
    format!("{:.2}\u{a0}s", hundredths / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::tests::run;

    #[test]
    fn the_headline_is_not_claimed_before_the_vm_ran() {
        let mut run = run();
        run.record.faults.clear();
        run.record.resumed_us = Some(100_001);
        assert!(run.compute_facts().ttr_s["1"]["0.9"] < 0.001, "a window may begin earlier");
        assert_eq!(run.headline(), "90 % of its speed from 0.11\u{a0}s on");
        assert_eq!(run.subline(), "ran from 0.11\u{a0}s on, all memory after 0.90\u{a0}s");
    }

    #[test]
    fn the_headline_is_that_of_the_last_long_wait() {
        // Two vCPUs, one waits until 0.7 s: a window of 1 s may have 0.2 s of waiting.
        assert_eq!(run().headline(), "90 % of its speed from 0.50\u{a0}s on");
    }

    #[test]
    fn a_headline_that_the_record_does_not_support_is_unknown() {
        let mut unfinished = run();
        unfinished.record.finished_us = None;
        unfinished.record.recorded_us = 1_400_000;
        assert_eq!(
            unfinished.headline(),
            "90 % of its speed: not yet when the record was written, after 1.40\u{a0}s"
        );
        unfinished.record.recorded_us = 1_500_000;
        assert_eq!(unfinished.headline(), "90 % of its speed from 0.50\u{a0}s on");
        let mut adopted = run();
        adopted.record.resumed_us = None;
        assert!(adopted.headline().ends_with("no time at which the VM began to run"));
        let mut full = run();
        full.record.faults_left_out = 17;
        assert!(full.headline().ends_with("does not list 17 more faults"));
    }

    #[test]
    fn times_are_rounded_up() {
        let up = [0.22, 0.220_000_1, 0.220_001, 0.229, 61.0].map(format_seconds_rounded_up);
        assert_eq!(
            up,
            ["0.22\u{a0}s", "0.22\u{a0}s", "0.23\u{a0}s", "0.23\u{a0}s", "61.00\u{a0}s"]
        );
    }
}
