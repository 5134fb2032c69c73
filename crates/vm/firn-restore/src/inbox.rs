//! Event inbox: the events of the guest, in the order in which they are processed.
//!
//! When the guest gives pages back, the inbox records them as removed in the moment in which it
//! reads the event. If such an event waits, no worker may install pages at that moment: a worker
//! could install a page with its old contents. The install lock ensures that
//! ([`crate::install_lock`]). Faults are queued.

use std::collections::VecDeque;
use std::time::Duration;

use firn_memory::{FaultKind, MemoryEvent, ProcessError};
use firn_types::{Page, ThreadId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::error::RestoreError;
use crate::shared::SharedRestore;

/// A page fault that was read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingFault {
    pub(crate) page: Page,
    pub(crate) tid: ThreadId,
    pub(crate) kind: FaultKind,
    /// When it was read.
    pub(crate) since: Duration,
}

/// The events that were read and are not processed yet.
pub(crate) struct EventInbox<'a> {
    shared: &'a SharedRestore,
    events: Vec<MemoryEvent>,
    faults: VecDeque<PendingFault>,
}

impl<'a> EventInbox<'a> {
    pub(crate) fn new(shared: &'a SharedRestore) -> Self {
        Self { shared, events: Vec::with_capacity(64), faults: VecDeque::with_capacity(256) }
    }

    /// The next fault, if one has been read.
    pub(crate) fn next_fault(&mut self) -> Option<PendingFault> {
        self.faults.pop_front()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.faults.is_empty()
    }

    /// Reads all pending events, without waiting for one. Faults are queued, removed pages are
    /// recorded.
    ///
    /// The kernel is asked whether it holds an event about pages that are given back. If so, or if no
    /// worker is installing, the events are read while all workers are kept from installing.
    pub(crate) fn read_events(&mut self) -> Result<(), RestoreError> {
        let shared = self.shared;
        let _exclusive = shared.install_lock.lock_exclusive(|| shared.faults.is_giving_back());
        shared.faults.wait_for_events(&mut self.events, Duration::ZERO)?;
        if self.events.is_empty() {
            return Ok(());
        }
        let since = shared.now();
        for event in self.events.drain(..) {
            match event {
                MemoryEvent::Removed { pages } => shared.record_removal(pages)?,
                MemoryEvent::Fault { page, tid, kind, .. } => {
                    self.faults.push_back(PendingFault { page, tid, kind, since });
                }
            }
        }
        Ok(())
    }

    /// Waits until there is an event to read, at most for `timeout`. Reads none.
    pub(crate) fn wait_until_readable(&self, timeout: Duration) -> Result<(), RestoreError> {
        let process = self.shared.faults.memory().process();
        let timeout = Timespec::try_from(timeout).ok();
        let mut fds = [
            PollFd::new(&self.shared.faults, PollFlags::IN),
            PollFd::from_borrowed_fd(process.pidfd(), PollFlags::IN),
        ];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) if !fds[1].revents().is_empty() => {
                Err(RestoreError::PageFaults(ProcessError::Gone { pid: process.pid() }.into()))
            }
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(RestoreError::Poll { source: errno.into() }),
        }
    }
}
