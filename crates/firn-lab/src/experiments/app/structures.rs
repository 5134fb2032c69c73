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
use firn_app::Kind;
use firn_report::plot::BarPlot;
use firn_transactions::{Calls, System, Taken, Workload};
use serde_json::json;

use super::guest::Guest;
use super::place::Place;
use crate::lab::{Lab, interleaved};
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

impl Place {
    fn operations(self, lab: &Lab) -> usize {
        match self {
            Self::Native => lab.extent.pick(OPERATIONS.0, OPERATIONS.1),
            Self::Guest | Self::Plain => {
                lab.extent.pick(OPERATIONS_IN_GUEST.0, OPERATIONS_IN_GUEST.1)
            }
        }
    }

    /// The compared pairs: a name, the slow system and the fast one.
    fn pairs(self) -> &'static [(&'static str, System, System)] {
        const PT: System = System::Plain(Kind::Pages);
        const EMULATE: System = System::Plain(Kind::Emulate);
        match self {
            Self::Native => &[
                ("pt_assisted", PT, System::Assisted),
                ("pt_assisted_pages", PT, System::Plain(Kind::Assisted)),
                ("emul_assisted", EMULATE, System::Assisted),
                ("scan", PT, System::Plain(Kind::Scan)),
                ("compare", PT, System::Plain(Kind::Compare)),
            ],
            Self::Guest => &[
                ("pt_assisted", PT, System::PagesNoted),
                ("pt_protected", PT, System::AssistedByHost),
                ("pt_protected_pages", PT, System::Plain(Kind::Host)),
                ("emul_assisted", EMULATE, System::Plain(Kind::Stores)),
            ],
            Self::Plain => &[
                ("pt_protected", PT, System::AssistedByHost),
                ("pt_protected_pages", PT, System::Plain(Kind::Host)),
                ("emul_compared", EMULATE, System::AssistedByHost),
            ],
        }
    }
}

/// All runs of one workload, system and count of operations per transaction.
#[derive(Clone, Debug)]
struct Cell {
    place: Place,
    workload: Workload,
    system: System,
    opt: usize,
    runs: Vec<Taken>,
}

impl Cell {
    fn median(&self, of: impl Fn(&Taken) -> f64) -> Result<f64> {
        Ok(Sample::new(self.runs.iter().map(of)).context("nothing was measured")?.median())
    }
}

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("app-structures");
    for place in lab.extent.wanted(&Place::ALL, |place| place.name().to_owned()) {
        let cells = match place {
            Place::Native => native(lab)?,
            place => in_guest(lab, place)?,
        };
        for cell in &cells {
            tell(&mut report, cell, place.operations(lab))?;
        }
        for opt in OPT {
            speedups(&mut report, place, opt);
            draw(&mut report, place, opt)?;
        }
    }
    OPT.into_iter().for_each(|opt| over_plain(&mut report, opt));
    report.note("native.speedup.emul_assisted is emul over pt_assisted: natively no lower layer observes single stores, and comparing \
        pages with the last committed copy yields their words");
    Ok(report)
}

fn native(lab: &Lab) -> Result<Vec<Cell>> {
    let mut cells = Vec::new();
    for workload in Workload::all() {
        lab.say(&workload.name());
        let mut row = cells_of(Place::Native, workload);
        let numbers: Vec<usize> = (0..row.len()).collect();
        interleaved(lab.extent.runs(ROUNDS.0, ROUNDS.1), &numbers, |_, &number| {
            let Cell { system, opt, runs, .. } = &mut row[number];
            let operations = Place::Native.operations(lab);
            runs.push(workload.measure(*system, &Calls::default(), operations, *opt)?);
            Ok(())
        })?;
        cells.append(&mut row);
    }
    Ok(cells)
}

