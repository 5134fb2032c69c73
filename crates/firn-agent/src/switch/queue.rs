//! Frames that wait for a port.
//!
//! ```text
//!   any port - push --> | frame | frame | frame | .. BYTES_MAX at most -> take - the port's stream
//!                '--- no room: dropped
//! ```
//!
//! The sender never waits. A protected VM's frames arrive in bursts of one epoch, so there has to
//! be room for a burst: the limit is what arrives in 34 ms at a gigabit a second.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::Notify;

/// Maximum bytes that wait for one port.
pub const BYTES_MAX: usize = 4 << 20;

/// What a frame counts besides its bytes: the memory that it takes to store one.
const FRAME_COST: usize = 64;

/// A queue of frames.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    some: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    frames: VecDeque<Bytes>,
    cost: usize,
}

impl Queue {
    /// Appends a frame. Returns whether there was room for it.
    pub(super) fn push(&self, frame: Bytes) -> bool {
        let mut waiting = self.waiting();
        let cost = waiting.cost + frame.len() + FRAME_COST;
        let has_room = cost <= BYTES_MAX;
        if has_room {
            waiting.cost = cost;
            waiting.frames.push_back(frame);
            self.some.notify_one();
        }
        has_room
    }

    /// Waits for frames, and takes the next ones: one, or as many as have at most `bytes` in total.
    pub(super) async fn take(&self, bytes: usize) -> Vec<Bytes> {
        loop {
            let taken = self.waiting().take(bytes);
            if !taken.is_empty() {
                return taken;
            }
            self.some.notified().await;
        }
    }

    /// The number of frames that wait.
    pub(super) fn len(&self) -> usize {
        self.waiting().frames.len()
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    fn take(&mut self, bytes: usize) -> Vec<Bytes> {
        let (mut taken, mut sum) = (Vec::new(), 0);
        while let Some(frame) = self.frames.pop_front() {
            if !taken.is_empty() && sum + frame.len() > bytes {
                self.frames.push_front(frame);
                break;
            }
            sum += frame.len();
            self.cost -= frame.len() + FRAME_COST;
            taken.push(frame);
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn frames_keep_their_order_and_come_in_pieces() {
        let queue = Queue::default();
        (0..5).for_each(|byte| assert!(queue.push(vec![byte; 100].into())));
        let firsts = |frames: Vec<Bytes>| frames.iter().map(|it| it[0]).collect::<Vec<u8>>();
        assert_eq!(firsts(queue.take(250).await), [0, 1]);
        assert_eq!(firsts(queue.take(10).await), [2], "one at least");
        assert_eq!(firsts(queue.take(1000).await), [3, 4]);
        assert!(timeout(Duration::from_millis(20), queue.take(1000)).await.is_err());
    }

    #[tokio::test]
    async fn who_waits_is_woken() {
        let queue = Arc::new(Queue::default());
        let taker = Arc::clone(&queue);
        let taken = tokio::spawn(async move { taker.take(10).await.len() });
        tokio::task::yield_now().await;
        assert!(queue.push(Bytes::from_static(b"x")));
        assert_eq!(timeout(Duration::from_secs(20), taken).await.unwrap().unwrap(), 1);
    }

    #[tokio::test]
    async fn at_the_bound_nothing_is_taken_and_nothing_lost_that_was() {
        let queue = Queue::default();
        let taken = (0..10_000).filter(|_| queue.push(vec![0; 1000].into())).count();
        assert_eq!(taken, BYTES_MAX / 1064);
        assert!(!queue.push(vec![0; 1000].into()));
        let mut left = 0;
        while queue.len() > 0 {
            left += queue.take(1 << 20).await.len();
        }
        assert_eq!(left, taken);
        assert!(queue.push(vec![0; 1000].into()), "and there is room again");
    }
}
