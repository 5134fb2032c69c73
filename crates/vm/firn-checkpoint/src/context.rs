//! What a save is given, and what it has once all memory is copied.

use std::ops::Range;
use std::sync::Arc;

use firn_image::{Image, ImageSeal};
use firn_memory::{GuestMemory, Process};
use firn_types::{Block, GuestPhys, Page, RegionMap};
use firn_vmm::{AuxRam, DriveCut, QemuVm};

use crate::cut::{CutState, SaveSteps};
use crate::pre_copy::WriteTracker;
use crate::report::SaveReport;

/// The VM to save, and what its save needs.
pub struct SaveContext<'a> {
    /// The VM's control channel.
    pub vm: &'a mut QemuVm,
    /// The hypervisor process.
    pub process: Arc<Process>,
    /// Its guest RAM.
    pub memory: Arc<GuestMemory>,
    /// Small RAM blocks beside guest RAM.
    pub aux: &'a [AuxRam],
    /// The pages that the guest has used lately, if they are to be its working set
    /// ([`crate::AccessScanner`], [`crate::watch_accesses`]); otherwise the working set is what the
    /// guest touches after the cut.
    pub used: Option<Vec<Range<Page>>>,
    /// The image that the new one is to build on.
    pub parent: Option<Arc<Image>>,
    /// The key with which the image is sealed, if it is.
    pub seal: Option<&'a ImageSeal>,
    /// Tracks the guest's writes since the last checkpoint, for [`crate::SaveStrategy::PreCopy`]: a
    /// save uses the tracker that is here, and leaves one here for the next save. No other strategy
    /// works while there is one.
    pub tracker: Option<WriteTracker>,
    /// What is done with the VM's disks in the pause.
    pub drives: DriveCut,
    /// The caller's steps before and after the pause.
    pub steps: &'a dyn SaveSteps,
}

/// What a save has found, for the description of the VM.
#[derive(Clone, Copy, Debug)]
pub struct SavedState<'a> {
    /// The share of the working set that was found in the last eighth of the time in which the
    /// guest was traced, if the working set was found that way: the larger the share, the more was
    /// missed.
    pub found_late: Option<f64>,
    /// The layout of RAM in the image.
    pub regions: &'a RegionMap,
    /// The state of devices and vCPUs in the image.
    pub device_state: &'a [u8],
}

/// Describes the VM. Called once its memory and disks are fixed.
pub type DescribeVm<'a> = dyn Fn(&SavedState<'_>) -> std::io::Result<serde_json::Value> + 'a;

/// All memory has been given to the pipeline, and the guest runs without faults.
pub(crate) struct CopiedMemory {
    pub(crate) cut: CutState,
    pub(crate) working_set: Vec<Block>,
    pub(crate) roots: Vec<GuestPhys>,
    pub(crate) report: SaveReport,
}
