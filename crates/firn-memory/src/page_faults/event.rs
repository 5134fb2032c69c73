//! The events that the kernel reports through a userfaultfd.

use std::ops::Range;

use firn_types::{HostVirt, PAGE_SIZE, Page, Tid};
use linux_raw_sys::general::{UFFD_EVENT_PAGEFAULT, UFFD_EVENT_REMOVE};

use crate::guest_memory::GuestMemory;
use crate::sys::uffd::{Message, flag};

/// An event of guest memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A thread waits for an answer.
    Fault {
        /// The page it touched.
        page: Page,
        /// The thread: of the hypervisor, or of the kernel (KVM's asynchronous page faults), by its
        /// number in its own PID namespace.
        tid: Tid,
        /// The reason why it waits.
        kind: FaultKind,
        /// Whether the access was a write.
        write: bool,
    },
    /// The hypervisor gave these pages back (balloon, free page reporting): they are zeros from now
    /// on. The thread that did it waits until this event has been read.
    Removed {
        /// The pages.
        pages: Range<Page>,
    },
}

/// The reason why a thread waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// The page is not in the RAM file.
    Missing,
    /// The page is in the RAM file, but not in the hypervisor's page tables.
    Minor,
    /// The page is write-protected, and the thread writes to it.
    WriteProtect,
}

/// Decodes one message; `None` if it concerns other memory, or is of a kind that Firn did not ask
/// for.
pub(super) fn decode(message: &Message, memory: &GuestMemory) -> Option<Event> {
    let [kind, a, b, c] = *message;
    match kind as u8 as u32 {
        UFFD_EVENT_PAGEFAULT => fault(a, HostVirt(b), Tid(c as u32 as i32), memory),
        UFFD_EVENT_REMOVE => removed(HostVirt(a), HostVirt(b), memory),
        _ => None,
    }
}

fn fault(flags: u64, address: HostVirt, tid: Tid, memory: &GuestMemory) -> Option<Event> {
    let page = memory.page_of_hva(address)?;
    let (kind, write) = fault_kind(flags);
    Some(Event::Fault { page, tid, kind, write })
}

fn fault_kind(flags: u64) -> (FaultKind, bool) {
    let kind = match flags {
        flags if flags & flag::FAULT_WP != 0 => FaultKind::WriteProtect,
        flags if flags & flag::FAULT_MINOR != 0 => FaultKind::Minor,
        _ => FaultKind::Missing,
    };
    (kind, flags & (flag::FAULT_WRITE | flag::FAULT_WP) != 0)
}

fn removed(start: HostVirt, end: HostVirt, memory: &GuestMemory) -> Option<Event> {
    let first = memory.page_of_hva(start)?;
    let count = end.0.checked_sub(start.0)? / PAGE_SIZE as u64;
    let region = memory.map().region_of(first)?.range();
    let end = Page(first.0.saturating_add(count.min(u64::from(u32::MAX)) as u32)).min(region.end);
    Some(Event::Removed { pages: first..end })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_follow_the_flags() {
        assert_eq!(fault_kind(0), (FaultKind::Missing, false));
        assert_eq!(fault_kind(flag::FAULT_WRITE), (FaultKind::Missing, true));
        assert_eq!(fault_kind(flag::FAULT_MINOR), (FaultKind::Minor, false));
        assert_eq!(fault_kind(flag::FAULT_MINOR | flag::FAULT_WRITE), (FaultKind::Minor, true));
        assert_eq!(fault_kind(flag::FAULT_WP | flag::FAULT_WRITE), (FaultKind::WriteProtect, true));
    }
}
