//! Discarded memory: pages that the guest gives back while it is being saved (virtio-balloon,
//! free-page reporting).
//!
//! The hypervisor removes such a page: it is zeros from then on. If the page had contents at the
//! cut and is not copied yet, they are lost, and an image with zeros there would be wrong. No page
//! fault reports the removal beforehand. So each copy of a block is followed by a check, and one
//! lost page makes the save fail. The caller tries again.
//!
//! ```text
//!                 pages with contents at the cut      the check after the copy
//!   shared RAM    backed just before the pause, or    every such page of the block is backed
//!                 filled since
//!   private RAM   any                                 every page of the block is write-protected
//!   huge pages    as shared RAM                       below
//! ```
//!
//! **Shared RAM.** The hypervisor punches a hole into the RAM file (`ram_block_discard_range` of
//! QEMU). A hole that the guest touches becomes a page of zeros: then the file has data there, as
//! before. So accesses to holes fault too ([`firn_memory::PageFaults::report_holes`]). The fault
//! handler copies and checks the block first, and fills the hole afterwards. Hence, from the cut to
//! the end of its check, no page of a block changes from a hole to data, and a page that has data
//! at the check has had the same data since the cut:
//!
//! ```text
//!   cut | hole | copy: zeros | check: hole              lost
//!   cut | copy: data | hole | check: hole               lost, although the copy is right
//!   cut | copy: data | check: data | hole               copied
//!   cut | hole | touch: fault | copy, check: hole       lost; the fault is answered after the check
//! ```
//!
//! The check takes the lock of the inode, which the hypervisor's call holds from its beginning to
//! its end: a page that is half removed is a hole for the check. Large pages would break that
//! (`GuestMemory::may_be_in_large_pages`), so such hosts are refused. Firn reads by `pread(2)`: a
//! mapping of its own would fill holes.
//!
//! The list of pages with data takes 10 ms per GiB, too long for the pause. It is made just before,
//! when accesses to holes fault already, and the handler adds each page that it fills until the
//! cut. A page that is removed between list and cut counts as lost, which costs a try and no more.
//!
//! **Huge pages, shared.** hugetlbfs does not report which pages are holes, only how many bytes the
//! file has. All accesses to holes fault, so that number grows only by Firn's own answers, which are
//! counted. If it is smaller than expected at a check, some page was given back since the list was
//! made, and the save fails, also if that page was copied before:
//!
//! ```text
//!   list: 96 pages | hole filled: 97 expected | check: 97     copied
//!   list: 96 pages | hole                     | check: 95     lost
//! ```
//!
//! Filling and counting are one step under a lock, and so is the check.
//!
//! **Huge pages, private.** The page tables of the hypervisor have each page with contents, as huge
//! pages are never swapped out. So they are checked as the RAM file of shared memory is.
//!
//! **Private RAM.** A page loses its write protection together with its contents, and only Firn can
//! protect it again. Firn protects all pages before the cut, also those without contents. So a page
//! that is protected at the check was not removed since, whatever the guest does. A page that is
//! removed before the cut, and so is not protected at the cut, counts as lost.

use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use firn_memory::{
    AtomicPageSet, GuestMemory, HUGE_PAGE_BYTES, InstallOutcome, MemoryError, PageFaultError,
};
use firn_types::{Block, Page};
use firn_vmm::QemuVm;

use crate::error::SaveError;

/// What a copy of a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyOutcome {
    /// The block as it was at the cut.
    Copied,
    /// Zeros, and the block had no contents at the cut.
    Zero,
    /// Without contents that the block had at the cut.
    Lost,
}

/// Checks the copies of one save for contents that were lost.
#[derive(Debug)]
pub(crate) struct DiscardCheck {
    memory: Arc<GuestMemory>,
    /// The pages that may have had contents at the cut; `None` for private memory that is not in huge
    /// pages: all pages.
    held: Option<AtomicPageSet>,
    /// The bytes that the files of shared huge pages must have; `None` for other memory.
    huge_bytes: Option<Mutex<u64>>,
    /// The first block whose contents were lost.
    lost: OnceLock<Block>,
}

impl DiscardCheck {
    /// The check for a VM that may give memory back; `None` if it has no balloon.
    pub(crate) fn for_vm(
        vm: &mut QemuVm,
        memory: &Arc<GuestMemory>,
    ) -> Result<Option<Arc<Self>>, SaveError> {
        if !may_discard(vm, memory)? {
            return Ok(None);
        }
        let bits = || AtomicPageSet::new(memory.region_map().total_pages());
        let (is_shared, is_huge) = (memory.is_shared(), memory.has_huge_pages());
        let (held, lost) = ((is_shared || is_huge).then(bits), OnceLock::new());
        let huge_bytes = (is_shared && is_huge).then(Mutex::default);
        Ok(Some(Arc::new(Self { memory: Arc::clone(memory), held, huge_bytes, lost })))
    }

    /// Whether accesses to holes must fault.
    pub(crate) fn needs_hole_faults(&self) -> bool {
        self.held.is_some()
    }

    /// Notes the pages that have contents now. Accesses to holes must fault already.
    pub(crate) fn record_backed(&self) -> Result<(), MemoryError> {
        let Some(held) = &self.held else { return Ok(()) };
        if let Some(bytes) = &self.huge_bytes {
            let mut bytes = bytes.lock().unwrap_or_else(PoisonError::into_inner);
            *bytes = self.memory.file_bytes()?;
        }
        self.memory.backed_runs()?.into_iter().for_each(|run| held.add_pages(run));
        Ok(())
    }

