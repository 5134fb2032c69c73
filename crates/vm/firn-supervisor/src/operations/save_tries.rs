//! Tries of a save: a save fails if the guest gives memory back that is not copied yet. Nothing is
//! left of it, and it is tried again, [`ATTEMPTS_MAX`] times in all.
//!
//! A guest gives memory back in bursts: while its balloon grows, or every two seconds if it reports
//! free pages. So the next try begins a moment later, and not in the same burst.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::records::control_protocol::OperationProgress;
use crate::records::failure::{Failure, FailureKind};

/// The maximum number of tries.
const ATTEMPTS_MAX: u32 = 3;
/// The time between two tries.
const PAUSE: Duration = Duration::from_millis(500);
/// How often the pause checks for a cancelled save.
const CANCEL_POLL_INTERVAL: Duration = Duration::from_millis(10);

const HINT: &str = "save it when the guest gives no memory back (while its balloon has the same size), with \
    `--strategy pre-copy`, which copies nothing after the cut, or while it is paused (`--strategy stop`)";

/// Saves by `save`, which receives the number of the try, from 1 on. Repeats it where the guest gave
/// memory back.
pub(crate) fn repeat_discarded<T>(
    cancel: &AtomicBool,
    mut save: impl FnMut(u32) -> Result<T, Failure>,
) -> Result<T, Failure> {
    for number in 1..ATTEMPTS_MAX {
        match save(number) {
            Err(failure) if failure.kind == FailureKind::Discarded => {
                tracing::info!("try {number} of {ATTEMPTS_MAX} of a save failed: {failure}");
                pause(cancel)?;
            }
            result => return result,
        }
    }
    save(ATTEMPTS_MAX).map_err(|failure| match failure.kind {
        FailureKind::Discarded => mark_last(failure),
        _ => failure,
    })
}

fn mark_last(mut failure: Failure) -> Failure {
    failure.chain.insert(1.min(failure.chain.len()), format!("{ATTEMPTS_MAX} tries failed"));
    failure.with_hint(HINT)
}

fn pause(cancel: &AtomicBool) -> Result<(), Failure> {
    let until = Instant::now() + PAUSE;
    while Instant::now() < until {
        if cancel.load(Ordering::Relaxed) {
            return Err(Failure::new(FailureKind::Interrupted, "the save was cancelled"));
        }
        thread::sleep(CANCEL_POLL_INTERVAL);
    }
    Ok(())
}

/// Adds the number of the try to the progress of a save, except of the first one.
pub(crate) fn mark_try(mut progress: OperationProgress, number: u32) -> OperationProgress {
    if number > 1 {
        progress.stage = format!("{} (try {number} of {ATTEMPTS_MAX})", progress.stage);
    }
    progress
}

#[cfg(test)]
mod tests {
    use super::*;

    fn discarded() -> Failure {
        let failure = Failure::new(FailureKind::Discarded, "the guest gave memory back");
        failure.while_doing("saving to a.firn")
    }

    #[test]
    fn a_save_that_lost_memory_is_tried_again() {
        let cancel = AtomicBool::new(false);
        let saved = repeat_discarded(&cancel, |number| match number {
            1 | 2 => Err(discarded()),
            number => Ok(number),
        });
        assert_eq!(saved, Ok(3));
    }

    #[test]
    fn the_last_failure_names_the_tries_and_the_reason() {
        let mut tries = Vec::new();
        let failed = repeat_discarded::<()>(&AtomicBool::new(false), |number| {
            tries.push(number);
            Err(discarded())
        });
        assert_eq!(tries, [1, 2, 3]);
        let failed = failed.unwrap_err();
        let chain = ["saving to a.firn", "3 tries failed", "the guest gave memory back"];
        assert_eq!(failed.chain, chain);
        assert_eq!(failed.hint.as_deref(), Some(HINT));
    }

    #[test]
    fn other_failures_are_final() {
        let mut tries = 0;
        let failed = repeat_discarded::<()>(&AtomicBool::new(false), |_| {
            tries += 1;
            Err(Failure::new(FailureKind::Host, "no"))
        });
        assert_eq!((tries, failed.unwrap_err().kind), (1, FailureKind::Host));
    }

    #[test]
    fn a_cancelled_save_is_not_repeated() {
        let failed = repeat_discarded::<()>(&AtomicBool::new(true), |_| Err(discarded()));
        assert_eq!(failed.unwrap_err().kind, FailureKind::Interrupted);
    }

    #[test]
    fn progress_names_the_try() {
        let mark = |number| mark_try(OperationProgress::new("saving", 1, 2), number).stage;
        assert_eq!((mark(1).as_str(), mark(2).as_str()), ("saving", "saving (try 2 of 3)"));
    }
}
