//! Templates: guest RAM that several hypervisors share until they write it.
//!
//! ```text
//!   holder        shared, writable mapping + userfaultfd       made before the file was sealed
//!                        |  UFFDIO_COPY, by any Firn process that has the descriptor
//!                        v
//!   template      [ page | hole | page | ... ]                  a sealed memfd per region
//!                   ^ private      ^ private
//!   clones        QEMU 1         QEMU 2        a page that a guest writes becomes its own; a hole is a page fault
//! ```
//!
//! The seals (`F_SEAL_FUTURE_WRITE` of fcntl(2)) refuse every later writable mapping and every
//! `write(2)`, so that no hypervisor can change the memory of another one. The mapping of the holder
//! is older than the seals, and pages enter the template through that mapping only. `UFFDIO_COPY`
//! makes a page appear whole or not at all. It changes no page that is there: a second process
//! gets `EEXIST`.
//!
//! A hypervisor that is not registered would fill a hole by reading it, with zeros. So a hypervisor
//! maps a template in three steps: without access, then registered, then accessible.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use firn_types::{HostVirt, PAGE_SIZE, Page, RamRegion, RegionMap};
use memmap2::{MmapOptions, MmapRaw};
use nix::libc;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, SeekFrom, fallocate, fcntl_add_seals, ftruncate,
    memfd_create, seek,
};
use rustix::io::Errno;
use thiserror::Error;

use crate::guest_memory::GuestMemory;
use crate::guest_memory::RegionLocation;
use crate::sys::uffd::{AddressSpan, Uffd, flag, own_for_template};
use crate::tracee::{TraceError, Tracee};

/// The name of a template's files. `/proc/PID/maps` shows it.
const FILE_NAME: &str = "firn-template";

/// What `/proc/PID/maps` shows for a mapping of a template.
const MAPPED_NAME: &str = "/memfd:firn-template";

/// The number of attempts while the kernel is busy with a page, and the pause between them.
const ATTEMPTS_MAX: u32 = 1000;
const ATTEMPT_PAUSE: Duration = Duration::from_micros(50);

/// Why a template can't be made or filled.
#[derive(Debug, Error)]
pub enum TemplateError {
    /// The kernel refused a step.
    #[error("{what} a template of guest memory failed")]
    Failed {
        /// The step.
        what: &'static str,
        /// The error of the kernel.
        source: io::Error,
    },
}

impl TemplateError {
    fn new(what: &'static str, source: impl Into<io::Error>) -> Self {
        Self::Failed { what, source: source.into() }
    }
}

/// A template in the process that holds it. Dropping it ends the possibility to fill it.
#[derive(Debug)]
pub struct HeldTemplate {
    uffd: Uffd,
    blocks: Vec<HeldBlock>,
}

#[derive(Debug)]
struct HeldBlock {
    file: File,
    /// Never read or written by this process: a hole in it would block the thread.
    mapping: MmapRaw,
}

impl HeldTemplate {
    /// Makes an empty template with a file for each region, and seals it.
    ///
    /// # Errors
    /// If the kernel refuses a file, a mapping or a userfaultfd.
    pub fn create(regions: &[RamRegion]) -> Result<Self, TemplateError> {
        let uffd = own_for_template().map_err(|errno| TemplateError::new("attaching to", errno))?;
        uffd.negotiate_api(flag::FEATURE_MISSING_SHMEM)
            .map_err(|errno| TemplateError::new("attaching to", errno))?;
        let blocks = regions.iter().map(HeldBlock::create).collect::<Result<Vec<_>, _>>()?;
        for block in &blocks {
            let span = AddressSpan { start: block.address(), len: block.mapping.len() as u64 };
            uffd.register(span, flag::REGISTER_MISSING)
                .map_err(|errno| TemplateError::new("registering", errno))?;
            let seals = SealFlags::FUTURE_WRITE | SealFlags::GROW | SealFlags::SHRINK;
            fcntl_add_seals(&block.file, seals | SealFlags::SEAL)
                .map_err(|errno| TemplateError::new("sealing", errno))?;
        }
        Ok(Self { uffd, blocks })
    }

    /// The address of each file's mapping in this process.
    pub fn addresses(&self) -> Vec<u64> {
        self.blocks.iter().map(HeldBlock::address).collect()
    }

    /// The descriptors that [`TemplateWriter::new`] needs: the userfaultfd, then the files.
    ///
    /// # Errors
    /// If the process has too many open files.
    pub fn clone_descriptors(&self) -> io::Result<Vec<File>> {
        let uffd = self.uffd.as_fd().try_clone_to_owned()?;
        let files = self.blocks.iter().map(|block| block.file.try_clone());
        std::iter::once(Ok(File::from(uffd))).chain(files).collect()
    }
}

impl HeldBlock {
    fn create(region: &RamRegion) -> Result<Self, TemplateError> {
        let file = memfd_create(FILE_NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|errno| TemplateError::new("creating", errno))?;
        ftruncate(&file, region.byte_len())
            .map_err(|errno| TemplateError::new("creating", errno))?;
        let len = region.byte_len() as usize;
        let mapping = MmapOptions::new().len(len).map_raw(&file);
        let mapping = mapping.map_err(|error| TemplateError::new("mapping", error))?;
        Ok(Self { file: file.into(), mapping })
    }

