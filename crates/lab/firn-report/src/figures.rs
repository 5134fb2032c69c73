//! Figures of the page: what is drawn of which run, on which axes.
//!
//! All runs of a page share their axes, so that figures beside each other can be compared. Waits
//! and reads have a time axis each: the background fill may read long after the last wait.

use firn_measure::{VcpuWaitingTime, responsiveness_curve, utilization_curve};
use firn_restore::{FaultRecord, ReadRecord};

use crate::figure::{Axis, Figure, PlotMarks, Series};
use crate::headline::format_seconds_rounded_up;
use crate::run::{ReportedRun, WINDOWS_US, to_seconds, window_name};
use crate::scale::Scale;

/// The window over which utilization is drawn.
const WINDOW_US: u64 = 100_000;
const PAGES_PER_MIB: f64 = 256.0;
const SECONDS: &str = "seconds since the command";

/// The runs of a page, with what their figures share.
pub(crate) struct RunFigures<'a> {
    runs: &'a [ReportedRun],
    stalls: Vec<VcpuWaitingTime>,
    /// Until the last wait.
    waits: Scale,
    /// Until the last read.
    reads: Scale,
}

impl<'a> RunFigures<'a> {
    pub(crate) fn new(runs: &'a [ReportedRun]) -> Self {
        let stalls: Vec<VcpuWaitingTime> =
            runs.iter().map(ReportedRun::vcpu_waiting_time).collect();
        let faults = runs.iter().flat_map(|run| run.record.faults.iter());
        let ends = stalls.iter().map(VcpuWaitingTime::end_us);
        let ends = ends.chain(faults.map(FaultRecord::answered_us));
        let waits = Scale::containing(ends.map(|us| to_seconds(us + WINDOW_US)));
        let ends = runs.iter().flat_map(|run| run.record.reads.iter()).map(ReadRecord::ended_us);
        let reads = Scale::containing(ends.map(to_seconds));
        Self { runs, stalls, waits, reads }
    }

    /// Utilization, and for each window the TTR.
    pub(crate) fn responsiveness_figures(&self) -> Vec<Figure> {
        let ttr = WINDOWS_US.iter().map(|&window| self.ttr_figure(window));
        [self.utilization_figure()].into_iter().chain(ttr).collect()
    }

    /// Bytes read, and for each run the requested pages over time.
    pub(crate) fn memory_figures(&self) -> Vec<Figure> {
        let maps = self
            .runs
            .iter()
            .enumerate()
            .map(|(number, run)| self.requested_pages_figure(number, run));
        [self.reads_figure()].into_iter().chain(maps).collect()
    }

    fn utilization_figure(&self) -> Figure {
        let end_us = (self.waits.end() * 1e6) as u64;
        let line = |stalls: &VcpuWaitingTime| {
            let last = (end_us, stalls.window_utilization(end_us, WINDOW_US));
            let corners = utilization_curve(stalls, WINDOW_US).into_iter().chain([last]);
            corners.map(|(us, share)| (to_seconds(us), 100.0 * share)).collect()
        };
        let describe = |run: &ReportedRun, _: &VcpuWaitingTime| run.headline();
        Figure {
            title: "Utilization over the next 0.1 s".to_owned(),
            description: self.describe_runs(describe),
            x: Axis { label: SECONDS, scale: self.waits },
            y: Axis { label: "%", scale: Scale::up_to(100.0) },
            series: self.lines_of_started_runs(line),
        }
    }

    fn ttr_figure(&self, window_us: u64) -> Figure {
        let line = |stalls: &VcpuWaitingTime| {
            let points = responsiveness_curve(stalls, window_us).into_iter();
            points.map(|point| (100.0 * point.utilization, point.ttr_s)).collect()
        };
        let describe = |_: &ReportedRun, stalls: &VcpuWaitingTime| {
            let at =
                |utilization| firn_measure::time_to_responsiveness(stalls, window_us, utilization);
            let (half, most) =
                (format_seconds_rounded_up(at(0.5)), format_seconds_rounded_up(at(0.9)));
            format!("50 % from {half}, 90 % from {most}")
        };
        Figure {
            title: format!("TTR({} s, u)", window_name(window_us)),
            description: self.describe_runs(describe),
            x: Axis { label: "utilization u, %", scale: Scale::up_to(100.0) },
            y: Axis { label: SECONDS, scale: self.waits },
            series: self.lines_of_started_runs(line),
        }
    }

    /// A line for each run whose vCPUs are known to run.
    fn lines_of_started_runs(
        &self,
        line: impl Fn(&VcpuWaitingTime) -> Vec<(f64, f64)>,
    ) -> Vec<Series> {
        let runs = self.runs.iter().zip(&self.stalls).enumerate();
        let started = runs.filter(|(_, (run, _))| run.record.resumed_us.is_some());
        let series = |(number, (run, stalls)): (usize, (&ReportedRun, &VcpuWaitingTime))| Series {
            name: run.name.clone(),
            number,
            marks: PlotMarks::Line(line(stalls)),
        };
        started.map(series).collect()
    }

    /// "lazy: ...; auto: ..."
    fn describe_runs(&self, text: impl Fn(&ReportedRun, &VcpuWaitingTime) -> String) -> String {
        let started = self.runs.iter().zip(&self.stalls);
        let started = started.filter(|(run, _)| run.record.resumed_us.is_some());
        let texts: Vec<String> =
            started.map(|(run, stalls)| format!("{}: {}", run.name, text(run, stalls))).collect();
        texts.join("; ")
    }

