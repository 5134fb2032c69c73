//! Sweep order: the order in which the sweep copies the blocks that the guest did not touch.
//!
//! Pages that are neighbours in a virtual address space are likely to be used together, more so
//! than neighbours in physical memory (Halite, section 5.2). So every address space found is walked
//! in virtual order, user half first; a block that several of them map is taken the first time. The
//! kernel's half is walked once, and blocks that no page table maps follow in physical order.

use std::collections::HashSet;
use std::ops::Range;

use firn_memory::GuestMemory;
use firn_memory::guest_pages::{AddressHalf, GuestPhysRead, PageTableWalker, kernel_half_roots};
use firn_types::{Block, BlockSize, GuestPhys, Page, RegionMap};
use firn_vmm::QemuVm;

use crate::duty_cycle::DutyCycle;
use crate::error::SaveError;

/// Blocks in sweep order, and those that need no copy.
#[derive(Debug, Default)]
pub(crate) struct SweepOrder {
    /// Every backed block, once.
    pub(crate) blocks: Vec<Block>,
    /// Every block without backing: zeros.
    pub(crate) unbacked: Vec<Block>,
    /// The number of `blocks`, from the first, that are released once they are copied.
    pub(crate) release_count: usize,
}

impl SweepOrder {
    /// Moves unbacked blocks for which `wanted` is true to the blocks that are copied (they read as
    /// zeros).
    pub(crate) fn add_unbacked(&mut self, wanted: impl Fn(Block) -> bool) {
        let (add, leave) = self.unbacked.drain(..).partition(|&block| wanted(block));
        self.unbacked = leave;
        self.blocks.extend::<Vec<Block>>(add);
    }

    /// Moves the blocks that hold any of these pages to the front, and does not change the order
    /// among them, or among the others. Returns the moved blocks.
    pub(crate) fn bring_forward(&mut self, used: &[Range<Page>], size: BlockSize) -> Vec<Block> {
        if used.is_empty() {
            return Vec::new();
        }
        let used: HashSet<Block> =
            used.iter().flat_map(|run| blocks_of(size, run.clone())).collect();
        let (mut front, rest): (Vec<_>, Vec<_>) =
            self.blocks.drain(..).partition(|block| used.contains(block));
        let in_front = front.clone();
        front.extend(rest);
        self.blocks = front;
        in_front
    }
}

/// Guest RAM, read with pauses: reading all page tables takes a while.
pub(crate) struct ThrottledReader<'a> {
    pub(crate) memory: &'a GuestMemory,
    pub(crate) duty_cycle: &'a DutyCycle,
}

impl GuestPhysRead for ThrottledReader<'_> {
    fn region_map(&self) -> &RegionMap {
        self.memory.region_map()
    }

    fn read_pages(&self, first: Page, out: &mut [u8]) -> bool {
        self.duty_cycle.pause_if_due();
        GuestPhysRead::read_pages(self.memory, first, out)
    }

    fn backed_pages(&self) -> Vec<Range<Page>> {
        self.memory.backed_pages()
    }
}

/// The address spaces of the guest that were found.
#[derive(Clone, Debug, Default)]
pub(crate) struct AddressSpaces {
    /// Their top-level page tables; those that vCPUs are using are first.
    pub(crate) roots: Vec<GuestPhys>,
    /// Levels of their page tables: 4 or 5.
    levels: u8,
}

impl AddressSpaces {
    /// The pages that programs have written, by the page tables of these `roots`.
    pub(crate) fn written_pages(
        &self,
        memory: &ThrottledReader<'_>,
        roots: &[GuestPhys],
    ) -> Vec<Range<Page>> {
        let mut written = Vec::new();
        let mut walker = PageTableWalker::new(memory, self.levels);
        for &root in roots {
            walker.walk_half(root, AddressHalf::User, &mut |_, first, pages, flags| {
                if flags.dirty {
                    written.push(first..Page(first.0 + pages));
                }
            });
        }
        written
    }
}

/// Finds the address spaces that vCPUs are using, then every other one that shares their kernel
/// half.
pub(crate) fn find_address_spaces(
    vm: &mut QemuVm,
    memory: &ThrottledReader<'_>,
) -> Result<AddressSpaces, SaveError> {
    let current = vm.page_table_roots()?;
    let Some(first) = current.first() else { return Ok(AddressSpaces::default()) };
    let same_kind = current.iter().filter(|root| root.levels == first.levels).map(|root| root.gpa);
    let mut known = HashSet::new();
    let roots = same_kind
        .chain(kernel_half_roots(memory, first.gpa))
        .filter(|&root| known.insert(root))
        .collect();
    Ok(AddressSpaces { roots, levels: first.levels })
}

