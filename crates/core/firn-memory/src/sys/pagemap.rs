//! The page map of another process, `/proc/PID/pagemap`: scanned by `PAGEMAP_SCAN` (Linux 6.7;
//! `linux/fs.h`) or read as words (proc(5)).

use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use linux_raw_sys::general::{self as raw, page_region, pm_scan_arg};
use rustix::io::Errno;
use rustix::ioctl::{self, Direction, Ioctl, IoctlOutput, Opcode};
use zerocopy::IntoBytes;

use super::uffd::AddressSpan;

/// The property of a page that a scan searches for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageQuery {
    /// Written since it was last write-protected.
    Written,
    /// As [`Self::Written`]; and write-protects it again.
    WrittenAndRearm,
    /// Without any entry in the page tables, not even one that marks it as write-protected.
    Unknown,
    /// As [`Self::Unknown`]; and write-protects it.
    UnknownAndRearm,
    /// Mapped.
    Present,
    /// As [`Self::Written`], where nothing is registered: a page that is not write-protected.
    Unprotected,
    /// As [`Self::Unknown`], where nothing is registered.
    Unmapped,
    /// Not mapped, with or without a mark.
    Absent,
    /// Mapped by an entry for 2 MiB.
    HugeMapped,
}

/// Pages that are read at once, as words.
const WORDS: usize = 512;
/// Bit of a word: the page is mapped.
const WORD_PRESENT: u64 = 1 << 63;
/// Bit of a word: the page is swapped out, or only a mark says that it is write-protected.
const WORD_SWAPPED: u64 = 1 << 62;
/// Bit of a word: the page is write-protected by a userfaultfd.
const WORD_PROTECTED: u64 = 1 << 57;

const _: () = {
    assert!(size_of::<page_region>() == 24);
    assert!(size_of::<pm_scan_arg>() == 96);
    assert!(ScanRequest::OPCODE == 0xc060_6610);
};

impl PageQuery {
    fn category_mask(self) -> u64 {
        u64::from(match self {
            Self::Written | Self::WrittenAndRearm | Self::Unprotected => raw::PAGE_IS_WRITTEN,
            Self::Unknown | Self::UnknownAndRearm | Self::Unmapped => {
                raw::PAGE_IS_PRESENT | raw::PAGE_IS_SWAPPED
            }
            Self::Present | Self::Absent => raw::PAGE_IS_PRESENT,
            Self::HugeMapped => raw::PAGE_IS_PRESENT | raw::PAGE_IS_HUGE,
        })
    }

    fn scan_flags(self) -> u64 {
        u64::from(match self {
            Self::Written | Self::Unknown => raw::PM_SCAN_CHECK_WPASYNC,
            Self::WrittenAndRearm | Self::UnknownAndRearm => {
                raw::PM_SCAN_CHECK_WPASYNC | raw::PM_SCAN_WP_MATCHING
            }
            Self::Present
            | Self::Unprotected
            | Self::Unmapped
            | Self::Absent
            | Self::HugeMapped => 0,
        })
    }

    /// The categories that a page must not have.
    fn inverted_categories(self) -> u64 {
        match self {
            Self::Unknown | Self::UnknownAndRearm | Self::Unmapped | Self::Absent => {
                self.category_mask()
            }
            Self::Written
            | Self::WrittenAndRearm
            | Self::Present
            | Self::Unprotected
            | Self::HugeMapped => 0,
        }
    }
}

struct ScanRequest<'a> {
    argument: pm_scan_arg,
    /// The memory to which `argument.vec` points.
    _regions: &'a mut [page_region],
}

impl<'a> ScanRequest<'a> {
    const OPCODE: Opcode =
        ioctl::opcode::from_components(Direction::ReadWrite, b'f', 16, size_of::<pm_scan_arg>());

