//! `firn-guest programs`: random programs on critical data areas, with a tracker that needs a host below (see `firn_programs`).
//!
//! ```text
//!   {"done":true,"tracker":"emul_host","transactions":10055}
//! ```
//!
//! A change that is not told, or told otherwise than it was, ends it with what differs and where.

use anyhow::{Result, bail};
use clap::Args;
use firn_app::{Host, Kind, Options, Precision, Session, Source};
use firn_programs::{Extent, Variant, run_all};
use serde_json::json;

/// Runs random programs with a tracker.
#[derive(Args, Clone, Debug)]
pub struct Programs {
    /// pt_host, emul_host, or pt_host_noted (pages, of stores that are noted).
    #[arg(long)]
    tracker: String,
    /// As which application.
    #[arg(long, default_value = "ledger")]
    name: String,
    /// Its key, 64 hexadecimal digits.
    #[arg(long)]
    key: String,
    /// Where randomness starts.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl Programs {
    fn host(&self) -> Result<Host> {
        let host = Host::open(&self.name, &self.key)?;
        Ok(match self.tracker.as_str() {
            "pt_host" => host,
            "pt_host_noted" => host.noting_stores(Precision::Pages)?,
            "emul_host" => host.noting_stores(Precision::Words)?,
            other => bail!("no tracker {other:?}"),
        })
    }

    fn open(&self, precision: Precision, undo: bool) -> Result<Session> {
        let options = Options::new(&self.name).source(Source::Allocated);
        let options = options.precision(precision).undo(undo);
        Ok(Session::open_with(options, Box::new(self.host()?))?)
    }
}

/// Runs to the end.
///
/// # Errors
/// If the tracker does not work here.
///
/// # Panics
/// If something is wrong.
pub fn run(args: &Programs) -> Result<()> {
    // Once with an error that is one, before sessions that must open.
    let notes_words = args.open(Precision::Pages, true)?.tracker() == Kind::Stores;
    let without = if notes_words { Precision::Words } else { Precision::Pages };
    #[expect(clippy::expect_used, reason = "documented: it opened before")]
    let open = |precision, undo| args.open(precision, undo).expect("a session");
    let (words, pages) = (|| open(Precision::Words, true), || open(Precision::Pages, true));
    let without = || open(without, false);
    let variants = [
        Variant { undo: true, open: &words },
        Variant { undo: true, open: &pages },
        Variant { undo: false, open: &without },
    ];
    let extent = Extent::new(args.seed);
    run_all(&variants, extent);
    let transactions = extent.transactions();
    println!("{}", json!({ "done": true, "tracker": args.tracker, "transactions": transactions }));
    Ok(())
}