fn in_guest(lab: &Lab, place: Place) -> Result<Vec<Cell>> {
    let guest = Guest::boot(lab, place.systems())?;
    let rounds = lab.extent.runs(ROUNDS_IN_GUEST.0, ROUNDS_IN_GUEST.1);
    let mut cells = Vec::new();
    for workload in Workload::all() {
        lab.say(&format!("{} in {}", workload.name(), place.name()));
        let mut row = cells_of(place, workload);
        for measured in
            guest.measure(&["--workload", &workload.name()], &OPT, place.operations(lab), rounds)?
        {
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

fn cells_of(place: Place, workload: Workload) -> Vec<Cell> {
    let cell = |system, opt| Cell { place, workload, system, opt, runs: Vec::new() };
    let of = |opt| place.systems().iter().map(move |&system| cell(system, opt));
    OPT.into_iter().flat_map(of).collect()
}

/// The suffix of the keys for a count of operations per transaction.
fn suffix(opt: usize) -> String {
    if opt == 1 { String::new() } else { format!(".opt{opt}") }
}

fn us_key(place: Place, workload: Workload, system: System, opt: usize, figure: &str) -> String {
    format!("{}.{figure}{}.{}.{}", place.name(), suffix(opt), workload.name(), system.name())
}

fn tell(report: &mut Report, cell: &Cell, operations: usize) -> Result<()> {
    let Cell { place, workload, system, opt, .. } = *cell;
    let key = |figure| us_key(place, workload, system, opt, figure);
    report.sample(key("us_per_transaction"), cell.runs.iter().map(|taken| taken.us));
    report.sample(key("us_with_copy"), cell.runs.iter().map(|taken| taken.us_with_copy));
    let bytes = cell.median(|taken| taken.bytes)?;
    let is_told_once = match place {
        Place::Native => true,
        Place::Guest => !System::NATIVE.contains(&system),
        Place::Plain => false,
    };
    if is_told_once {
        report.number(format!("bytes{}.{}.{}", suffix(opt), workload.name(), system.name()), bytes);
    }
    report.repetition(json!({ "place": place.name(), "workload": workload.name(),
        "tracker": system.name(), "opt": opt, "operations": operations,
        "us": cell.runs.iter().map(|taken| taken.us).collect::<Vec<_>>(),
        "called": cell.runs.iter().map(|taken| taken.called).sum::<u64>(),
        "runs_per_transaction": cell.median(|taken| taken.runs)? / (operations / opt) as f64 }));
    Ok(())
}

/// Adds mean and maximum of the speedup of one system over another, over all workloads.
fn speedups(report: &mut Report, place: Place, opt: usize) {
    for &(name, slow, quick) in place.pairs() {
        for (figure, key) in
            [("us_per_transaction", "speedup"), ("us_with_copy", "speedup_with_copy")]
        {
            let ratios = ratios(report, opt, figure, ((place, slow), (place, quick)));
            let Some(ratios) = Sample::new(ratios) else { continue };
            let key = format!("{}.{key}{}.{name}", place.name(), suffix(opt));
            report.number(format!("{key}.mean"), ratios.mean());
            report.number(format!("{key}.max"), ratios.max());
        }
    }
}

/// Adds the speedup of assisted systems over others in a guest without the plugin.
fn over_plain(report: &mut Report, opt: usize) {
    for &(name, slow, quick) in Place::Guest.pairs() {
        let systems = ((Place::Plain, slow), (Place::Guest, quick));
        let ratios = ratios(report, opt, "us_per_transaction", systems);
        let Some(ratios) = Sample::new(ratios) else { continue };
        let key = format!("guest.speedup_over_plain{}.{name}", suffix(opt));
        report.number(format!("{key}.mean"), ratios.mean());
        report.number(format!("{key}.max"), ratios.max());
    }
}

fn ratios(
    report: &Report,
    opt: usize,
    figure: &str,
    (slow, quick): ((Place, System), (Place, System)),
) -> Vec<f64> {
    let value =
        |workload, (place, system)| report.value(&us_key(place, workload, system, opt, figure));
    let ratio = |workload: &Workload| Some(value(*workload, slow)? / value(*workload, quick)?);
    Workload::all().iter().filter_map(ratio).collect()
}

fn draw(report: &mut Report, place: Place, opt: usize) -> Result<()> {
    let workloads = Workload::all();
    let series = |system: System| {
        let value = |workload: &Workload| {
            let key = us_key(place, *workload, system, opt, "us_per_transaction");
            report.value(&key).unwrap_or(0.0)
        };
        (system.name().to_owned(), workloads.iter().map(value).collect())
    };
    let plot = BarPlot {
        title: format!("Transactions of {opt} operation(s) on data structures ({})", place.name()),
        y: "microseconds per transaction".into(),
        groups: workloads.iter().map(|workload| workload.name()).collect(),
        series: place.systems().iter().map(|&system| series(system)).collect(),
    };
    let svg = plot.svg().context("Figures 11 and 13")?;
    report.drawing(format!("app-structures-{}-opt{opt}", place.name()), svg);
    Ok(())
}
