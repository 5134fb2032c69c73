//! `firn-guest ring`: a token that circulates among several VMs, so that a duplicated, returned or
//! lost token is detected.
//!
//! The token is a number. Each VM adds one and passes it on, so that it returns increased by the
//! number of VMs. A VM has the last number that it received in its memory alone.
//!
//! ```text
//!   -> {"token":17}          from the previous VM; the reply is {"got":17}, then the token is passed on
//!   -> {"begin":true}        from outside, to one of them, once
//!   -> {"ask":true}          from outside; the reply is {"last":16,"passed":5,"wrong":0,"broken":0}
//! ```
//!
//! A VM that receives no reply reconnects and sends the token again: that number, and no other, may
//! arrive twice, as the first of a new connection. Between VMs that fail over as one, no connection
//! breaks.

mod serve;
mod token;

use std::net::SocketAddr;

use anyhow::Result;
use clap::Args;

pub use token::TokenRecord;

/// The port that a VM listens on.
pub const PORT: u16 = 7011;

/// Passes a token on, for ever.
#[derive(Args, Clone, Debug)]
pub struct RingArgs {
    /// The number of VMs.
    #[arg(long)]
    vms: u64,
    /// The address of the next VM.
    next: SocketAddr,
    /// Maximum number of times per second that the token is passed on.
    #[arg(long, default_value_t = 50.0)]
    rate: f64,
}

/// Passes tokens on for ever.
pub fn run(args: &RingArgs) -> Result<()> {
    serve::serve_ring(args)
}
