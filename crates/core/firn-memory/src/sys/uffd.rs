//! The requests of `userfaultfd(2)` (`linux/userfaultfd.h`), on a descriptor of another process.
//!
//! All addresses in these requests but one lie in the address space that the descriptor belongs to,
//! which is never Firn's own (see [`crate::Process`]). The exception is the source of
//! `UFFDIO_COPY`, which is a borrowed slice here.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use linux_raw_sys::general as raw;
use nix::libc;
use rustix::io::Errno;
use rustix::ioctl::{self, Direction, Ioctl, IoctlOutput, Opcode};
use rustix::mm::UserfaultfdFlags;
use zerocopy::IntoBytes;

/// Flags and features of the header, widened to the 64 bits in which requests carry them.
pub(crate) mod flag {
    use linux_raw_sys::general as raw;

    pub(crate) const REGISTER_MISSING: u64 = 1 << 0;
    pub(crate) const REGISTER_WP: u64 = 1 << 1;
    pub(crate) const REGISTER_MINOR: u64 = 1 << 2;
    pub(crate) const COPY_DONTWAKE: u64 = 1 << 0;
    pub(crate) const CONTINUE_DONTWAKE: u64 = 1 << 0;
    pub(crate) const CONTINUE_WP: u64 = 1 << 1;
    pub(crate) const ZEROPAGE_DONTWAKE: u64 = 1 << 0;
    pub(crate) const WRITEPROTECT_WP: u64 = 1 << 0;

    pub(crate) const FAULT_WRITE: u64 = raw::UFFD_PAGEFAULT_FLAG_WRITE as u64;
    pub(crate) const FAULT_WP: u64 = raw::UFFD_PAGEFAULT_FLAG_WP as u64;
    pub(crate) const FAULT_MINOR: u64 = raw::UFFD_PAGEFAULT_FLAG_MINOR as u64;

    pub(crate) const FEATURE_WP: u64 = raw::UFFD_FEATURE_PAGEFAULT_FLAG_WP as u64;
    pub(crate) const FEATURE_EVENT_REMOVE: u64 = raw::UFFD_FEATURE_EVENT_REMOVE as u64;
    pub(crate) const FEATURE_MISSING_SHMEM: u64 = raw::UFFD_FEATURE_MISSING_SHMEM as u64;
    pub(crate) const FEATURE_THREAD_ID: u64 = raw::UFFD_FEATURE_THREAD_ID as u64;
    pub(crate) const FEATURE_MINOR_SHMEM: u64 = raw::UFFD_FEATURE_MINOR_SHMEM as u64;
    pub(crate) const FEATURE_WP_SHMEM: u64 = raw::UFFD_FEATURE_WP_HUGETLBFS_SHMEM as u64;
    pub(crate) const FEATURE_WP_UNPOPULATED: u64 = raw::UFFD_FEATURE_WP_UNPOPULATED as u64;
    pub(crate) const FEATURE_WP_ASYNC: u64 = raw::UFFD_FEATURE_WP_ASYNC as u64;
}

/// One message of the descriptor, as four little-endian words (`struct uffd_msg`).
///
/// ```text
///   word 0   event (8 bits), reserved (56)
///   word 1   page fault: flags            remove: start
///   word 2   page fault: address          remove: end
///   word 3   page fault: thread id (32 bits)
/// ```
pub(crate) type UffdMessage = [u64; 4];

const _: () = assert!(size_of::<UffdMessage>() == size_of::<raw::uffd_msg>());

/// The argument of one request.
///
/// # Safety
///
/// `OPCODE` is a request whose argument has exactly this type, and through which the kernel touches
/// no other memory of the calling process than the argument itself and what its fields are
/// documented here to borrow.
unsafe trait IoctlArgument {
    const OPCODE: Opcode;
}

const fn ioctl_opcode<T>(direction: Direction, number: u32) -> Opcode {
    ioctl::opcode::from_components(direction, raw::UFFDIO as u8, number as u8, size_of::<T>())
}

#[repr(transparent)]
struct WakeArgument(raw::uffdio_range);
#[repr(transparent)]
struct UnregisterArgument(raw::uffdio_range);

