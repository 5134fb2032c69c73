//! `firn-guest transactions`: the cost of transactions in this guest, by tracker (see
//! `firn_transactions`).
//!
//! ```text
//!   {"round":0,"opt":1,"system":"pt","us":310.2,"us_with_copy":312.9,"bytes":8192000.0,"runs":2000.0,"blind":0,"called":0}
//! ```

use anyhow::{Context as _, Result};
use clap::Args;
use firn_transactions::{
    GuestCallIdentity, RunResult, StructureWorkload, TrackerSystem, WriteShape,
};
use serde::{Deserialize, Serialize};

/// Measures operations on a data structure, or writes of a shape, once with each tracker in each
/// round.
#[derive(Args, Clone, Debug)]
pub struct TransactionsArgs {
    /// Structure and operation, such as avl-insert.
    #[arg(long, required_unless_present = "shape")]
    workload: Option<String>,
    /// Pages per transaction, writes per page, pages of each area, and areas, such as 2,4,256,1.
    #[arg(long, conflicts_with = "workload")]
    shape: Option<WriteShape>,
    /// The trackers: pt, emul, pt_host and so on.
    #[arg(long, value_delimiter = ',', required = true)]
    systems: Vec<TrackerSystem>,
    /// Operations per transaction.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    opt: Vec<usize>,
    /// Operations of a run; with a shape, transactions.
    #[arg(long, default_value_t = 1000)]
    operations: usize,
    /// Rounds.
    #[arg(long, default_value_t = 1)]
    rounds: usize,
    /// For trackers on the host: the application's name.
    #[arg(long, default_value = "ledger")]
    name: String,
    /// For trackers on the host: the application's key, 64 hexadecimal digits.
    #[arg(long, default_value = "")]
    key: String,
}

impl TransactionsArgs {
    fn measure_run(
        &self,
        system: TrackerSystem,
        identity: &GuestCallIdentity,
        opt: usize,
    ) -> Result<RunResult> {
        if let Some(shape) = self.shape {
            return shape.measure_tracker(system, identity, self.operations);
        }
        let name = self.workload.as_deref().unwrap_or_default();
        let workload = StructureWorkload::find_by_name(name)
            .with_context(|| format!("no workload {name:?}"))?;
        workload.measure_tracker(system, identity, self.operations, opt)
    }
}

/// The output line of each run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MeasuredRun {
    /// The number of the round.
    pub round: usize,
    /// Operations per transaction.
    pub opt: usize,
    /// The tracker.
    pub system: String,
    /// The measured costs.
    #[serde(flatten)]
    pub taken: RunResult,
}

/// Runs to the end.
///
/// # Errors
/// If there is no such workload, or a tracker does not work here.
pub fn run(args: &TransactionsArgs) -> Result<()> {
    let identity = GuestCallIdentity { name: args.name.clone(), key: args.key.clone() };
    for round in 0..args.rounds {
        for &opt in &args.opt {
            for &system in &args.systems {
                let taken = args.measure_run(system, &identity, opt.max(1))?;
                let measured = MeasuredRun { round, opt, system: system.name().to_owned(), taken };
                println!("{}", serde_json::to_string(&measured)?);
            }
        }
    }
    Ok(())
}
