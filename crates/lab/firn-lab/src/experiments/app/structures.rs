//! `app-structures`: operations on thirteen data structures, each a transaction, or five in one.
//!
//! Reproduces Table 2 and Figures 11 to 18 of "Hypervisor-Assisted Application Checkpointing in
//! Virtualized Environments" (section VI), natively and in a guest: trackers in user space,
//! assisted by the operating system, and by Firn on the host.
//!
//! **What varies**: the tracker, the structure and its operation (the 20 pairs of Table 2),
//! operations per transaction (OPT, 1 or 5). **What is equal**: keys and their order, the size of
//! the area (as 10,000 elements need), 10,000 operations (fewer in a guest). Insertions begin with
//! an empty structure, deletions with all elements, and delete the last inserted first. The guest
//! has one vCPU: the host's side of a call needs a processor as well.
//!
//! **What is measured**: microseconds per transaction, the operations included (Figures 11 and 13;
//! `us_per_transaction`); the same with a copy of the changes (Figure 17; `us_with_copy`); reported
//! bytes that changed (Figures 15 and 16; `bytes`). `pt_assisted` is the default of sessions:
//! words, by comparing pages with the last committed copy; `pt_assisted_pages` reports pages, as PT
//! does; `pt_host` and `pt_host_pages` are the same by Firn on the host, which protects the guest's
//! pages. `emul_host` reports words of stores that Firn's plugin in QEMU notes, `pt_host_noted`
//! their pages. Speedups (Figures 12, 14, 18) are PT over assisted PT (`pt_assisted`), and
//! emulation over an assisted tracker that reports words as well (`emul_assisted`): natively no
//! lower layer observes single stores. The plugin makes all of the guest slower, PT and Emul too:
//! `plain-guest` is a guest without it, and `guest.speedup_over_plain` is PT and Emul there over
//! assisted trackers in `guest`.

use anyhow::{Context as _, Result, ensure};
use firn_app::TrackerKind;
use firn_report::plot::BarPlot;
use firn_transactions::{GuestCallIdentity, RunResult, StructureWorkload, TrackerSystem};
use serde_json::json;

use super::environment::TestEnvironment;
use super::guest::{GuestSize, TransactionGuest};
use crate::lab::{Lab, run_interleaved};
use crate::report::Report;
use crate::stats::Sample;

/// Operations on each structure, in quick and in full runs.
const OPERATIONS: (usize, usize) = (2000, 10_000);
const OPERATIONS_IN_GUEST: (usize, usize) = (200, 2000);
/// Rounds, in quick and in full runs.
const ROUNDS: (usize, usize) = (3, 7);
const ROUNDS_IN_GUEST: (usize, usize) = (1, 5);
/// Values of operations per transaction.
const OPT: [usize; 2] = [1, 5];

impl TestEnvironment {
    fn operation_count(self, lab: &Lab) -> usize {
        match self {
            Self::Native => lab.extent.pick(OPERATIONS.0, OPERATIONS.1),
            Self::Guest | Self::Plain => {
                lab.extent.pick(OPERATIONS_IN_GUEST.0, OPERATIONS_IN_GUEST.1)
            }
        }
    }

    /// The compared pairs: a name, the slow system and the fast one.
    fn compared_systems(self) -> &'static [(&'static str, TrackerSystem, TrackerSystem)] {
        const PT: TrackerSystem = TrackerSystem::Plain(TrackerKind::Pages);
        const EMULATE: TrackerSystem = TrackerSystem::Plain(TrackerKind::Emulate);
        match self {
            Self::Native => &[
                ("pt_assisted", PT, TrackerSystem::Assisted),
                ("pt_assisted_pages", PT, TrackerSystem::Plain(TrackerKind::Assisted)),
                ("emul_assisted", EMULATE, TrackerSystem::Assisted),
                ("scan", PT, TrackerSystem::Plain(TrackerKind::Scan)),
                ("compare", PT, TrackerSystem::Plain(TrackerKind::Compare)),
            ],
            Self::Guest => &[
                ("pt_assisted", PT, TrackerSystem::PagesRecorded),
                ("pt_protected", PT, TrackerSystem::AssistedByHost),
                ("pt_protected_pages", PT, TrackerSystem::Plain(TrackerKind::Host)),
                ("emul_assisted", EMULATE, TrackerSystem::Plain(TrackerKind::Stores)),
            ],
            Self::Plain => &[
                ("pt_protected", PT, TrackerSystem::AssistedByHost),
                ("pt_protected_pages", PT, TrackerSystem::Plain(TrackerKind::Host)),
                ("emul_compared", EMULATE, TrackerSystem::AssistedByHost),
            ],
        }
    }
}

