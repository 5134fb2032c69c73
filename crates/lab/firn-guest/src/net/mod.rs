//! `firn-guest net-dma`: DMA of a network card into and from guest memory.
//!
//! The guest echoes messages, over UDP and TCP on the same port; the sender checks the echoes. The
//! sender can be in another guest or on the host ([`load`]), and outlives the guest: echoes that
//! are missing while the guest is paused count as lost, not as wrong.

mod count;
mod echo;
mod gossip;
pub mod load;
mod talk;

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, Subcommand};
use serde_json::json;

/// The port of the echo server.
pub const PORT: u16 = 7007;

/// The port of the counter.
pub const COUNT_PORT: u16 = 7008;

/// Loads the network card: echoes, or sends and checks the echoes.
#[derive(Args, Clone, Debug)]
pub struct NetDma {
    #[command(subcommand)]
    role: NetRole,
}

#[derive(Subcommand, Clone, Debug)]
enum NetRole {
    /// Echoes all messages, UDP and TCP.
    Echo {
        /// Port to listen on.
        #[arg(long, default_value_t = PORT)]
        port: u16,
    },
    /// Answers each UDP datagram with its first eight bytes and the number of datagrams answered:
    /// each answer is a change of state.
    Count {
        /// Port to listen on.
        #[arg(long, default_value_t = COUNT_PORT)]
        port: u16,
    },
    /// Exchanges progress with another such program, for ever.
    Gossip {
        /// Address of the other, which listens on the same port.
        to: SocketAddr,
        /// Messages per second at most.
        #[arg(long, default_value_t = 100.0)]
        rate: f64,
    },
    /// Sends messages over one TCP connection and checks their echoes, until the connection breaks.
    Talk {
        /// Destination.
        to: SocketAddr,
        /// Bytes of each message.
        #[arg(long, default_value_t = 1200)]
        bytes: usize,
        /// Messages per second at most.
        #[arg(long, default_value_t = 50.0)]
        rate: f64,
    },
    /// Sends messages and checks their echoes.
    Send {
        /// Destination.
        to: SocketAddr,
        /// Over UDP; TCP otherwise.
        #[arg(long)]
        udp: bool,
        /// Bytes of each message.
        #[arg(long, default_value_t = 1200)]
        bytes: usize,
        /// Messages per second; 0 is as fast as echoes arrive.
        #[arg(long, default_value_t = 0.0)]
        rate: f64,
        /// Ends after this many seconds.
        #[arg(long, default_value_t = 10.0)]
        seconds: f64,
    },
}

/// Echoes for ever, or sends to the end. False if an echo was wrong.
pub fn run(args: &NetDma) -> Result<bool> {
    match &args.role {
        NetRole::Echo { port } => echo::serve_echoes(*port).map(|()| true),
        NetRole::Count { port } => count::serve_counts(*port).map(|()| true),
        NetRole::Gossip { to, rate } => gossip::run_gossip(to.port(), *to, *rate).map(|()| true),
        NetRole::Talk { to, bytes, rate } => talk::run_talk(*to, *bytes, *rate),
        NetRole::Send { to, udp, bytes, rate, seconds } => {
            let mut load = load::EchoLoad::new(*to, *udp, *bytes);
            let report = load.run_for(Duration::from_secs_f64(*seconds), *rate);
            println!(
                "{}",
                json!({
                    "done": true,
                    "sent": report.sent,
                    "echoed": report.echoed,
                    "wrong": report.wrong,
                })
            );
            Ok(report.wrong == 0)
        }
    }
}
