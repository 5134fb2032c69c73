//! The events that the kernel reports through a userfaultfd.

use std::ops::Range;

use firn_types::{HostVirt, PAGE_SIZE, Page, ThreadId};
use linux_raw_sys::general::{UFFD_EVENT_PAGEFAULT, UFFD_EVENT_REMOVE};

use crate::guest_memory::GuestMemory;
use crate::sys::uffd::{UffdMessage, flag};

/// An event of guest memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryEvent {
    /// A thread waits for an answer.
    Fault {
        /// The page it touched.
        page: Page,
        /// The thread: of the hypervisor, or of the kernel (KVM's asynchronous page faults), by its
        /// number in its own PID namespace.
        tid: ThreadId,
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
    /// The page is not in the RAM file or template.
    Missing,
    /// The page is in the RAM file or template, but not in the hypervisor's page tables.
    Minor,
    /// The page is write-protected, and the thread writes to it.
    WriteProtect,
}

/// Decodes one message; `None` if it concerns other memory, or is of a kind that Firn did not ask
/// for.
pub(super) fn decode_message(message: &UffdMessage, memory: &GuestMemory) -> Option<MemoryEvent> {
    let [kind, a, b, c] = *message;
    match kind as u8 as u32 {
        UFFD_EVENT_PAGEFAULT => decode_fault(a, HostVirt(b), ThreadId(c as u32 as i32), memory),
        UFFD_EVENT_REMOVE => decode_removal(HostVirt(a), HostVirt(b), memory),
        _ => None,
    }
}

fn decode_fault(
    flags: u64,
    address: HostVirt,
    tid: ThreadId,
    memory: &GuestMemory,
) -> Option<MemoryEvent> {
    let page = memory.page_of_hva(address)?;
    let (kind, write) = kind_of_flags(flags);
    Some(MemoryEvent::Fault { page, tid, kind, write })
}

fn kind_of_flags(flags: u64) -> (FaultKind, bool) {
    let kind = match flags {
        flags if flags & flag::FAULT_WP != 0 => FaultKind::WriteProtect,
        flags if flags & flag::FAULT_MINOR != 0 => FaultKind::Minor,
        _ => FaultKind::Missing,
    };
    (kind, flags & (flag::FAULT_WRITE | flag::FAULT_WP) != 0)
}

fn decode_removal(start: HostVirt, end: HostVirt, memory: &GuestMemory) -> Option<MemoryEvent> {
    let first = memory.page_of_hva(start)?;
    let count = end.0.checked_sub(start.0)? / PAGE_SIZE as u64;
    let region = memory.region_map().region_of(first)?.page_range();
    let end = Page(first.0.saturating_add(count.min(u64::from(u32::MAX)) as u32)).min(region.end);
    Some(MemoryEvent::Removed { pages: first..end })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_follow_the_flags() {
        assert_eq!(kind_of_flags(0), (FaultKind::Missing, false));
        assert_eq!(kind_of_flags(flag::FAULT_WRITE), (FaultKind::Missing, true));
        assert_eq!(kind_of_flags(flag::FAULT_MINOR), (FaultKind::Minor, false));
        assert_eq!(kind_of_flags(flag::FAULT_MINOR | flag::FAULT_WRITE), (FaultKind::Minor, true));
        assert_eq!(
            kind_of_flags(flag::FAULT_WP | flag::FAULT_WRITE),
            (FaultKind::WriteProtect, true)
        );
    }
}
