//! Templates: guest RAM that several hypervisors share until they write it.
//!
//! ```text
//!   holder        shared, writable mapping                      made before the files were sealed
//!                        |  written through /proc/PID/mem, by any Firn process that has that file
//!                        v
//!   template      [ filled | hole | zeros | filled | ... ]      a sealed memfd per region
//!                   ^ private      ^ private
//!   clones        QEMU 1         QEMU 2        a page that a guest writes becomes its own
//! ```
//!
//! | a page of the template | a hypervisor that is registered | one that is not |
//! |---|---|---|
//! | filled | MINOR fault: the page is mapped | sees the page |
//! | hole | MISSING fault: the page is filled, and mapped | makes a page of zeros of it |
//! | a page of zeros that is not filled | MINOR fault: as for a hole | sees zeros, until the page is filled |
//!
//! The seals (`F_SEAL_FUTURE_WRITE` of fcntl(2)) refuse every later writable mapping and every
//! `write(2)`, so that no hypervisor can change the memory of another one. The mapping of the holder
//! is older than the seals, and pages enter the template through that mapping only: `/proc/PID/mem`
//! of the holder, which the holder opens itself and passes on, so that no process needs a right to
//! trace it.
//!
//! A hypervisor that has unregistered its mapping, or maps the file once more, can make pages of
//! zeros where the template has holes. So that the template has a page means nothing: whether it is
//! filled is recorded in `filled_pages`, which no hypervisor can reach. A page is filled whatever
//! the template has there, and no hypervisor that is registered sees it before.
//!
//! A hypervisor must not use pages that are not filled. So it maps a template in three steps:
//! without access, then registered, then accessible.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use firn_types::{HostVirt, PAGE_SIZE, Page};
use nix::libc;
use rustix::fs::{FallocateFlags, fallocate};

use crate::guest_memory::GuestMemory;
use crate::guest_memory::RegionLocation;
use crate::tracee::{TraceError, Tracee};

mod error;
mod filled_pages;
mod held;
mod writer;

pub use error::TemplateError;
pub use held::HeldTemplate;
pub use writer::TemplateWriter;

/// What `/proc/PID/maps` shows for a mapping of a template.
const MAPPED_NAME: &str = "/memfd:firn-template";

/// Whether `/proc/PID/maps` shows this path for a template.
pub(crate) fn is_template_path(path: &str) -> bool {
    path.starts_with(MAPPED_NAME)
}

/// Maps the files of a template over the RAM of a hypervisor that has not run its guest: privately,
/// and without access. `numbers` are the hypervisor's descriptors, in the order of the regions.
///
/// Until [`allow_access`] the hypervisor must not touch its RAM.
///
/// # Errors
/// If the hypervisor refuses, or ends.
pub fn map_template(
    tracee: &mut Tracee<'_>,
    locations: &[RegionLocation],
    numbers: &[i32],
) -> Result<(), TraceError> {
    let (protection, flags) =
        (libc::PROT_NONE as u64, (libc::MAP_PRIVATE | libc::MAP_FIXED) as u64);
    for (RegionLocation { region, hva: HostVirt(hva) }, &number) in locations.iter().zip(numbers) {
        let arguments = [*hva, region.byte_len(), protection, flags, number as u64, 0];
        tracee.syscall(libc::SYS_mmap, arguments)?;
    }
    Ok(())
}

/// Allows a hypervisor to access the template that it has mapped. Its page faults must be
/// registered.
///
/// # Errors
/// If the hypervisor refuses, or ends.
pub fn allow_access(tracee: &mut Tracee<'_>, memory: &GuestMemory) -> Result<(), TraceError> {
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    for (part, HostVirt(hva)) in memory.locate_parts(memory.all_pages()) {
        let len = (Page::count_in(&part) * PAGE_SIZE) as u64;
        // As QEMU does with its RAM: a child process of its own must not share it.
        let advice = libc::MADV_DONTFORK as u64;
        tracee.syscall(libc::SYS_madvise, [hva, len, advice, 0, 0, 0])?;
        tracee.syscall(libc::SYS_mprotect, [hva, len, protection, 0, 0, 0])?;
    }
    Ok(())
}

/// Gives back all memory of a file.
///
/// # Errors
/// If the kernel refuses, for a sealed file for instance.
pub fn empty_file(file: &File) -> io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match file.metadata()?.len() {
        0 => Ok(()),
        len => Ok(fallocate(file, flags, 0, len)?),
    }
}

/// The numbers of open files in this process.
pub fn descriptor_numbers(files: &[File]) -> Vec<i32> {
    files.iter().map(|file| file.as_fd()).map(|fd: BorrowedFd<'_>| fd.as_raw_fd()).collect()
}
