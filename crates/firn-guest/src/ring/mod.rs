//! `firn-guest ring`: a token that goes round several VMs, and is found out if it is seen twice, goes back or is lost.
//!
//! The token is a number. Each VM adds one and passes it on, so that it comes back higher by the number of VMs. What a VM saw last is in its
//! memory alone.
//!
//! ```text
//!   -> {"token":17}          from the VM before; the answer is {"got":17}, then it is passed on
//!   -> {"begin":true}        from outside, to one of them, once
//!   -> {"ask":true}          from outside; the answer is {"last":16,"passed":5,"wrong":0,"broken":0}
//! ```
//!
//! A VM that hears no answer makes a new connection and says it again: that number, and no other, may come twice, as the first of a new
//! connection. Between VMs that fail over together no connection breaks.

mod serve;
mod token;

use std::net::SocketAddr;

use anyhow::Result;
use clap::Args;

pub use token::Passed;

/// The port it listens on.
pub const PORT: u16 = 7011;

/// Passes a token on, for ever.
#[derive(Args, Clone, Debug)]
pub struct Ring {
    /// How many VMs there are.
    #[arg(long)]
    vms: u64,
    /// The next of them.
    next: SocketAddr,
    /// How often the token is passed on each second, at most.
    #[arg(long, default_value_t = 50.0)]
    rate: f64,
}

/// Passes tokens on for ever.
pub fn run(args: &Ring) -> Result<()> {
    serve::serve(args)
}
