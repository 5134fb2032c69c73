//! Fault points of a release: they do nothing, whatever the environment says.

use std::io;

/// Does nothing.
#[inline(always)]
pub fn point(_name: &'static str) {}

/// Always succeeds.
#[inline(always)]
pub fn io(_name: &'static str) -> io::Result<()> {
    Ok(())
}
