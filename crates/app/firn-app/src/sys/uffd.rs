//! Asynchronous userfaultfd(2) of this process: the kernel remembers writes and sends no message
//! (`UFFD_FEATURE_WP_ASYNC`).

use std::os::fd::OwnedFd;

use linux_raw_sys::general as raw;
use rustix::io::Errno;
use rustix::ioctl::{self, Direction, Ioctl, IoctlOutput, Opcode};
use rustix::mm::UserfaultfdFlags;

use crate::span::PageSpan;

const FEATURES: u64 = (raw::UFFD_FEATURE_PAGEFAULT_FLAG_WP
    | raw::UFFD_FEATURE_WP_HUGETLBFS_SHMEM
    | raw::UFFD_FEATURE_WP_UNPOPULATED
    | raw::UFFD_FEATURE_WP_ASYNC) as u64;
const MODE_WP: u64 = 1 << 1;
const WRITEPROTECT_WP: u64 = 1 << 0;

const fn opcode<T>(direction: Direction, number: u32) -> Opcode {
    ioctl::opcode::from_components(direction, raw::UFFDIO as u8, number as u8, size_of::<T>())
}

const API: Opcode = opcode::<raw::uffdio_api>(Direction::ReadWrite, raw::_UFFDIO_API);
const REGISTER: Opcode =
    opcode::<raw::uffdio_register>(Direction::ReadWrite, raw::_UFFDIO_REGISTER);
const UNREGISTER: Opcode = opcode::<raw::uffdio_range>(Direction::Read, raw::_UFFDIO_UNREGISTER);
const WRITEPROTECT: Opcode =
    opcode::<raw::uffdio_writeprotect>(Direction::ReadWrite, raw::_UFFDIO_WRITEPROTECT);

// The numbers a C compiler computes from the header.
const _: () = {
    assert!(API == 0xc018_aa3f);
    assert!(REGISTER == 0xc020_aa00);
    assert!(UNREGISTER == 0x8010_aa01);
    assert!(WRITEPROTECT == 0xc018_aa06);
};

struct UffdCall<'a, T>(Opcode, &'a mut T);

// SAFETY: only `AsyncUffd::call_ioctl` makes one, with the argument type that belongs to the number
// (each pair is in one method below); the argument is borrowed for longer than the call and may be
// written.
unsafe impl<T> Ioctl for UffdCall<'_, T> {
    type Output = ();
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.0
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        std::ptr::from_mut(self.1).cast()
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut std::ffi::c_void) -> Result<(), Errno> {
        Ok(())
    }
}

/// Write protection under which the kernel permits writes and remembers them.
#[derive(Debug)]
pub(crate) struct AsyncUffd(OwnedFd);

impl AsyncUffd {
    /// Makes a userfaultfd without privileges: faults inside of system calls need no handler here
    /// either.
    pub(crate) fn new() -> Result<Self, Errno> {
        let user_mode_only = UserfaultfdFlags::from_bits_retain(raw::UFFD_USER_MODE_ONLY);
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK | user_mode_only;
        // SAFETY: a userfaultfd changes an address space only through what is registered with it.
        // `register_span` takes spans only, and a write to those never blocks, as the descriptor is
        // asynchronous.
        let uffd = Self(unsafe { rustix::mm::userfaultfd(flags) }?);
        let api = u64::from(raw::UFFD_API);
        uffd.call_ioctl(API, &mut raw::uffdio_api { api, features: FEATURES, ioctls: 0 })?;
        Ok(uffd)
    }

    fn call_ioctl<T>(&self, opcode: Opcode, argument: &mut T) -> Result<(), Errno> {
        // SAFETY: `UffdCall` upholds the contract of `Ioctl`. The requests made here change the
        // protection of spans, which sessions own, and no content.
        unsafe { ioctl::ioctl(&self.0, UffdCall(opcode, argument)) }
    }

    pub(crate) fn register_span(&self, span: PageSpan) -> Result<(), Errno> {
        let mut argument =
            raw::uffdio_register { range: uffd_range(span), mode: MODE_WP, ioctls: 0 };
        self.call_ioctl(REGISTER, &mut argument)
    }

    pub(crate) fn unregister_span(&self, span: PageSpan) -> Result<(), Errno> {
        self.call_ioctl(UNREGISTER, &mut uffd_range(span))
    }

    pub(crate) fn write_protect(&self, span: PageSpan) -> Result<(), Errno> {
        let mut argument =
            raw::uffdio_writeprotect { range: uffd_range(span), mode: WRITEPROTECT_WP };
        self.call_ioctl(WRITEPROTECT, &mut argument)
    }
}

fn uffd_range(span: PageSpan) -> raw::uffdio_range {
    raw::uffdio_range { start: span.start() as u64, len: span.byte_count() as u64 }
}
