//! The limit on the memory of an open image: no more than the length of its files justifies.
//!
//! ```text
//!   memory of an open chain  <=  32 MiB + 32 x bytes of its files        budget: sections and index, decoded and parsed
//!                              + 16 MiB + 16 x bytes of its files        tables of placements (where each memory block lies); larger ones become sparse
//!                              + 16 MiB                                  directory of placements
//! ```
//!
//! A few kilobytes of Zstandard can stand for a gigabyte, so the length of a section does not limit
//! its memory. Each kind of section has a factor: the maximum number of bytes of memory for each
//! decoded byte. The memory is charged before anything is allocated. A writer stores a section
//! uncompressed where a reader would refuse it compressed: then the length of the file justifies
//! it.

use crate::footer::SectionKind;

/// The memory that an image of any length may take.
const FLOOR: u64 = 32 << 20;

/// The memory that each byte of a file adds.
const PER_FILE_BYTE: u64 = 32;

/// The part of the floor that a writer uses for one section at most: seven kinds are charged
/// together, and values of JSON besides.
const FLOOR_PER_SECTION: u64 = FLOOR / 16;

/// As [`FLOOR`] and [`PER_FILE_BYTE`], for tables of placements.
const TABLES_FLOOR: u64 = 16 << 20;
const TABLES_PER_FILE_BYTE: u64 = 16;

/// The memory that an image may still take.
pub(crate) struct MemoryBudget {
    left: u64,
    file_bytes: u64,
}

impl MemoryBudget {
    /// The budget of an image whose own file has this length.
    pub(crate) fn of_file(file_bytes: u64) -> Self {
        let mut budget = Self { left: FLOOR, file_bytes: 0 };
        budget.add_file(file_bytes);
        budget
    }

    /// Adds a file of the chain.
    pub(crate) fn add_file(&mut self, file_bytes: u64) {
        self.file_bytes = self.file_bytes.saturating_add(file_bytes);
        self.left = self.left.saturating_add(file_bytes.saturating_mul(PER_FILE_BYTE));
    }

    /// Charges a section before it is decoded.
    pub(crate) fn charge_section(
        &mut self,
        kind: SectionKind,
        decoded_len: u64,
    ) -> Result<(), String> {
        self.charge_bytes(decoded_len.saturating_mul(memory_factor(kind)))
    }

    /// Charges memory.
    pub(crate) fn charge_bytes(&mut self, bytes: u64) -> Result<(), String> {
        match self.left.checked_sub(bytes) {
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => Err(format!(
                "it would take {bytes} bytes of memory, which {} bytes of file do not explain",
                self.file_bytes
            )),
        }
    }
}

/// The maximum size of the placement tables of a file of this length, in bytes.
pub(crate) fn table_bytes_max(file_bytes: u64, is_first: bool) -> u64 {
    let floor = if is_first { TABLES_FLOOR } else { 0 };
    file_bytes.saturating_mul(TABLES_PER_FILE_BYTE).saturating_add(floor)
}

/// Whether any reader accepts a compressed section of this kind with these lengths: the budget of a
/// reader depends on the length of the file, which the writer of a section does not know yet.
pub(crate) fn is_accepted_by_any_reader(
    kind: SectionKind,
    stored_len: usize,
    decoded_len: usize,
) -> bool {
    let cost = (decoded_len as u64).saturating_mul(memory_factor(kind));
    cost <= FLOOR_PER_SECTION || cost <= (stored_len as u64).saturating_mul(PER_FILE_BYTE)
}

/// The maximum number of bytes of memory for each decoded byte of a section.
fn memory_factor(kind: SectionKind) -> u64 {
    match kind {
        // Strings, twice, and their printed form. Other values are charged by number.
        SectionKind::Meta | SectionKind::Regions => 4,
        SectionKind::DeviceState | SectionKind::Parent | SectionKind::Seal => 1,
        // Read piece by piece, and never kept.
        SectionKind::AuxBlocks => 0,
        SectionKind::WorkingSet | SectionKind::PageTableRoots => 2,
        // An entry has 15 bytes in the section and 24 in memory, in a sealed image 16 more; a run of zeros has 8, and 8 and a
        // node of a tree.
        SectionKind::Index => 8,
        // A group of one memory block has 10 bytes, and 64 in memory.
        SectionKind::AccessOrder => 8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_justifies_memory_by_its_length() {
        let mut budget = MemoryBudget::of_file(1 << 20);
        assert!(budget.charge_section(SectionKind::WorkingSet, 16 << 20).is_ok());
        assert!(budget.charge_section(SectionKind::Index, 4 << 20).is_ok());
        let problem = budget.charge_bytes(1).unwrap_err();
        assert!(problem.ends_with("which 1048576 bytes of file do not explain"), "{problem}");
        budget.add_file(1);
        assert!(budget.charge_bytes(PER_FILE_BYTE).is_ok());
        assert!(budget.charge_section(SectionKind::Meta, u64::MAX).is_err());
        assert!(budget.charge_section(SectionKind::AuxBlocks, u64::MAX).is_ok());
    }

    #[test]
    fn an_uncompressed_section_is_always_accepted() {
        for kind in SectionKind::ALL {
            assert!(is_accepted_by_any_reader(kind, 1 << 30, 1 << 30), "{kind:?}");
            assert!(
                kind == SectionKind::AuxBlocks || !is_accepted_by_any_reader(kind, 1000, 1 << 30),
                "{kind:?}"
            );
        }
    }
}
