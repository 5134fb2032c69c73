//! The memory of one region: found through the hypervisor's mappings, opened through `/proc`.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use firn_types::{HostVirt, PAGE_SIZE, Page, RamRegion};
use rustix::fs::{OFlags, SeekFrom, Stat, fstat, fstatfs, seek};
use rustix::io::Errno;

use super::source::{PrivateRam, RamFile, RamSource, TemplateRam};
use super::users::FileId;
use super::{HUGE_PAGE_BYTES, MemoryError, RegionLocation};
use crate::process::maps::{MemoryMapping, find_covering};
use crate::process::{Process, ProcessError};
use crate::template::is_template_path;

/// `TMPFS_MAGIC` and `HUGETLBFS_MAGIC` of `linux/magic.h`.
const TMPFS: u64 = 0x0102_1994;
const HUGETLBFS: u64 = 0x9584_58f6;

/// The unit in which stat(2) reports how much memory a file occupies.
const STATUS_BLOCK_BYTES: u64 = 512;

/// One region: its address, and the source of its bytes.
#[derive(Debug)]
pub(super) struct RegionBacking {
    region: RamRegion,
    hva: HostVirt,
    source: RamSource,
    /// The bytes that one entry of a page table maps.
    page_bytes: u64,
}

impl RegionBacking {
    /// Finds the mappings that hold the region, and opens their memory.
    pub(super) fn from_mappings(
        process: &Arc<Process>,
        mappings: &[MemoryMapping],
        location: &RegionLocation,
    ) -> Result<Self, MemoryError> {
        let RegionLocation { region, hva } = location.clone();
        let mapped = find_mappings(process, mappings, &region, hva)?;
        let open_file = || Self::open_ram_file(process, mapped, &region, hva);
        let open_own = || PrivateRam::open(process.clone(), hva);
        let (source, page_bytes) = match MappingKind::of_mappings(mapped) {
            MappingKind::Private => (RamSource::Private(open_own()?), PAGE_SIZE as u64),
            MappingKind::Template => {
                let (template, page_bytes) = open_file()?;
                (RamSource::Template(TemplateRam { own: open_own()?, template }), page_bytes)
            }
            MappingKind::PrivateFile => {
                check_private_file(process, mapped, &region)?;
                (RamSource::Private(open_own()?), HUGE_PAGE_BYTES)
            }
            MappingKind::Shared => {
                let (file, page_bytes) = open_file()?;
                (RamSource::File(file), page_bytes)
            }
        };
        let start = source.file_start();
        if [hva.0, region.byte_len(), start].iter().any(|number| number % page_bytes != 0) {
            return Err(unmapped_error(process, &region, hva));
        }
        Ok(Self { region, hva, source, page_bytes })
    }

    fn open_ram_file(
        process: &Process,
        mapped: &[MemoryMapping],
        region: &RamRegion,
        hva: HostVirt,
    ) -> Result<(RamFile, u64), MemoryError> {
        let start = file_offset(process, mapped, region, hva)?;
        let first = &mapped[0];
        let failed = |source| open_error(process, region, first, source);
        let file = open_mapped_file(process, mapped).map_err(failed)?;
        let page_bytes = page_bytes_of(&file, region, first)
            .map_err(|refusal| refusal.unwrap_or_else(failed))?;
        Ok((RamFile { file, start, inode: first.inode }, page_bytes))
    }

    /// Whether it is in huge pages.
    pub(super) fn is_huge(&self) -> bool {
        self.page_bytes > PAGE_SIZE as u64
    }

    /// The pages that one entry of a page table maps together with this page of the region.
    pub(super) fn entry_pages(&self, page: Page) -> Range<Page> {
        let start = self.region.offset_of(page) / self.page_bytes * self.page_bytes;
        self.page_at_offset(start)..self.page_at_offset(start + self.page_bytes)
    }

    pub(super) fn region_id(&self) -> &str {
        &self.region.id
    }

    pub(super) fn is_shared(&self) -> bool {
        matches!(self.source, RamSource::File(_))
    }

