//! Fault points: named steps at which a test makes Firn die, or makes its I/O fail.
//!
//! A promise such as "a checkpoint is whole or it does not exist" is tested by breaking each step
//! on purpose. Each step that matters calls [`pass_point`] with its name, or [`pass_io_point`] if
//! the step is I/O. Only programs that are built with the feature `armed` read the environment
//! variable `FIRN_FAULT`. A release is built without the feature: both functions are empty there.
//! With it:
//!
//! ```text
//!   FIRN_FAULT=save.protected             the process kills itself with SIGKILL when it gets there
//!   FIRN_FAULT=save.protected@3           ... the third time
//!   FIRN_FAULT=image.write=ENOSPC     the I/O step fails with that error (ENOSPC, EIO), as if the disk had failed
//!   FIRN_FAULT=image.write@5=EIO      ... from the fifth time on
//!   FIRN_FAULT=image.read=EIO:/a/file ... as long as that file exists: a test breaks storage, and repairs it
//!   FIRN_FAULT=save.tracing=HOLD     the thread that gets there sleeps for SLEEP_TIME: a test can inspect what is half done
//!   FIRN_FAULT=save.protected=WAIT:/a/file  the thread that gets there makes that file, and continues when it is removed: a
//!                                     test can break something else just then (kill the hypervisor), on any machine
//!   FIRN_FAULT=a.point=WAIT:/f,b.point=EIO:/g   several at once
//! ```
//!
//! [`POINTS`] lists every name, so that a test can walk them all; a name that is not listed is a bug and panics in
//! debug builds.

#![forbid(unsafe_code)]

#[cfg(any(feature = "armed", test))]
#[cfg_attr(
    not(feature = "armed"),
    allow(dead_code, reason = "its tests run without the feature too")
)]
mod active;
mod points;
#[cfg(not(feature = "armed"))]
mod release;

#[cfg(feature = "armed")]
pub use active::{pass_io_point, pass_point};
pub use points::POINTS;
#[cfg(not(feature = "armed"))]
pub use release::{pass_io_point, pass_point};

use std::time::Duration;

/// The environment variable that activates fault points.
pub const VARIABLE: &str = "FIRN_FAULT";

/// How long a thread sleeps at a point with `HOLD`. Long enough for any step of a test on a busy
/// machine.
pub const SLEEP_TIME: Duration = Duration::from_secs(8);
