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
pub(super) struct FrameQueue {
    waiting: Mutex<QueuedFrames>,
    some: Notify,
}

#[derive(Debug, Default)]
struct QueuedFrames {
    frames: VecDeque<Bytes>,
    cost: usize,
}

impl FrameQueue {
    /// Appends a frame. Returns whether there was room for it.
    pub(super) fn push_frame(&self, frame: Bytes) -> bool {
        let mut waiting = self.lock_queue();
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
    pub(super) async fn take_frames(&self, bytes: usize) -> Vec<Bytes> {
        loop {
            let taken = self.lock_queue().take_frames(bytes);
            if !taken.is_empty() {
                return taken;
            }
            self.some.notified().await;
        }
    }

    /// The number of frames that wait.
    pub(super) fn len(&self) -> usize {
        self.lock_queue().frames.len()
    }

    fn lock_queue(&self) -> MutexGuard<'_, QueuedFrames> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl QueuedFrames {
    fn take_frames(&mut self, bytes: usize) -> Vec<Bytes> {
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
        let queue = FrameQueue::default();
        (0..5).for_each(|byte| assert!(queue.push_frame(vec![byte; 100].into())));
        let firsts = |frames: Vec<Bytes>| frames.iter().map(|it| it[0]).collect::<Vec<u8>>();
        assert_eq!(firsts(queue.take_frames(250).await), [0, 1]);
        assert_eq!(firsts(queue.take_frames(10).await), [2], "one at least");
        assert_eq!(firsts(queue.take_frames(1000).await), [3, 4]);
        assert!(timeout(Duration::from_millis(20), queue.take_frames(1000)).await.is_err());
    }

    #[tokio::test]
    async fn who_waits_is_woken() {
        let queue = Arc::new(FrameQueue::default());
        let taker = Arc::clone(&queue);
        let taken = tokio::spawn(async move { taker.take_frames(10).await.len() });
        tokio::task::yield_now().await;
        assert!(queue.push_frame(Bytes::from_static(b"x")));
        assert_eq!(timeout(Duration::from_secs(20), taken).await.unwrap().unwrap(), 1);
    }

    #[tokio::test]
    async fn at_the_bound_nothing_is_taken_and_nothing_lost_that_was() {
        let queue = FrameQueue::default();
        let taken = (0..10_000).filter(|_| queue.push_frame(vec![0; 1000].into())).count();
        assert_eq!(taken, BYTES_MAX / 1064);
        assert!(!queue.push_frame(vec![0; 1000].into()));
        let mut left = 0;
        while queue.len() > 0 {
            left += queue.take_frames(1 << 20).await.len();
        }
        assert_eq!(left, taken);
        assert!(queue.push_frame(vec![0; 1000].into()), "and there is room again");
    }
}
