//! What is done to a VM: start, checkpoint, restore, protect, and the work between checkpoints.

pub(crate) mod access_scan;
pub(crate) mod auxiliary;
pub(crate) mod calls;
pub(crate) mod dirty_tracking;
pub(crate) mod domain_restore;
pub(crate) mod family;
pub(crate) mod guest_clock;
pub(crate) mod huge_page_repair;
pub(crate) mod image_origin;
pub(crate) mod image_signature;
pub(crate) mod learned_blocks;
pub(crate) mod outage;
pub(crate) mod process_check;
pub(crate) mod protection;
pub(crate) mod protection_end;
pub(crate) mod restore;
pub(crate) mod restore_task;
pub(crate) mod restore_work;
pub(crate) mod save_checks;
pub(crate) mod save_tries;
pub(crate) mod standby;
pub(crate) mod standby_files;
pub(crate) mod storage_latency;
pub(crate) mod vm_checks;
pub(crate) mod vm_operations;
pub(crate) mod vm_start;
