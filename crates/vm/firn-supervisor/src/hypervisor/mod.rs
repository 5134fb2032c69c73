//! A running QEMU: its monitor, what is asked of it, and what its command line becomes on a restore.

pub(crate) mod consoles;
pub(crate) mod host_check;
pub(crate) mod inspection;
pub(crate) mod libvirt;
pub(crate) mod memory_use;
pub(crate) mod monitor;
pub(crate) mod qemu;
pub(crate) mod relocation;
pub(crate) mod restored_domain;
pub(crate) mod store_plugin;