// SAFETY: UFFDIO_API takes struct uffdio_api, which holds no address.
unsafe impl IoctlArgument for raw::uffdio_api {
    const OPCODE: Opcode = ioctl_opcode::<Self>(Direction::ReadWrite, raw::_UFFDIO_API);
}
// SAFETY: UFFDIO_REGISTER takes struct uffdio_register; its range lies in the descriptor's address
// space.
unsafe impl IoctlArgument for raw::uffdio_register {
    const OPCODE: Opcode = ioctl_opcode::<Self>(Direction::ReadWrite, raw::_UFFDIO_REGISTER);
}
// SAFETY: UFFDIO_UNREGISTER takes struct uffdio_range, which lies in the descriptor's address
// space.
unsafe impl IoctlArgument for UnregisterArgument {
    const OPCODE: Opcode = ioctl_opcode::<Self>(Direction::Read, raw::_UFFDIO_UNREGISTER);
}
// SAFETY: UFFDIO_WAKE takes struct uffdio_range, which lies in the descriptor's address space.
unsafe impl IoctlArgument for WakeArgument {
    const OPCODE: Opcode = ioctl_opcode::<Self>(Direction::Read, raw::_UFFDIO_WAKE);
}
// SAFETY: UFFDIO_COPY takes struct uffdio_copy and reads `len` bytes at `src`; `Uffd::copy_pages`,
// the only function that makes one, takes both from a slice that is borrowed for the whole call.
unsafe impl IoctlArgument for raw::uffdio_copy {
    const OPCODE: Opcode = ioctl_opcode::<Self>(Direction::ReadWrite, raw::_UFFDIO_COPY);
}
// SAFETY: UFFDIO_ZEROPAGE takes struct uffdio_zeropage; its range lies in the descriptor's address
// space.
unsafe impl IoctlArgument for raw::uffdio_zeropage {
    const OPCODE: Opcode = ioctl_opcode::<Self>(Direction::ReadWrite, raw::_UFFDIO_ZEROPAGE);
}
// SAFETY: UFFDIO_CONTINUE takes struct uffdio_continue; its range lies in the descriptor's address
// space.
unsafe impl IoctlArgument for raw::uffdio_continue {
    const OPCODE: Opcode = ioctl_opcode::<Self>(Direction::ReadWrite, raw::_UFFDIO_CONTINUE);
}
// SAFETY: UFFDIO_WRITEPROTECT takes struct uffdio_writeprotect; its range lies in the descriptor's
// address space.
unsafe impl IoctlArgument for raw::uffdio_writeprotect {
    const OPCODE: Opcode = ioctl_opcode::<Self>(Direction::ReadWrite, raw::_UFFDIO_WRITEPROTECT);
}

// The numbers a C compiler computes from the header.
const _: () = {
    assert!(<raw::uffdio_api as IoctlArgument>::OPCODE == 0xc018_aa3f);
    assert!(<raw::uffdio_register as IoctlArgument>::OPCODE == 0xc020_aa00);
    assert!(<UnregisterArgument as IoctlArgument>::OPCODE == 0x8010_aa01);
    assert!(<WakeArgument as IoctlArgument>::OPCODE == 0x8010_aa02);
    assert!(<raw::uffdio_copy as IoctlArgument>::OPCODE == 0xc028_aa03);
    assert!(<raw::uffdio_zeropage as IoctlArgument>::OPCODE == 0xc020_aa04);
    assert!(<raw::uffdio_writeprotect as IoctlArgument>::OPCODE == 0xc018_aa06);
    assert!(<raw::uffdio_continue as IoctlArgument>::OPCODE == 0xc020_aa07);
};

struct IoctlCall<'a, T>(&'a mut T);

// SAFETY: `as_ptr` is a unique borrow of an argument of the type that `IoctlArgument` promises for
// `OPCODE`; it lives longer than the call, and IS_MUTATING declares that the kernel may write it.
unsafe impl<T: IoctlArgument> Ioctl for IoctlCall<'_, T> {
    type Output = ();
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        T::OPCODE
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        std::ptr::from_mut(self.0).cast()
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut std::ffi::c_void) -> Result<(), Errno> {
        Ok(())
    }
}

/// A range of addresses of the descriptor's address space, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AddressSpan {
    pub(crate) start: u64,
    pub(crate) len: u64,
}

impl AddressSpan {
    fn to_raw(self) -> raw::uffdio_range {
        raw::uffdio_range { start: self.start, len: self.len }
    }
}

/// A userfaultfd of another address space.
#[derive(Debug)]
pub(crate) struct Uffd(OwnedFd);

