//! How the allocator gets memory, and gives it back: `mallopt(3)`, `malloc_trim(3)`.

use nix::libc;

/// By itself glibc gives each thread one, up to eight for each processor, and what one has that is free serves no other.
#[cfg(target_env = "gnu")]
const HEAPS_MAX: i32 = 2;

/// Has each block of so many bytes or more be a mapping of its own, now and later, and heaps of smaller ones keep up to `kept` bytes that
/// are free at their end. There are no more than [`HEAPS_MAX`] of these. `false` if this allocator can't be told.
#[cfg(target_env = "gnu")]
pub(crate) fn map_blocks_from(bytes: i32, kept: i32) -> bool {
    // SAFETY: mallopt changes settings of the allocator under the allocator's own lock, and takes no pointers.
    let set = |what, value| unsafe { libc::mallopt(what, value) == 1 };
    set(libc::M_MMAP_THRESHOLD, bytes)
        && set(libc::M_TRIM_THRESHOLD, kept)
        && set(libc::M_ARENA_MAX, HEAPS_MAX)
}

/// Gives back all whole pages that are free.
#[cfg(target_env = "gnu")]
pub(crate) fn trim() {
    // SAFETY: malloc_trim gives back what nobody has, under the allocator's own locks, and takes no pointers. Whether there was
    // anything does not matter.
    unsafe { libc::malloc_trim(0) };
}

/// Others decide for themselves.
#[cfg(not(target_env = "gnu"))]
pub(crate) fn trim() {}

/// Others decide for themselves.
#[cfg(not(target_env = "gnu"))]
pub(crate) fn map_blocks_from(_: i32, _: i32) -> bool {
    false
}
