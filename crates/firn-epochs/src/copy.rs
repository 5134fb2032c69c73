//! What an epoch wrote, as it was at its cut. Pure.
//!
//! ```text
//!   plan.copy      3  4        9  10  11                  found written, or left writable
//!   bytes        [ 3 | 4 ][ 9 | 10 | 11 ]                 in that order
//!   compared       .  =        .   =                      left writable only; "=" is as in the copy before: not sent
//! ```

use firn_cluster::Epoch;
use firn_cluster::predict::{CutPlan, PageSet};
use firn_disks::Change;
use firn_image::AuxBlock;
use firn_types::{PAGE_SIZE, Page};

/// Everything of one epoch.
#[derive(Clone, Debug, Default)]
pub struct EpochCopy {
    /// Which one.
    pub epoch: Epoch,
    /// What was copied, and why.
    pub plan: CutPlan,
    /// The pages of `plan.copy`, in order. Empty if they were sent from within the pause.
    pub pages: Vec<Page>,
    /// What they held.
    pub bytes: Vec<u8>,
    /// Devices and vCPUs.
    pub devices: Vec<u8>,
    /// Small RAM blocks beside guest RAM.
    pub aux: Vec<AuxBlock>,
    /// What was changed on each disk.
    pub disks: Vec<Vec<Change>>,
    /// No epoch follows.
    pub last: bool,
}

impl EpochCopy {
    /// What a page held, if it was copied.
    pub fn page(&self, page: Page) -> Option<&[u8]> {
        let at = self.pages.binary_search(&page).ok()?;
        self.bytes.get(at * PAGE_SIZE..(at + 1) * PAGE_SIZE)
    }

    /// The pages with what they held.
    pub fn iter(&self) -> impl Iterator<Item = (Page, &[u8])> {
        self.pages.iter().copied().zip(self.bytes.chunks_exact(PAGE_SIZE))
    }

    /// Memory that its disks' changes take, in pages.
    pub fn disk_pages(&self) -> u64 {
        let bytes: usize = self.disks.iter().flatten().map(Change::cost).sum();
        bytes.div_ceil(PAGE_SIZE) as u64
    }

    /// Pages that nobody knows to be written, and that hold what they did in the copy of the epoch before.
    pub fn unchanged_since(&self, before: &Self) -> PageSet {
        let is_same = |(page, bytes): &(Page, &[u8])| {
            !self.plan.written.contains(*page) && before.page(*page) == Some(*bytes)
        };
        self.iter().filter(is_same).map(|(page, _)| page).collect()
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn what_is_as_before_need_not_be_sent() {
        let before = copy(&[(3, 1), (4, 1), (9, 1)], &[]);
        let now = copy(&[(3, 1), (4, 2), (9, 1), (10, 1)], &[9, 10]);
        let same: Vec<Page> = now.unchanged_since(&before).iter().collect();
        assert_eq!(same, [Page(3)], "9 was written to; nobody has a copy of 10");
        assert!(now.unchanged_since(&EpochCopy::default()).is_empty());
    }

    #[test]
    fn pages_are_found() {
        let copy = copy(&[(3, 1), (9, 2)], &[]);
        assert_eq!(copy.page(Page(9)), Some(&[2; PAGE_SIZE][..]));
        assert_eq!(copy.page(Page(4)), None);
    }
}
