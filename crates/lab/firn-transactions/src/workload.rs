//! Workloads of operations on data structures.

use anyhow::Result;
use firn_structures::DataStructure;

use crate::system::{AreaLayout, GuestCallIdentity, RunResult, TrackerSystem, measure_areas};

/// The count of elements that areas have space for.
pub const ELEMENTS: usize = 10_000;

/// A structure, and an operation on it.
#[derive(Clone, Copy, Debug)]
pub struct StructureWorkload {
    structure: DataStructure,
    deletes: bool,
}

impl StructureWorkload {
    /// All pairs of structure and operation in Table 2 of Lee et al.
    pub fn all_pairs() -> Vec<Self> {
        let both = |structure: DataStructure| {
            let deletions = structure.has_deletions_in_paper.then_some(true);
            [Some(false), deletions]
                .into_iter()
                .flatten()
                .map(move |deletes| Self { structure, deletes })
        };
        firn_structures::ALL.into_iter().flat_map(both).collect()
    }

    /// The workload of that name.
    pub fn find_by_name(name: &str) -> Option<Self> {
        Self::all_pairs().into_iter().find(|workload| workload.name() == name)
    }

    /// The names of structure and operation.
    pub fn name(self) -> String {
        let operation = if self.deletes { "delete" } else { "insert" };
        format!("{}-{operation}", self.structure.name)
    }

    /// Creates the structure. It is empty if insertions are measured, and full if deletions are.
    fn prepare_structure(self, words: &mut [u64]) {
        (self.structure.create)(words);
        if self.deletes {
            (0..ELEMENTS).for_each(|number| (self.structure.insert)(words, scattered_key(number)));
        }
    }

    fn run_operation(self, words: &mut [u64], number: usize) {
        match self.deletes {
            true => (self.structure.delete)(words, scattered_key(ELEMENTS - 1 - number)),
            false => (self.structure.insert)(words, scattered_key(number)),
        }
    }

    /// Runs this count of operations with a tracker, `per_transaction` of them in each transaction.
    /// Returns the time per transaction without and with a copy of the changes, and the bytes and runs
    /// that the tracker reported. A tracker on the host is called with the name and key of `identity`.
    ///
    /// # Errors
    /// If the tracker does not work here.
    pub fn measure_tracker(
        self,
        system: TrackerSystem,
        identity: &GuestCallIdentity,
        operations: usize,
        per_transaction: usize,
    ) -> Result<RunResult> {
        let layout = AreaLayout { areas: 1, words: (self.structure.words)(ELEMENTS) };
        let work = |words: &mut [u64], transaction: usize| {
            (0..per_transaction).for_each(|number| {
                self.run_operation(words, transaction * per_transaction + number);
            });
        };
        measure_areas(
            system,
            identity,
            layout,
            operations / per_transaction,
            |words| self.prepare_structure(words),
            work,
        )
    }
}

/// Distinct keys, in no order.
fn scattered_key(number: usize) -> u64 {
    (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 1
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests may fail so")]
mod tests {
    use firn_app::TrackerKind;

    use super::*;

    #[test]
    fn the_papers_pairs_are_measured() {
        let names: Vec<_> =
            StructureWorkload::all_pairs().into_iter().map(StructureWorkload::name).collect();
        assert_eq!(names.len(), 20);
        assert!(names.contains(&"leftheap-delete".to_owned()));
        assert!(!names.contains(&"avl-delete".to_owned()));
        assert!(names.iter().all(|name| StructureWorkload::find_by_name(name).is_some()));
    }

    #[test]
    fn every_workload_changes_something_in_every_transaction() {
        for workload in StructureWorkload::all_pairs() {
            let compare = TrackerSystem::Plain(TrackerKind::Compare);
            let taken =
                workload.measure_tracker(compare, &GuestCallIdentity::default(), 20, 5).unwrap();
            assert!(taken.bytes >= 4.0 * 8.0, "{}", workload.name());
        }
    }
}