    fn new(span: AddressSpan, sought: PageQuery, regions: &'a mut [page_region]) -> Self {
        let argument = pm_scan_arg {
            size: size_of::<pm_scan_arg>() as u64,
            flags: sought.scan_flags(),
            start: span.start,
            end: span.start + span.len,
            walk_end: 0,
            vec: regions.as_mut_ptr().expose_provenance() as u64,
            vec_len: regions.len() as u64,
            max_pages: 0,
            category_inverted: sought.inverted_categories(),
            category_mask: sought.category_mask(),
            category_anyof_mask: 0,
            return_mask: sought.category_mask(),
        };
        Self { argument, _regions: regions }
    }
}

// SAFETY: PAGEMAP_SCAN takes struct pm_scan_arg, which `as_ptr` points to, writes at most `vec_len`
// regions at `vec`, both taken from a slice that is borrowed for as long as `self`, and returns
// their number. The pages that it may write-protect lie in the address space of the descriptor.
unsafe impl Ioctl for ScanRequest<'_> {
    /// The number of regions, and the address where the scan ended.
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
        // SAFETY: the caller passes the pointer that `as_ptr` returned: a valid argument, which the
        // kernel has filled in.
        let walk_end = unsafe { (*argument.cast::<pm_scan_arg>()).walk_end };
        Ok((count.unsigned_abs() as usize, walk_end))
    }
}

/// The page map of another process.
#[derive(Debug)]
pub(crate) struct Pagemap(File);

impl Pagemap {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self(fd.into())
    }

    /// A buffer for this number of page runs.
    pub(crate) fn region_buffer(runs: usize) -> Vec<page_region> {
        vec![page_region { start: 0, end: 0, categories: 0 }; runs]
    }

    /// Calls `found` with each run of pages that match the query, as start and end address, in
    /// order.
    pub(crate) fn scan_pages(
        &self,
        mut span: AddressSpan,
        sought: PageQuery,
        regions: &mut [page_region],
        mut found: impl FnMut(u64, u64),
    ) -> Result<(), Errno> {
        let end = span.start + span.len;
        while span.start < end {
            // SAFETY: `Scan` upholds the contract of `Ioctl`.
            let (count, walk_end) =
                unsafe { ioctl::ioctl(&self.0, ScanRequest::new(span, sought, regions)) }?;
            regions[..count.min(regions.len())].iter().for_each(|r| found(r.start, r.end));
            if walk_end <= span.start {
                return Err(Errno::IO);
            }
            span = AddressSpan { start: walk_end, len: end.saturating_sub(walk_end) };
        }
        Ok(())
    }

    /// As [`Self::scan_pages`], but page by page and on every kernel, for pages that are mapped, or
    /// with `swapped` also those that are swapped out.
    pub(crate) fn scan_present(
        &self,
        span: AddressSpan,
        swapped: bool,
        mut found: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> io::Result<()> {
        let wanted = if swapped { WORD_PRESENT | WORD_SWAPPED } else { WORD_PRESENT };
        let page = firn_types::PAGE_SIZE as u64;
        let (first, end) = (span.start / page, (span.start + span.len) / page);
        let mut words = [0u64; WORDS];
        for start in (first..end).step_by(WORDS) {
            let words = &mut words[..(end - start).min(WORDS as u64) as usize];
            self.0.read_exact_at(words.as_mut_bytes(), start * 8)?;
            for (number, _) in (start..).zip(words).filter(|(_, word)| **word & wanted != 0) {
                if found(number * page, (number + 1) * page).is_break() {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Whether a userfaultfd write-protects every page of a span.
    pub(crate) fn are_protected(&self, span: AddressSpan) -> io::Result<bool> {
        let page = firn_types::PAGE_SIZE as u64;
        let (first, end) = (span.start / page, (span.start + span.len) / page);
        let mut words = [0u64; WORDS];
        for start in (first..end).step_by(WORDS) {
            let words = &mut words[..(end - start).min(WORDS as u64) as usize];
            self.0.read_exact_at(words.as_mut_bytes(), start * 8)?;
            if words.iter().any(|word| word & WORD_PROTECTED == 0) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
