//! Auxiliary blocks: small RAM blocks beside guest RAM, which device state does not contain and the
//! hypervisor does not rebuild (video memory).
//!
//! Video memory has 16 MiB or more. To copy that takes longer than all else in a pause, so large
//! blocks are copied ahead:
//!
//! ```text
//!   guest runs   | protect the blocks | copy all of them |
//!   guest paused |                                       | copy the pages written since, and small blocks
//!   guest runs   |                                                                                       | unregister
//! ```
//!
//! The kernel itself records the writes (userfaultfd with `WP_ASYNC`, `PAGEMAP_SCAN`; Linux 6.7), with
//! a descriptor that registers nothing else. So no thread of the guest waits for Firn. Where the
//! kernel can't, or the hypervisor may have no userfaultfd, all blocks are copied in the pause.
//!
//! A page counts as written when a device of the hypervisor begins to write to it. A disk that began
//! before the protection to read straight into video memory (direct I/O), and ends after the copy,
//! would be missed. No guest has its disks do that.

use std::sync::Arc;

use firn_image::AuxBlock;
use firn_memory::{
    GuestMemory, KernelFeatures, MemoryError, PageScan, Process, RegionLocation, ScanError, Tracee,
    process_memory,
};
use firn_types::{PAGE_SIZE, Page, RegionMap, ThreadId};
use firn_vmm::AuxRam;

use crate::error::SaveError;

/// The size in bytes from which a block is copied ahead. A smaller one is copied in the pause in
/// less time than a scan takes.
const AHEAD_BYTES_MIN: u64 = 128 << 10;

/// The copies of all auxiliary blocks that a restore needs.
pub(crate) struct AuxCopies {
    process: Arc<Process>,
    /// The blocks that are copied in the pause.
    late: Vec<AuxRam>,
    /// The blocks that were copied ahead.
    ahead: Option<AheadCopies>,
}

impl AuxCopies {
    /// Plans to copy all blocks in the pause.
    pub(crate) fn copied_late(process: &Arc<Process>, aux: &[AuxRam]) -> Self {
        let late = aux.iter().filter(|aux| !aux.rom).cloned().collect();
        Self { process: Arc::clone(process), late, ahead: None }
    }

    /// Copies large blocks now, while the guest runs. A host that can't record writes is no error.
    pub(crate) fn copied_ahead(process: &Arc<Process>, aux: &[AuxRam], vcpus: &[ThreadId]) -> Self {
        let mut copies = Self::copied_late(process, aux);
        let large: Vec<AuxRam> = copies.late.iter().filter(|aux| is_large(aux)).cloned().collect();
        if large.is_empty() {
            return copies;
        }
        match AheadCopies::begin(process, &large, vcpus) {
            Ok(ahead) => {
                copies.late.retain(|aux| !large.contains(aux));
                copies.ahead = Some(ahead);
            }
            Err(error) => tracing::debug!("video memory is copied in the pause: {error}"),
        }
        copies
    }

    /// With the VM stopped: copies what is not copied yet, and returns all blocks.
    pub(crate) fn complete(&mut self) -> Result<Vec<AuxBlock>, SaveError> {
        let late = self.late.iter().map(|aux| read_block(&self.process, aux));
        let mut blocks = late.collect::<Result<Vec<_>, _>>()?;
        if let Some(ahead) = &mut self.ahead {
            blocks.extend(ahead.complete()?);
        }
        Ok(blocks)
    }

    /// Removes the descriptor from the hypervisor.
    pub(crate) fn close(self) {
        let closed = self.ahead.map_or(Ok(()), |ahead| ahead.close(&self.process));
        if let Err(error) = closed {
            tracing::warn!("writes to video memory are still recorded by the kernel: {error}");
        }
    }
}

/// Blocks that were copied while the guest ran.
struct AheadCopies {
    scan: PageScan,
    vcpus: Vec<ThreadId>,
    /// The copies, in the order of the regions of the scanned memory.
    blocks: Vec<AuxBlock>,
}

