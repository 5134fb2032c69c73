//! Epoch copy: the pages that an epoch wrote, as they were at its cut. Pure.
//!
//! ```text
//!   ahead        3  4  9                            copied while the VM ran
//!   pages           4    10  11                     copied in the pause: written, or left writable
//!   bytes      [ 3 | 4 | 9 ][ 4 | 10 | 11 ]         in that order; the early copy of 4 is obsolete
//!   before       .        ?   .   =    .            compared with the copy of the epoch before:
//! ```
//!
//! "=" is unchanged, "." differs in a few words, "?" is not in that copy, or differs in many words.

use firn_cluster::Epoch;
use firn_cluster::member::NicEpoch;
use firn_cluster::predict::{CutPlan, PageSet};
use firn_disks::DiskChange;
use firn_image::AuxBlock;
use firn_types::{PAGE_SIZE, Page};

use crate::delta::{PagePatches, changed_runs, is_small_delta};
use crate::wire::PATCHES_BYTES;

/// All parts of one epoch.
#[derive(Clone, Debug, Default)]
pub struct EpochCopy {
    /// The epoch.
    pub epoch: Epoch,
    /// The pages that were copied, and why.
    pub plan: CutPlan,
    /// Pages copied ahead, in order.
    pub ahead: Vec<Page>,
    /// The pages of `plan.copy`, in order. Empty if they were sent from within the pause.
    pub pages: Vec<Page>,
    /// The contents of the pages.
    pub bytes: Vec<u8>,
    /// The state of devices and vCPUs.
    pub devices: Vec<u8>,
    /// The auxiliary blocks.
    pub aux: Vec<AuxBlock>,
    /// The changes of each disk.
    pub disks: Vec<Vec<DiskChange>>,
    /// The state of the card that belongs to it, for a member of a cluster.
    pub card: Option<NicEpoch>,
    /// No epoch follows.
    pub last: bool,
}

impl EpochCopy {
    /// The contents of a page, if it was copied.
    pub fn page_contents(&self, page: Page) -> Option<&[u8]> {
        let at = match self.plan.ahead.contains(page) {
            true => self.ahead.binary_search(&page).ok()?,
            false => self.ahead.len() + self.pages.binary_search(&page).ok()?,
        };
        self.bytes.get(at * PAGE_SIZE..(at + 1) * PAGE_SIZE)
    }

    /// The pages with their contents.
    pub fn iter(&self) -> impl Iterator<Item = (Page, &[u8])> {
        let (ahead, paused) = self.bytes.split_at(self.ahead.len() * PAGE_SIZE);
        let ahead = self.ahead.iter().copied().zip(ahead.chunks_exact(PAGE_SIZE));
        let paused = self.pages.iter().copied().zip(paused.chunks_exact(PAGE_SIZE));
        ahead.filter(|(page, _)| self.plan.ahead.contains(*page)).chain(paused)
    }

    /// The memory that its disks' changes occupy, in pages.
    pub fn disk_pages(&self) -> u64 {
        let bytes: usize = self.disks.iter().flatten().map(DiskChange::memory_bytes).sum();
        bytes.div_ceil(PAGE_SIZE) as u64
    }

    /// Compares it with the epoch before, which the backup has: determines what to send.
    pub fn compare_with(&self, before: &Self) -> PageComparison {
        let mut comparison = PageComparison::default();
        for (page, bytes) in self.iter() {
            let runs = before.page_contents(page).map(|before| changed_runs(before, bytes));
            match runs {
                Some(runs) if runs.is_empty() => comparison.same.insert(page),
                Some(runs) if is_small_delta(&runs) => comparison.patched.insert(page),
                _ => comparison.whole.insert(page),
            }
        }
        comparison
    }

    /// Passes the deltas of some pages to `give`, about [`PATCHES_BYTES`] at a time. All of them at
    /// once would take half as much memory again as the pages.
    ///
    /// # Errors
    /// The errors of `give`.
    pub fn for_each_patch_batch<E>(
        &self,
        before: &Self,
        pages: &PageSet,
        mut give: impl FnMut(&PagePatches) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut patches = PagePatches::default();
        for (page, bytes) in self.iter().filter(|(page, _)| pages.contains(*page)) {
            let Some(before) = before.page_contents(page) else { continue };
            patches.add_runs(page, &changed_runs(before, bytes), bytes);
            if patches.bytes().len() >= PATCHES_BYTES {
                give(&std::mem::take(&mut patches))?;
            }
        }
        if patches.bytes().is_empty() { Ok(()) } else { give(&patches) }
    }
}

