//! The means to fill a template, in any process.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use firn_types::{PAGE_SIZE, Page, RegionMap};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, pwrite};

use super::error::TemplateError;
use super::filled_pages::FilledPages;

/// The means to put pages into a template, in any process.
#[derive(Debug)]
pub struct TemplateWriter {
    /// The memory of the holder.
    memory: File,
    filled: FilledPages,
    blocks: Vec<TemplateBlock>,
    /// A connection that the holder keeps open. None in the holder itself.
    holder: Option<OwnedFd>,
    is_gone: AtomicBool,
}

#[derive(Debug)]
struct TemplateBlock {
    pages: Range<Page>,
    /// In the holder.
    address: u64,
    file: File,
}

impl TemplateWriter {
    /// A writer from [`super::HeldTemplate::clone_descriptors`] and
    /// [`super::HeldTemplate::addresses`] of a template with these regions. `holder` is a connection
    /// that ends with the holder. `None` if the numbers of regions, addresses and descriptors
    /// differ, or the bits of filled pages can't be mapped.
    pub fn new(
        map: &RegionMap,
        addresses: &[u64],
        descriptors: Vec<File>,
        holder: Option<OwnedFd>,
    ) -> Option<Self> {
        let regions = map.regions();
        let mut files = descriptors.into_iter();
        let (memory, filled) = (files.next()?, FilledPages::map_file(&files.next()?).ok()?);
        if regions.len() != addresses.len() || files.len() != addresses.len() {
            return None;
        }
        let blocks = regions.iter().zip(addresses).zip(files);
        let blocks = blocks.map(|((region, &address), file)| TemplateBlock {
            pages: region.page_range(),
            address,
            file,
        });
        let (blocks, is_gone) = (blocks.collect(), AtomicBool::new(false));
        Some(Self { memory, filled, blocks, holder, is_gone })
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

    /// Whether the template has the contents of this page.
    pub fn is_filled(&self, page: Page) -> bool {
        self.filled.contains(page)
    }

    /// The filled pages from this one on, at most up to `end`. Empty if it is not filled.
    pub fn filled_run(&self, first: Page, end: Page) -> Range<Page> {
        let count = Page::iter_range(first..end).take_while(|&page| self.is_filled(page)).count();
        first..Page(first.0 + count as u32)
    }

    /// Whether the template has the contents of all pages of a range that are RAM.
    pub fn has_pages(&self, range: Range<Page>) -> bool {
        Page::iter_range(range).all(|page| self.is_filled(page) || self.block_of(page).is_none())
    }

    /// The pages that have been filled since the last call with the same `seen`, in runs of at most
    /// `pages_max`. Before the first call `seen` is empty.
    pub fn take_new_runs(&self, seen: &mut Vec<u32>, pages_max: u32) -> Vec<Range<Page>> {
        self.filled.take_new_runs(seen, pages_max)
    }

    /// Puts the pages of a memory block into the template, except for those that are filled. The
    /// block may extend past the end of its region.
    ///
    /// # Errors
    /// If the holder has ended, or the host has no memory.
    pub fn fill_pages(&self, first: Page, bytes: &[u8]) -> Result<(), TemplateError> {
        let Some(block) = self.block_of(first) else { return Ok(()) };
        let room = Page::count_in(&(first..block.pages.end)) * PAGE_SIZE;
        self.write_pages(first, &bytes[..bytes.len().min(room)])
            .map_err(|errno| TemplateError::new("filling", errno))
    }

    /// Puts pages of one region into the template, except for those that are filled. `SRCH`: the
    /// holder has ended. `NOMEM`: the host has no memory for a page.
    ///
    /// Two processes may write a page at the same time. Both write the bytes of the image, so the
    /// page has them when the first of the two records it as filled, and keeps them.
    pub(crate) fn write_pages(&self, first: Page, bytes: &[u8]) -> Result<(), Errno> {
        let block = self.block_of(first).ok_or(Errno::NOENT)?;
        let end = Page(first.0 + (bytes.len() / PAGE_SIZE) as u32);
        let mut at = first;
        while at < end {
            let is_missing = |page: &Page| !self.is_filled(*page);
            let missing = Page::iter_range(at..end).take_while(is_missing).count() as u32;
            let run = at..Page(at.0 + missing);
            if !run.is_empty() {
                let from = Page::count_in(&(first..run.start)) * PAGE_SIZE;
                let to = Page::count_in(&(first..run.end)) * PAGE_SIZE;
                self.write_memory(block.address_of(run.start), &bytes[from..to])?;
                self.filled.record_filled(run.clone());
            }
            // The page after the run is filled.
            at = Page(run.end.0 + 1);
        }
        Ok(())
    }

    /// Writes to the memory of the holder. An address is a number here: the mapping behind it
    /// belongs to the template, and no program code reads or writes it.
    fn write_memory(&self, mut address: u64, mut bytes: &[u8]) -> Result<(), Errno> {
        while !bytes.is_empty() {
            match pwrite(&self.memory, bytes, address) {
                // The holder's address space is gone.
                Ok(0) => {
                    self.is_gone.store(true, Ordering::Release);
                    return Err(Errno::SRCH);
                }
                Ok(written) => {
                    address += written as u64;
                    bytes = &bytes[written..];
                }
                Err(Errno::INTR) => {}
                // The page is part of a mapping that may be written: it can't be brought in.
                Err(Errno::IO) => return Err(Errno::NOMEM),
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    fn block_of(&self, page: Page) -> Option<&TemplateBlock> {
        self.blocks.iter().find(|block| block.pages.contains(&page))
    }
}

impl TemplateBlock {
    fn address_of(&self, page: Page) -> u64 {
        self.address + u64::from(page.0 - self.pages.start.0) * PAGE_SIZE as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process_memory::read_traced;
    use crate::template::held::HeldTemplate;
    use firn_types::HostVirt;
    use memmap2::MmapOptions;
    use std::os::unix::fs::{FileExt as _, MetadataExt as _};

    fn template() -> (HeldTemplate, TemplateWriter) {
        let map = RegionMap::lay_out([("a", 40 * 4096), ("b", 8 * 4096)]).unwrap();
        let held = HeldTemplate::create(map.regions()).unwrap();
        let descriptors = held.clone_descriptors().unwrap();
        let writer = TemplateWriter::new(&map, &held.addresses(), descriptors, None).unwrap();
        (held, writer)
    }

    fn page_of(writer: &TemplateWriter, page: usize) -> u8 {
        let (mut bytes, file) = ([1; PAGE_SIZE], &writer.clone_files().unwrap()[0]);
        file.read_exact_at(&mut bytes, (page * PAGE_SIZE) as u64).unwrap();
        assert_eq!(bytes, [bytes[0]; PAGE_SIZE]);
        bytes[0]
    }

    /// Touches a page as a hypervisor could that has been taken over: through a mapping that is not
    /// registered.
    fn touch_page(writer: &TemplateWriter, page: usize) -> u8 {
        let file = &writer.clone_files().unwrap()[0];
        let mapping = MmapOptions::new().map_raw_read_only(file).unwrap();
        let (mut byte, at) = ([1], mapping.as_ptr().addr() + page * PAGE_SIZE);
        read_traced(std::process::id() as i32, HostVirt(at as u64), &mut byte).unwrap();
        byte[0]
    }

    #[test]
    fn pages_are_filled_once() {
        let (_held, writer) = template();
        writer.fill_pages(Page(3), &[7; 2 * PAGE_SIZE]).unwrap();
        writer.fill_pages(Page(2), &[8; 4 * PAGE_SIZE]).unwrap();
        assert_eq!([1, 2, 3, 4, 5, 6].map(|page| page_of(&writer, page)), [0, 8, 7, 7, 8, 0]);
        assert_eq!(writer.filled_run(Page(2), Page(40)), Page(2)..Page(6));
        assert_eq!(writer.filled_run(Page(1), Page(40)), Page(1)..Page(1));
        assert!(writer.has_pages(Page(2)..Page(6)) && !writer.has_pages(Page(2)..Page(7)));
    }

    #[test]
    fn a_block_may_reach_past_the_end_of_its_region() {
        let (_held, writer) = template();
        writer.fill_pages(Page(38), &[9; 16 * PAGE_SIZE]).unwrap();
        assert!(writer.is_filled(Page(39)) && !writer.is_filled(Page(40)));
        assert_eq!(page_of(&writer, 39), 9);
    }

    #[test]
    fn a_hole_that_was_touched_is_not_filled_and_can_be() {
        let (_held, writer) = template();
        assert_eq!(touch_page(&writer, 10), 0);
        let file = &writer.clone_files().unwrap()[0];
        assert_eq!(file.metadata().unwrap().blocks(), 8, "the template has a page of zeros");
        assert!(!writer.is_filled(Page(10)));
        writer.fill_pages(Page(10), &[5; PAGE_SIZE]).unwrap();
        assert_eq!((page_of(&writer, 10), touch_page(&writer, 10)), (5, 5));
    }

    #[test]
    fn a_writer_of_another_template_is_refused() {
        let (held, _) = template();
        let other = RegionMap::lay_out([("a", 40 * 4096)]).unwrap();
        let descriptors = held.clone_descriptors().unwrap();
        assert!(TemplateWriter::new(&other, &held.addresses(), descriptors, None).is_none());
    }
}
