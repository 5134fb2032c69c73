//! Reply times: responsiveness measured from outside, for the guest of any hypervisor, by a client
//! that gets replies from it all the time.
//!
//! ```text
//!   replies   | | | | | | | |          |     |  | | | | | | | | | |       steady: replies per second before the save
//!             -- before ----X command ------------------------------> observed until here
//!   utilization of a window [t, t + w): replies in it, as a share of those that come in w when the guest does not wait
//!   TTR(w, u): the earliest t from which on every completely observed window has a utilization of at least u
//! ```

/// The times of the replies after the restore command.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplyTimes {
    times_us: Vec<u64>,
    observed_us: u64,
    steady_per_s: f64,
}

impl ReplyTimes {
    /// Replies at these times, in microseconds since the command; observed until `observed_us`;
    /// `steady_per_s` come per second when the guest does not wait: before the save, for example.
    pub fn new(mut times_us: Vec<u64>, observed_us: u64, steady_per_s: f64) -> Self {
        times_us.retain(|&time| time < observed_us);
        times_us.sort_unstable();
        Self { times_us, observed_us, steady_per_s }
    }

    /// The share of the steady replies that came in `[start, start + window)`; 1 at most.
    pub fn window_utilization(&self, start_us: u64, window_us: u64) -> f64 {
        let count = self.replies_before(start_us + window_us) - self.replies_before(start_us);
        let steady = self.steady_per_s * window_us as f64 / 1e6;
        if steady > 0.0 { (count as f64 / steady).min(1.0) } else { 1.0 }
    }

    /// TTR(w, u), in seconds since the command. `None` if the last completely observed window had a
    /// lower utilization, or if the observation is shorter than a window.
    pub fn time_to_responsiveness(&self, window_us: u64, utilization: f64) -> Option<f64> {
        let last_start = self.observed_us.checked_sub(window_us)?;
        let wanted = utilization * self.steady_per_s * window_us as f64 / 1e6;
        let wanted = (wanted - 1e-9).ceil().max(0.0) as usize;
        let back = self
            .start_of_last_short_window(window_us, wanted, last_start)
            .map_or(0, |last| last + 1);
        (back <= last_start).then_some(back as f64 / 1e6)
    }

    /// A window is *short* if it has fewer replies than wanted. Returns the start of the last short
    /// window, or `None` if no window that starts by `last_start` is short.
    ///
    /// A window can start at every microsecond, and to try them all would take too long. Instead
    /// the function tries each gap between two replies, from the last gap to the first:
    ///
    /// ```text
    ///   replies        |        |    |       |                 wanted: 3
    ///                   ^starts^                               a gap: after one reply, up to and with the next
    ///                      [ - - window - - )|                 the last short window of the gap ends at the third
    ///                                                          reply from there, which it does not contain
    /// ```
    ///
    /// If a window starts later in the same gap, it loses no reply at its start, and may gain some
    /// at its end. So the last short window of the gap is the one that ends just at the reply with
    /// which it would have enough, or the last one of the gap if no window of the gap has enough.
    fn start_of_last_short_window(
        &self,
        window_us: u64,
        wanted: usize,
        last_start: u64,
    ) -> Option<u64> {
        if wanted == 0 {
            return None;
        }
        (0..=self.times_us.len()).rev().find_map(|next| {
            let earliest = next.checked_sub(1).map_or(0, |before| self.times_us[before] + 1);
            let latest = self.times_us.get(next).map_or(last_start, |&time| time.min(last_start));
            let enough = self.times_us.get(next + wanted - 1);
            let short = enough.map_or(Some(latest), |&time| time.checked_sub(window_us));
            short.map(|short| short.min(latest)).filter(|&short| short >= earliest)
        })
    }

    /// The number of replies before a time.
    fn replies_before(&self, time_us: u64) -> usize {
        self.times_us.partition_point(|&reply| reply < time_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_guest_that_answers_as_before_is_back_at_once() {
        let steady = ReplyTimes::new((0..500).map(|n| n * 10_000).collect(), 5_000_000, 100.0);
        assert_eq!(steady.time_to_responsiveness(1_000_000, 0.9), Some(0.0));
    }

    #[test]
    fn silence_ends_when_enough_of_the_window_is_steady() {
        let late = ReplyTimes::new((200..500).map(|n| n * 10_000).collect(), 5_000_000, 100.0);
        let back = late.time_to_responsiveness(1_000_000, 0.9).unwrap();
        assert!((1.88..=1.9).contains(&back), "{back}");
    }

    #[test]
    fn a_guest_that_never_replies_has_no_ttr() {
        let hesitant = ReplyTimes::new((0..50).map(|n| n * 100_000).collect(), 5_000_000, 100.0);
        assert_eq!(hesitant.time_to_responsiveness(1_000_000, 0.9), None);
        assert_eq!(hesitant.time_to_responsiveness(1_000_000, 0.0), Some(0.0));
        assert_eq!(ReplyTimes::new(Vec::new(), 10, 1.0).time_to_responsiveness(20, 0.5), None);
    }

    /// The definition taken literally, by trying every microsecond.
    fn slow(replies: &ReplyTimes, window_us: u64, utilization: f64) -> Option<f64> {
        let last_start = replies.observed_us.checked_sub(window_us)?;
        let is_short = |at: &u64| {
            let steady = replies.steady_per_s * window_us as f64 / 1e6;
            let count =
                (replies.replies_before(at + window_us) - replies.replies_before(*at)) as f64;
            count < utilization * steady - 1e-9
        };
        let back = (0..=last_start).rev().find(is_short).map_or(0, |last| last + 1);
        (back <= last_start).then_some(back as f64 / 1e6)
    }

    proptest! {
        #[test]
        fn ttr_equals_the_definition(
            times in prop::collection::vec(0u64..400, 0..60),
            observed in 0u64..420,
            window in 1u64..90,
            per_window in 1u32..9,
            percent in 0u32..=100,
        ) {
            let steady = f64::from(per_window) * 1e6 / window as f64;
            let replies = ReplyTimes::new(times, observed, steady);
            let utilization = f64::from(percent) / 100.0;
            prop_assert_eq!(replies.time_to_responsiveness(window, utilization), slow(&replies, window, utilization));
        }
    }
}