impl Uffd {
    /// Wraps a descriptor that the caller knows to be a userfaultfd of another process. Any other
    /// file would answer every request with an error, as the numbers are unique to userfaultfd.
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self(fd)
    }

    fn run_ioctl<T: IoctlArgument>(&self, argument: &mut T) -> Result<(), Errno> {
        // SAFETY: `IoctlCall` upholds the contract of `Ioctl` for this argument, and the descriptor
        // belongs to another address space (module documentation), so that the request changes no
        // mapping of this process.
        unsafe { ioctl::ioctl(&self.0, IoctlCall(argument)) }
    }

    /// The handshake, once per descriptor. Returns the features that the kernel has.
    pub(crate) fn negotiate_api(&self, features: u64) -> Result<u64, Errno> {
        let api = u64::from(raw::UFFD_API);
        let mut argument = raw::uffdio_api { api, features, ioctls: 0 };
        self.run_ioctl(&mut argument).map(|()| argument.features)
    }

    /// Registers a range, and returns the bit set of requests that work on it.
    pub(crate) fn register(&self, span: AddressSpan, mode: u64) -> Result<u64, Errno> {
        let mut argument = raw::uffdio_register { range: span.to_raw(), mode, ioctls: 0 };
        self.run_ioctl(&mut argument).map(|()| argument.ioctls)
    }

    pub(crate) fn unregister(&self, span: AddressSpan) -> Result<(), Errno> {
        self.run_ioctl(&mut UnregisterArgument(span.to_raw()))
    }

    pub(crate) fn wake(&self, span: AddressSpan) -> Result<(), Errno> {
        self.run_ioctl(&mut WakeArgument(span.to_raw()))
    }

    /// Copies whole pages to `to` and wakes the threads that wait for them. Returns the bytes done,
    /// which may be fewer.
    pub(crate) fn copy_pages(&self, to: u64, bytes: &[u8], mode: u64) -> Result<u64, Errno> {
        let (src, len) = (bytes.as_ptr().addr() as u64, bytes.len() as u64);
        let mut argument = raw::uffdio_copy { dst: to, src, len, mode, copy: 0 };
        let result = self.run_ioctl(&mut argument);
        request_progress(result, argument.copy, len)
    }

    /// Maps pages of zeros, as [`Self::copy_pages`].
    pub(crate) fn map_zeros(&self, span: AddressSpan, mode: u64) -> Result<u64, Errno> {
        let mut argument = raw::uffdio_zeropage { range: span.to_raw(), mode, zeropage: 0 };
        let result = self.run_ioctl(&mut argument);
        request_progress(result, argument.zeropage, span.len)
    }

    /// Maps pages that the RAM file has already (UFFDIO_CONTINUE), as [`Self::copy_pages`].
    pub(crate) fn map_existing(&self, span: AddressSpan, mode: u64) -> Result<u64, Errno> {
        let mut argument = raw::uffdio_continue { range: span.to_raw(), mode, mapped: 0 };
        let result = self.run_ioctl(&mut argument);
        request_progress(result, argument.mapped, span.len)
    }

    pub(crate) fn write_protect(&self, span: AddressSpan, mode: u64) -> Result<(), Errno> {
        self.run_ioctl(&mut raw::uffdio_writeprotect { range: span.to_raw(), mode })
    }

    /// Reads as many messages as there are and fit; 0 if there are none.
    pub(crate) fn read_messages(&self, messages: &mut [UffdMessage]) -> Result<usize, Errno> {
        match rustix::io::read(&self.0, messages.as_mut_bytes()) {
            Ok(bytes) => Ok(bytes / size_of::<UffdMessage>()),
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A descriptor of Firn's own address space, to query features. Nothing may be registered with it.
pub(crate) fn own_for_probing() -> Result<Uffd, Errno> {
    let user_mode_only = UserfaultfdFlags::from_bits_retain(raw::UFFD_USER_MODE_ONLY);
    let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK | user_mode_only;
    // SAFETY: a userfaultfd changes an address space only through what is registered with it, and
    // no caller registers anything with this one.
    unsafe { rustix::mm::userfaultfd(flags) }.map(Uffd)
}

/// As [`own_for_probing`], without the restriction to faults of user space, as a hypervisor needs
/// it.
pub(crate) fn own_unrestricted() -> Result<Uffd, Errno> {
    let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
    // SAFETY: as in `own_for_probing`.
    unsafe { rustix::mm::userfaultfd(flags) }.map(Uffd)
}

/// `_IO(0xAA, 0x00)` of `linux/userfaultfd.h`.
pub(crate) const USERFAULTFD_IOC_NEW: u64 = 0xaa00;

/// A descriptor of Firn's own address space that `/dev/userfaultfd` makes. Nothing may be
/// registered with it.
pub(crate) fn own_by_device(device: BorrowedFd<'_>) -> Result<Uffd, Errno> {
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as libc::c_ulong;
    let request = USERFAULTFD_IOC_NEW as libc::c_ulong;
    // SAFETY: USERFAULTFD_IOC_NEW takes a number and touches no memory; no caller registers
    // anything with the result.
    let made = unsafe { libc::ioctl(device.as_raw_fd(), request, flags) };
    if made < 0 {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    }
    // SAFETY: the kernel has just made this descriptor, so nothing else owns it.
    Ok(Uffd(unsafe { OwnedFd::from_raw_fd(made) }))
}

/// The bytes that a request completed. A request that stopped half-way reports EAGAIN and its
/// progress; one that did not start, its error.
fn request_progress(result: Result<(), Errno>, done: i64, all: u64) -> Result<u64, Errno> {
    match result {
        Ok(()) => Ok(all),
        Err(_) if done > 0 => Ok(done.unsigned_abs().min(all)),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupted_request_reports_its_progress() {
        assert_eq!(request_progress(Ok(()), 0, 8192), Ok(8192));
        assert_eq!(request_progress(Err(Errno::AGAIN), 4096, 8192), Ok(4096));
        assert_eq!(request_progress(Err(Errno::AGAIN), 0, 8192), Err(Errno::AGAIN));
        assert_eq!(request_progress(Err(Errno::EXIST), -17, 8192), Err(Errno::EXIST));
    }
}
