//! All unsafe code of this crate that calls the kernel or handles signals.

pub(crate) mod fault;
pub(crate) mod fork;
pub(crate) mod mapping;
pub(crate) mod pagemap;
pub(crate) mod perform;
mod processor;
pub(crate) mod quiet_writes;
pub(crate) mod region;
pub(crate) mod uffd;
pub(crate) mod write_log;
