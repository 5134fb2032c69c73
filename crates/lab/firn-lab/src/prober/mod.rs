//! Prober: measures from outside how soon a guest replies again, and how soon at its former rate.
//!
//! ```text
//!   replies   | | | | | | | |            |        |  |  | | | | | | | |
//!   time      ------------- steady ------X-----------------------------
//!                                        event    ^first reply
//!                                                      ^back to 90 % of the steady rate
//! ```
//!
//! [`Prober`] sends requests continuously and records the times of replies; [`ReplyTimeline`]
//! evaluates them. [`GuestClock`] measures how long the guest was paused.

mod guest_clock;
mod source;
mod timeline;

pub use guest_clock::GuestClock;
pub use source::{Heartbeats, HttpGets, RedisPings, ReplySource};
pub use timeline::ReplyTimeline;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long to wait after a refusal before the next request: it bounds the accuracy of a first
/// reply's time.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Sends requests to a guest continuously, in its own thread.
#[derive(Debug)]
pub struct Prober {
    started: Instant,
    stop: Arc<AtomicBool>,
    replies: Arc<Mutex<Vec<Duration>>>,
    thread: Option<JoinHandle<()>>,
}

impl Prober {
    /// Starts requests to `source`, at most `per_second` times per second (0: as fast as replies
    /// arrive).
    pub fn start(mut source: impl ReplySource + 'static, per_second: f64) -> Self {
        let started = Instant::now();
        let stop = Arc::new(AtomicBool::new(false));
        let replies = Arc::new(Mutex::new(Vec::new()));
        let (stopped, seen) = (Arc::clone(&stop), Arc::clone(&replies));
        let thread = thread::spawn(move || {
            let mut rate = RequestRate::new(per_second);
            while !stopped.load(Ordering::Relaxed) {
                if source.wait_reply() {
                    seen.lock().unwrap_or_else(PoisonError::into_inner).push(started.elapsed());
                    rate.wait_for_next();
                } else {
                    thread::sleep(RETRY_INTERVAL);
                }
            }
        });
        Self { started, stop, replies, thread: Some(thread) }
    }

    /// When the prober was started, which is the zero of its [`ReplyTimeline`].
    pub fn started(&self) -> Instant {
        self.started
    }

    /// The current time, on the timeline.
    pub fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// The replies so far.
    pub fn timeline(&self) -> ReplyTimeline {
        ReplyTimeline::new(self.replies.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// Stops the requests, and returns all replies.
    pub fn finish(mut self) -> ReplyTimeline {
        self.stop_and_join();
        self.timeline()
    }

    fn stop_and_join(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A source that panicked has no more replies.
            let _ = thread.join();
        }
    }
}

/// A request rate. A request that waited is not made up for: a burst of requests afterwards would
/// hide the wait.
struct RequestRate {
    interval: Duration,
    next: Instant,
}

impl RequestRate {
    fn new(per_second: f64) -> Self {
        let interval = if per_second > 0.0 { 1.0 / per_second } else { 0.0 };
        Self { interval: Duration::from_secs_f64(interval), next: Instant::now() }
    }

    /// Waits until the next request's time.
    fn wait_for_next(&mut self) {
        let now = Instant::now();
        self.next = now.max(self.next + self.interval);
        thread::sleep(self.next - now);
    }
}

impl Drop for Prober {
    fn drop(&mut self) {
        self.stop_and_join();
    }
}
