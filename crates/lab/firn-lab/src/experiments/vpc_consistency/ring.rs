//! Watchers of the token, from outside: a thread for each VM polls it.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use firn_guest::lines::JsonLines;
use firn_guest::ring::TokenRecord;
use serde_json::{Value, json};

use crate::site::NetworkNamespace;

const POLL_INTERVAL: Duration = Duration::from_millis(100);
const REPLY_TIMEOUT: Duration = Duration::from_secs(1);

/// The reports of one VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TokenReports {
    newest: TokenRecord,
    /// How often a report was less than the one before: the state of the earlier one was undone.
    undone: u64,
}

impl TokenReports {
    fn record_report(&mut self, passed: TokenRecord) {
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
pub(super) struct TokenWatchers {
    reports: Arc<Mutex<Vec<TokenReports>>>,
    ends: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<()>>>,
}

impl TokenWatchers {
    /// Has the first VM begin, and watches all.
    pub(super) fn start_watchers(vms: &[SocketAddr], outside: &NetworkNamespace) -> Self {
        let reports = Arc::new(Mutex::new(vec![TokenReports::default(); vms.len()]));
        let ends = Arc::new(AtomicBool::new(false));
        let watch = |(number, &vm): (usize, &SocketAddr)| {
            let (reports, ends, outside) =
                (Arc::clone(&reports), Arc::clone(&ends), outside.clone());
            thread::spawn(move || {
                outside.enter()?;
                watch_vm(number, vm, &reports, &ends);
                Ok(())
            })
        };
        let threads = vms.iter().enumerate().map(watch).collect();
        Self { reports, ends, threads }
    }

    fn lock_reports(&self) -> MutexGuard<'_, Vec<TokenReports>> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass_counts(&self) -> Vec<u64> {
        self.lock_reports().iter().map(|reports| reports.newest.passed).collect()
    }

    /// Waits until every VM has passed the token on `times` more times; false if one doesn't in
    /// time.
    pub(super) fn has_completed_rounds(&self, times: u64, limit: Duration) -> bool {
        let (before, since) = (self.pass_counts(), Instant::now());
        let is_far = |(now, before): (u64, &u64)| now >= before + times;
        while since.elapsed() < limit {
            if self.pass_counts().into_iter().zip(&before).all(is_far) {
                return true;
            }
            thread::sleep(POLL_INTERVAL);
        }
        false
    }

    /// Ends the watchers; returns the errors, and the number of connections between VMs that broke.
    pub(super) fn end_watchers(mut self) -> Result<(Vec<String>, u64)> {
        self.ends.store(true, Ordering::Relaxed);
        let reports = self.lock_reports().clone();
        for thread in self.threads.drain(..) {
            thread.join().map_err(|_| anyhow!("a watcher panicked"))??;
        }
        let is_wrong = |reports: &&TokenReports| reports.newest.wrong > 0 || reports.undone > 0;
        let wrong =
            reports.iter().filter(is_wrong).map(|reports| format!("of the token: {reports:?}"));
        let broken = reports.iter().map(|reports| reports.newest.broken).sum();
        Ok((wrong.collect(), broken))
    }
}

impl Drop for TokenWatchers {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
    }
}

fn watch_vm(number: usize, vm: SocketAddr, reports: &Mutex<Vec<TokenReports>>, ends: &AtomicBool) {
    let (mut link, mut is_begun) = (None, number > 0);
    while !ends.load(Ordering::Relaxed) {
        match poll_vm(&mut link, vm, &mut is_begun) {
            Ok(passed) => {
                reports.lock().unwrap_or_else(PoisonError::into_inner)[number]
                    .record_report(passed);
            }
            Err(_) => link = None,
        }
        thread::sleep(POLL_INTERVAL);
    }
}

fn poll_vm(
    link: &mut Option<JsonLines>,
    vm: SocketAddr,
    is_begun: &mut bool,
) -> Result<TokenRecord> {
    let open = match link.take() {
        Some(open) => open,
        None => JsonLines::connect_within(vm, REPLY_TIMEOUT)?,
    };
    let open = link.insert(open);
    if !*is_begun {
        // Sent once: a second token would be an error.
        *is_begun = true;
        open.send_line(&json!({"begin": true}))?;
        open.receive_line::<Value>()?;
    }
    open.send_line(&json!({"ask": true}))?;
    Ok(open.receive_line()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reported_tokens_never_decrease() {
        let mut reports = TokenReports::default();
        let passed = TokenRecord { last: 8, passed: 4, wrong: 0, broken: 1 };
        reports.record_report(passed);
        reports.record_report(TokenRecord { last: 10, passed: 5, ..passed });
        assert_eq!(reports.undone, 0);
        reports.record_report(passed);
        reports.record_report(passed);
        assert_eq!(reports.undone, 1);
    }
}
