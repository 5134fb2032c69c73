//! A guest seen from outside: how soon it answers again, and how soon as fast as before.
//!
//! ```text
//!   replies   | | | | | | | |            |        |  |  | | | | | | | |
//!   time      ------------- steady ------X-----------------------------
//!                                        event    ^first reply
//!                                                      ^back to 90 % of the steady rate
//! ```
//!
//! [`Prober`] asks all the time and writes down when replies came; [`Timeline`] says what that means.
//! [`GuestClock`] tells how long the guest stood still.

mod guest_clock;
mod source;
mod timeline;

pub use guest_clock::GuestClock;
pub use source::{Heartbeats, HttpGets, RedisPings, Source};
pub use timeline::Timeline;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long to wait before asking again after a refusal: it bounds how exactly a first reply is seen.
const MOMENT: Duration = Duration::from_millis(1);

/// Asks a guest all the time, in a thread of its own.
#[derive(Debug)]
pub struct Prober {
    started: Instant,
    stop: Arc<AtomicBool>,
    replies: Arc<Mutex<Vec<Duration>>>,
    thread: Option<JoinHandle<()>>,
}

impl Prober {
    /// Starts asking `source`, at most `per_second` times per second (0: as often as it answers).
    pub fn start(mut source: impl Source + 'static, per_second: f64) -> Self {
        let started = Instant::now();
        let stop = Arc::new(AtomicBool::new(false));
        let replies = Arc::new(Mutex::new(Vec::new()));
        let (stopped, seen) = (Arc::clone(&stop), Arc::clone(&replies));
        let thread = thread::spawn(move || {
            let mut pace = Pace::new(per_second);
            while !stopped.load(Ordering::Relaxed) {
                if source.reply() {
                    seen.lock().unwrap_or_else(PoisonError::into_inner).push(started.elapsed());
                    pace.wait();
                } else {
                    thread::sleep(MOMENT);
                }
            }
        });
        Self { started, stop, replies, thread: Some(thread) }
    }

    /// When the prober was started: the zero of its [`Timeline`].
    pub fn started(&self) -> Instant {
        self.started
    }

    /// Now, on the timeline.
    pub fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// The replies so far.
    pub fn timeline(&self) -> Timeline {
        Timeline::new(self.replies.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// Stops asking.
    pub fn finish(mut self) -> Timeline {
        self.end();
        self.timeline()
    }

    fn end(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A source that panicked has no more replies to give.
            let _ = thread.join();
        }
    }
}

/// A rate. Who is kept waiting does not make up for it: questions asked in a burst afterwards would hide the wait.
struct Pace {
    interval: Duration,
    next: Instant,
}

impl Pace {
    fn new(per_second: f64) -> Self {
        let interval = if per_second > 0.0 { 1.0 / per_second } else { 0.0 };
        Self { interval: Duration::from_secs_f64(interval), next: Instant::now() }
    }

    /// Waits until the next question is due.
    fn wait(&mut self) {
        let now = Instant::now();
        self.next = now.max(self.next + self.interval);
        thread::sleep(self.next - now);
    }
}

impl Drop for Prober {
    fn drop(&mut self) {
        self.end();
    }
}
