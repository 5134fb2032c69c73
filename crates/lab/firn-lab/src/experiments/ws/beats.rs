//! Progress of a guest by its heartbeats, each of which contains the number of completed steps of
//! its work.

use std::io::{BufRead as _, BufReader};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::stats::Sample;

/// Events per second of a guest at its steady rate: fine enough for a window of a second.
pub(super) const EVENTS_PER_S: f64 = 1000.0;
/// How often the connection is tried while the socket does not exist.
const RETRY_INTERVAL: Duration = Duration::from_millis(2);

/// Receives heartbeats in its own thread, until it is dropped or the guest ends.
pub(super) struct StepReceiver {
    since: Instant,
    received: Arc<Mutex<StepTimes>>,
    over: Arc<AtomicBool>,
}

/// Numbers of completed steps over time: microseconds since an instant, and the guest's count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct StepTimes(Vec<(u64, u64)>);

impl StepReceiver {
    /// Connects to the socket of a guest's heartbeats as soon as it exists.
    pub(super) fn start_receiving(socket: &Path) -> Self {
        let (since, received) = (Instant::now(), Arc::new(Mutex::new(StepTimes::default())));
        let over = Arc::new(AtomicBool::new(false));
        let (shared, is_over, socket) =
            (Arc::clone(&received), Arc::clone(&over), socket.to_owned());
        thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                let Ok(stream) = UnixStream::connect(&socket) else {
                    thread::sleep(RETRY_INTERVAL);
                    continue;
                };
                for line in BufReader::new(stream).lines().map_while(Result::ok) {
                    let at = since.elapsed().as_micros() as u64;
                    let mut received = shared.lock().unwrap_or_else(PoisonError::into_inner);
                    received.0.extend(parse_steps(&line).map(|steps| (at, steps)));
                }
            }
        });
        Self { since, received, over }
    }

    /// The steps since an instant.
    pub(super) fn steps_since(&self, since: Instant) -> StepTimes {
        let before_us = since.saturating_duration_since(self.since).as_micros() as u64;
        let received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        let later =
            received.0.iter().filter_map(|&(at, steps)| Some((at.checked_sub(before_us)?, steps)));
        StepTimes(later.collect())
    }

    /// All steps so far.
    pub(super) fn all_steps(&self) -> StepTimes {
        self.steps_since(self.since)
    }
}

/// Parses the number of completed steps from a heartbeat.
fn parse_steps(line: &str) -> Option<u64> {
    serde_json::from_str::<Value>(line).ok()?["progress"].as_u64()
}

impl Drop for StepReceiver {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

impl StepTimes {
    /// The median of steps per second, over windows of this length from then on.
    pub(super) fn steady_rate(&self, from_us: u64, window_us: u64) -> Option<f64> {
        let later = &self.0[self.0.partition_point(|beat| beat.0 < from_us)..];
        let rate = |&(from, before): &(u64, u64)| {
            let next = later.partition_point(|beat| beat.0 < from + window_us);
            let &(until, after) = later.get(next)?;
            Some(after.saturating_sub(before) as f64 * 1e6 / (until - from) as f64)
        };
        Sample::new(later.iter().filter_map(rate)).map(|rates| rates.median())
    }

    /// Times of events, in microseconds. A guest at its steady rate has [`EVENTS_PER_S`] events a
    /// second. Steps between two beats are spread evenly over the time between them.
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
        let steps = StepTimes(vec![(0, 0), (10_000, 100), (20_000, 100), (30_000, 300)]);
        // An event is 10 steps.
        let times = steps.times_us(10_000.0);
        assert_eq!(times.len(), 30);
        assert_eq!(times[..3], [1_000, 2_000, 3_000]);
        assert!(!times.iter().any(|&time| (10_001..20_000).contains(&time)));
        assert_eq!(times.iter().filter(|&&time| time > 20_000).count(), 20);
    }

    #[test]
    fn the_steady_rate_is_that_of_most_windows() {
        // 10 steps per 10 ms; none in the first second, and for 50 ms later on.
        let beat = |n: u64| (n * 10_000, if n < 100 { 0 } else { 10 * (n - 100) });
        let steps =
            StepTimes((0..300).map(beat).filter(|beat| beat.0 % 1_000_000 > 50_000).collect());
        let rate = steps.steady_rate(1_000_000, 100_000).unwrap();
        assert!((rate - 1000.0).abs() < 20.0, "{rate}");
        assert_eq!(steps.steady_rate(2_950_000, 100_000), None);
    }

    #[test]
    fn progress_lines_of_a_guest_are_parsed() {
        assert_eq!(parse_steps(r#"{"progress":12000,"seconds":1.0,"wrong":0}"#), Some(12_000));
        assert_eq!(parse_steps(r#"{"ready":true}"#), None);
        assert_eq!(parse_steps(r#"gress":12000,"seconds""#), None);
    }

    #[test]
    fn a_partial_beat_counts_in_the_next_window() {
        let steps = StepTimes(vec![(0, 0), (1_000, 6), (2_000, 12), (3_000, 18), (4_000, 20)]);
        assert_eq!(steps.times_us(10_000.0).len(), 2);
    }
}