/// Orders all blocks of guest RAM.
pub(crate) fn plan_blocks(
    memory: &ThrottledReader<'_>,
    spaces: &AddressSpaces,
    size: BlockSize,
) -> Result<SweepOrder, SaveError> {
    let mut planner =
        SweepPlanner::new(memory.region_map().total_pages(), &memory.memory.backed_runs()?, size);
    let mut take = |_, first: Page, pages: u32, _| planner.take_pages(first..Page(first.0 + pages));
    let mut walker = PageTableWalker::new(memory, spaces.levels);
    for &root in &spaces.roots {
        walker.walk_half(root, AddressHalf::User, &mut take);
    }
    if let Some(&root) = spaces.roots.first() {
        walker.walk_half(root, AddressHalf::Kernel, &mut take);
    }
    Ok(planner.finish_order())
}

struct SweepPlanner {
    size: BlockSize,
    backed: Vec<bool>,
    taken: Vec<bool>,
    order: SweepOrder,
}

impl SweepPlanner {
    fn new(total_pages: u32, backed: &[Range<Page>], size: BlockSize) -> Self {
        let blocks = size.blocks_in(total_pages) as usize;
        let mut planner = Self {
            size,
            backed: vec![false; blocks],
            taken: vec![false; blocks],
            order: SweepOrder::default(),
        };
        backed.iter().cloned().for_each(|run| planner.mark_backed(run));
        planner
    }

    fn mark_backed(&mut self, run: Range<Page>) {
        for block in blocks_of(self.size, run) {
            self.backed[block.index()] = true;
        }
    }

    fn take_pages(&mut self, pages: Range<Page>) {
        for block in blocks_of(self.size, pages) {
            self.take_block(block);
        }
    }

    fn take_block(&mut self, block: Block) {
        if self.backed[block.index()] && !std::mem::replace(&mut self.taken[block.index()], true) {
            self.order.blocks.push(block);
        }
    }

    fn finish_order(mut self) -> SweepOrder {
        for block in (0..self.backed.len() as u32).map(Block) {
            if self.backed[block.index()] {
                self.take_block(block);
            } else {
                self.order.unbacked.push(block);
            }
        }
        self.order
    }
}

fn blocks_of(size: BlockSize, pages: Range<Page>) -> impl Iterator<Item = Block> {
    let end = if pages.is_empty() { pages.start.0 } else { pages.end.0 };
    let first = size.block_of(pages.start).0;
    (first..size.blocks_in(end).max(first)).map(Block)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn planner(backed: &[Range<Page>]) -> SweepPlanner {
        SweepPlanner::new(64, backed, BlockSize::default())
    }

    #[test]
    fn walked_pages_are_first_in_walk_order() {
        let mut planner = planner(&[Page(0)..Page(16)]);
        planner.take_pages(Page(9)..Page(11));
        planner.take_pages(Page(2)..Page(3));
        let order = planner.finish_order();
        let first: Vec<_> = order.blocks.iter().take(4).map(|block| block.0).collect();
        assert_eq!(first, [4, 5, 1, 0]);
    }

    #[test]
    fn used_blocks_are_moved_to_the_front() {
        let mut planner = planner(&[Page(0)..Page(12)]);
        planner.take_pages(Page(8)..Page(10));
        let mut order = planner.finish_order();
        let used = [Page(1)..Page(3), Page(8)..Page(9), Page(40)..Page(41)];
        let in_front = order.bring_forward(&used, BlockSize::default());
        assert_eq!(in_front, [4, 0, 1].map(Block));
        assert_eq!(order.blocks, [4, 0, 1, 2, 3, 5].map(Block));
        assert_eq!(order.unbacked.len(), 26);
    }

    proptest! {
        #[test]
        fn every_block_is_in_the_order_once(
            runs in prop::collection::vec((0u32..60, 1u32..5), 0..8),
            walks in prop::collection::vec((0u32..60, 1u32..5), 0..20),
        ) {
            let backed: Vec<_> = runs.iter().map(|&(start, len)| Page(start)..Page((start + len).min(64))).collect();
            let mut planner = planner(&backed);
            for (start, len) in walks {
                planner.take_pages(Page(start)..Page((start + len).min(64)));
            }
            let order = planner.finish_order();
            let mut all: Vec<_> = order.blocks.iter().chain(&order.unbacked).map(|block| block.0).collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..32).collect::<Vec<_>>());
            for block in order.blocks {
                let pages = BlockSize::default().pages_of(block);
                prop_assert!(backed.iter().any(|run| run.start < pages.end && pages.start < run.end));
            }
        }
    }
}
