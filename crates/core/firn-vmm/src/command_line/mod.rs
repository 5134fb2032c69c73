//! A user's own QEMU command line, and Firn's additions to it.
//!
//! Firn needs three things of a QEMU: RAM that Firn can map too, a monitor, and, for a restore, a
//! start that waits for device state. Everything else stays as the user wrote it.
//!
//! ```text
//!   qemu-system-x86_64 -M q35 -m 1G -drive file=a.img                                     as given
//!     -object memory-backend-file,id=firn.ram,size=1073741824,mem-path=...,share=on       RAM over Firn's file
//!     -machine memory-backend=firn.ram
//!     -chardev socket,id=firn.qmp,path=...,server=on,wait=off                             a monitor of its own
//!     -mon chardev=firn.qmp,mode=control
//!     -S -incoming defer -global migration.send-configuration=off                         for a restore
//! ```
//!
//! A command line that already gives its RAM as `memory-backend-*` objects (`-machine
//! memory-backend=`, `-numa node,memdev=`, `-device pc-dimm,memdev=`) keeps them, each over a file
//! of Firn's. First [`plan_command`] finds the RAM regions; with one file for each region,
//! [`CommandPlan::augment`] or [`CommandPlan::for_restore`] returns the new command line and a note
//! for each change.
//!
//! [`CommandPlan::with_drives`] gives a VM other files for its disks. A VM whose applications make
//! guest calls has a device for that in its command line ([`with_calls`]).
//!
//! A network card whose back end is `-netdev firn,id=ID,uplink=PATH` gets one end of a pair of
//! sockets; its frames pass through Firn. Firn serves a disk with `firn=on`
//! ([`CommandPlan::with_disks`]); the standby of a VM has such a disk for each drive that is
//! mirrored ([`with_standby_disk`]).
//!
//! A VM that is restored beside another has sockets, ports and files of its own
//! ([`CommandPlan::relocate_endpoints`]). [`CommandOverrides`] has the changes that its user
//! requests.
//!
//! A VM has a generation ID, and gets another one in each restore ([`with_generation_id`],
//! [`replace_generation_id`]).
//!
//! A restore of an image of unknown origin runs only options that open nothing of the host
//! ([`find_host_accesses`]).
//!
//! Options in files become options of the command line ([`expand_option_files`]).
//!
//! The first word of a command line is the program.

mod arguments;
mod backend;
mod calls;
mod cards;
mod consoles;
mod disks;
mod drives;
mod endpoints;
mod error;
mod generation;
mod host_access;
mod libvirt;
mod mirrored_drives;
mod needs;
mod network_disks;
mod option_files;
mod overrides;
mod plan;
mod properties;
mod size;

pub use calls::{CALLS_BYTES, CALLS_ID, with_calls};
pub use cards::{CardPlan, CardUplink, OtherCard, with_uplink};
pub use consoles::{GuestConsole, find_agent_socket, find_consoles};
pub use disks::{DiskPlan, with_disk};
pub use drives::DriveFile;
pub use endpoints::{EndpointRelocation, HostEndpoint, list_forwards};
pub use error::CommandLineError;
pub use generation::{replace_generation_id, with_generation_id};
pub use host_access::{HostAccess, find_host_accesses};
pub use libvirt::{PlainCommand, without_libvirt};
pub use mirrored_drives::{MirroredDrive, with_standby_disk};
pub use needs::{CommandNeeds, NamedDevice, SecretFile, find_needs};
pub use network_disks::NetworkDisk;
pub use option_files::expand_option_files;
pub use overrides::CommandOverrides;
pub use plan::{
    AddedPaths, AugmentedCommand, CommandPlan, MONITOR_ID, RAM_ID, RamPlan, StorePlugin,
    plan_command,
};
