//! `firn-lab`: runs Firn's experiments.
//!
//! Exit code: 0 all figures were measured, 1 something could not be measured or came out wrong, 2
//! the experiment could not run.

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use firn_lab::experiments::{self, Experiment};
use firn_lab::lab::{ExperimentOptions, Lab};
use firn_lab::report::Report;
use firn_lab::site::ConsensusKind;
use firn_lab::{demo, demo_app, demo_cluster, disk_profile, publish, recorder, toucher};

/// Reproduces tables and figures of papers. Compares Firn with the minimum that QEMU and the kernel
/// need (the floor), and with other programs.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    verb: LabVerb,
}

#[derive(Subcommand)]
enum LabVerb {
    /// Lists the experiments.
    List,
    /// Runs one experiment, or all of them.
    Run(RunArgs),
    /// Makes a page from the reports of experiments.
    Publish {
        /// The directory with the reports.
        #[arg(default_value = "target/lab")]
        from: PathBuf,
        /// The page, in Markdown.
        #[arg(long, default_value = "target/lab/measured.md")]
        page: PathBuf,
    },
    /// Boots a VM, checkpoints it, kills it, restores it in each mode.
    Demo,
    /// Kills memcached under load and restarts it. With its cache in a critical data area it
    /// recovers every acknowledged write; stock memcached runs beside it for comparison.
    DemoApp {
        /// How often each memcached is killed.
        #[arg(long, default_value_t = 20)]
        kills: u64,
    },
    /// Kills one host of three: a VM with Redis under load fails over to another host
    /// automatically, and is protected again.
    DemoCluster {
        /// Which consensus the hosts use.
        #[arg(long, value_enum, default_value_t = Membership::Both)]
        membership: Membership,
    },
    KvmHost(firn_lab::kvm_host::KvmHostArgs),
    /// Reads randomly from a file and prints how fast that was.
    #[command(hide = true)]
    ProbeDisk {
        file: PathBuf,
    },
    /// Touches the memory pages that are named on standard input.
    #[command(hide = true)]
    TouchMemory {
        pages: u32,
    },
    /// Commits areas of a size with a log, and prints the maximum of memory as a multiple of them.
    #[command(hide = true)]
    AppMemory {
        mib: usize,
        areas: usize,
        log: PathBuf,
    },
    /// Restores the guest that is described on standard input, and prints a run record.
    #[command(hide = true)]
    RestoreRecorded,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Membership {
    Embedded,
    Etcd,
    Both,
}

impl Membership {
    fn consensus_kinds(self) -> &'static [ConsensusKind] {
        match self {
            Self::Embedded => &[ConsensusKind::Embedded],
            Self::Etcd => &[ConsensusKind::Etcd],
            Self::Both => &[ConsensusKind::Embedded, ConsensusKind::Etcd],
        }
    }
}

#[derive(clap::Args)]
struct RunArgs {
    /// The experiment's name, or all.
    name: String,
    /// Fewer repetitions, smaller guests: every figure, in at most five minutes per experiment.
    #[arg(long)]
    quick: bool,
    /// Print one JSON object per experiment rather than a table.
    #[arg(long)]
    json: bool,
    /// Directory for NAME.json and the drawings.
    #[arg(long, default_value = "target/lab")]
    out: PathBuf,
    /// Number of repetitions, or of randomized runs.
    #[arg(long)]
    runs: Option<usize>,
    /// Seed of the random numbers.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only these guests and disks, where an experiment has several: words such as jvm, or hdd7200.
    /// Figures of the others are missing.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
}

fn main() -> ExitCode {
    match run_verb(Cli::parse().verb) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("firn-lab: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run_verb(verb: LabVerb) -> Result<bool> {
    match verb {
        LabVerb::List => list_experiments(),
        LabVerb::Run(args) => run_experiments(&args),
        LabVerb::Publish { from, page } => {
            let count = publish::publish_reports(&from, &page)?;
            println!("{}: {count} experiments", page.display());
            Ok(true)
        }
        LabVerb::Demo => show_demo(),
        LabVerb::DemoApp { kills } => demo_app::run_demo(&quick_lab()?, kills).map(|()| true),
        LabVerb::DemoCluster { membership } => {
            demo_cluster::run_demo(&quick_lab()?, membership.consensus_kinds()).map(|()| true)
        }
        LabVerb::KvmHost(command) => Ok(command.run()? == 0),
        LabVerb::ProbeDisk { file } => {
            println!("{}", serde_json::to_string(&disk_profile::probe_disk(&file)?)?);
            Ok(true)
        }
        LabVerb::TouchMemory { pages } => toucher::serve_touches(pages).map(|()| true),
        LabVerb::AppMemory { mib, areas, log } => {
            experiments::app::size::serve_memory(mib, areas, &log).map(|()| true)
        }
        LabVerb::RestoreRecorded => recorder::serve_restore().map(|()| true),
    }
}

fn list_experiments() -> Result<bool> {
    for Experiment { name, about, .. } in experiments::ALL {
        println!("{name:22} {about}");
    }
    Ok(true)
}

fn show_demo() -> Result<bool> {
    demo::run_demo(&quick_lab()?).map(|()| true)
}

fn quick_lab() -> Result<Lab> {
    Lab::new(ExperimentOptions { quick: true, seed: 1, ..ExperimentOptions::default() })
}

fn run_experiments(args: &RunArgs) -> Result<bool> {
    let RunArgs { quick, seed, runs, .. } = *args;
    let extent = ExperimentOptions { quick, seed, runs, only: args.only.clone() };
    let mut complete = true;
    for experiment in experiments::find_experiments(&args.name)? {
        let lab = Lab::new(extent.clone())?;
        lab.log_progress(experiment.name);
        let report = experiment.run(&lab).with_context(|| experiment.name)?;
        print_report(&report, args)?;
        complete &= report.is_complete();
    }
    Ok(complete)
}

fn print_report(report: &Report, args: &RunArgs) -> Result<()> {
    match args.json {
        true => println!("{}", report.to_json()),
        false => println!("{}", report.to_table()),
    }
    for path in report.write_files(&args.out).context("cannot write the report")? {
        eprintln!("wrote {}", path.display());
    }
    Ok(())
}