    fn address(&self) -> u64 {
        self.mapping.as_ptr().addr() as u64
    }
}

/// The means to put pages into a template, in any process.
#[derive(Debug)]
pub struct TemplateWriter {
    uffd: Uffd,
    blocks: Vec<TemplateBlock>,
    /// A connection that the holder keeps open. None in the holder itself.
    holder: Option<OwnedFd>,
    is_gone: AtomicBool,
}

#[derive(Debug)]
struct TemplateBlock {
    pages: Range<Page>,
    address: u64,
    file: File,
}

impl TemplateWriter {
    /// A writer from [`HeldTemplate::clone_descriptors`] and [`HeldTemplate::addresses`] of a
    /// template with these regions. `holder` is a connection that ends with the holder. `None` if
    /// the numbers of regions, addresses and descriptors differ.
    pub fn new(
        map: &RegionMap,
        addresses: &[u64],
        descriptors: Vec<File>,
        holder: Option<OwnedFd>,
    ) -> Option<Self> {
        let regions = map.regions();
        let mut files = descriptors.into_iter();
        let uffd = Uffd::new(files.next()?.into());
        if regions.len() != addresses.len() || files.len() != addresses.len() {
            return None;
        }
        let blocks = regions.iter().zip(addresses).zip(files);
        let blocks = blocks.map(|((region, &address), file)| TemplateBlock {
            pages: region.page_range(),
            address,
            file,
        });
        Some(Self { uffd, blocks: blocks.collect(), holder, is_gone: AtomicBool::new(false) })
    }

    /// Copies of the descriptors of the files, in the order of the regions.
    ///
    /// # Errors
    /// If the process has too many open files.
    pub fn clone_files(&self) -> io::Result<Vec<File>> {
        self.blocks.iter().map(|block| block.file.try_clone()).collect()
    }

    /// Whether the holder has ended, so that nothing more can be put into the template.
    pub fn is_holder_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire) || self.has_hung_up()
    }

    fn has_hung_up(&self) -> bool {
        let Some(holder) = &self.holder else { return false };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut polled = [PollFd::new(holder, PollFlags::IN)];
        let has_ended = matches!(poll(&mut polled, Some(&now)), Ok(1..));
        if has_ended {
            self.is_gone.store(true, Ordering::Release);
        }
        has_ended
    }

    /// Puts pages of one region into the template, from its first page on. Returns the bytes done.
    /// `EXIST`: the first page is there. `SRCH`: the holder has ended.
    pub(crate) fn copy_pages(&self, first: Page, bytes: &[u8]) -> Result<u64, Errno> {
        let block = self.block_of(first).ok_or(Errno::NOENT)?;
        let copied = self.uffd.copy_pages(block.address + block.offset_of(first), bytes);
        if copied == Err(Errno::SRCH) {
            self.is_gone.store(true, Ordering::Release);
        }
        copied
    }

    /// Whether the template has this page.
    pub(crate) fn has_page(&self, page: Page) -> bool {
        let Some(block) = self.block_of(page) else { return false };
        let offset = block.offset_of(page);
        seek(&block.file, SeekFrom::Data(offset)) == Ok(offset)
    }

    /// Whether the template has all pages of a range that are RAM.
    pub fn has_pages(&self, range: Range<Page>) -> bool {
        Page::iter_range(range).all(|page| self.block_of(page).is_none() || self.has_page(page))
    }

    /// Puts the pages of a memory block into the template; pages that are there stay. The block may
    /// extend past the end of its region.
    ///
    /// # Errors
    /// If the holder has ended, or the host has no memory.
    pub fn fill_pages(&self, first: Page, bytes: &[u8]) -> Result<(), TemplateError> {
        let Some(block) = self.block_of(first) else { return Ok(()) };
        let room = Page::count_in(&(first..block.pages.end)) * PAGE_SIZE;
        let mut rest = &bytes[..bytes.len().min(room)];
        let (mut at, mut attempts) = (first, 0);
        while !rest.is_empty() {
            let done = match self.copy_pages(at, rest) {
                Ok(done) => done as usize,
                Err(Errno::EXIST) => PAGE_SIZE,
                Err(Errno::AGAIN) if attempts < ATTEMPTS_MAX => {
                    attempts += 1;
                    std::thread::sleep(ATTEMPT_PAUSE);
                    0
                }
                Err(errno) => return Err(TemplateError::new("filling", errno)),
            };
            rest = &rest[done.min(rest.len())..];
            at = Page(at.0 + (done / PAGE_SIZE) as u32);
        }
        Ok(())
    }

    fn block_of(&self, page: Page) -> Option<&TemplateBlock> {
        self.blocks.iter().find(|block| block.pages.contains(&page))
    }
}

impl TemplateBlock {
    fn offset_of(&self, page: Page) -> u64 {
        u64::from(page.0 - self.pages.start.0) * PAGE_SIZE as u64
    }
}

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
