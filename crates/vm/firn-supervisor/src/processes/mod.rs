//! Processes and what identifies them: Firn's own (their locks, start, logs, sockets) and those of the
//! hypervisor.

pub(crate) mod descriptors;
pub(crate) mod endpoints;
pub(crate) mod identity;
pub(crate) mod kept_keys;
pub(crate) mod lock;
pub(crate) mod log;
pub(crate) mod ownership;
pub(crate) mod process_names;
pub(crate) mod programs;
pub(crate) mod restarts;
pub(crate) mod runtime;
pub(crate) mod spawn;
pub(crate) mod state_dir;
pub(crate) mod store_program;
pub(crate) mod unix_sockets;
