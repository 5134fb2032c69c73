//! Throughput reports of a guest: a datagram at intervals, with a number.
//!
//! The guest measures seconds by its own clock, so a report contains its work while it ran. The
//! time of arrival shows how long that took.

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Instant;

/// Receives reports, in a thread that ends with the program.
pub(super) struct ThroughputReceiver {
    port: u16,
    received: Arc<Mutex<ReceivedReports>>,
}

struct ReceivedReports {
    since: Instant,
    /// The time of each report, in seconds since then, and its number.
    reports: Vec<(f64, f64)>,
}

impl ThroughputReceiver {
    /// Receives at a port of the loopback interface, where a guest's datagrams to its host arrive.
    pub(super) fn start_receiving() -> io::Result<Self> {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = socket.local_addr()?.port();
        let received =
            Arc::new(Mutex::new(ReceivedReports { since: Instant::now(), reports: Vec::new() }));
        let shared = Arc::clone(&received);
        thread::Builder::new().name("throughput".into()).spawn(move || {
            let mut buffer = [0; 64];
            while let Ok(length) = socket.recv(&mut buffer) {
                let text = String::from_utf8_lossy(&buffer[..length]);
                let mut received = shared.lock().unwrap_or_else(PoisonError::into_inner);
                let at = received.since.elapsed().as_secs_f64();
                received.reports.extend(text.trim().parse().ok().map(|number| (at, number)));
            }
        })?;
        Ok(Self { port, received })
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// Discards all reports.
    pub(super) fn clear_reports(&self) {
        let mut received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        *received = ReceivedReports { since: Instant::now(), reports: Vec::new() };
    }

    /// The time of each report, in seconds since `start`, and its number, without reports before
    /// `start`.
    pub(super) fn reports_since(&self, start: Instant) -> Vec<(f64, f64)> {
        let received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        let late = start.saturating_duration_since(received.since).as_secs_f64();
        let reports = received.reports.iter().map(|&(at, number)| (at - late, number));
        reports.filter(|report| report.0 >= 0.0).collect()
    }
}

/// The work of each second. A report's work is spread evenly over the time since the previous
/// report.
pub(super) fn work_per_second(reports: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let Some(&(end, _)) = reports.last() else { return Vec::new() };
    let before = [0.0].into_iter().chain(reports.iter().map(|report| report.0));
    let spans: Vec<(f64, f64, f64)> =
        before.zip(reports).map(|(from, &(until, number))| (from, until, number)).collect();
    (0..end.ceil() as u32)
        .map(|second| {
            let (start, stop) = (f64::from(second), f64::from(second) + 1.0);
            let done = spans.iter().map(|&(from, until, number)| {
                let shared = (until.min(stop) - from.max(start)).max(0.0);
                number * shared / (until - from).max(f64::EPSILON)
            });
            (start, done.sum())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_report_is_spread_over_the_time_it_took() {
        assert_eq!(work_per_second(&[]), []);
        let seconds = work_per_second(&[(2.0, 100.0), (3.0, 80.0)]);
        assert_eq!(seconds, [(0.0, 50.0), (1.0, 50.0), (2.0, 80.0)]);
    }

    #[test]
    fn old_reports_are_dropped() {
        let throughput = ThroughputReceiver::start_receiving().unwrap();
        let guest = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let say = |text: &str| {
            guest.send_to(text.as_bytes(), (Ipv4Addr::LOCALHOST, throughput.port())).unwrap();
        };
        // A report that arrives at once is not older than this.
        let begun = Instant::now();
        say("no number");
        say("1200\n");
        while throughput.reports_since(begun).is_empty() {
            assert!(begun.elapsed().as_secs() < 5);
            thread::yield_now();
        }
        assert!(throughput.reports_since(Instant::now()).is_empty());
        throughput.clear_reports();
        assert!(throughput.reports_since(begun).is_empty());
    }
}
