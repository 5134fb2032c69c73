//! A guest as tests know it: all of it.

use std::collections::{BTreeMap, BTreeSet};

use firn_calls::{CallRefusal, GuestAccess, Nonce, PluginOrder, Proof, RecordedStores};
use firn_types::{GuestPhys, Page};

/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// A guest of a few address spaces, and a host that follows writes as the kernel does: it reports
/// each write once.
#[derive(Default)]
pub struct Guest {
    pub proofs: BTreeMap<(GuestPhys, u64), Proof>,
    pub maps: BTreeMap<(GuestPhys, u64), Result<Page, CallRefusal>>,
    pub written: BTreeSet<Page>,
    pub era: Option<u64>,
    pub numbers: u8,
    pub searches: usize,
    /// The recorded stores of each slot, if this hypervisor records stores.
    pub recorded: Option<BTreeMap<u32, RecordedStores>>,
}

impl Guest {
    pub fn new() -> Self {
        Self { era: Some(1), ..Self::default() }
    }

    /// Pages of an address space at `start`, in RAM from `first` on.
    pub fn map(&mut self, space: GuestPhys, start: u64, first: u32, pages: u32) {
        for n in 0..pages {
            self.maps.insert((space, start + u64::from(n) * PAGE), Ok(Page(first + n)));
        }
    }

    /// A program writes a page.
    pub fn write(&mut self, space: GuestPhys, address: u64) {
        if let Some(Ok(page)) = self.maps.get(&(space, address)) {
            self.written.insert(*page);
        }
    }
}

impl GuestAccess for Guest {
    fn random_number(&mut self) -> Nonce {
        self.numbers += 1;
        [self.numbers; 32]
    }

    fn find_spaces(&mut self, at: u64, proof: &Proof) -> Vec<GuestPhys> {
        self.searches += 1;
        let is_there = |it: &(&(GuestPhys, u64), &Proof)| it.0.1 == at && it.1 == proof;
        self.proofs.iter().filter(is_there).map(|(key, _)| key.0).collect()
    }

    fn has_proof(&mut self, space: GuestPhys, at: u64, proof: &Proof) -> bool {
        self.proofs.get(&(space, at)) == Some(proof)
    }

    fn translate_pages(
        &mut self,
        space: GuestPhys,
        start: u64,
        pages: u32,
    ) -> Vec<Result<Page, CallRefusal>> {
        let at = |n: u32| {
            let address = start + u64::from(n) * PAGE;
            self.maps.get(&(space, address)).copied().unwrap_or(Err(CallRefusal::Unmapped(address)))
        };
        (0..pages).map(at).collect()
    }

    fn take_written(&mut self, pages: &[Page]) -> Option<(u64, Vec<Page>)> {
        assert!(pages.is_sorted());
        let era = self.era?;
        // Pages in between are reported too, and not again: a host scans many at once.
        let (Some(first), Some(last)) = (pages.first(), pages.last()) else {
            return Some((era, vec![]));
        };
        let told: Vec<Page> = self.written.range(*first..=*last).copied().collect();
        self.written.retain(|page| !told.contains(page));
        Some((era, told))
    }

    fn order_plugin(&mut self, order: &PluginOrder) -> bool {
        let Some(recorded) = &mut self.recorded else { return false };
        match order.clone() {
            PluginOrder::RecordStores(order) => {
                recorded.insert(order.slot, RecordedStores::new(order))
            }
            PluginOrder::End { slot } => recorded.remove(&slot),
        };
        true
    }
}
