//! Counts its own starts, also when it is killed at any instant: `counter counter.log`.

use firn_app::{BackupTarget, Error, Session, SessionOptions};

fn main() -> Result<(), Error> {
    let log = std::env::args().nth(1).unwrap_or_else(|| "counter.log".into());
    println!("start {}", count_start(log.as_ref())?);
    Ok(())
}

/// Performs one start; returns its number.
pub fn count_start(log: &std::path::Path) -> Result<u64, Error> {
    let mut session =
        Session::open(SessionOptions::new("counter").backup(BackupTarget::file(log)))?;
    let state = session.allocate("state", 5 * 8)?;
    session.recover()?;

    let mut transaction = session.begin()?;
    let words = transaction.words(&state);
    words[1 + words[0] as usize % 4] = words[0];
    words[0] += 1;
    let starts = words[0];
    transaction.commit()?;
    Ok(starts)
}
