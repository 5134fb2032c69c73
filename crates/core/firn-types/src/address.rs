//! Addresses and numbers of pages, threads and vCPUs, each a type of its own.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Bytes in a page: the x86-64 base page, for guest and host alike.
pub const PAGE_SIZE: usize = 4096;

/// A page of guest RAM, counted densely over all RAM regions of the VM (see [`crate::RegionMap`]).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Page(pub u32);

/// A guest-physical address, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GuestPhys(pub u64);

/// A virtual address in the hypervisor process, in bytes. Never dereferenced: it belongs to another
/// address space.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HostVirt(pub u64);

/// A Linux thread id, as the hypervisor's own PID namespace counts it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ThreadId(pub i32);

/// The number of a virtual CPU.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct VcpuId(pub u16);

impl Page {
    /// The page as an index into a table with one entry per page.
    pub fn index(self) -> usize {
        self.0 as usize
    }

    /// The pages of a half-open range, one by one.
    pub fn iter_range(
        range: Range<Page>,
    ) -> impl DoubleEndedIterator<Item = Page> + ExactSizeIterator {
        (range.start.0..range.end.0).map(Page)
    }

    /// The number of pages in a half-open range.
    pub fn count_in(range: &Range<Page>) -> usize {
        range.end.0.saturating_sub(range.start.0) as usize
    }
}

impl GuestPhys {
    /// The address that is `bytes` higher.
    pub fn offset_by(self, bytes: u64) -> Self {
        Self(self.0.wrapping_add(bytes))
    }
}

impl HostVirt {
    /// The address that is `bytes` higher.
    pub fn offset_by(self, bytes: u64) -> Self {
        Self(self.0.wrapping_add(bytes))
    }
}

impl fmt::Debug for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {}", self.0)
    }
}

impl fmt::Display for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl fmt::Debug for GuestPhys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gpa {:#x}", self.0)
    }
}

impl fmt::Display for GuestPhys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl fmt::Debug for HostVirt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hva {:#x}", self.0)
    }
}

impl fmt::Display for HostVirt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl fmt::Debug for ThreadId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "thread {}", self.0)
    }
}

impl fmt::Debug for VcpuId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vCPU {}", self.0)
    }
}
