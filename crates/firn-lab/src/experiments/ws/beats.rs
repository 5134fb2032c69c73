//! How fast a guest gets on, by its heartbeats: each says how many steps of its work are done.

use std::io::{BufRead as _, BufReader};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Events per second of a guest at its steady pace: fine enough for a window of a second.
pub(super) const EVENTS_PER_S: f64 = 1000.0;
/// How often a socket that is not there yet is tried.
const KNOCK: Duration = Duration::from_millis(2);

/// Listens, in a thread of its own, until it is dropped or the guest ends.
pub(super) struct Beats {
    since: Instant,
    heard: Arc<Mutex<Steps>>,
    over: Arc<AtomicBool>,
}

/// When how many steps were done: microseconds since some instant, and the guest's count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Steps(Vec<(u64, u64)>);

impl Beats {
    /// To the guest whose heartbeats come at this socket, as soon as it is there.
    pub(super) fn listen(socket: &Path) -> Self {
        let (since, heard) = (Instant::now(), Arc::new(Mutex::new(Steps::default())));
        let over = Arc::new(AtomicBool::new(false));
        let (ears, is_over, socket) = (Arc::clone(&heard), Arc::clone(&over), socket.to_owned());
        thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                let Ok(stream) = UnixStream::connect(&socket) else {
                    thread::sleep(KNOCK);
                    continue;
                };
                for line in BufReader::new(stream).lines().map_while(Result::ok) {
                    let at = since.elapsed().as_micros() as u64;
                    let steps = line.split(' ').nth(2).and_then(|steps| steps.parse().ok());
                    let mut heard = ears.lock().unwrap_or_else(PoisonError::into_inner);
                    heard.0.extend(steps.map(|steps| (at, steps)));
                }
            }
        });
        Self { since, heard, over }
    }

    /// What was heard since then.
    pub(super) fn steps(&self, since: Instant) -> Steps {
        let before_us = since.saturating_duration_since(self.since).as_micros() as u64;
        let heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        let later =
            heard.0.iter().filter_map(|&(at, steps)| Some((at.checked_sub(before_us)?, steps)));
        Steps(later.collect())
    }

    /// Steps per second, over all that was heard.
    pub(super) fn pace(&self) -> Option<f64> {
        let Steps(beats) = self.steps(self.since);
        let (first, last) = (beats.first()?, beats.last()?);
        let seconds = (last.0 - first.0) as f64 / 1e6;
        (seconds > 0.0).then(|| last.1.saturating_sub(first.1) as f64 / seconds)
    }
}

impl Drop for Beats {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

impl Steps {
    /// Until when something was heard. A guest that has ended says nothing, which is no sign of its pace.
    pub(super) fn until_us(&self) -> u64 {
        self.0.last().map_or(0, |beat| beat.0)
    }

    /// Events, of which a guest at its steady pace has [`EVENTS_PER_S`] a second, in microseconds. Steps between two beats are
    /// spread evenly over the time between them.
    pub(super) fn times_us(&self, steady_steps_per_s: f64) -> Vec<u64> {
        let steps = (steady_steps_per_s / EVENTS_PER_S).max(1.0);
        let pairs = self.0.iter().zip(self.0.iter().skip(1));
        let mut left = 0.0;
        let mut times = Vec::new();
        for (&(from, before), &(until, after)) in pairs {
            let done = after.saturating_sub(before) as f64;
            let mut next = steps - left;
            while next <= done {
                times.push(from + ((until - from) as f64 * next / done) as u64);
                next += steps;
            }
            left = steps - (next - done);
        }
        times
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_spread_between_beats() {
        let steps = Steps(vec![(0, 0), (10_000, 100), (20_000, 100), (30_000, 300)]);
        // 10 steps are an event.
        let times = steps.times_us(10_000.0);
        assert_eq!(times.len(), 30);
        assert_eq!(times[..3], [1_000, 2_000, 3_000]);
        assert!(!times.iter().any(|&time| (10_001..20_000).contains(&time)));
        assert_eq!(times.iter().filter(|&&time| time > 20_000).count(), 20);
    }

    #[test]
    fn what_is_left_of_one_beat_counts_in_the_next() {
        let steps = Steps(vec![(0, 0), (1_000, 6), (2_000, 12), (3_000, 18), (4_000, 20)]);
        assert_eq!(steps.times_us(10_000.0).len(), 2);
    }
}
