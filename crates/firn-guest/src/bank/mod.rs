//! `firn-guest bank`: accounts of several VMs, and money that goes between them.
//!
//! Account `n` is with VM `n` modulo their number, in its memory alone: what its checkpoint doesn't keep is lost. Clients are outside,
//! and ask the VM that has the account (of a transfer, the one that pays):
//!
//! ```text
//!   client            VM of the payer                          VM of the payee
//!     |- transfer 7 ----> enough? the account is locked
//!     |                     |------------ deposit 7 --------------> held is more; 7 is noted
//!     |                     |<------------- done -------------------  7 again: done already
//!     |<---- done -------- held is less, unlocked; 7 is noted
//!     |- transfer 7 ----> done already
//! ```
//!
//! While an account is locked, who wants to know what it holds or to take from it waits; who pays in does not. So a transfer happens at one
//! moment, that of the deposit, and whatever clients see has an order (`firn-linear` looks for it). A question may be asked any number of
//! times, by any connection: by its number it is known again.
//!
//! VMs ask each other by TCP, over a connection for each of their clients. One that breaks is made again, and counted: between VMs that
//! fail over together none should.

mod books;
mod serve;
mod words;

use std::net::SocketAddr;

use anyhow::{Result, ensure};
use clap::Args;

pub use words::{Known, Question, Reply, Said};

/// The port it listens on.
pub const PORT: u16 = 7010;

/// Keeps a part of the accounts of a bank.
#[derive(Args, Clone, Debug)]
pub struct Bank {
    /// Which of the VMs this is, from 0.
    #[arg(long)]
    number: usize,
    /// Where they listen, all of them.
    #[arg(long, value_delimiter = ',', required = true)]
    vms: Vec<SocketAddr>,
    /// How many accounts there are.
    #[arg(long, default_value_t = 16)]
    accounts: usize,
    /// What each holds in the beginning.
    #[arg(long, default_value_t = 1000)]
    held: i64,
}

/// Serves for ever.
pub fn run(args: &Bank) -> Result<()> {
    ensure!(args.number < args.vms.len(), "there is no VM {} of {}", args.number, args.vms.len());
    serve::serve(args)
}
