//! Creation of a userfaultfd in the hypervisor.
//!
//! `userfaultfd(2)` is for privileged processes, unless `vm.unprivileged_userfaultfd` allows it to
//! all, and a hypervisor often runs as a user of its own. The device `/dev/userfaultfd` (Linux 6.1)
//! gives the same to every process that may open it. A privileged Firn may, and passes the opened
//! device to the hypervisor:
//!
//! ```text
//!   Firn                                   hypervisor (injected)
//!                                          mmap        a page for the arguments
//!                                          socketpair  (a, b)
//!   pidfd_getfd(b)
//!   open /dev/userfaultfd
//!   sendmsg(b, SCM_RIGHTS) --------------> recvmsg(a)  the device
//!                                          ioctl       USERFAULTFD_IOC_NEW: the userfaultfd
//!                                          close a, b, the device; munmap
//! ```

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;

use firn_types::{HostVirt, PAGE_SIZE};
use nix::errno::Errno;
use nix::libc;
use rustix::fs::{Mode, OFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::error::PageFaultError;
use crate::process_memory;
use crate::sys::uffd::USERFAULTFD_IOC_NEW;
use crate::tracee::{TraceError, Tracee};

/// The device that makes userfaultfds.
pub(super) const DEVICE: &str = "/dev/userfaultfd";
const FLAGS: u64 = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;

/// Creates a userfaultfd, and returns its number in the hypervisor's table.
pub(super) fn create_userfaultfd(tracee: &mut Tracee<'_>) -> Result<i32, PageFaultError> {
    match tracee.syscall(libc::SYS_userfaultfd, [FLAGS, 0, 0, 0, 0, 0]) {
        Ok(number) => Ok(number as i32),
        // Where the device cannot be used either, the first refusal has the advice for the user.
        Err(refused) if is_refusal(&refused) => {
            create_by_device(tracee).map_err(|_| refused.into())
        }
        Err(error) => Err(error.into()),
    }
}

fn is_refusal(error: &TraceError) -> bool {
    matches!(error, TraceError::Call { source: Errno::EPERM, .. })
}

fn create_by_device(tracee: &mut Tracee<'_>) -> Result<i32, PageFaultError> {
    let process = tracee.process();
    let device = rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| process.operation_error("opening /dev/userfaultfd", errno))?;
    let scratch = ScratchPage::new(tracee)?;
    let made = scratch.pass_device(tracee, &device);
    scratch.unmap_page(tracee)?;
    made
}

/// Closes a descriptor of the hypervisor.
pub(super) fn close_descriptor(tracee: &mut Tracee<'_>, number: i32) -> Result<(), TraceError> {
    tracee.syscall(libc::SYS_close, [number as u64, 0, 0, 0, 0, 0]).map(drop)
}

/// A page in the hypervisor for the memory to which arguments of system calls point.
struct ScratchPage(u64);

// The offsets in the page.
const PAIR: u64 = 0;
const HEADER: u64 = 64;
const VECTOR: u64 = 128;
const CONTROL: u64 = 192;
const BYTE: u64 = 256;
/// Bytes of a control message with one descriptor (`CMSG_SPACE(4)`); the descriptor follows after
/// 16 bytes.
const CONTROL_BYTES: u64 = 24;
const CONTROL_HEAD: u64 = 16;

impl ScratchPage {
    fn new(tracee: &mut Tracee<'_>) -> Result<Self, TraceError> {
        let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
        let arguments = [0, PAGE_SIZE as u64, protection, flags, u64::MAX, 0];
        tracee.syscall(libc::SYS_mmap, arguments).map(Self)
    }

    fn unmap_page(self, tracee: &mut Tracee<'_>) -> Result<(), TraceError> {
        tracee.syscall(libc::SYS_munmap, [self.0, PAGE_SIZE as u64, 0, 0, 0, 0]).map(drop)
    }

    /// Passes the device to the hypervisor through a pair of sockets, and makes a userfaultfd of it
    /// there.
    fn pass_device(
        &self,
        tracee: &mut Tracee<'_>,
        device: &impl AsFd,
    ) -> Result<i32, PageFaultError> {
        let kind = (libc::SOCK_DGRAM | libc::SOCK_CLOEXEC) as u64;
        let arguments = [libc::AF_UNIX as u64, kind, 0, self.0 + PAIR, 0, 0];
        tracee.syscall(libc::SYS_socketpair, arguments)?;
        let [ours, theirs] = [self.read_number(tracee, PAIR)?, self.read_number(tracee, PAIR + 4)?];
        let passed = self
            .send_device(tracee, theirs, device)
            .and_then(|()| self.receive_device(tracee, ours));
        for socket in [ours, theirs] {
            close_descriptor(tracee, socket)?;
        }
        let device = passed?;
        let made =
            tracee.syscall(libc::SYS_ioctl, [device as u64, USERFAULTFD_IOC_NEW, FLAGS, 0, 0, 0]);
        close_descriptor(tracee, device)?;
        Ok(made? as i32)
    }

    fn send_device(
        &self,
        tracee: &Tracee<'_>,
        socket: i32,
        device: &impl AsFd,
    ) -> Result<(), PageFaultError> {
        let process = tracee.process();
        let socket = process.copy_descriptor(socket)?;
        let devices = [device.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&devices));
        sendmsg(&socket, &[IoSlice::new(&[0])], &mut control, SendFlags::empty())
            .map_err(|errno| process.operation_error("passing /dev/userfaultfd", errno))?;
        Ok(())
    }

    /// Receives a descriptor in the hypervisor; returns its number. `struct msghdr`, `struct iovec`
    /// and `struct cmsghdr` are those of recvmsg(2) and cmsg(3).
    fn receive_device(&self, tracee: &mut Tracee<'_>, socket: i32) -> Result<i32, PageFaultError> {
        let header = [0, 0, self.0 + VECTOR, 1, self.0 + CONTROL, CONTROL_BYTES, 0];
        self.write_words(tracee, HEADER, &header)?;
        self.write_words(tracee, VECTOR, &[self.0 + BYTE, 1])?;
        self.write_words(tracee, CONTROL, &[0; 3])?;
        let flags = (libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT) as u64;
        tracee.syscall(libc::SYS_recvmsg, [socket as u64, self.0 + HEADER, flags, 0, 0, 0])?;
        self.read_number(tracee, CONTROL + CONTROL_HEAD)
    }

    fn write_words(
        &self,
        tracee: &Tracee<'_>,
        at: u64,
        words: &[u64],
    ) -> Result<(), PageFaultError> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        Ok(process_memory::write_memory(tracee.process(), HostVirt(self.0 + at), &bytes)?)
    }

    fn read_number(&self, tracee: &Tracee<'_>, at: u64) -> Result<i32, PageFaultError> {
        let mut bytes = [0; 4];
        process_memory::read_memory(tracee.process(), HostVirt(self.0 + at), &mut bytes)?;
        Ok(i32::from_le_bytes(bytes))
    }
}
