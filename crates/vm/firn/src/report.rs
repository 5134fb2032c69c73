//! `firn report`

use std::fmt::Write;
use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;
use firn_report::{ReportedRun, RunFacts, render_page};
use firn_supervisor::{Failure, FailureContext, FailureKind, VmName};
use firn_types::make_printable;

use crate::output::{FactPrinter, check_output, print_text};

/// Draw a report of restores, from their run records.
///
/// A run record is kept with the VM once all its memory is loaded: `restore.json` in its runtime
/// directory. Name a run record by its VM or by its file. The file may have been copied and
/// renamed: the report gives the run the name of the file.
///
/// The page compares the runs: from when on each VM had 90 % of its speed, utilization over time,
/// TTR curves, reads of the image, which pages were prefetched and requested, and the numbers. All
/// runs share their axes. The page is one file that loads nothing else.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = r#"Examples:
  firn report web -o report.html
  firn report lazy.json locality.json auto.json -o report.html
  firn report web --json | jq '.runs[0].ttr_s."1"."0.9"'"#)]
pub struct ReportArgs {
    /// Run records, or names of VMs.
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// The page to write, or `-` for standard output; without it only the numbers are printed.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

impl ReportArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        if let Some(file) = self.output.as_deref().filter(|it| it.as_os_str() != "-") {
            check_output(file)
                .map_err(|failure| failure.with_hint("`-o -` writes to standard output"))?;
        }
        let runs: Vec<ReportedRun> =
            self.runs.iter().map(|run| read_run(run)).collect::<Result<_, _>>()?;
        match &self.output {
            Some(file) if file.as_os_str() == "-" => return print_text(&render_page(&runs)),
            Some(file) => write_page(file, &runs)?,
            None => {}
        }
        let facts: Vec<RunFacts> = runs.iter().map(ReportedRun::compute_facts).collect();
        let page = self.output.as_deref();
        let json = serde_json::json!({ "report": page.map(Path::to_string_lossy), "runs": facts });
        out.print_facts(&json, || describe_runs(&facts, page))
    }
}

/// Reads a run record by its file, or otherwise by the name of a VM.
fn read_run(run: &Path) -> Result<ReportedRun, Failure> {
    let name = run.to_str().and_then(|name| VmName::new(name.to_owned()).ok());
    let Some(name) = name.filter(|_| !run.exists()) else { return load_run(run) };
    let kept = crate::hidden::runtime_dir()?.vm_dir(&name).run_record();
    if !kept.exists() {
        let text =
            format!("there is neither a file nor a run record of a VM called {}", run.display());
        return Err(Failure::new(FailureKind::NoSuchVm, text)
            .with_hint("a restored VM has one once all its memory is loaded: `firn status NAME --watch` waits for that"));
    }
    load_run(&kept).map(|run| ReportedRun { name: name.to_string(), ..run })
}

fn load_run(path: &Path) -> Result<ReportedRun, Failure> {
    ReportedRun::read_file(path).map_err(|error| Failure::from_error(FailureKind::Usage, &error))
}

fn write_page(file: &Path, runs: &[ReportedRun]) -> Result<(), Failure> {
    firn_files::replace_output(file, render_page(runs).as_bytes())
        .while_doing(format!("writing {}", file.display()))
}

fn describe_runs(facts: &[RunFacts], page: Option<&Path>) -> String {
    let mut text = format!(
        "{:<16} {:<12} {:>9} {:>13} {:>11} {:>11} {:>10}\n",
        "RUN", "MODE", "RUNNING", "TTR(0.1,0.9)", "TTR(1,0.8)", "TTR(1,0.9)", "COMPLETE"
    );
    let time = |seconds: Option<f64>| seconds.map_or("-".to_owned(), |it| format!("{it:.3} s"));
    for run in facts {
        let ttr =
            |window: &str, utilization: &str| time(run.ttr_s[window].get(utilization).copied());
        let _ = writeln!(
            text,
            "{:<16} {:<12} {:>9} {:>13} {:>11} {:>11} {:>10}",
            make_printable(&run.name),
            run.mode.to_string(),
            time(run.running_s),
            ttr("0.1", "0.9"),
            ttr("1", "0.8"),
            ttr("1", "0.9"),
            time(run.complete_s)
        );
    }
    if let Some(page) = page {
        let _ = writeln!(text, "wrote {}", make_printable(&page.to_string_lossy()));
    }
    text
}
