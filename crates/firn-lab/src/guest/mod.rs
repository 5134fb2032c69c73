//! Test guests: built, started under QEMU, and talked to.
//!
//! ```text
//!   GuestImage::small()      kernel and initrd, built by guests/build if they are not cached
//!   QemuArgs                 the command line of a guest, as a user would type it; Firn adds its part to it
//!   Machine                  a QEMU started from it without Firn: for boots, floors and peers
//!   Control                  runs programs in the guest, over a virtio port
//!   Redis                    loads the guest's Redis and checks what it holds
//! ```
//!
//! [`accel::decide`] is the only place that chooses between KVM and TCG.

pub mod accel;
mod control;
mod image;
mod machine;
mod port;
mod qemu_args;
mod redis;
mod redis_load;

pub use control::{Control, ControlError, JobState};
pub use image::{GuestImage, ImageError};
pub use machine::{Machine, MachineError};
pub use port::free_tcp_port;
pub use qemu_args::{Disk, HostForward, QemuArgs, default_program, lean};
pub use redis::{Redis, RedisError};
pub use redis_load::{LoadReport, RedisLoad};
