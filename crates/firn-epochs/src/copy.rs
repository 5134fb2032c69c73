//! What an epoch wrote, as it was at its cut. Pure.
//!
//! ```text
//!   ahead          3  4  9                                copied while the VM ran
//!   pages             4    10  11                         copied in the pause: found written, or left writable
//!   bytes        [ 3 | 4 | 9 ][ 4 | 10 | 11 ]             in that order; the copy ahead of 4 is of no use
//!   compared       .            .   =    .                left writable only; "=" is as in the copy before: not sent
//! ```

use firn_cluster::Epoch;
use firn_cluster::member::OfEpoch;
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
    /// Pages copied ahead, in order.
    pub ahead: Vec<Page>,
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
    /// What of its card goes with it, of a member of a cluster.
    pub card: Option<OfEpoch>,
    /// No epoch follows.
    pub last: bool,
}

impl EpochCopy {
    /// What a page held, if it was copied.
    pub fn page(&self, page: Page) -> Option<&[u8]> {
        let at = match self.plan.ahead.contains(page) {
            true => self.ahead.binary_search(&page).ok()?,
            false => self.ahead.len() + self.pages.binary_search(&page).ok()?,
        };
        self.bytes.get(at * PAGE_SIZE..(at + 1) * PAGE_SIZE)
    }

    /// The pages with what they held.
    pub fn iter(&self) -> impl Iterator<Item = (Page, &[u8])> {
        let (ahead, paused) = self.bytes.split_at(self.ahead.len() * PAGE_SIZE);
        let ahead = self.ahead.iter().copied().zip(ahead.chunks_exact(PAGE_SIZE));
        let paused = self.pages.iter().copied().zip(paused.chunks_exact(PAGE_SIZE));
        ahead.filter(|(page, _)| self.plan.ahead.contains(*page)).chain(paused)
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

    #[test]
    fn of_a_page_copied_twice_the_later_copy_counts() {
        let ahead = [3, 9].map(Page);
        let mut copy = copy(&[(9, 3), (10, 4)], &[9, 10]);
        copy.plan.ahead.insert(Page(3));
        copy.ahead = ahead.to_vec();
        copy.bytes = [&[[1; PAGE_SIZE], [2; PAGE_SIZE]].concat()[..], &copy.bytes].concat();
        let held: Vec<(u32, u8)> = copy.iter().map(|(page, bytes)| (page.0, bytes[0])).collect();
        assert_eq!(held, [(3, 1), (9, 3), (10, 4)]);
        held.iter().for_each(|&(page, fill)| assert_eq!(copy.page(Page(page)).unwrap()[0], fill));
    }
}
