//! `firn-guest VERB`: see the library's documentation.
//!
//! Exit code: 0 success, 1 a check failed (a page, a sector, an echo), 2 an error.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use firn_guest::walkers::{random, synthetic, toucher};
use firn_guest::{
    agent, bank, disk, heartbeat, ledger, mem_report, net, npb, programs, ring, sha, transactions,
    writers,
};

/// Programs for Firn's test guests.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    Agent(agent::Agent),
    Bank(bank::Bank),
    Writers(writers::Writers),
    Verify(writers::Verify),
    Synthetic(synthetic::Synthetic),
    Toucher(toucher::Toucher),
    Random(random::Random),
    DiskDma(disk::DiskDma),
    NetDma(net::NetDma),
    Heartbeat(heartbeat::Heartbeat),
    Ring(ring::Ring),
    Sha(sha::Sha),
    Ledger(ledger::Ledger),
    Npb(npb::Npb),
    Programs(programs::Programs),
    Transactions(transactions::Transactions),
    /// Prints the kernel's report on memory.
    MemReport,
}

fn main() -> ExitCode {
    match run(Cli::parse().verb) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("firn-guest: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(verb: Verb) -> Result<bool> {
    match verb {
        Verb::Agent(args) => agent::run(&args).map(|()| true),
        Verb::Bank(args) => bank::run(&args).map(|()| true),
        Verb::Writers(args) => writers::run(&args),
        Verb::Verify(args) => writers::verify(&args),
        Verb::Synthetic(args) => synthetic::run(&args),
        Verb::Toucher(args) => toucher::run(&args),
        Verb::Random(args) => random::run(&args),
        Verb::DiskDma(args) => disk::run(&args),
        Verb::NetDma(args) => net::run(&args),
        Verb::Heartbeat(args) => heartbeat::run(&args).map(|()| true),
        Verb::Ring(args) => ring::run(&args).map(|()| true),
        Verb::Sha(args) => sha::run(&args).map(|()| true),
        Verb::Ledger(args) => ledger::run(&args),
        Verb::Npb(args) => npb::run(&args),
        Verb::Programs(args) => programs::run(&args).map(|()| true),
        Verb::Transactions(args) => transactions::run(&args).map(|()| true),
        Verb::MemReport => mem_report::run().map(|()| true),
    }
}
