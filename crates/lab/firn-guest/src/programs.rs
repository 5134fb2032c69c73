//! `firn-guest programs`: random programs on critical data areas, with a tracker that needs Firn on
//! the host (see `firn_programs`).
//!
//! ```text
//!   {"done":true,"tracker":"emul_host","transactions":10055}
//! ```
//!
//! The program ends with the difference and its position if a change is not reported, or is
//! reported wrongly, or if data that was only read is reported as written.

use anyhow::{Result, bail};
use clap::Args;
use firn_app::{Area, HostTracker, MemorySource, Precision, Session, SessionOptions, TrackerKind};
use firn_programs::{SessionVariant, TestExtent, run_all};
use serde_json::json;

/// Sizes that C libraries copy in several ways: by vectors, by one instruction that loads and
/// stores.
const READ_BYTES: [usize; 6] = [8, 24, 100, 1000, 3000, 64 << 10];

/// Runs random programs with a tracker.
#[derive(Args, Clone, Debug)]
pub struct ProgramsArgs {
    /// pt_host, emul_host, or pt_host_noted (pages, of stores that are recorded).
    #[arg(long)]
    tracker: String,
    /// The application's name.
    #[arg(long, default_value = "ledger")]
    name: String,
    /// The application's key, 64 hexadecimal digits.
    #[arg(long)]
    key: String,
    /// Chooses the programs.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl ProgramsArgs {
    fn open_host(&self) -> Result<HostTracker> {
        let host = HostTracker::open(&self.name, &self.key)?;
        Ok(match self.tracker.as_str() {
            "pt_host" => host,
            "pt_host_noted" => host.recording_stores(Precision::Pages)?,
            "emul_host" => host.recording_stores(Precision::Words)?,
            other => bail!("no tracker {other:?}"),
        })
    }

    fn open_session(&self, precision: Precision, undo: bool) -> Result<Session> {
        let options = SessionOptions::new(&self.name).source(MemorySource::Allocated);
        let options = options.precision(precision).undo(undo);
        Ok(Session::open_with(options, Box::new(self.open_host()?))?)
    }
}

/// Runs to the end.
///
/// # Errors
/// If the tracker does not work here.
///
/// # Panics
/// If a change is reported wrongly.
pub fn run(args: &ProgramsArgs) -> Result<()> {
    // Opens one session whose error is returned, before those that must open.
    let notes_words =
        args.open_session(Precision::Pages, true)?.tracker_kind() == TrackerKind::Stores;
    let without = if notes_words { Precision::Words } else { Precision::Pages };
    #[expect(clippy::expect_used, reason = "documented: it opened before")]
    let open = |precision, undo| args.open_session(precision, undo).expect("a session");
    let (words, pages) = (|| open(Precision::Words, true), || open(Precision::Pages, true));
    let without = || open(without, false);
    check_reads_unreported(without())?;
    let variants = [
        SessionVariant { can_abort: true, open: &words },
        SessionVariant { can_abort: true, open: &pages },
        SessionVariant { can_abort: false, open: &without },
    ];
    let extent = TestExtent::new(args.seed);
    run_all(&variants, extent);
    let transactions = extent.transaction_count();
    println!("{}", json!({ "done": true, "tracker": args.tracker, "transactions": transactions }));
    Ok(())
}

/// Copies parts of an area, and checks that no change is reported.
fn check_reads_unreported(mut session: Session) -> Result<()> {
    let area = session.allocate("read", 64 << 10)?;
    let mut transaction = session.begin()?;
    transaction.bytes(&area).fill(1);
    transaction.commit()?;
    READ_BYTES.iter().try_for_each(|&bytes| check_read_unreported(&mut session, &area, bytes))
}

/// Checks one size. Recorded stores match by address, whichever program made them, so the check is
/// tried several times.
fn check_read_unreported(session: &mut Session, area: &Area, bytes: usize) -> Result<()> {
    let mut reported = String::new();
    for _ in 0..3 {
        let mut transaction = session.begin()?;
        let copy = std::hint::black_box(transaction.bytes(area)[..bytes].to_vec());
        transaction.commit()?;
        if copy.iter().all(|&byte| byte == 1) && session.changes().is_empty() {
            return Ok(());
        }
        reported = format!("{:?}", session.changes());
    }
    bail!(
        "{bytes} bytes were read and nothing was written, but the reported changes are {reported}"
    )
}
