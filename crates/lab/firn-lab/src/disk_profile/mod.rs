//! Disk profiles: slow disks on fast machines, by the kernel's block I/O throttle.
//!
//! ```text
//!   profile    IOPS   MB/s     imitates
//!   none          -      -     the disk as it is
//!   netssd     3000    125     a cloud provider's network SSD
//!   hdd15k      180    120     a 15,000 rpm disk, as in the Halite paper
//!   hdd7200      80    100     a 7,200 rpm disk
//! ```
//!
//! A process and all its children get the profile when they are started through
//! [`DiskThrottle::command`], which first puts the process into its own control group. The process
//! that reads the image must be in it: Firn's supervisor (a child of `firn restore`), or the whole
//! QEMU of a peer. Throttling does not affect reads that the page cache answers: [`make_cold`]
//! evicts the files first, and checks that they are gone. And a disk can't imitate a faster one:
//! [`make_cold_when_ready`] waits until the disk has recovered from earlier writes.
//!
//! The kernel only promises these limits; [`measure_throttle`] measures their effect (random 4 KiB
//! reads), and experiments print the result.

mod cold;
mod device;
mod group;
mod probe;
mod profile;
mod ready;

pub use cold::{make_cold, warm_file};
pub use device::{BlockDevice, device_of};
pub use group::DiskThrottle;
pub use probe::{ProbeResult, measure_throttle, probe_disk};
pub use profile::{DiskLimits, DiskProfile, DiskProfileError, ThrottleError};
pub use ready::make_cold_when_ready;