/// The result of comparing an epoch's pages with the epoch before: how each page is sent.
#[derive(Clone, Debug, Default)]
pub struct PageComparison {
    /// Pages with the same contents, of which nothing is sent.
    pub same: PageSet,
    /// Pages that are sent as a whole.
    pub whole: PageSet,
    /// Pages of which a small delta is sent.
    pub patched: PageSet,
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn copy(pages: &[(u32, u8)], written: &[u32]) -> EpochCopy {
        let set = |pages: &[u32]| pages.iter().copied().map(Page).collect::<PageSet>();
        let numbers: Vec<u32> = pages.iter().map(|&(page, _)| page).collect();
        let plan = CutPlan { copy: set(&numbers), written: set(written), ..CutPlan::default() };
        EpochCopy {
            plan,
            pages: numbers.into_iter().map(Page).collect(),
            bytes: pages.iter().flat_map(|&(_, fill)| [fill; PAGE_SIZE]).collect(),
            ..EpochCopy::default()
        }
    }

    fn patches(now: &EpochCopy, before: &EpochCopy) -> Vec<PagePatches> {
        let mut all = Vec::new();
        let give = |patches: &PagePatches| {
            all.push(patches.clone());
            Ok::<_, Infallible>(())
        };
        now.for_each_patch_batch(before, &now.compare_with(before).patched, give).unwrap();
        all
    }

    #[test]
    fn only_changed_pages_are_sent_as_deltas() {
        let before = copy(&[(3, 1), (4, 1), (9, 1)], &[]);
        let mut now = copy(&[(3, 1), (4, 2), (9, 1), (10, 1)], &[9, 10]);
        now.bytes[2 * PAGE_SIZE + 16] = 5;
        let PageComparison { same, whole, patched } = now.compare_with(&before);
        let pages = |set: PageSet| set.iter().collect::<Vec<_>>();
        assert_eq!((pages(same), pages(whole)), (vec![Page(3)], vec![Page(4), Page(10)]));
        assert_eq!(pages(patched), [Page(9)]);
        let patches = patches(&now, &before);
        let parts: Vec<_> = patches.iter().flat_map(PagePatches::iter).collect();
        assert_eq!(parts, [(Page(9), 16, &[5, 1, 1, 1, 1, 1, 1, 1][..])]);
        let unknown = now.compare_with(&EpochCopy::default());
        assert_eq!((unknown.whole.len(), unknown.same.len(), unknown.patched.len()), (4, 0, 0));
    }

    #[test]
    fn many_patches_are_cut_to_messages() {
        let pages: Vec<(u32, u8)> = (0..2000).map(|page| (page, 1)).collect();
        let (before, mut now) = (copy(&pages, &[]), copy(&pages, &[]));
        now.bytes.chunks_exact_mut(PAGE_SIZE).for_each(|page| page[..1024].fill(2));
        let patches = patches(&now, &before);
        assert!(patches.len() > 1 && patches.iter().flat_map(PagePatches::iter).count() == 2000);
        let most = PATCHES_BYTES + PAGE_SIZE;
        assert!(patches.iter().all(|patches| patches.bytes().len() < most));
    }

    #[test]
    fn pages_are_found() {
        let copy = copy(&[(3, 1), (9, 2)], &[]);
        assert_eq!(copy.page_contents(Page(9)), Some(&[2; PAGE_SIZE][..]));
        assert_eq!(copy.page_contents(Page(4)), None);
    }

    #[test]
    fn of_a_page_copied_twice_the_later_copy_counts() {
        let ahead = [3, 9].map(Page);
        let mut copy = copy(&[(9, 3), (10, 4)], &[9, 10]);
        copy.plan.ahead.insert(Page(3));
        copy.ahead = ahead.to_vec();
        copy.bytes = [&[[1; PAGE_SIZE], [2; PAGE_SIZE]].concat()[..], &copy.bytes].concat();
        let held: Vec<(u32, u8)> = copy.iter().map(|(page, bytes)| (page.0, bytes[0])).collect();
        assert_eq!(held, [(3, 1), (9, 3), (10, 4)]);
        held.iter()
            .for_each(|&(page, fill)| assert_eq!(copy.page_contents(Page(page)).unwrap()[0], fill));
    }
}