impl AheadCopies {
    fn begin(
        process: &Arc<Process>,
        aux: &[AuxRam],
        vcpus: &[ThreadId],
    ) -> Result<Self, ScanError> {
        if !KernelFeatures::of_kernel()?.write_protect_async {
            return Err(ScanError::Unsupported);
        }
        let memory = Arc::new(open_blocks(process, aux)?);
        let scan = PageScan::create(&mut seize_hypervisor(process, vcpus)?, memory)?;
        let mut ahead = Self { scan, vcpus: vcpus.to_vec(), blocks: Vec::new() };
        match ahead.copy_all() {
            Ok(()) => Ok(ahead),
            Err(error) => {
                // The first error is the one to report.
                let _ = ahead.close(process);
                Err(error)
            }
        }
    }

    fn copy_all(&mut self) -> Result<(), ScanError> {
        self.scan.arm_all()?;
        let memory = self.scan.memory();
        let copy = |region: &firn_types::RamRegion| {
            let mut bytes = vec![0; region.byte_len() as usize];
            memory.read_pages(region.first, &mut bytes)?;
            Ok::<_, MemoryError>(AuxBlock { id: region.id.clone(), bytes })
        };
        self.blocks = memory.region_map().regions().iter().map(copy).collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Copies the pages that were written since they were copied.
    fn complete(&mut self) -> Result<Vec<AuxBlock>, SaveError> {
        let memory = Arc::clone(self.scan.memory());
        for (region, block) in memory.region_map().regions().iter().zip(&mut self.blocks) {
            let mut written = Vec::new();
            self.scan.collect_written(region.page_range(), &mut written)?;
            for run in written {
                let at = region.offset_of(run.start) as usize;
                let len = Page::count_in(&run) * PAGE_SIZE;
                memory.read_pages(run.start, &mut block.bytes[at..at + len])?;
            }
        }
        Ok(std::mem::take(&mut self.blocks))
    }

    fn close(self, process: &Process) -> Result<(), ScanError> {
        // This is possible even if no thread can be stopped.
        let unregistered = self.scan.unregister_all();
        self.scan.close(&mut seize_hypervisor(process, &self.vcpus)?)?;
        unregistered
    }
}

/// Whether a block is worth copying ahead, and consists of whole pages.
fn is_large(aux: &AuxRam) -> bool {
    let page = PAGE_SIZE as u64;
    let is_aligned = aux.hva.is_some_and(|hva| hva.0 % page == 0) && aux.bytes % page == 0;
    aux.bytes >= AHEAD_BYTES_MIN && is_aligned
}

/// The blocks as memory whose writes can be recorded.
fn open_blocks(process: &Arc<Process>, aux: &[AuxRam]) -> Result<GuestMemory, ScanError> {
    let sizes = aux.iter().map(|aux| (aux.id.as_str(), aux.bytes));
    let map = RegionMap::lay_out(sizes).map_err(|_| ScanError::Unsupported)?;
    let hvas = aux.iter().filter_map(|aux| aux.hva);
    let locations = map.regions().iter().cloned().zip(hvas);
    let locations: Vec<RegionLocation> =
        locations.map(|(region, hva)| RegionLocation { region, hva }).collect();
    Ok(GuestMemory::open_any(Arc::clone(process), map, &locations)?)
}

fn read_block(process: &Process, aux: &AuxRam) -> Result<AuxBlock, SaveError> {
    let hva = aux.hva.ok_or(SaveError::Options(
        "an auxiliary RAM block is not mapped by the hypervisor; remove its device",
    ))?;
    let mut bytes = vec![0; aux.bytes as usize];
    process_memory::read_memory(process, hva, &mut bytes)?;
    Ok(AuxBlock { id: aux.id.clone(), bytes })
}

fn seize_hypervisor<'p>(process: &'p Process, vcpus: &[ThreadId]) -> Result<Tracee<'p>, ScanError> {
    Tracee::seize(process, vcpus).map_err(|error| ScanError::Drop(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_types::HostVirt;

    fn aux(bytes: u64, hva: Option<u64>) -> AuxRam {
        AuxRam { id: "vga.vram".into(), bytes, hva: hva.map(HostVirt), rom: false }
    }

    #[test]
    fn blocks_of_whole_pages_are_copied_ahead() {
        assert!(is_large(&aux(16 << 20, Some(0x7000_0000))));
        assert!(!is_large(&aux(4096, Some(0x7000_0000))), "a scan takes longer");
        assert!(!is_large(&aux((16 << 20) + 8, Some(0x7000_0000))));
        assert!(!is_large(&aux(16 << 20, Some(0x7000_0010))));
        assert!(!is_large(&aux(16 << 20, None)), "it is an error when the VM is paused");
    }
}
