//! The devices of a VM in which Firn has a part: disks, their snapshots, copies and layers, and network
//! cards.

pub(crate) mod card_filters;
pub(crate) mod disk_copies;
pub(crate) mod disk_kinds;
pub(crate) mod disk_layers;
pub(crate) mod disk_snapshots;
pub(crate) mod mirrored_disks;
pub(crate) mod network;
pub(crate) mod served_disks;
