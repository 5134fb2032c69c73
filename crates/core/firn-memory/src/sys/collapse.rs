//! `process_madvise(2)` with `MADV_COLLAPSE` (Linux 6.1, `mm/khugepaged.c`).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use linux_raw_sys::general::MADV_COLLAPSE;
use nix::errno::Errno;
use nix::libc;

use super::uffd::AddressSpan;

/// Puts the pages of each aligned 2 MiB of a span into one huge page, in the address space of
/// another process. The bytes stay what they are; a thread that touches them waits meanwhile.
///
/// # Errors
/// If that was not possible for all of the span.
pub(crate) fn collapse_span(pidfd: BorrowedFd<'_>, span: AddressSpan) -> io::Result<()> {
    let range =
        libc::iovec { iov_base: span.start as *mut libc::c_void, iov_len: span.len as usize };
    // SAFETY: the kernel reads one struct iovec, which lives throughout the call. Its address is one
    // of another process (a `Process` is never Firn itself), and no content changes there.
    let result = unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            pidfd.as_raw_fd(),
            &raw const range,
            1_usize,
            MADV_COLLAPSE as libc::c_int,
            0_u32,
        )
    };
    Errno::result(result)?;
    Ok(())
}
