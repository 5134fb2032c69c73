//! Timeline of replies: the times of replies, and the rates and gaps that follow from them.

use std::ops::Range;
use std::time::Duration;

/// Times of replies, ascending, from the start of the prober.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplyTimeline {
    replies: Vec<Duration>,
}

impl ReplyTimeline {
    /// A timeline of ascending times.
    pub fn new(replies: Vec<Duration>) -> Self {
        debug_assert!(replies.is_sorted());
        Self { replies }
    }

    /// All replies.
    pub fn replies(&self) -> &[Duration] {
        &self.replies
    }

    /// How many replies came in a span of time.
    pub fn count_in(&self, span: Range<Duration>) -> usize {
        self.count_before(span.end).saturating_sub(self.count_before(span.start))
    }

    /// Replies per second over a span of time.
    pub fn rate_in(&self, span: Range<Duration>) -> f64 {
        let seconds = span.end.saturating_sub(span.start).as_secs_f64();
        if seconds > 0.0 { self.count_in(span) as f64 / seconds } else { 0.0 }
    }

    /// How long after `event` the first reply came.
    pub fn first_after(&self, event: Duration) -> Option<Duration> {
        Some(*self.replies.get(self.count_before(event))? - event)
    }

    /// How long after `event` the first `window` begins in which replies come at `rate` per second
    /// or more.
    ///
    /// Checks windows that begin with a reply: between two replies no window is better. The last
    /// window must have ended before the last reply.
    pub fn recovery_after(&self, event: Duration, rate: f64, window: Duration) -> Option<Duration> {
        let wanted = (rate * window.as_secs_f64()).ceil() as usize;
        let last = *self.replies.last()?;
        self.replies[self.count_before(event)..]
            .iter()
            .take_while(|&&start| start + window <= last)
            .find(|&&start| self.count_in(start..start + window) >= wanted)
            .map(|&start| start - event)
    }

    /// The longest time without a reply in a span of time, its ends counted as replies.
    pub fn longest_gap(&self, span: Range<Duration>) -> Duration {
        let inside = &self.replies[self.count_before(span.start)
            ..self.count_before(span.end).max(self.count_before(span.start))];
        let ends = inside.iter().copied().chain([span.end]);
        let starts = [span.start].into_iter().chain(inside.iter().copied());
        starts.zip(ends).map(|(from, to)| to.saturating_sub(from)).max().unwrap_or_default()
    }

    fn count_before(&self, time: Duration) -> usize {
        self.replies.partition_point(|&reply| reply < time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// 100 replies per second for a second, silence, 3 hesitant replies from 1.5 s on, steady again
    /// from 2 s on.
    fn restored() -> ReplyTimeline {
        let steady = (0..100).map(|n| ms(n * 10));
        let hesitant = [ms(1500), ms(1600), ms(1800)];
        let again = (200..300).map(|n| ms(n * 10));
        ReplyTimeline::new(steady.chain(hesitant).chain(again).collect())
    }

    #[test]
    fn rates_and_gaps() {
        let line = restored();
        assert!((line.rate_in(ms(0)..ms(1000)) - 100.0).abs() < 1.0);
        assert_eq!(line.longest_gap(ms(900)..ms(1600)), ms(510));
        assert_eq!(line.longest_gap(ms(1000)..ms(1400)), ms(400));
        assert_eq!(line.rate_in(ms(5)..ms(5)), 0.0);
    }

    #[test]
    fn first_reply_and_steady_replies() {
        let line = restored();
        assert_eq!(line.first_after(ms(1000)), Some(ms(500)));
        assert_eq!(line.recovery_after(ms(1000), 90.0, ms(200)), Some(ms(1000)));
        assert_eq!(line.recovery_after(ms(1000), 900.0, ms(200)), None);
        assert_eq!(line.first_after(ms(5000)), None);
    }
}
