//! `firn-guest writers` and `firn-guest verify`: memory that is written continuously and can be
//! checked at any time.
//!
//! One thread per vCPU, pinned, owns a region that no other thread touches. It rewrites the pages
//! of its region in order or at random, checking each before it overwrites it, and records in a
//! table of its own the expected stamp of each page. So a page that is torn, lost or too old is
//! detected the next time it is written, or at once on request:
//!
//! ```text
//!   firn-guest verify --- /run/firn/writers.sock --- writers: each thread stops writing, reads all its pages, replies
//! ```
//!
//! Replies are one JSON line ([`report`]).

mod region;
pub mod report;
mod socket;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;

use crate::stamp::StampStyle;
use crate::threads;
use region::{WriteOrder, WriterRegion};

/// Writes memory from every vCPU, each its own region, and checks it.
#[derive(Args, Clone, Debug)]
pub struct WritersArgs {
    /// Threads; one per vCPU unless given.
    #[arg(long)]
    threads: Option<usize>,
    /// Memory of all threads together.
    #[arg(long, default_value_t = 64)]
    mib: usize,
    /// Pages that each thread writes per second; 0 is as fast as possible.
    #[arg(long, default_value_t = 0.0)]
    rate: f64,
    /// The percentage of its size to which a page compresses.
    #[arg(long, default_value_t = 50)]
    compresses_to: u8,
    /// Rewrite first and last words of a page only: dirties memory faster.
    #[arg(long)]
    light: bool,
    /// The order in which pages are written.
    #[arg(long, value_enum, default_value_t = WriteOrder::Sequential)]
    order: WriteOrder,
    /// Don't check a page before overwriting it.
    #[arg(long)]
    no_check: bool,
    /// Ends after this many seconds, with a last verification; 0 runs until a stop request.
    #[arg(long, default_value_t = 0.0)]
    seconds: f64,
    /// Socket for verify, status and stop.
    #[arg(long, default_value = socket::PATH)]
    socket: PathBuf,
}

/// Requests that running writers check all their memory.
#[derive(Args, Clone, Debug)]
pub struct VerifyArgs {
    /// The request: verify, status (counts only) or stop.
    #[arg(default_value = "verify", value_parser = ["verify", "status", "stop"])]
    question: String,
    /// Socket of the writers.
    #[arg(long, default_value = socket::PATH)]
    socket: PathBuf,
}

/// Runs the writers to their end. False if a wrong page was found.
pub fn run(args: &WritersArgs) -> Result<bool> {
    let style = StampStyle::compressing_to(args.compresses_to, args.light);
    let count = args.threads.unwrap_or_else(threads::vcpu_count).max(1);
    let pages = (args.mib * 256 / count).max(1);
    let stop = Arc::new(AtomicBool::new(false));
    let (filled, all_filled) = mpsc::channel();
    let mut questions = Vec::new();
    let mut writers = Vec::new();
    for number in 0..count {
        let (ask, asked) = mpsc::channel();
        questions.push(ask);
        let (stop, filled, args) = (Arc::clone(&stop), filled.clone(), args.clone());
        writers.push(thread::Builder::new().name(format!("writer {number}")).spawn(move || {
            threads::pin_thread(number)?;
            let mut region =
                WriterRegion::new(number as u32, pages, style, args.order, !args.no_check);
            filled.send(()).context("the main thread has ended")?;
            region.run_writer(args.rate, &asked, &stop);
            anyhow::Ok(region.verify_all())
        })?);
    }
    for _ in 0..count {
        all_filled.recv().context("a writer ended before it began")?;
    }
    println!("{}", serde_json::json!({"ready": true, "threads": count, "pages": pages * count}));
    let server = socket::WritersServer::start_server(&args.socket, questions, Arc::clone(&stop))?;
    wait_until_stopped(args.seconds, &stop);
    let regions = writers.into_iter().map(|writer| match writer.join() {
        Ok(region) => region,
        Err(_) => Err(anyhow::anyhow!("a writer panicked")),
    });
    let report = report::WritersReport::from_regions(regions.collect::<Result<_>>()?);
    drop(server);
    println!("{}", serde_json::to_string(&report)?);
    Ok(report.wrong == 0)
}

/// Sends a request to running writers. False if they found a wrong page.
pub fn run_verify(args: &VerifyArgs) -> Result<bool> {
    let report = socket::send_request(&args.socket, &args.question)?;
    println!("{}", serde_json::to_string(&report)?);
    Ok(report.wrong == 0)
}

fn wait_until_stopped(seconds: f64, stop: &AtomicBool) {
    let mut left = if seconds > 0.0 { seconds } else { f64::INFINITY };
    while left > 0.0 && !stop.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_millis(50));
        left -= 0.05;
    }
    stop.store(true, Ordering::Relaxed);
}
