//! Write protection of this process's own memory by userfaultfd(2), in two modes. *Asynchronous*:
//! the kernel remembers a write and sends no message (`UFFD_FEATURE_WP_ASYNC`). *Synchronous*: the
//! kernel sends a message, and the thread that writes waits until the page is writable, also inside
//! of a system call.

use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

use linux_raw_sys::general as raw;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{self, Direction, Ioctl, IoctlOutput, Opcode};
use rustix::mm::UserfaultfdFlags;

use crate::span::PageSpan;

const FEATURES: u32 = raw::UFFD_FEATURE_PAGEFAULT_FLAG_WP
    | raw::UFFD_FEATURE_WP_HUGETLBFS_SHMEM
    | raw::UFFD_FEATURE_WP_UNPOPULATED;
const MODE_WP: u64 = 1 << 1;
const WRITEPROTECT_WP: u64 = 1 << 0;
/// `USERFAULTFD_IOC_NEW`, of the device.
const NEW_BY_DEVICE: u64 = 0xaa00;
/// Where a message has the address of the fault, and the thread. Its first byte is the event.
const MESSAGE_BYTES: usize = 32;
const ADDRESS_AT: usize = 16;
const THREAD_AT: usize = 24;

const fn opcode<T>(direction: Direction, number: u32) -> Opcode {
    ioctl::opcode::from_components(direction, raw::UFFDIO as u8, number as u8, size_of::<T>())
}

const API: Opcode = opcode::<raw::uffdio_api>(Direction::ReadWrite, raw::_UFFDIO_API);
const REGISTER: Opcode =
    opcode::<raw::uffdio_register>(Direction::ReadWrite, raw::_UFFDIO_REGISTER);
const UNREGISTER: Opcode = opcode::<raw::uffdio_range>(Direction::Read, raw::_UFFDIO_UNREGISTER);
const WAKE: Opcode = opcode::<raw::uffdio_range>(Direction::Read, raw::_UFFDIO_WAKE);
const WRITEPROTECT: Opcode =
    opcode::<raw::uffdio_writeprotect>(Direction::ReadWrite, raw::_UFFDIO_WRITEPROTECT);

// The numbers a C compiler computes from the header.
const _: () = {
    assert!(API == 0xc018_aa3f);
    assert!(REGISTER == 0xc020_aa00);
    assert!(UNREGISTER == 0x8010_aa01);
    assert!(WAKE == 0x8010_aa02);
    assert!(WRITEPROTECT == 0xc018_aa06);
    assert!(size_of::<raw::uffd_msg>() == MESSAGE_BYTES);
};

struct UffdCall<'a, T>(Opcode, &'a mut T);

// SAFETY: only `Uffd::call_ioctl` makes one, with the argument type that belongs to the number
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

/// A thread that waits to write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitingWriter {
    pub(crate) address: usize,
    /// Its number.
    pub(crate) thread: u32,
}

/// A userfaultfd of this process.
#[derive(Debug)]
pub(crate) struct Uffd(OwnedFd);

impl Uffd {
    /// Opens one without privileges that permits every write, and remembers the page.
    pub(crate) fn asynchronous() -> Result<Self, Errno> {
        let user_mode_only = UserfaultfdFlags::from_bits_retain(raw::UFFD_USER_MODE_ONLY);
        Self::open(user_mode_only, FEATURES | raw::UFFD_FEATURE_WP_ASYNC)
    }

    /// Opens one whose messages another thread must read: writers wait for it, also those inside of
    /// system calls. For that the kernel requires a privilege (`CAP_SYS_PTRACE`, the setting
    /// `vm.unprivileged_userfaultfd`, or access to `/dev/userfaultfd`).
    pub(crate) fn synchronous() -> Result<Self, Errno> {
        let features = FEATURES | raw::UFFD_FEATURE_THREAD_ID;
        match Self::open(UserfaultfdFlags::empty(), features) {
            Err(Errno::PERM) => Self::enable(open_by_device()?, features),
            opened => opened,
        }
    }

    fn open(flags: UserfaultfdFlags, features: u32) -> Result<Self, Errno> {
        let flags = UserfaultfdFlags::CLOEXEC | flags;
        // SAFETY: a userfaultfd changes an address space only through what is registered with it.
        // `register_span` takes spans only. A write to those never blocks if the descriptor is
        // asynchronous; otherwise it waits for the thread of `quiet_writes`, which touches no span.
        let uffd = unsafe { rustix::mm::userfaultfd(flags) }?;
        Self::enable(uffd, features)
    }

    fn enable(uffd: OwnedFd, features: u32) -> Result<Self, Errno> {
        let uffd = Self(uffd);
        let (api, features) = (u64::from(raw::UFFD_API), u64::from(features));
        uffd.call_ioctl(API, &mut raw::uffdio_api { api, features, ioctls: 0 })?;
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
        self.set_protection(span, WRITEPROTECT_WP)
    }

    /// Makes a span writable, and wakes the threads that wait to write it.
    pub(crate) fn permit_writes(&self, span: PageSpan) -> Result<(), Errno> {
        self.set_protection(span, 0)
    }

    fn set_protection(&self, span: PageSpan, mode: u64) -> Result<(), Errno> {
        let mut argument = raw::uffdio_writeprotect { range: uffd_range(span), mode };
        self.call_ioctl(WRITEPROTECT, &mut argument)
    }

    /// Lets the threads that wait to write a span try again.
    pub(crate) fn wake_writers(&self, span: PageSpan) -> Result<(), Errno> {
        self.call_ioctl(WAKE, &mut uffd_range(span))
    }

    /// Waits for a thread that waits to write. `None` if it was interrupted. Allocates nothing, and
    /// locks nothing.
    pub(crate) fn wait_for_writer(&self) -> Option<WaitingWriter> {
        let mut message = [0; MESSAGE_BYTES];
        let read = rustix::io::read(&self.0, &mut message[..]);
        let is_write = read == Ok(MESSAGE_BYTES) && message[0] == raw::UFFD_EVENT_PAGEFAULT as u8;
        is_write.then(|| parse_message(&message)).flatten()
    }
}

/// Opens a userfaultfd by the device that permits it without privileges (Linux 6.1).
fn open_by_device() -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let device =
        rustix::fs::open("/dev/userfaultfd", flags, Mode::empty()).map_err(|_| Errno::PERM)?;
    // SAFETY: the request takes the flags of the new descriptor by value, and returns it.
    let new = unsafe { libc::ioctl(device.as_raw_fd(), NEW_BY_DEVICE, libc::O_CLOEXEC) };
    // SAFETY: a descriptor that the kernel has just made, which no other code has.
    if new < 0 { Err(Errno::PERM) } else { Ok(unsafe { OwnedFd::from_raw_fd(new) }) }
}

fn parse_message(message: &[u8; MESSAGE_BYTES]) -> Option<WaitingWriter> {
    let address = u64::from_ne_bytes(*message[ADDRESS_AT..].first_chunk()?) as usize;
    let thread = u32::from_ne_bytes(*message[THREAD_AT..].first_chunk()?);
    Some(WaitingWriter { address, thread })
}

fn uffd_range(span: PageSpan) -> raw::uffdio_range {
    raw::uffdio_range { start: span.start() as u64, len: span.byte_count() as u64 }
}
