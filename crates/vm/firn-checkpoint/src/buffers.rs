//! Block buffers: empty buffers for memory blocks. Their number is the limit of a save's memory.
//!
//! Some exist from the beginning, so that the first faults need not wait for memory; the others are
//! allocated when they are needed, because a small save needs few. A thread that finds none sleeps
//! until one is returned: the fault handler has real-time priority, and would wait for ever by
//! spinning.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Buffers that exist from the beginning.
const READY: usize = 256;

/// The buffers of a save: empty ones, and those that may still be allocated.
#[derive(Debug)]
pub(crate) struct SaveBuffers {
    block_bytes: usize,
    count_max: usize,
    stock: Mutex<EmptyBuffers>,
    changed: Condvar,
}

#[derive(Debug)]
struct EmptyBuffers {
    empty: Vec<Box<[u8]>>,
    unmade: usize,
    /// No thread returns any more buffers.
    is_closed: bool,
}

impl SaveBuffers {
    /// At most `most` buffers, of one memory block each.
    pub(crate) fn new(count_max: usize, block_bytes: usize) -> Self {
        let ready = count_max.min(READY);
        let mut empty = Vec::with_capacity(count_max);
        empty.extend((0..ready).map(|_| empty_buffer(block_bytes)));
        let stock = EmptyBuffers { empty, unmade: count_max - ready, is_closed: false };
        Self { block_bytes, count_max, stock: Mutex::new(stock), changed: Condvar::new() }
    }

    fn lock_stock(&self) -> MutexGuard<'_, EmptyBuffers> {
        self.stock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An empty buffer, waiting for one if necessary. `None` once no more buffers are returned and
    /// none is left.
    pub(crate) fn take_buffer(&self) -> Option<Box<[u8]>> {
        let none = |stock: &mut EmptyBuffers| {
            stock.empty.is_empty() && stock.unmade == 0 && !stock.is_closed
        };
        let waited = self.changed.wait_while(self.lock_stock(), none);
        let mut stock = waited.unwrap_or_else(PoisonError::into_inner);
        if let Some(buffer) = stock.empty.pop() {
            return Some(buffer);
        }
        stock.unmade = stock.unmade.checked_sub(1)?;
        drop(stock);
        Some(empty_buffer(self.block_bytes))
    }

    /// Returns a buffer.
    pub(crate) fn return_buffer(&self, buffer: Box<[u8]>) {
        self.lock_stock().empty.push(buffer);
        self.changed.notify_one();
    }

    /// No buffer is returned from now on.
    pub(crate) fn close_stock(&self) {
        self.lock_stock().is_closed = true;
        self.changed.notify_all();
    }

    /// The bytes of one buffer.
    pub(crate) fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// The maximum number of buffers.
    pub(crate) fn count_max(&self) -> usize {
        self.count_max
    }

    /// The number of buffers that can be taken without waiting.
    pub(crate) fn free_count(&self) -> usize {
        let stock = self.lock_stock();
        stock.empty.len() + stock.unmade
    }
}

fn empty_buffer(bytes: usize) -> Box<[u8]> {
    vec![0; bytes].into_boxed_slice()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    #[test]
    fn there_are_no_more_than_were_allowed() {
        let buffers = SaveBuffers::new(READY + 2, 8);
        let mut taken: Vec<_> = (0..READY + 2).map(|_| buffers.take_buffer().unwrap()).collect();
        assert_eq!(buffers.free_count(), 0);
        buffers.return_buffer(taken.pop().unwrap());
        assert_eq!((buffers.free_count(), buffers.count_max()), (1, READY + 2));
    }

    #[test]
    fn a_thread_waits_for_a_buffer_until_one_is_returned_or_none_can_be() {
        let buffers = Arc::new(SaveBuffers::new(1, 8));
        let only = buffers.take_buffer().unwrap();
        let waiting = {
            let buffers = Arc::clone(&buffers);
            thread::spawn(move || (buffers.take_buffer(), buffers.take_buffer()))
        };
        buffers.return_buffer(only);
        while buffers.free_count() > 0 {
            thread::yield_now();
        }
        buffers.close_stock();
        let (first, second) = waiting.join().unwrap();
        assert!(first.is_some() && second.is_none());
    }
}
