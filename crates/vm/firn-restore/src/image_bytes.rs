//! Image bytes in memory, in buffers that are reused.
//!
//! ```text
//!   one read of three locality blocks      UnitBytes of 7    unit 8          unit 9
//!   [...............|...............|...]  ^ start 0         ^ start 65536   ^ start 131072
//!   `--- ReadBuffer: returns to the pool when the last UnitBytes is dropped
//! ```

use std::sync::{Arc, Mutex, PoisonError};

/// Maximum number of buffers kept for reuse.
const SPARE_MAX: usize = 8;

/// Buffers for reuse.
#[derive(Debug, Default)]
pub(crate) struct BufferPool {
    spare: Mutex<Vec<Vec<u8>>>,
}

/// The bytes of one read.
#[derive(Debug)]
pub(crate) struct ReadBuffer {
    bytes: Vec<u8>,
    pool: Arc<BufferPool>,
}

/// The bytes of one unit in a read: from `start` on.
#[derive(Clone, Debug)]
pub(crate) struct UnitBytes {
    run: Arc<ReadBuffer>,
    start: usize,
}

impl BufferPool {
    /// A buffer, of any length and content.
    pub(crate) fn take_buffer(&self) -> Vec<u8> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    fn return_buffer(&self, buffer: Vec<u8>) {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.len() < SPARE_MAX {
            spare.push(buffer);
        }
    }

    /// Wraps a filled buffer, so that it returns to the pool after its last use.
    pub(crate) fn wrap_buffer(self: &Arc<Self>, bytes: Vec<u8>) -> Arc<ReadBuffer> {
        Arc::new(ReadBuffer { bytes, pool: self.clone() })
    }
}

impl Drop for ReadBuffer {
    fn drop(&mut self) {
        self.pool.return_buffer(std::mem::take(&mut self.bytes));
    }
}

impl UnitBytes {
    pub(crate) fn new(run: Arc<ReadBuffer>, start: usize) -> Self {
        Self { run, start }
    }

    /// The bytes from the start of the unit to the end of the read.
    pub(crate) fn to_read_end(&self) -> &[u8] {
        self.run.bytes.get(self.start..).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_returns_to_the_pool_after_its_last_use() {
        let pool = Arc::new(BufferPool::default());
        let run = pool.wrap_buffer(vec![1, 2, 3, 4]);
        let (first, second) = (UnitBytes::new(run.clone(), 0), UnitBytes::new(run, 2));
        assert_eq!((first.to_read_end(), second.to_read_end()), (&[1, 2, 3, 4][..], &[3, 4][..]));
        drop(first);
        assert_eq!(pool.take_buffer().capacity(), 0);
        drop(second);
        assert!(pool.take_buffer().capacity() >= 4);
    }
}
