//! Who goes first on the processors.
//!
//! A guest that has just come back has everything to do at once: caches of all kinds are cold, clients wait. What Firn does
//! without anybody waiting for it stays out of the way then; later it gets its share, so that a restore ends even if the
//! guest never sleeps.
//!
//! ```text
//!   threads                 nice, before the guest runs     its first second     later
//!   fault handler           0                               0                    0
//!   readers, on demand      0                               0                    0
//!   readers otherwise       10                              10                   10
//!   workers                 10                              19                   10
//! ```
//!
//! A thread that may not raise its priority again stays where it began: readers at 0, workers at 10.
//!
//! Nice values are a thread's own under Linux (setpriority(2), "C library/kernel differences"); against threads with 0, 10
//! gives about a tenth of a processor and 19 a hundredth (sched(7)).

use std::time::Duration;

use rustix::process::setpriority_process;

/// What is left to the guest when it has just begun to run.
const FIRST: Duration = Duration::from_secs(1);

/// For what somebody waits.
const URGENT: i32 = 0;
/// For what nobody waits for.
const BACKGROUND: i32 = 10;
/// For what nobody waits for, while the guest has just begun to run.
const OUT_OF_THE_WAY: i32 = 19;

/// The priority of the thread that made it.
#[derive(Debug)]
pub(crate) struct Priority {
    nice: i32,
    /// Whether the thread may take back what it has given away.
    may_rise: bool,
}

impl Priority {
    /// Of the calling thread, from now on that of what nobody waits for.
    pub(crate) fn of_background() -> Self {
        let may_rise = may_rise();
        set(BACKGROUND);
        Self { nice: BACKGROUND, may_rise }
    }

    /// The same for a thread that also does what somebody waits for. It never gives away what it could not take back.
    pub(crate) fn of_reader() -> Self {
        Self { nice: URGENT, may_rise: may_rise() }
    }

    /// The thread does what somebody waits for.
    pub(crate) fn urgent(&mut self) {
        self.change(URGENT);
    }

    /// The thread does what nobody waits for.
    pub(crate) fn background(&mut self) {
        self.change(BACKGROUND);
    }

    /// The same, and the guest has run for so long, if it runs.
    pub(crate) fn out_of_the_way(&mut self, guest_runs_for: Option<Duration>) {
        self.change(out_of_the_way(guest_runs_for));
    }

    /// Whether that would change anything, which takes a system call.
    pub(crate) fn is_out_of_the_way(&self, guest_runs_for: Option<Duration>) -> bool {
        !self.may_rise || self.nice == out_of_the_way(guest_runs_for)
    }

    fn change(&mut self, nice: i32) {
        if self.may_rise && nice != self.nice && set(nice) {
            self.nice = nice;
        }
    }
}

fn out_of_the_way(guest_runs_for: Option<Duration>) -> i32 {
    match guest_runs_for.is_some_and(|time| time < FIRST) {
        true => OUT_OF_THE_WAY,
        false => BACKGROUND,
    }
}

/// Whether the calling thread may raise its priority, which takes `CAP_SYS_NICE` (capabilities(7)): tried before it is
/// lowered, since it could not be raised again.
fn may_rise() -> bool {
    set(URGENT - 1) && set(URGENT)
}

/// Of the calling thread alone. Without it everything works the same, only less smoothly.
fn set(nice: i32) -> bool {
    setpriority_process(None, nice).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nice() -> i32 {
        rustix::process::getpriority_process(None).unwrap()
    }

    #[test]
    fn a_thread_is_out_of_the_way_of_a_guest_that_has_just_begun() {
        std::thread::spawn(|| {
            let mut priority = Priority::of_reader();
            if !priority.may_rise {
                println!("skipped: this user may not raise a priority again");
                return;
            }
            assert_eq!(nice(), 0);
            for (time, expected) in [(None, 10), (Some(0), 19), (Some(999), 19), (Some(1000), 10)] {
                let time = time.map(Duration::from_millis);
                priority.out_of_the_way(time);
                assert!(priority.is_out_of_the_way(time));
                assert_eq!(nice(), expected);
                priority.urgent();
                assert!(!priority.is_out_of_the_way(time));
                assert_eq!(nice(), 0);
            }
        })
        .join()
        .unwrap();
    }

    #[test]
    fn who_can_not_rise_gives_nothing_away() {
        std::thread::spawn(|| {
            let mut priority = Priority { nice: 0, may_rise: false };
            priority.background();
            priority.out_of_the_way(Some(Duration::ZERO));
            assert_eq!(nice(), 0);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_worker_is_in_the_background() {
        std::thread::spawn(|| {
            let _priority = Priority::of_background();
            assert_eq!(nice(), 10);
        })
        .join()
        .unwrap();
    }
}
