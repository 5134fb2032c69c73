//! First touches are recorded with the vCPU that made them.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

use firn_guest::stamp;
use firn_image::{FilledBy, Image, LocalityBlockId};
use firn_lab::guest::accel::{self, Accel};
use firn_types::{Block, PAGE_SIZE, VcpuId};

use crate::vm::Vm;

/// What is needed for shares that mean something.
const LOCALITY_BLOCKS_MIN: u32 = 60;
const CHECKPOINTS_MAX: u32 = 12;

/// What a checkpoint of writers, each with a region of its own on a vCPU of its own, says about who touched what.
#[derive(Debug, Default)]
struct Attributed {
    /// Locality blocks filled by a vCPU that hold pages of writers.
    locality_blocks: u32,
    /// Of these: all such pages are of one region.
    of_one_region: u32,
    /// Writers' memory blocks that were touched during the save, by who is said to have touched them first.
    right: u32,
    wrong: u32,
    nobody: u32,
}

impl Attributed {
    /// Counts one checkpoint.
    fn add(&mut self, image: &Image, ram: &File) {
        for id in (0..image.locality_blocks()).map(LocalityBlockId) {
            let blocks = image.entries(id).iter().map(|entry| entry.block);
            let regions: Vec<u32> = blocks.filter_map(|block| region(image, ram, block)).collect();
            match image.filled_by(id) {
                FilledBy::Vcpu(vcpu) if !regions.is_empty() => self.count(vcpu, &regions),
                FilledBy::Device => self.nobody += regions.len() as u32,
                _ => {}
            }
        }
    }

    /// Counts a locality block. Writer and vCPU have the same number.
    fn count(&mut self, vcpu: VcpuId, regions: &[u32]) {
        let right = regions.iter().filter(|&&region| region == u32::from(vcpu.0)).count();
        self.right += right as u32;
        self.wrong += (regions.len() - right) as u32;
        self.locality_blocks += 1;
        self.of_one_region += u32::from(regions.iter().all(|region| *region == regions[0]));
    }

    fn share_of_one_region(&self) -> f64 {
        f64::from(self.of_one_region) / f64::from(self.locality_blocks)
    }

    fn share_right(&self) -> f64 {
        f64::from(self.right) / f64::from(self.right + self.wrong + self.nobody)
    }
}

/// The region that a memory block belongs to; a page's contents say whose it is. Where two regions meet inside a block it belongs to none.
fn region(image: &Image, ram: &File, block: Block) -> Option<u32> {
    let mut page = [0; PAGE_SIZE];
    let pages = image.geometry().block_size.pages_of(block);
    let pages = pages.start.0..pages.end.0.min(image.geometry().total_pages);
    let owner = pages.filter_map(|number| {
        ram.read_exact_at(&mut page, u64::from(number) * PAGE_SIZE as u64).unwrap();
        Some(stamp::read_stamp(&page)?.region)
    });
    let regions: BTreeSet<u32> = owner.collect();
    if regions.len() == 1 { regions.first().copied() } else { None }
}

#[test]
fn locality_blocks_hold_pages_that_one_vcpu_touched() {
    let vm = Vm::alone().booted(&["--mib", "64", "--compresses-to", "70"]);
    let mut found = Attributed::default();
    // On a busy host the sweep leaves the guest little to touch first.
    for _ in 0..CHECKPOINTS_MAX {
        let save = ["checkpoint", "web", "-o", "web.firn", "--reference", "web.ram"];
        let saved = vm.session.json(&save);
        eprintln!("faults: {}", saved["report"]["faults"]);
        let image = Image::open(&vm.image("web.firn")).unwrap();
        found.add(&image, &File::open(vm.image("web.ram")).unwrap());
        if found.locality_blocks >= LOCALITY_BLOCKS_MIN {
            break;
        }
    }
    vm.is_well();
    eprintln!(
        "{found:?}: {:.1} % of locality blocks of one region, {:.1} % of touches attributed rightly",
        found.share_of_one_region() * 100.0,
        found.share_right() * 100.0
    );
    assert!(found.locality_blocks >= LOCALITY_BLOCKS_MIN, "{found:?}");
    // Most of KVM's faults are taken by kernel workers, which tell their vCPU only indirectly.
    let (of_one_region, right) = match accel::choose_accel().accel {
        Accel::Tcg => (0.95, 0.95),
        Accel::Kvm => (0.6, 0.6),
    };
    assert!(found.share_of_one_region() >= of_one_region, "{found:?}");
    assert!(found.share_right() >= right, "{found:?}");
}
