//! What this process keeps of the memory that it no longer needs.
//!
//! An allocator expects that what was freed is soon needed again, and glibc's learns to: once a block of 20 MiB was freed, blocks of that size
//! come from heaps that each thread has of its own, and stay there. Copies of guest memory are such blocks, made and freed by
//! threads that come and go: a process that protects a VM would grow with each time it begins to.

use crate::sys::heap;

/// From this size on a block of memory is the kernel's again as soon as it is freed.
pub const LARGE_BYTES: i32 = 1 << 20;

/// What a heap of small blocks keeps when they are freed: what is needed again and again, in a pause for example, takes no page faults.
const KEPT_BYTES: i32 = 4 << 20;

/// From now on large blocks that are freed are given back (`M_MMAP_THRESHOLD`, `M_TRIM_THRESHOLD`, mallopt(3)). Getting one takes a
/// system call, and a page fault for each page of it. `false` if this C library can't be told.
pub fn give_back_large_blocks() -> bool {
    heap::map_blocks_from(LARGE_BYTES, KEPT_BYTES)
}

/// Gives back what is free of small blocks as well (malloc_trim(3)): after work that needed many, milliseconds.
pub fn give_back() {
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
        give_back();
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
        match give_back_large_blocks() {
            true => nothing_is_kept_of_large_blocks(),
            false => return eprintln!("SKIPPED: this C library decides for itself"),
        }
        small_blocks_are_given_back();
    }

    #[test]
    fn what_is_freed_is_the_kernels_again() {
        let only = ["--exact", "heap::tests::memory_goes_back", "--ignored", "--nocapture"];
        let test = std::env::current_exe().unwrap();
        assert!(std::process::Command::new(test).args(only).status().unwrap().success());
    }
}