    /// Its file, and the offset of the region in the file, in bytes.
    pub(super) fn ram_file(&self) -> Option<(&File, u64)> {
        match &self.source {
            RamSource::File(file) => Some((&file.file, file.start)),
            RamSource::Private(_) | RamSource::Template(_) => None,
        }
    }

    /// Whether it is a private mapping of a template.
    pub(super) fn is_template(&self) -> bool {
        matches!(self.source, RamSource::Template(_))
    }

    /// Appends all runs of pages of a template's region that the hypervisor has mapped.
    pub(super) fn append_mapped_template_runs(
        &self,
        runs: &mut Vec<Range<Page>>,
    ) -> Result<(), MemoryError> {
        let RamSource::Template(ram) = &self.source else { return Ok(()) };
        let mut rest = 0..self.region.byte_len();
        while !rest.is_empty() {
            let run = ram.own.first_run(rest.clone());
            let run =
                run.map_err(|error| MemoryError::from_io("querying", &self.pages(), error))?;
            let Some(run) = run else { break };
            rest.start = run.end;
            runs.push(self.page_at_offset(run.start)..self.page_at_offset(run.end));
        }
        Ok(())
    }

    /// Its file, as `/proc/PID/maps` names it.
    pub(super) fn file_id(&self) -> Result<Option<FileId>, MemoryError> {
        let Some((file, _)) = self.ram_file() else { return Ok(None) };
        let status = fstat(file);
        let status =
            status.map_err(|errno| MemoryError::from_io("inspecting", &self.pages(), errno))?;
        Ok(Some((device_number(&status), status.st_ino)))
    }

    /// Copies pages of the region.
    pub(super) fn read_pages(&self, part: &Range<Page>, out: &mut [u8]) -> Result<(), MemoryError> {
        let read = self.source.read_bytes(self.region.offset_of(part.start), out);
        read.map_err(|error| MemoryError::from_io("reading", part, error))
    }

    /// The first run of backed pages of the region within `part`.
    pub(super) fn first_run(&self, part: &Range<Page>) -> Result<Option<Range<Page>>, MemoryError> {
        let (start, end) = (self.region.offset_of(part.start), self.offset_of_end(part.end));
        let run = self.source.first_run(start..end);
        let run = run.map_err(|error| MemoryError::from_io("querying", part, error))?;
        Ok(run.map(|run| self.page_at_offset(run.start)..self.page_at_offset(run.end)))
    }

    /// Whether no page of `part` was given back: see [`super::GuestMemory::has_kept`].
    pub(super) fn has_kept(&self, part: &Range<Page>) -> Result<bool, MemoryError> {
        let (start, end) = (self.region.offset_of(part.start), self.offset_of_end(part.end));
        let kept = match &self.source {
            RamSource::Private(private) if self.is_huge() => {
                private.first_run(start..end).map(|run| run == Some(start..end))
            }
            source => source.has_kept(start..end),
        };
        kept.map_err(|error| MemoryError::from_io("querying", part, error))
    }

    /// The bytes that its file occupies in memory, once every removal that has begun is complete.
    pub(super) fn file_bytes(&self) -> Result<Option<(FileId, u64)>, MemoryError> {
        let Some((file, _)) = self.ram_file() else { return Ok(None) };
        // Both seeking and removing lock the inode; reading the status does not.
        let status = match seek(file, SeekFrom::Data(0)) {
            Ok(_) | Err(Errno::NXIO) => fstat(file),
            Err(errno) => Err(errno),
        };
        let status =
            status.map_err(|errno| MemoryError::from_io("inspecting", &self.pages(), errno))?;
        let id = (device_number(&status), status.st_ino);
        Ok(Some((id, status.st_blocks as u64 * STATUS_BLOCK_BYTES)))
    }

    /// Appends all runs of backed pages of the region within `rest`.
    pub(super) fn append_backed_runs(
        &self,
        mut rest: Range<Page>,
        runs: &mut Vec<Range<Page>>,
    ) -> Result<(), MemoryError> {
        while !rest.is_empty() {
            let Some(run) = self.first_run(&rest)? else { break };
            rest.start = run.end;
            runs.push(run);
        }
        Ok(())
    }

