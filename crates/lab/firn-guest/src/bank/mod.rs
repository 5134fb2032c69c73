//! `firn-guest bank`: accounts of several VMs, and transfers between them.
//!
//! VM `n` modulo the number of VMs has account `n`, in its memory alone: changes that its
//! checkpoint does not contain are lost. Clients are outside, and send requests to the VM that has
//! the account (for a transfer, the payer's):
//!
//! ```text
//!   client            VM of the payer                          VM of the payee
//!     |- transfer 7 ----> enough? the account is locked
//!     |                     |------------ deposit 7 --------------> adds the money; records 7
//!     |                     |<------------- done -------------------  7 once more: done already
//!     |<---- done -------- withdraws, unlocks; records 7
//!     |- transfer 7 ----> done already
//! ```
//!
//! While an account is locked, requests for its balance or for withdrawals wait; deposits do not.
//! So a transfer happens at one instant, that of the deposit, and the clients' observations have an
//! order (`firn-linear` searches for it). A client may repeat a request any number of times, on any
//! connection: the VM recognizes it by its number.
//!
//! VMs send requests to each other by TCP, over one connection for each of their clients. A VM
//! reconnects a broken connection, and counts it: between VMs that fail over as one, none should
//! break.

mod books;
mod messages;
mod serve;

use std::net::SocketAddr;

use anyhow::{Result, ensure};
use clap::Args;

pub use messages::{AnswerBody, BankReply, BankRequest, TransferLog};

/// The port that a VM listens on.
pub const PORT: u16 = 7010;

/// Serves a part of the accounts of a bank.
#[derive(Args, Clone, Debug)]
pub struct BankArgs {
    /// The number of this VM, from 0.
    #[arg(long)]
    number: usize,
    /// The addresses of all VMs.
    #[arg(long, value_delimiter = ',', required = true)]
    vms: Vec<SocketAddr>,
    /// The number of accounts.
    #[arg(long, default_value_t = 16)]
    accounts: usize,
    /// The initial balance of each account.
    #[arg(long, default_value_t = 1000)]
    held: i64,
}

/// Serves for ever.
pub fn run(args: &BankArgs) -> Result<()> {
    ensure!(args.number < args.vms.len(), "there is no VM {} of {}", args.number, args.vms.len());
    serve::serve_bank(args)
}
