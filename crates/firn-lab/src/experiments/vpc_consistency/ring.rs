//! Watchers of the token, from outside: a thread for each VM polls it.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use firn_guest::lines::Lines;
use firn_guest::ring::Passed;
use serde_json::{Value, json};

use crate::site::Inside;

const LOOK_EVERY: Duration = Duration::from_millis(100);
const PATIENCE: Duration = Duration::from_secs(1);

/// The reports of one VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Heard {
    newest: Passed,
    /// How often a report was less than the one before: the state of the earlier one was undone.
    undone: u64,
}

impl Heard {
    fn hear(&mut self, passed: Passed) {
        let before = self.newest;
        let is_less = passed.last < before.last
            || passed.passed < before.passed
            || passed.wrong < before.wrong
            || passed.broken < before.broken;
        self.undone += u64::from(is_less);
        self.newest = passed;
    }
}

/// The watchers.
pub(super) struct Ring {
    heard: Arc<Mutex<Vec<Heard>>>,
    ends: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<()>>>,
}

impl Ring {
    /// Has the first VM begin, and watches all.
    pub(super) fn start(vms: &[SocketAddr], outside: &Inside) -> Self {
        let heard = Arc::new(Mutex::new(vec![Heard::default(); vms.len()]));
        let ends = Arc::new(AtomicBool::new(false));
        let watch = |(number, &vm): (usize, &SocketAddr)| {
            let (heard, ends, outside) = (Arc::clone(&heard), Arc::clone(&ends), outside.clone());
            thread::spawn(move || {
                outside.enter()?;
                watch(number, vm, &heard, &ends);
                Ok(())
            })
        };
        let threads = vms.iter().enumerate().map(watch).collect();
        Self { heard, ends, threads }
    }

    fn heard(&self) -> MutexGuard<'_, Vec<Heard>> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn passed(&self) -> Vec<u64> {
        self.heard().iter().map(|heard| heard.newest.passed).collect()
    }

    /// Waits until every VM has passed the token on `times` more times; false if one doesn't in
    /// time.
    pub(super) fn goes_round(&self, times: u64, limit: Duration) -> bool {
        let (before, since) = (self.passed(), Instant::now());
        let is_far = |(now, before): (u64, &u64)| now >= before + times;
        while since.elapsed() < limit {
            if self.passed().into_iter().zip(&before).all(is_far) {
                return true;
            }
            thread::sleep(LOOK_EVERY);
        }
        false
    }

    /// Ends the watchers; returns the errors, and the number of connections between VMs that broke.
    pub(super) fn end(mut self) -> Result<(Vec<String>, u64)> {
        self.ends.store(true, Ordering::Relaxed);
        let heard = self.heard().clone();
        for thread in self.threads.drain(..) {
            thread.join().map_err(|_| anyhow!("a watcher panicked"))??;
        }
        let is_wrong = |heard: &&Heard| heard.newest.wrong > 0 || heard.undone > 0;
        let wrong = heard.iter().filter(is_wrong).map(|heard| format!("of the token: {heard:?}"));
        let broken = heard.iter().map(|heard| heard.newest.broken).sum();
        Ok((wrong.collect(), broken))
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
    }
}

fn watch(number: usize, vm: SocketAddr, heard: &Mutex<Vec<Heard>>, ends: &AtomicBool) {
    let (mut link, mut is_begun) = (None, number > 0);
    while !ends.load(Ordering::Relaxed) {
        match look(&mut link, vm, &mut is_begun) {
            Ok(passed) => {
                heard.lock().unwrap_or_else(PoisonError::into_inner)[number].hear(passed);
            }
            Err(_) => link = None,
        }
        thread::sleep(LOOK_EVERY);
    }
}

fn look(link: &mut Option<Lines>, vm: SocketAddr, is_begun: &mut bool) -> Result<Passed> {
    let open = match link.take() {
        Some(open) => open,
        None => Lines::connect_within(vm, PATIENCE)?,
    };
    let open = link.insert(open);
    if !*is_begun {
        // Sent once: a second token would be an error.
        *is_begun = true;
        open.say(&json!({"begin": true}))?;
        open.hear::<Value>()?;
    }
    open.say(&json!({"ask": true}))?;
    Ok(open.hear()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_does_not_go_back() {
        let mut heard = Heard::default();
        let passed = Passed { last: 8, passed: 4, wrong: 0, broken: 1 };
        heard.hear(passed);
        heard.hear(Passed { last: 10, passed: 5, ..passed });
        assert_eq!(heard.undone, 0);
        heard.hear(passed);
        heard.hear(passed);
        assert_eq!(heard.undone, 1);
    }
}
