//! `halite-pgbench`: a database that is cached in memory, restored while clients query it.
//!
//! Reproduces Figure 6 of Halite (section 8.2.2). There, transactions completed in five minutes are
//! counted; here, a fixed number of transactions is timed, which measures the same wait and ends
//! sooner.
//!
//! PostgreSQL with pgbench's database at scale 40 (600 MB), all of it in the guest's memory: in the
//! page cache, and part of it in shared buffers. pgbench runs in the guest, with select queries
//! only as in the paper, two clients on two threads. [`super::application`] documents what varies,
//! what is held equal and what is measured.

use anyhow::Result;

use super::application::ApplicationRun;
use crate::lab::Lab;
use crate::report::Report;

/// Transactions of each client before the checkpoint.
const TRANSACTIONS_BEFORE: u32 = 2000;
/// Transactions of each client after the checkpoint, without those of about a second.
const QUICK: u32 = 2000;
const FULL: u32 = 3000;

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let application = ApplicationRun {
        name: "halite-pgbench",
        memory_mib: 1536,
        services: "postgres",
        script: guest_script(lab.extent.pick(QUICK, FULL)),
        quick_rounds: 1,
        figure: "Restore overhead of pgbench (Halite, Figure 6)",
        drawing: "halite-figure-6",
    };
    application.run(lab)
}

fn guest_script(after: u32) -> String {
    format!("before={TRANSACTIONS_BEFORE} after={after}\n{}", include_str!("halite_pgbench.sh"))
}