    pub(super) fn punch_out(&self, part: &Range<Page>) -> Result<(), MemoryError> {
        let len = (Page::count_in(part) * PAGE_SIZE) as u64;
        let punched = self.source.punch_out(self.region.offset_of(part.start), len);
        punched.map_err(|error| MemoryError::from_io("punching out", part, error))
    }

    pub(super) fn pages(&self) -> Range<Page> {
        self.region.page_range()
    }

    /// The pages of the region that are in `range`; `None` if there are none.
    pub(super) fn overlap_with(&self, range: &Range<Page>) -> Option<Range<Page>> {
        let mine = self.pages();
        let part = mine.start.max(range.start)..mine.end.min(range.end);
        (part.start < part.end).then_some(part)
    }

    pub(super) fn hva_of(&self, page: Page) -> HostVirt {
        self.hva.offset_by(self.region.offset_of(page))
    }

    pub(super) fn page_at(&self, hva: HostVirt) -> Option<Page> {
        let offset = hva.0.checked_sub(self.hva.0)?;
        (offset < self.region.byte_len())
            .then(|| Page(self.region.first.0 + (offset / PAGE_SIZE as u64) as u32))
    }

    /// The page at an offset in the region.
    fn page_at_offset(&self, offset: u64) -> Page {
        let pages = (offset / PAGE_SIZE as u64).min(u64::from(self.region.pages));
        Page(self.region.first.0 + pages as u32)
    }

    /// The offset in the region at which a range that ends before `page` ends.
    fn offset_of_end(&self, page: Page) -> u64 {
        u64::from(page.0 - self.region.first.0) * PAGE_SIZE as u64
    }

    /// Checks that the region is still mapped as it was found, and shared.
    pub(super) fn check_shared(
        &self,
        process: &Process,
        mappings: &[MemoryMapping],
    ) -> Result<(), MemoryError> {
        let RamSource::File(file) = &self.source else {
            return Err(MemoryError::Private { id: self.region.id.clone() });
        };
        let mapped = find_mappings(process, mappings, &self.region, self.hva)?;
        let start = file_offset(process, mapped, &self.region, self.hva)?;
        match mapped[0].inode == file.inode && start == file.start {
            true => Ok(()),
            false => Err(unmapped_error(process, &self.region, self.hva)),
        }
    }
}

/// How a hypervisor maps a region.
enum MappingKind {
    /// As anonymous memory.
    Private,
    /// As a private mapping of a template.
    Template,
    /// As a private mapping of another file.
    PrivateFile,
    /// As a shared file, or in a manner that is refused later.
    Shared,
}

impl MappingKind {
    fn of_mappings(mapped: &[MemoryMapping]) -> Self {
        let is_each = |property: fn(&MemoryMapping) -> bool| mapped.iter().all(property);
        match () {
            () if is_each(|mapping| !mapping.shared && mapping.inode == 0) => Self::Private,
            () if is_each(is_template) => Self::Template,
            () if is_each(|mapping| !mapping.shared && mapping.inode != 0) => Self::PrivateFile,
            () => Self::Shared,
        }
    }
}

fn is_template(mapping: &MemoryMapping) -> bool {
    !mapping.shared && is_template_path(&mapping.path)
}

/// The mappings that hold a region without gaps.
fn find_mappings<'m>(
    process: &Process,
    mappings: &'m [MemoryMapping],
    region: &RamRegion,
    hva: HostVirt,
) -> Result<&'m [MemoryMapping], MemoryError> {
    let aligned = hva.0 % PAGE_SIZE as u64 == 0;
    let mapped = find_covering(mappings, hva.0, region.byte_len()).filter(|_| aligned);
    mapped.ok_or_else(|| unmapped_error(process, region, hva))
}

