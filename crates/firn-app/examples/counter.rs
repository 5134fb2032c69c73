//! Counts its own starts, also when it is killed at any instant: `counter counter.log`.

use firn_app::{Error, Options, Session, Target};

fn main() -> Result<(), Error> {
    let log = std::env::args().nth(1).unwrap_or_else(|| "counter.log".into());
    println!("start {}", start(log.as_ref())?);
    Ok(())
}

/// Performs one start; returns its number.
pub fn start(log: &std::path::Path) -> Result<u64, Error> {
    let mut session = Session::open(Options::new("counter").backup(Target::file(log)))?;
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
