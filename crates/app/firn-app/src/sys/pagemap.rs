//! The page map of this process: `/proc/self/pagemap`, by `PAGEMAP_SCAN` (Linux 6.7) or read as
//! words (proc(5)).

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;

use linux_raw_sys::general::{self as raw, page_region, pm_scan_arg};
use rustix::io::Errno;
use rustix::ioctl::{self, Direction, Ioctl, IoctlOutput, Opcode};

use crate::span::{PAGE, PageSpan};
use crate::tracker::interface::WrittenRuns;

/// The property of the pages that a scan finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScanCriterion {
    /// Written since the last write protection. The scan write-protects these pages again.
    WrittenAndRearm,
    /// Written since the last write protection. Also of spans with synchronous protection, and
    /// changes nothing.
    Written,
    /// A private copy of a page of a file.
    Copied,
}

/// The maximum count of page runs that one call of the kernel reports.
const REGIONS_MAX: usize = 64;
/// The count of pages read as words at once.
const WORDS_PER_READ: usize = 512;
/// Bit of a word: written since `clear_refs`.
const SOFT_DIRTY: u64 = 1 << 55;

const _: () = {
    assert!(size_of::<page_region>() == 24);
    assert!(size_of::<pm_scan_arg>() == 96);
    assert!(SelfScan::OPCODE == 0xc060_6610);
};

struct SelfScan<'a> {
    argument: pm_scan_arg,
    /// What `argument.vec` points to.
    _regions: &'a mut [page_region],
}

impl<'a> SelfScan<'a> {
    const OPCODE: Opcode =
        ioctl::opcode::from_components(Direction::ReadWrite, b'f', 16, size_of::<pm_scan_arg>());

    fn new(start: u64, end: u64, sought: ScanCriterion, regions: &'a mut [page_region]) -> Self {
        let mut argument = pm_scan_arg {
            size: size_of::<pm_scan_arg>() as u64,
            flags: 0,
            start,
            end,
            walk_end: 0,
            vec: regions.as_mut_ptr().expose_provenance() as u64,
            vec_len: regions.len() as u64,
            max_pages: 0,
            category_inverted: 0,
            category_mask: 0,
            category_anyof_mask: 0,
            return_mask: 0,
        };
        match sought {
            // The kernel has a short path for exactly this combination. It skips mappings that are
            // not registered.
            ScanCriterion::WrittenAndRearm => {
                argument.flags = u64::from(raw::PM_SCAN_WP_MATCHING);
                argument.category_mask = u64::from(raw::PAGE_IS_WRITTEN);
                argument.return_mask = u64::from(raw::PAGE_IS_WRITTEN);
            }
            ScanCriterion::Written => {
                argument.category_mask = u64::from(raw::PAGE_IS_WRITTEN);
                argument.return_mask = u64::from(raw::PAGE_IS_WRITTEN);
            }
            ScanCriterion::Copied => {
                argument.category_mask = u64::from(raw::PAGE_IS_FILE);
                argument.category_inverted = u64::from(raw::PAGE_IS_FILE);
                argument.category_anyof_mask =
                    u64::from(raw::PAGE_IS_PRESENT | raw::PAGE_IS_SWAPPED);
                argument.return_mask = u64::from(raw::PAGE_IS_PRESENT);
            }
        }
        Self { argument, _regions: regions }
    }
}

// SAFETY: PAGEMAP_SCAN takes struct pm_scan_arg, which `as_ptr` points to, writes at most `vec_len`
// regions at `vec`, both taken from a slice that is borrowed for as long as `self`, and returns
// their number. What it may write-protect is a span registered with an asynchronous userfaultfd:
// writes do not block.
unsafe impl Ioctl for SelfScan<'_> {
    /// The count of regions, and the address at which the scan ended.
    type Output = (usize, u64);
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        Self::OPCODE
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        (&raw mut self.argument).cast()
    }

    unsafe fn output_from_ptr(
        count: IoctlOutput,
        argument: *mut std::ffi::c_void,
    ) -> Result<(usize, u64), Errno> {
        // SAFETY: the caller returns what `as_ptr` gave: a valid argument, which the kernel has
        // filled in.
        let walk_end = unsafe { (*argument.cast::<pm_scan_arg>()).walk_end };
        Ok((count.unsigned_abs() as usize, walk_end))
    }
}

/// The page map of this process.
#[derive(Debug)]
pub(crate) struct SelfPagemap {
    file: File,
    regions: Vec<page_region>,
}

impl SelfPagemap {
    pub(crate) fn open() -> io::Result<Self> {
        let empty = page_region { start: 0, end: 0, categories: 0 };
        Ok(Self { file: File::open("/proc/self/pagemap")?, regions: vec![empty; REGIONS_MAX] })
    }

    /// Adds each run of pages that meet the criterion, in order.
    pub(crate) fn scan_span(
        &mut self,
        span: PageSpan,
        sought: ScanCriterion,
        found: &mut WrittenRuns,
    ) -> Result<(), Errno> {
        let mut start = span.start() as u64;
        while start < span.end() as u64 {
            let scan = SelfScan::new(start, span.end() as u64, sought, &mut self.regions);
            // SAFETY: `SelfScan` upholds the contract of `Ioctl`.
            let (count, end) = unsafe { ioctl::ioctl(&self.file, scan) }?;
            for run in &self.regions[..count] {
                found.push_run(run.start as usize, (run.end - run.start) as usize);
            }
            start = end.max(start + 1);
        }
        Ok(())
    }

    /// Adds each page that was written since [`clear_soft_dirty`].
    pub(crate) fn scan_soft_dirty(
        &self,
        span: PageSpan,
        found: &mut WrittenRuns,
    ) -> io::Result<()> {
        let mut bytes = [0; WORDS_PER_READ * 8];
        for first in (0..span.page_count()).step_by(WORDS_PER_READ) {
            let part = span.sub_span(first..first + WORDS_PER_READ);
            let bytes = &mut bytes[..part.page_count() * 8];
            self.file.read_exact_at(bytes, (part.start() / PAGE * 8) as u64)?;
            for (page, word) in bytes.chunks_exact(8).enumerate() {
                let word = u64::from_le_bytes(word.try_into().unwrap_or_default());
                if word & SOFT_DIRTY != 0 {
                    found.push_run(part.start() + page * PAGE, PAGE);
                }
            }
        }
        Ok(())
    }
}

/// Clears the soft-dirty bits of the whole process.
pub(crate) fn clear_soft_dirty() -> io::Result<()> {
    OpenOptions::new().write(true).open("/proc/self/clear_refs")?.write_all(b"4")
}