/// The offset at which a region starts in its file. Its mappings must be shared, or of a template;
/// of one file, and consecutive in it.
fn file_offset(
    process: &Process,
    mapped: &[MemoryMapping],
    region: &RamRegion,
    hva: HostVirt,
) -> Result<u64, MemoryError> {
    if mapped.iter().any(|mapping| !mapping.shared && !is_template(mapping)) {
        return Err(MemoryError::Private { id: region.id.clone() });
    }
    let follows = |pair: &[MemoryMapping]| {
        let (a, b) = (&pair[0], &pair[1]);
        (a.device, a.inode) == (b.device, b.inode) && a.offset + (a.end - a.start) == b.offset
    };
    match mapped.windows(2).all(follows) {
        true => Ok(mapped[0].offset + (hva.0 - mapped[0].start)),
        false => Err(unmapped_error(process, region, hva)),
    }
}

fn unmapped_error(process: &Process, region: &RamRegion, hva: HostVirt) -> MemoryError {
    let (id, bytes, pid) = (region.id.clone(), region.byte_len(), process.pid());
    MemoryError::Unmapped { id, hva, bytes, pid }
}

fn open_error(
    process: &Process,
    region: &RamRegion,
    mapping: &MemoryMapping,
    source: io::Error,
) -> MemoryError {
    if !process.is_alive() {
        return ProcessError::Gone { pid: process.pid() }.into();
    }
    let (id, pid, path) = (region.id.clone(), process.pid(), mapping.path.clone());
    MemoryError::Open { id, pid, path, source }
}

/// Opens the file of some mappings: through the mapping itself where Firn has the right
/// (CAP_CHECKPOINT_RESTORE), else through a descriptor that the process still has for the same
/// file.
fn open_mapped_file(process: &Process, mapped: &[MemoryMapping]) -> io::Result<File> {
    let first = &mapped[0];
    let by_mapping = format!("map_files/{:x}-{:x}", first.start, first.end);
    let wanted =
        |status: &Stat| status.st_ino == first.inode && device_number(status) == first.device;
    let open = |name: &str| process.open_file(name, OFlags::RDWR).map(File::from);
    let refused = match open(&by_mapping) {
        Ok(file) if wanted(&fstat(&file)?) => return Ok(file),
        Ok(_) => io::Error::from(io::ErrorKind::NotFound),
        Err(error) => error,
    };
    let descriptors = process.list_descriptors().map_err(io::Error::other)?;
    let mut names = descriptors.iter().map(|descriptor| format!("fd/{}", descriptor.number));
    let same = names.find(|name| process.status_of(name).is_ok_and(|status| wanted(&status)));
    open(&same.ok_or(refused)?)
}

fn device_number(status: &Stat) -> (u32, u32) {
    (rustix::fs::major(status.st_dev), rustix::fs::minor(status.st_dev))
}

/// The bytes of a file's pages. Refuses files of kinds that userfaultfd cannot trace. `Err(Err)`
/// means that the kernel did not answer the query.
fn page_bytes_of(
    file: &File,
    region: &RamRegion,
    mapping: &MemoryMapping,
) -> Result<u64, Result<MemoryError, io::Error>> {
    let status = fstatfs(file).map_err(|errno| Err(errno.into()))?;
    let kind = match status.f_type as u64 {
        TMPFS => return Ok(PAGE_SIZE as u64),
        HUGETLBFS if status.f_bsize as u64 == HUGE_PAGE_BYTES => return Ok(HUGE_PAGE_BYTES),
        HUGETLBFS => "in huge pages (hugetlbfs) of another size",
        _ => "on a disk file system",
    };
    Err(Ok(MemoryError::NotShmem { id: region.id.clone(), path: mapping.path.clone(), kind }))
}

/// Accepts a private mapping of a file only if all that the hypervisor has there is its own: huge
/// pages, of a file that has none. A page of the file itself would be missing from a save.
fn check_private_file(
    process: &Process,
    mapped: &[MemoryMapping],
    region: &RamRegion,
) -> Result<(), MemoryError> {
    let has_empty_file = || -> io::Result<bool> {
        let file = open_mapped_file(process, mapped)?;
        let status = fstatfs(&file)?;
        let is_huge = status.f_type as u64 == HUGETLBFS && status.f_bsize as u64 == HUGE_PAGE_BYTES;
        Ok(is_huge && fstat(&file)?.st_blocks == 0)
    };
    match has_empty_file() {
        Ok(true) => Ok(()),
        _ => Err(MemoryError::Private { id: region.id.clone() }),
    }
}
