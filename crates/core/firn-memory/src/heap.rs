//! The memory that this process keeps after it was freed: limits for the C library's allocator.
//!
//! An allocator expects freed memory to be needed again soon, and glibc adapts to that: once a
//! block of 20 MiB was freed, blocks of that size come from heaps that each thread has of its own,
//! and stay there. Copies of guest memory are such blocks, which short-lived threads allocate and
//! free: a process that protects a VM would grow with each new protection.

use crate::sys::heap;

/// Blocks of this size and larger are returned to the kernel as soon as they are freed.
pub const LARGE_BYTES: i32 = 1 << 20;

/// The bytes that a heap of small blocks keeps when they are freed: memory that is needed
/// repeatedly, in a pause for example, then causes no page faults.
const KEPT_BYTES: i32 = 4 << 20;

/// From now on freed large blocks are returned to the kernel (`M_MMAP_THRESHOLD`,
/// `M_TRIM_THRESHOLD`, mallopt(3)). Allocating one takes a system call, and a page fault for each
/// page of it. `false` if this C library has no such setting.
pub fn return_large_blocks_when_freed() -> bool {
    heap::map_blocks_from(LARGE_BYTES, KEPT_BYTES)
}

/// Returns the free memory of small blocks to the kernel as well (malloc_trim(3)). After work that
/// needed many of them this takes milliseconds.
pub fn trim_heap() {
    heap::trim();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resident_kib() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// Blocks that are freed in another order than they were made, by threads that end.
    fn churn() {
        for bytes in [9 << 20, 17 << 20, 25 << 20] {
            let block = move || std::hint::black_box(vec![1_u8; bytes]);
            let threads: Vec<_> = (0..4).map(|_| std::thread::spawn(block)).collect();
            drop(threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>());
        }
    }

    fn small_blocks_are_given_back() {
        let blocks: Vec<_> = (0..200).map(|_| std::hint::black_box(vec![1_u8; 100_000])).collect();
        // The last one holds the others' place in the heap.
        let held = std::hint::black_box(vec![1_u8; 100_000]);
        drop(blocks);
        let before = resident_kib();
        trim_heap();
        let after = resident_kib();
        drop(held);
        assert!(after + 10_000 < before, "{before} KiB, then {after} KiB");
    }

    fn nothing_is_kept_of_large_blocks() {
        churn();
        let before = resident_kib();
        (0..5).for_each(|_| churn());
        let after = resident_kib();
        assert!(after < before + (8 << 10), "{before} KiB, then {after} KiB");
    }

    /// The child of the next test: other tests' memory would count.
    #[test]
    #[ignore = "measures its whole process"]
    fn memory_goes_back() {
        match return_large_blocks_when_freed() {
            true => nothing_is_kept_of_large_blocks(),
            false => return firn_skip::skip_test("this C library decides for itself"),
        }
        small_blocks_are_given_back();
    }

    #[test]
    fn freed_memory_is_returned_to_the_kernel() {
        let only = ["--exact", "heap::tests::memory_goes_back", "--ignored", "--nocapture"];
        let test = std::env::current_exe().unwrap();
        assert!(std::process::Command::new(test).args(only).status().unwrap().success());
    }
}