/// All runs of one workload, system and count of operations per transaction.
#[derive(Clone, Debug)]
struct MeasuredCell {
    environment: TestEnvironment,
    workload: StructureWorkload,
    system: TrackerSystem,
    opt: usize,
    runs: Vec<RunResult>,
}

impl MeasuredCell {
    fn median_of(&self, of: impl Fn(&RunResult) -> f64) -> Result<f64> {
        Ok(Sample::new(self.runs.iter().map(of)).context("nothing was measured")?.median())
    }
}

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("app-structures");
    for environment in
        lab.extent.select_wanted(&TestEnvironment::ALL, |environment| environment.name().to_owned())
    {
        let cells = match environment {
            TestEnvironment::Native => measure_natively(lab)?,
            environment => measure_in_guest(lab, environment)?,
        };
        for cell in &cells {
            add_results(&mut report, cell, environment.operation_count(lab))?;
        }
        for opt in OPT {
            add_speedups(&mut report, environment, opt);
            draw_plot(&mut report, environment, opt)?;
        }
    }
    OPT.into_iter().for_each(|opt| add_speedups_over_plain(&mut report, opt));
    report.add_remark("native.speedup.emul_assisted is emul over pt_assisted: natively no lower layer observes single stores, and comparing \
        pages with the last committed copy yields their words");
    Ok(report)
}

fn measure_natively(lab: &Lab) -> Result<Vec<MeasuredCell>> {
    let mut cells = Vec::new();
    for workload in StructureWorkload::all_pairs() {
        lab.log_progress(&workload.name());
        let mut row = empty_cells(TestEnvironment::Native, workload);
        let numbers: Vec<usize> = (0..row.len()).collect();
        run_interleaved(lab.extent.runs(ROUNDS.0, ROUNDS.1), &numbers, |_, &number| {
            let MeasuredCell { system, opt, runs, .. } = &mut row[number];
            let operations = TestEnvironment::Native.operation_count(lab);
            runs.push(workload.measure_tracker(
                *system,
                &GuestCallIdentity::default(),
                operations,
                *opt,
            )?);
            Ok(())
        })?;
        cells.append(&mut row);
    }
    Ok(cells)
}

fn measure_in_guest(lab: &Lab, environment: TestEnvironment) -> Result<Vec<MeasuredCell>> {
    let guest = TransactionGuest::boot_guest(lab, environment.systems(), GuestSize::SMALL)?;
    let rounds = lab.extent.runs(ROUNDS_IN_GUEST.0, ROUNDS_IN_GUEST.1);
    let mut cells = Vec::new();
    for workload in StructureWorkload::all_pairs() {
        lab.log_progress(&format!("{} in {}", workload.name(), environment.name()));
        let mut row = empty_cells(environment, workload);
        for measured in guest.measure_systems(
            &["--workload", &workload.name()],
            &OPT,
            environment.operation_count(lab),
            rounds,
        )? {
            let blind = measured.taken.blind;
            ensure!(blind == 0, "the host could not report what {blind} transactions wrote");
            let cell = row
                .iter_mut()
                .find(|cell| cell.system.name() == measured.system && cell.opt == measured.opt);
            cell.context("the guest measured an unknown system")?.runs.push(measured.taken);
        }
        cells.append(&mut row);
    }
    Ok(cells)
}

fn empty_cells(environment: TestEnvironment, workload: StructureWorkload) -> Vec<MeasuredCell> {
    let cell = |system, opt| MeasuredCell { environment, workload, system, opt, runs: Vec::new() };
    let of = |opt| environment.systems().iter().map(move |&system| cell(system, opt));
    OPT.into_iter().flat_map(of).collect()
}

/// The suffix of the keys for a count of operations per transaction.
fn opt_suffix(opt: usize) -> String {
    if opt == 1 { String::new() } else { format!(".opt{opt}") }
}

fn us_key(
    environment: TestEnvironment,
    workload: StructureWorkload,
    system: TrackerSystem,
    opt: usize,
    figure: &str,
) -> String {
    format!(
        "{}.{figure}{}.{}.{}",
        environment.name(),
        opt_suffix(opt),
        workload.name(),
        system.name()
    )
}

