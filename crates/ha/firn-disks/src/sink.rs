//! Mirror sink: the store of a mirrored disk, whose bytes are at the hypervisor only.
//!
//! A change has an effect nowhere but in the log. A job that mirrors a disk reads nothing from its
//! target.

use std::io;
use std::ops::Range;

use rustix::io::Errno;

use crate::store::DiskStore;

/// A store that keeps nothing.
#[derive(Debug)]
pub struct MirrorSink;

impl DiskStore for MirrorSink {
    fn read_at(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
        Err(Errno::OPNOTSUPP.into())
    }

    fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
        firn_fault::pass_io_point("mirror.write")
    }

    fn zero_range(&self, _: u64, _: u64, _: bool) -> io::Result<()> {
        Ok(())
    }

    fn punch_hole(&self, _: u64, _: u64) -> io::Result<bool> {
        Ok(true)
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn next_data_range(&self, _: u64) -> io::Result<Option<Range<u64>>> {
        Ok(None)
    }
}
