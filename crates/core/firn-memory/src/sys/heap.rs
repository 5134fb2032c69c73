//! Settings of the allocator, and the return of free memory: `mallopt(3)`, `malloc_trim(3)`.

use nix::libc;

/// The maximum number of heaps. By default glibc gives each thread one, up to eight for each
/// processor, and the free memory of one serves no other.
#[cfg(target_env = "gnu")]
const HEAPS_MAX: i32 = 2;

/// Makes each block of `bytes` or more a mapping of its own, from now on. Heaps of smaller blocks
/// keep up to `kept` bytes that are free at their end. There are at most [`HEAPS_MAX`] heaps.
/// `false` if this allocator has no such settings.
#[cfg(target_env = "gnu")]
pub(crate) fn map_blocks_from(bytes: i32, kept: i32) -> bool {
    // SAFETY: mallopt changes settings of the allocator under the allocator's own lock, and takes
    // no pointers.
    let set = |what, value| unsafe { libc::mallopt(what, value) == 1 };
    set(libc::M_MMAP_THRESHOLD, bytes)
        && set(libc::M_TRIM_THRESHOLD, kept)
        && set(libc::M_ARENA_MAX, HEAPS_MAX)
}

/// Returns all whole pages that are free to the kernel.
#[cfg(target_env = "gnu")]
pub(crate) fn trim() {
    // SAFETY: malloc_trim returns memory that is not allocated, under the allocator's own locks,
    // and takes no pointers. Whether there was any does not matter.
    unsafe { libc::malloc_trim(0) };
}

/// Other allocators manage their memory by themselves.
#[cfg(not(target_env = "gnu"))]
pub(crate) fn trim() {}

/// Other allocators manage their memory by themselves.
#[cfg(not(target_env = "gnu"))]
pub(crate) fn map_blocks_from(_: i32, _: i32) -> bool {
    false
}
