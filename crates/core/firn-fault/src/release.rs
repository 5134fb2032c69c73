//! Fault points of a release: they do nothing, whatever the environment says.

use std::io;

/// Does nothing.
#[inline(always)]
pub fn pass_point(_name: &'static str) {}

/// Always succeeds.
#[inline(always)]
pub fn pass_io_point(_name: &'static str) -> io::Result<()> {
    Ok(())
}
