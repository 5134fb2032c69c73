//! A check whether a running VM could be restored from a checkpoint of it.
//!
//! A restore starts QEMU with the VM's command line and loads device state. That works if the
//! command line describes the VM as it is now, and if Firn has access to all of the VM's state. So
//! Firn inspects the running QEMU, not its command line alone:
//!
//! ```text
//!   qom-list, qom-get      devices, and which of them were added later     query-cpus-fast, smp    vCPUs
//!   info network           types of network back ends                      query-block             media
//!   command line           descriptors, secrets, removed devices
//!        |
//!        v
//!   MachineFacts  --- find_obstacles --->  RestoreObstacle: one reason each, with a remedy
//! ```

mod facts;
mod obstacle;
mod rules;

pub use facts::{BackendFacts, DeviceFacts, MachineFacts, MediumFacts};
pub use obstacle::{InaccessibleDeviceKind, RestoreObstacle};
pub use rules::{CommandLines, find_obstacles};

pub(crate) use facts::collect_facts;

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