    fn reads_figure(&self) -> Figure {
        let series = |(number, run): (usize, &ReportedRun)| {
            let marks = PlotMarks::Line(summed_reads(run));
            Series { name: run.name.clone(), number, marks }
        };
        let series: Vec<Series> = self.runs.iter().enumerate().map(series).collect();
        let sums = self.runs.iter().map(|run| summed_reads(run).last().map_or(0.0, |last| last.1));
        let describe = |run: &ReportedRun| {
            let (end, mib) = summed_reads(run).last().copied().unwrap_or_default();
            format!("{}: {mib:.1} MiB after {}", run.name, format_seconds_rounded_up(end))
        };
        Figure {
            title: "Read from the image, summed up".to_owned(),
            description: self.runs.iter().map(describe).collect::<Vec<_>>().join("; "),
            x: Axis { label: SECONDS, scale: self.reads },
            y: Axis { label: "MiB", scale: Scale::containing(sums) },
            series,
        }
    }

    fn requested_pages_figure(&self, number: usize, run: &ReportedRun) -> Figure {
        let pages = self.runs.iter().map(|run| run.record.ram_pages).max().unwrap_or(0);
        let (record, name) = (&run.record, &run.name);
        let dots = PlotMarks::Dots(record.faults.iter().map(fault_dot).collect());
        let strip = (!record.prefetched.is_empty()).then(|| prefetched_strip(&record.prefetched));
        let series = |name: &str, marks| Series { name: name.to_owned(), number, marks };
        let strip = strip.map(|strip| series("prefetched (no time)", strip));
        let prefetched: u64 = record.prefetched.iter().map(|run| u64::from(run.1)).sum();
        Figure {
            title: format!("{name}: requested pages"),
            description: format!(
                "{} page faults are listed; {prefetched} pages were prefetched",
                record.faults.len()
            ),
            x: Axis { label: SECONDS, scale: self.waits },
            y: Axis { label: "MiB", scale: Scale::up_to(pages_to_mib(pages)) },
            series: [series("on demand", dots)].into_iter().chain(strip).collect(),
        }
    }
}

/// The sum of the bytes read, in MiB, over the time at which each read ended. Records of earlier
/// versions list the reads of the prefill after later ones.
fn summed_reads(run: &ReportedRun) -> Vec<(f64, f64)> {
    let mut reads: Vec<&ReadRecord> = run.record.reads.iter().collect();
    reads.sort_by_key(|read| read.ended_us());
    let mut bytes = 0;
    let ended = reads.into_iter().map(|read| {
        bytes += u64::from(read.len);
        (to_seconds(read.ended_us()), to_mib(bytes))
    });
    std::iter::once((0.0, 0.0)).chain(ended).collect()
}

/// The dot of a fault: when it was, in seconds, and where in memory, in MiB.
fn fault_dot(fault: &FaultRecord) -> (f64, f64) {
    (to_seconds(fault.t_us), pages_to_mib(fault.page.0))
}

fn prefetched_strip(runs: &[(u32, u32)]) -> PlotMarks {
    let range = |&(page, pages): &(u32, u32)| {
        (pages_to_mib(page), pages_to_mib(page.saturating_add(pages)))
    };
    PlotMarks::Strip(runs.iter().map(range).collect())
}

fn pages_to_mib(pages: u32) -> f64 {
    f64::from(pages) / PAGES_PER_MIB
}

pub(crate) fn to_mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::tests::run;

    #[test]
    fn reads_are_summed_by_the_time_at_which_they_ended() {
        let mut run = run();
        let read = run.record.reads[0];
        run.record.reads.push(ReadRecord { t_us: 0, us: 10_000, len: 1 << 20, ..read });
        run.record.reads.push(ReadRecord { t_us: 250_000, us: 100, len: 1 << 20, ..read });
        let sums = summed_reads(&run);
        assert_eq!(sums, [(0.0, 0.0), (0.01, 1.0), (0.2501, 2.0), (0.699, 2.0625)]);
    }

    #[test]
    fn runs_share_their_axes() {
        let (short, mut long) = (run(), run());
        long.record.faults[0].wait_us = 9_000_000;
        long.record.ram_pages = 4096;
        let runs = [short, long];
        let figures = RunFigures::new(&runs);
        let ends: Vec<(f64, f64)> = figures.memory_figures()[1..]
            .iter()
            .map(|map| (map.x.scale.end(), map.y.scale.end()))
            .collect();
        assert_eq!(ends[0], ends[1]);
        assert!(ends[0].0 > 9.2 && ends[0].1 == 16.0, "{ends:?}");
        let ttr = figures.responsiveness_figures().split_off(1);
        assert!(ttr.iter().all(|figure| figure.y.scale == ttr[0].y.scale));
    }

    #[test]
    fn a_run_that_never_resumed_is_not_drawn() {
        let mut adopted = run();
        adopted.record.resumed_us = None;
        let runs = [adopted, run()];
        let figure = RunFigures::new(&runs).utilization_figure();
        assert_eq!(figure.series.iter().map(|it| it.number).collect::<Vec<_>>(), [1]);
        assert_eq!(figure.description, "web: 90 % of its speed from 0.50\u{a0}s on");
    }
}
