//! Test guests: built by a script, started under QEMU, controlled by their agent.
//!
//! ```text
//!   GuestImage::small()      kernel and initrd, built by guests/build if they are not cached
//!   QemuArgs                 the command line of a guest, as a user would type it; Firn adds options to it
//!   UnmanagedGuest               a QEMU started from it without Firn: for boots, floors and peers
//!   GuestControl             runs programs in the guest, over a virtio port
//!   RedisClient              loads the guest's Redis and checks its data
//! ```
//!
//! Only [`accel::choose_accel`] chooses between KVM and TCG.

pub mod accel;
mod control;
mod image;
mod machine;
mod port;
mod qemu_args;
mod redis;
mod redis_load;

pub use control::{ControlError, GuestControl, JobState};
pub use image::{GuestImage, ImageError};
pub use machine::{MachineError, UnmanagedGuest};
pub use port::free_tcp_port;
pub use qemu_args::{HostForward, QemuArgs, VirtioDisk, default_program, lean_virtio_options};
pub use redis::{RedisClient, RedisError};
pub use redis_load::{LoadReport, RedisLoad};
