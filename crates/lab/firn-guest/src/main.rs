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
    verb: GuestVerb,
}

#[derive(Subcommand)]
enum GuestVerb {
    Agent(agent::AgentArgs),
    Bank(bank::BankArgs),
    Writers(writers::WritersArgs),
    Verify(writers::VerifyArgs),
    Synthetic(synthetic::SyntheticArgs),
    Toucher(toucher::ToucherArgs),
    Random(random::RandomArgs),
    DiskDma(disk::DiskDma),
    NetDma(net::NetDma),
    Heartbeat(heartbeat::HeartbeatArgs),
    Ring(ring::RingArgs),
    Sha(sha::ShaArgs),
    Ledger(ledger::LedgerArgs),
    Npb(npb::NpbArgs),
    Programs(programs::ProgramsArgs),
    Transactions(transactions::TransactionsArgs),
    /// Prints the kernel's report on memory.
    MemReport,
}

fn main() -> ExitCode {
    match run_verb(Cli::parse().verb) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("firn-guest: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run_verb(verb: GuestVerb) -> Result<bool> {
    match verb {
        GuestVerb::Agent(args) => agent::run(&args).map(|()| true),
        GuestVerb::Bank(args) => bank::run(&args).map(|()| true),
        GuestVerb::Writers(args) => writers::run(&args),
        GuestVerb::Verify(args) => writers::run_verify(&args),
        GuestVerb::Synthetic(args) => synthetic::run(&args),
        GuestVerb::Toucher(args) => toucher::run(&args),
        GuestVerb::Random(args) => random::run(&args),
        GuestVerb::DiskDma(args) => disk::run(&args),
        GuestVerb::NetDma(args) => net::run(&args),
        GuestVerb::Heartbeat(args) => heartbeat::run(&args).map(|()| true),
        GuestVerb::Ring(args) => ring::run(&args).map(|()| true),
        GuestVerb::Sha(args) => sha::run(&args).map(|()| true),
        GuestVerb::Ledger(args) => ledger::run(&args),
        GuestVerb::Npb(args) => npb::run(&args),
        GuestVerb::Programs(args) => programs::run(&args).map(|()| true),
        GuestVerb::Transactions(args) => transactions::run(&args).map(|()| true),
        GuestVerb::MemReport => mem_report::run().map(|()| true),
    }
}