fn add_results(report: &mut Report, cell: &MeasuredCell, operations: usize) -> Result<()> {
    let MeasuredCell { environment, workload, system, opt, .. } = *cell;
    let key = |figure| us_key(environment, workload, system, opt, figure);
    report.add_sample(key("us_per_transaction"), cell.runs.iter().map(|taken| taken.us));
    report.add_sample(key("us_with_copy"), cell.runs.iter().map(|taken| taken.us_with_copy));
    let bytes = cell.median_of(|taken| taken.bytes)?;
    let has_bytes = match environment {
        TestEnvironment::Native => true,
        TestEnvironment::Guest => !TrackerSystem::NATIVE.contains(&system),
        TestEnvironment::Plain => false,
    };
    if has_bytes {
        report.add_number(
            format!("bytes{}.{}.{}", opt_suffix(opt), workload.name(), system.name()),
            bytes,
        );
    }
    report.add_repetition(json!({ "place": environment.name(), "workload": workload.name(),
        "tracker": system.name(), "opt": opt, "operations": operations,
        "us": cell.runs.iter().map(|taken| taken.us).collect::<Vec<_>>(),
        "called": cell.runs.iter().map(|taken| taken.called).sum::<u64>(),
        "runs_per_transaction": cell.median_of(|taken| taken.runs)? / (operations / opt) as f64 }));
    Ok(())
}

/// Adds mean and maximum of the speedup of one system over another, over all workloads.
fn add_speedups(report: &mut Report, environment: TestEnvironment, opt: usize) {
    for &(name, slow, quick) in environment.compared_systems() {
        for (figure, key) in
            [("us_per_transaction", "speedup"), ("us_with_copy", "speedup_with_copy")]
        {
            let ratios =
                time_ratios(report, opt, figure, ((environment, slow), (environment, quick)));
            let Some(ratios) = Sample::new(ratios) else { continue };
            let key = format!("{}.{key}{}.{name}", environment.name(), opt_suffix(opt));
            report.add_number(format!("{key}.mean"), ratios.mean());
            report.add_number(format!("{key}.max"), ratios.max());
        }
    }
}

/// Adds the speedup of assisted systems over others in a guest without the plugin.
fn add_speedups_over_plain(report: &mut Report, opt: usize) {
    for &(name, slow, quick) in TestEnvironment::Guest.compared_systems() {
        let systems = ((TestEnvironment::Plain, slow), (TestEnvironment::Guest, quick));
        let ratios = time_ratios(report, opt, "us_per_transaction", systems);
        let Some(ratios) = Sample::new(ratios) else { continue };
        let key = format!("guest.speedup_over_plain{}.{name}", opt_suffix(opt));
        report.add_number(format!("{key}.mean"), ratios.mean());
        report.add_number(format!("{key}.max"), ratios.max());
    }
}

fn time_ratios(
    report: &Report,
    opt: usize,
    figure: &str,
    (slow, quick): ((TestEnvironment, TrackerSystem), (TestEnvironment, TrackerSystem)),
) -> Vec<f64> {
    let value = |workload, (environment, system)| {
        report.figure_value(&us_key(environment, workload, system, opt, figure))
    };
    let ratio =
        |workload: &StructureWorkload| Some(value(*workload, slow)? / value(*workload, quick)?);
    StructureWorkload::all_pairs().iter().filter_map(ratio).collect()
}

fn draw_plot(report: &mut Report, environment: TestEnvironment, opt: usize) -> Result<()> {
    let workloads = StructureWorkload::all_pairs();
    let series = |system: TrackerSystem| {
        let value = |workload: &StructureWorkload| {
            let key = us_key(environment, *workload, system, opt, "us_per_transaction");
            report.figure_value(&key).unwrap_or(0.0)
        };
        (system.name().to_owned(), workloads.iter().map(value).collect())
    };
    let plot = BarPlot {
        title: format!(
            "Transactions of {opt} operation(s) on data structures ({})",
            environment.name()
        ),
        y: "microseconds per transaction".into(),
        groups: workloads.iter().map(|workload| workload.name()).collect(),
        series: environment.systems().iter().map(|&system| series(system)).collect(),
    };
    let svg = plot.to_svg().context("Figures 11 and 13")?;
    report.add_drawing(format!("app-structures-{}-opt{opt}", environment.name()), svg);
    Ok(())
}
