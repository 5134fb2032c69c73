//! `firn-guest ledger`: an application with transactions, which knows itself what each of them
//! changed.
//!
//! It writes random words on random pages of a critical data area, commits, and compares the
//! changes that `firn_app` reports with its own: a tracker must never fail to report a change.
//! Output is JSON lines:
//!
//! ```text
//!   {"ready":true,"tracker":"pt_host"}
//!   {"progress":12000,"seconds":1.0,"wrong":0,"blind":0,"called":0}
//!   {"done":true,"transactions":100000,"wrong":0,"blind":0,"called":0,"us_per_transaction":12.5}
//! ```
//!
//! `us_per_transaction` is the time within begin and commit, the writes included.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Args;
use firn_app::{Area, HostTracker, PAGE, Precision, Session, SessionOptions, TrackerKind};
use serde_json::{Value, json};

use crate::stamp::mix;

/// Words of a page.
const WORDS: u64 = PAGE as u64 / 8;

/// Commits transactions, and checks the changes that are reported for them.
#[derive(Args, Clone, Debug)]
pub struct LedgerArgs {
    /// The tracker that finds the writes: pt, emul, pt_assisted, scan, compare, pt_host (Firn on
    /// the host tracks), or emul_host (its plugin there records stores).
    #[arg(long, default_value = "pt_host")]
    tracker: String,
    /// With pt_host and emul_host: the application's name.
    #[arg(long, default_value = "ledger")]
    name: String,
    /// With pt_host and emul_host: its key, 64 hexadecimal digits.
    #[arg(long, default_value = "")]
    key: String,
    /// Pages of its area.
    #[arg(long, default_value_t = 80)]
    pages: u64,
    /// Words that a transaction writes, each on a page drawn at random.
    #[arg(long, default_value_t = 4)]
    writes: u64,
    /// Transactions; 0 runs for ever.
    #[arg(long, default_value_t = 10_000)]
    transactions: u64,
    /// Count whole pages as changed, without comparing.
    #[arg(long)]
    whole_pages: bool,
    /// With emul_host: keep no copy of committed data, so that recorded stores are reported without
    /// a comparison.
    #[arg(long)]
    no_undo: bool,
    /// Milliseconds between progress lines.
    #[arg(long, default_value_t = 200)]
    progress_ms: u64,
    /// Chooses the words that are written.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Runs to the end. False if a change was not reported.
pub fn run(args: &LedgerArgs) -> Result<bool> {
    let (mut session, area) = open_session(args)?;
    println!("{}", json!({ "ready": true, "tracker": session.tracker_kind().name() }));
    let mut tally = LedgerTally { since: Instant::now(), count: 0, wrong: 0, busy: Duration::ZERO };
    let mut last_report = Duration::ZERO;
    while args.transactions == 0 || tally.count < args.transactions {
        let expected = run_transaction(&mut session, &area, args, &mut tally)?;
        tally.wrong += u64::from(!is_reported(&session, args.whole_pages, &expected));
        if tally.since.elapsed() >= last_report + Duration::from_millis(args.progress_ms) {
            last_report = tally.since.elapsed();
            println!("{}", tally.progress_line(&session));
        }
    }
    println!("{}", tally.done_line(&session));
    Ok(tally.wrong == 0)
}

fn open_session(args: &LedgerArgs) -> Result<(Session, Area)> {
    ensure!(args.pages > 0, "an area has a page at least");
    let precision = if args.whole_pages { Precision::Pages } else { Precision::Words };
    let options = SessionOptions::new(&args.name).precision(precision);
    let mut session = match args.tracker.as_str() {
        "pt_host" => {
            Session::open_with(options, Box::new(HostTracker::open(&args.name, &args.key)?))?
        }
        "emul_host" => {
            let host =
                HostTracker::open(&args.name, &args.key)?.recording_stores(Precision::Words)?;
            Session::open_with(options.undo(!args.no_undo), Box::new(host))?
        }
        other => Session::open(options.tracker(other.parse::<TrackerKind>()?))?,
    };
    let area = session.allocate("accounts", args.pages as usize * PAGE)?;
    // The first commit of an area reports all of it.
    session.begin()?.commit()?;
    Ok((session, area))
}

/// Runs one transaction; returns the words that it changed.
fn run_transaction(
    session: &mut Session,
    area: &Area,
    args: &LedgerArgs,
    tally: &mut LedgerTally,
) -> Result<BTreeSet<usize>> {
    tally.count += 1;
    let draw = |n: u64| mix(args.seed ^ tally.count << 20 ^ n);
    let at = |n: u64| (draw(2 * n) % (args.pages * WORDS)) as usize;
    let since = Instant::now();
    let mut open = session.begin()?;
    let words = open.words(area);
    for n in 0..args.writes {
        // The count makes each value differ from the word's old one.
        words[at(n)] = tally.count << 8 | n & 0xff;
    }
    open.commit()?;
    tally.busy += since.elapsed();
    Ok((0..args.writes).map(at).collect())
}

/// Whether each of these words was reported, and, where the tracker reports words, no other.
fn is_reported(session: &Session, whole_pages: bool, expected: &BTreeSet<usize>) -> bool {
    let reported: BTreeSet<usize> = session
        .changes()
        .iter()
        .flat_map(|change| change.bytes.start / 8..change.bytes.end.div_ceil(8))
        .collect();
    if whole_pages { expected.is_subset(&reported) } else { *expected == reported }
}

struct LedgerTally {
    since: Instant,
    count: u64,
    wrong: u64,
    busy: Duration,
}

impl LedgerTally {
    fn progress_line(&self, session: &Session) -> Value {
        json!({ "progress": self.count, "seconds": self.since.elapsed().as_secs_f64(),
            "wrong": self.wrong, "blind": session.tracker_counts().blind,
            "called": session.tracker_counts().called })
    }

    fn done_line(&self, session: &Session) -> Value {
        json!({ "done": true, "transactions": self.count, "wrong": self.wrong,
            "blind": session.tracker_counts().blind, "called": session.tracker_counts().called,
            "us_per_transaction": self.busy.as_secs_f64() * 1e6 / self.count.max(1) as f64 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        ledger: LedgerArgs,
    }

    fn ledger(words: &[&str]) -> LedgerArgs {
        Cli::parse_from([&["ledger"], words].concat()).ledger
    }

    #[test]
    fn the_ledger_carries_out_its_operations() {
        for tracker in ["pt", "compare"] {
            assert!(run(&ledger(&["--tracker", tracker, "--transactions", "50"])).unwrap());
            let pages = ["--tracker", tracker, "--transactions", "50", "--whole-pages"];
            assert!(run(&ledger(&pages)).unwrap());
        }
    }

    #[test]
    fn an_unreported_change_is_detected() {
        let args = ledger(&["--tracker", "compare", "--pages", "2"]);
        let (mut session, area) = open_session(&args).unwrap();
        let mut tally =
            LedgerTally { since: Instant::now(), count: 0, wrong: 0, busy: Duration::ZERO };
        let mut expected = run_transaction(&mut session, &area, &args, &mut tally).unwrap();
        assert!(is_reported(&session, false, &expected));
        expected.insert(2 * PAGE / 8 - 1);
        assert!(!is_reported(&session, false, &expected));
        assert!(!is_reported(&session, true, &expected));
    }

    #[test]
    fn a_missing_host_is_an_error() {
        let error = run(&ledger(&["--key", &"00".repeat(32)])).unwrap_err().to_string();
        assert!(error.contains("no device to call the host through"), "{error}");
    }
}
