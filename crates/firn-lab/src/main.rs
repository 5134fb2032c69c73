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
use firn_lab::lab::{Extent, Lab};
use firn_lab::report::Report;
use firn_lab::site::Agreement;
use firn_lab::{demo, demo_app, demo_cluster, disk_profile, recorder, toucher};

/// Reproduces tables and figures, and measures Firn against its floors and its peers.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Lists the experiments.
    List,
    /// Runs one experiment, or all of them.
    Run(Run),
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
    KvmHost(firn_lab::kvm_host::Command),
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
    fn agreements(self) -> &'static [Agreement] {
        match self {
            Self::Embedded => &[Agreement::Embedded],
            Self::Etcd => &[Agreement::Etcd],
            Self::Both => &[Agreement::Embedded, Agreement::Etcd],
        }
    }
}

#[derive(clap::Args)]
struct Run {
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
    match run(Cli::parse().verb) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("firn-lab: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(verb: Verb) -> Result<bool> {
    match verb {
        Verb::List => list(),
        Verb::Run(args) => run_experiments(&args),
        Verb::Demo => show_demo(),
        Verb::DemoApp { kills } => demo_app::run(&quick_lab()?, kills).map(|()| true),
        Verb::DemoCluster { membership } => {
            demo_cluster::run(&quick_lab()?, membership.agreements()).map(|()| true)
        }
        Verb::KvmHost(command) => Ok(command.run()? == 0),
        Verb::ProbeDisk { file } => {
            println!("{}", serde_json::to_string(&disk_profile::probe(&file)?)?);
            Ok(true)
        }
        Verb::TouchMemory { pages } => toucher::serve(pages).map(|()| true),
        Verb::RestoreRecorded => recorder::serve().map(|()| true),
    }
}

fn list() -> Result<bool> {
    for Experiment { name, about, .. } in experiments::ALL {
        println!("{name:22} {about}");
    }
    Ok(true)
}

fn show_demo() -> Result<bool> {
    demo::run(&quick_lab()?).map(|()| true)
}

fn quick_lab() -> Result<Lab> {
    Lab::new(Extent { quick: true, seed: 1, ..Extent::default() })
}

fn run_experiments(args: &Run) -> Result<bool> {
    let Run { quick, seed, runs, .. } = *args;
    let extent = Extent { quick, seed, runs, only: args.only.clone() };
    let mut complete = true;
    for experiment in experiments::named(&args.name)? {
        let lab = Lab::new(extent.clone())?;
        lab.say(experiment.name);
        let report = experiment.run(&lab).with_context(|| experiment.name)?;
        show(&report, args)?;
        complete &= report.is_complete();
    }
    Ok(complete)
}

fn show(report: &Report, args: &Run) -> Result<()> {
    match args.json {
        true => println!("{}", report.json()),
        false => println!("{}", report.table()),
    }
    for path in report.write(&args.out).context("cannot write the report")? {
        eprintln!("wrote {}", path.display());
    }
    Ok(())
}