    /// Notes a page that was filled before the cut.
    pub(crate) fn record_filled(&self, page: Page) {
        if let Some(held) = &self.held {
            held.add_pages(page..Page(page.0 + 1));
        }
    }

    /// Fills a hole, and counts it where the number of filled pages is what is known of them.
    pub(crate) fn count_filled(
        &self,
        fill: impl FnOnce() -> Result<InstallOutcome, PageFaultError>,
    ) -> Result<InstallOutcome, PageFaultError> {
        let Some(bytes) = &self.huge_bytes else { return fill() };
        let mut bytes = bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = fill()?;
        if outcome == InstallOutcome::Done {
            *bytes += HUGE_PAGE_BYTES;
        }
        Ok(outcome)
    }

    /// Whether no page was given back since the list was made. Always true where each page is checked.
    fn has_kept_huge(&self) -> Result<bool, MemoryError> {
        let Some(bytes) = &self.huge_bytes else { return Ok(true) };
        let bytes = bytes.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(self.memory.file_bytes()? >= *bytes)
    }

    /// Whether any of these pages may have had contents at the cut.
    pub(crate) fn may_hold(&self, pages: Range<Page>) -> bool {
        self.held.as_ref().is_none_or(|held| !held.runs_in(pages).is_empty())
    }

    /// Checks the copy of a block that the caller has claimed, before the block is released.
    pub(crate) fn check_copy(
        &self,
        block: Block,
        pages: Range<Page>,
    ) -> Result<CopyOutcome, MemoryError> {
        let held = match &self.held {
            Some(held) => held.runs_in(pages),
            None => vec![pages],
        };
        let mut outcome = match self.has_kept_huge()? {
            true => copy_outcome(&held, |run| self.memory.has_kept(run))?,
            false => CopyOutcome::Lost,
        };
        if firn_fault::pass_io_point("discards.check").is_err() {
            // A test that compares images shows that it would find a copy without contents.
            outcome = CopyOutcome::Copied;
        }
        if outcome == CopyOutcome::Lost {
            let _ = self.lost.set(block);
        }
        Ok(outcome)
    }

    /// Whether contents were lost, so that there can be no image.
    pub(crate) fn has_lost(&self) -> bool {
        self.lost.get().is_some()
    }

    /// An error if contents were lost.
    pub(crate) fn check_none_lost(&self) -> Result<(), SaveError> {
        match self.lost.get() {
            Some(&block) => Err(SaveError::Discarded { block }),
            None => Ok(()),
        }
    }
}

/// The outcome for a block, of which the pages in `held` had contents at the cut. `has_kept` returns
/// whether a run was not discarded since.
fn copy_outcome<E>(
    held: &[Range<Page>],
    mut has_kept: impl FnMut(Range<Page>) -> Result<bool, E>,
) -> Result<CopyOutcome, E> {
    for run in held {
        if !has_kept(run.clone())? {
            return Ok(CopyOutcome::Lost);
        }
    }
    Ok(if held.is_empty() { CopyOutcome::Zero } else { CopyOutcome::Copied })
}

/// Whether the VM may give memory back.
///
/// # Errors
/// If what it gives back could not be recognized on this host.
pub(crate) fn may_discard(vm: &mut QemuVm, memory: &GuestMemory) -> Result<bool, SaveError> {
    match vm.balloon()? {
        None => Ok(false),
        Some(_) => check_discards(memory).map(|()| true),
    }
}

/// Checks that a save recognizes what a guest with this memory gives back.
///
/// # Errors
/// If this host may keep shared memory in large pages, or RAM is of several kinds.
pub fn check_discards(memory: &GuestMemory) -> Result<(), SaveError> {
    if !memory.has_huge_pages() {
        return match (memory.is_partly_shared(), memory.may_be_in_large_pages()) {
            (true, _) => Err(SaveError::PartlyShared),
            (false, true) => Err(SaveError::LargePages),
            (false, false) => Ok(()),
        };
    }
    match memory.has_only_like_huge_pages() {
        true => Ok(()),
        false => Err(SaveError::HugePagesGivenBack {
            condition: ", but not all of it, or not all of it shared",
            alternative: ", or start it with all RAM in huge pages, and share=on for each backend",
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    fn page(range: Range<u32>) -> Range<Page> {
        Page(range.start)..Page(range.end)
    }

    /// The outcome for a block of which these pages had contents, and others were discarded.
    fn outcome(held: &[Range<u32>], discarded: &[u32]) -> CopyOutcome {
        let held: Vec<_> = held.iter().cloned().map(page).collect();
        let has_kept = |run: Range<Page>| -> Result<bool, Infallible> {
            Ok(!discarded.iter().any(|&number| run.contains(&Page(number))))
        };
        copy_outcome(&held, has_kept).unwrap()
    }

    #[test]
    fn only_a_page_with_contents_can_be_lost() {
        let run = |start, end| start..end;
        assert_eq!(outcome(&[], &[0, 1]), CopyOutcome::Zero);
        assert_eq!(outcome(&[run(0, 2)], &[]), CopyOutcome::Copied);
        assert_eq!(outcome(&[run(0, 2)], &[1]), CopyOutcome::Lost);
        assert_eq!(outcome(&[run(0, 1)], &[1]), CopyOutcome::Copied);
        assert_eq!(outcome(&[0..1, 2..4], &[3]), CopyOutcome::Lost);
    }

    #[test]
    fn an_error_of_the_query_is_no_outcome() {
        let failed = copy_outcome(&[page(0..1)], |_| Err::<bool, _>("broken"));
        assert_eq!(failed, Err("broken"));
    }
}
