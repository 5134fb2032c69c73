//! Read plan: which memory blocks one read brings in.
//!
//! ```text
//!   locality restore                          lazy restore (the baseline)
//!   unit 0 = locality block 0: 77 78 1024     unit 0 = memory block 3
//!   unit 1 = locality block 1: 5 2 900        unit 1 = memory block 4
//!   ...                                       ...  in physical order
//! ```
//!
//! The page server knows neither files nor offsets, only these *read units*: a locality block, or
//! for `lazy` a single memory block. Memory blocks in no unit are zeros.

use firn_types::Block;

use super::SettledPages;

/// What one read brings in: a locality block, or in a lazy restore one memory block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReadUnit(pub u32);

impl ReadUnit {
    /// The unit as an index into a table with one entry per unit.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Marks a memory block that is in no unit.
const NO_UNIT: u32 = u32::MAX;

/// The memory blocks of each unit, and the unit of each memory block.
#[derive(Clone, Debug)]
pub struct ReadPlan {
    unit_of: Vec<u32>,
    starts: Vec<u32>,
    members: Vec<Block>,
}

impl ReadPlan {
    /// A plan over memory blocks `0..blocks`, still without units.
    pub fn new(blocks: u32) -> Self {
        Self { unit_of: vec![NO_UNIT; blocks as usize], starts: vec![0], members: Vec::new() }
    }

    /// Adds the next unit. Blocks past the last one, and those that an earlier unit holds, are left
    /// out of it.
    pub fn push_unit(&mut self, blocks: impl IntoIterator<Item = Block>) -> ReadUnit {
        let unit = self.unit_count();
        for block in blocks {
            let Some(slot) = self.unit_of.get_mut(block.index()).filter(|slot| **slot == NO_UNIT)
            else {
                continue;
            };
            *slot = unit;
            self.members.push(block);
        }
        self.starts.push(self.members.len() as u32);
        ReadUnit(unit)
    }

    /// The number of units.
    pub fn unit_count(&self) -> u32 {
        self.starts.len() as u32 - 1
    }

    /// The number of memory blocks, in units or not.
    pub fn block_count(&self) -> u32 {
        self.unit_of.len() as u32
    }

    /// The number of pages of all units that are not settled.
    pub fn missing_pages(&self, settled: &SettledPages) -> u32 {
        self.members.iter().map(|&block| settled.missing_in(block).count()).sum()
    }

    /// The unit that holds a memory block; `None` if it is all zeros.
    pub fn unit_of(&self, block: Block) -> Option<ReadUnit> {
        self.unit_of.get(block.index()).copied().filter(|&unit| unit != NO_UNIT).map(ReadUnit)
    }

    /// The memory blocks of a unit, in the order in which they are stored.
    pub fn members(&self, unit: ReadUnit) -> &[Block] {
        &self.members[self.starts[unit.index()] as usize..self.starts[unit.index() + 1] as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_in_the_unit_that_lists_it() {
        let mut plan = ReadPlan::new(6);
        plan.push_unit([Block(4), Block(1)]);
        plan.push_unit([Block(0)]);
        assert_eq!(plan.unit_count(), 2);
        assert_eq!(plan.members(ReadUnit(0)), [Block(4), Block(1)]);
        assert_eq!(plan.unit_of(Block(0)), Some(ReadUnit(1)));
        assert_eq!(plan.unit_of(Block(2)), None);
    }

    #[test]
    fn a_block_is_in_one_unit_only() {
        let mut plan = ReadPlan::new(2);
        plan.push_unit([Block(1)]);
        plan.push_unit([Block(1), Block(0), Block(9)]);
        assert_eq!(plan.members(ReadUnit(1)), [Block(0)]);
        assert_eq!(plan.unit_of(Block(1)), Some(ReadUnit(0)));
    }
}
