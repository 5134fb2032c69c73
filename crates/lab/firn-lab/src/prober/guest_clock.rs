//! Guest clock: measures by the guest's own clock how long the guest was paused.
//!
//! The guest's clock stops with its vCPUs, the host's does not. Each heartbeat contains the guest's
//! time. The prober records it with the host's time of arrival; the difference of the two jumps by
//! exactly the length of a pause:
//!
//! ```text
//!   host - guest          o  o                     o = a beat; above its line: it was late
//!        |                 oo oo__oo_o__
//!        |  o      o               ^
//!        |__oo_oo_oo_oo    jump ---+
//!        +-------------X------------------> host's time
//!                      pause
//! ```
//!
//! A vCPU that waits for a page does not stop the clock. A watched write on each vCPU (`firn-guest
//! heartbeat --stall-mib`) shows such a wait: each beat reports how late the write was.
//!
//! A beat may be late, because the guest has other work, but never early. So the earliest beats on
//! either side of an instant are compared, and a guest that is merely slow does not count as
//! paused.

use std::io::{self, BufRead as _, BufReader};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Beats this close to an instant are used, by the guest's time: enough that some are prompt.
const USED_BEATS_WINDOW_NS: u64 = 250_000_000;
/// With fewer beats than this on a side, there is no result.
const BEATS_MIN: usize = 5;

/// A heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GuestHeartbeat {
    /// When it came, in the host's time since the clock was started.
    host_ns: u64,
    /// When the guest sent it, by its own clock.
    guest_ns: u64,
    /// The longest stall of a vCPU since the previous beat, in microseconds.
    stall_us: u64,
}

impl GuestHeartbeat {
    /// Parses a heartbeat line.
    fn from_line(host_ns: u64, line: &str) -> Option<Self> {
        let numbers: Result<Vec<u64>, _> = line.split(' ').map(str::parse).collect();
        match numbers.ok()?[..] {
            [_, guest_ns, _, stall_us] => Some(Self { host_ns, guest_ns, stall_us }),
            _ => None,
        }
    }

    fn offset_ns(self) -> i64 {
        self.host_ns as i64 - self.guest_ns as i64
    }
}

/// Receives a guest's heartbeats, in a thread that ends when the guest does.
#[derive(Debug)]
pub struct GuestClock {
    started: Instant,
    beats: Arc<Mutex<Vec<GuestHeartbeat>>>,
}

impl GuestClock {
    /// Connects to the guest's heartbeat socket. Start the clock before `firn-guest heartbeat`.
    pub fn start(socket: &Path) -> io::Result<Self> {
        let lines = BufReader::new(UnixStream::connect(socket)?).lines();
        let (started, beats) = (Instant::now(), Arc::new(Mutex::new(Vec::new())));
        let seen = Arc::clone(&beats);
        thread::Builder::new().name("guest clock".into()).spawn(move || {
            for line in lines.map_while(Result::ok) {
                let host_ns = started.elapsed().as_nanos() as u64;
                let beat = GuestHeartbeat::from_line(host_ns, &line);
                seen.lock().unwrap_or_else(PoisonError::into_inner).extend(beat);
            }
        })?;
        Ok(Self { started, beats })
    }

    /// The longest stall of a vCPU since an instant, while the guest ran.
    pub fn stalled_since(&self, since: Instant) -> Option<Duration> {
        let since_ns = since.saturating_duration_since(self.started).as_nanos() as u64;
        let beats = self.beats.lock().unwrap_or_else(PoisonError::into_inner);
        let first = beats.partition_point(|beat| beat.host_ns < since_ns);
        beats[first..].iter().map(|beat| beat.stall_us).max().map(Duration::from_micros)
    }

    /// The stalls of vCPUs that the beats since an instant reported, in milliseconds: for each beat
    /// the longest one.
    pub fn stalls_since(&self, since: Instant) -> Vec<f64> {
        let since_ns = since.saturating_duration_since(self.started).as_nanos() as u64;
        let beats = self.beats.lock().unwrap_or_else(PoisonError::into_inner);
        let first = beats.partition_point(|beat| beat.host_ns < since_ns);
        beats[first..].iter().map(|beat| beat.stall_us as f64 / 1e3).collect()
    }

    /// The longest pause of the guest since an instant. `None` if there were too few beats.
    pub fn paused_since(&self, since: Instant) -> Option<Duration> {
        let since_ns = since.saturating_duration_since(self.started).as_nanos() as u64;
        let beats = self.beats.lock().unwrap_or_else(PoisonError::into_inner);
        let first = beats.partition_point(|beat| beat.host_ns < since_ns);
        largest_jump(&beats[first..])
    }
}

/// The largest jump between two neighbouring beats, each with its earliest neighbours.
fn largest_jump(beats: &[GuestHeartbeat]) -> Option<Duration> {
    let jumps = (1..beats.len()).filter_map(|at| offset_jump(&beats[..at], &beats[at..]));
    jumps.max().map(|ns| Duration::from_nanos(ns.max(0).unsigned_abs()))
}

fn offset_jump(before: &[GuestHeartbeat], after: &[GuestHeartbeat]) -> Option<i64> {
    let (last, first) = (before.last()?.guest_ns, after.first()?.guest_ns);
    let near = before.partition_point(|beat| beat.guest_ns + USED_BEATS_WINDOW_NS < last)..;
    let until = after.partition_point(|beat| beat.guest_ns < first + USED_BEATS_WINDOW_NS);
    Some(earliest_offset(&after[..until])? - earliest_offset(&before[near])?)
}

/// The offset of the most prompt of some beats.
fn earliest_offset(beats: &[GuestHeartbeat]) -> Option<i64> {
    let enough = beats.len() >= BEATS_MIN;
    beats.iter().map(|beat| beat.offset_ns()).min().filter(|_| enough)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// A beat every 2 ms for a second, some late, with a pause of 5 ms after half of it.
    fn beats() -> Vec<GuestHeartbeat> {
        let beat = |number: u64| {
            let pause = if number >= 250 { 5 * MS } else { 0 };
            let late = if number % 3 == 0 { number % 2 * MS } else { 0 };
            let host_ns = number * 2 * MS + pause + late;
            GuestHeartbeat { host_ns, guest_ns: 77 * MS + number * 2 * MS, stall_us: 0 }
        };
        (0..500).map(beat).collect()
    }

    #[test]
    fn a_pause_is_found_among_late_beats() {
        assert_eq!(largest_jump(&beats()), Some(Duration::from_millis(5)));
    }

    #[test]
    fn a_slow_guest_was_not_paused() {
        assert_eq!(largest_jump(&beats()[..240]), Some(Duration::ZERO));
    }

    #[test]
    fn beats_that_were_held_up_together_are_no_pause() {
        let mut beats = beats();
        beats[100..140].iter_mut().for_each(|beat| beat.host_ns = 300 * MS);
        assert_eq!(largest_jump(&beats), Some(Duration::from_millis(5)));
    }

    #[test]
    fn a_few_beats_give_no_estimate() {
        assert_eq!(largest_jump(&beats()[..6]), None);
        assert_eq!(largest_jump(&[]), None);
    }

    #[test]
    fn lines_that_are_no_beats_are_skipped() {
        let beat = GuestHeartbeat { host_ns: 5, guest_ns: 123_456, stall_us: 70 };
        assert_eq!(GuestHeartbeat::from_line(5, "17 123456 9 70"), Some(beat));
        for line in ["17", "17 123456 9", "a b c d", "17 123456 9 70 1"] {
            assert_eq!(GuestHeartbeat::from_line(5, line), None, "{line}");
        }
    }
}
