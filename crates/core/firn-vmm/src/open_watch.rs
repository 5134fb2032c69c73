//! Detection that another process opens an unnamed pipe: inotify(7) reports openings through
//! `/proc/PID/fd`.
//!
//! ```text
//!   pipe2() ........ no event
//!   QEMU opens ..... one event            it has stopped the VM just before (pause_pipe)
//!   QEMU writes .... no event
//! ```
//!
//! The kernel merges equal events that have not been read yet.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::inotify::{self, CreateFlags, Reader, WatchFlags};
use rustix::io::Errno;

/// Buffer size for a few events without names.
const EVENTS_BYTES: usize = 512;

/// An inotify watch on a pipe.
#[derive(Debug)]
pub(crate) struct OpenWatch(OwnedFd);

impl OpenWatch {
    /// Begins to watch. `None` if the system's limit on watches is reached, or inotify fails
    /// otherwise.
    pub(crate) fn watch_pipe(pipe: impl AsFd) -> Option<Self> {
        let watching = Self::add_watch(pipe.as_fd());
        let log_error =
            |errno: &Errno| tracing::debug!("openings of a pipe can't be watched: {errno}");
        watching.inspect_err(log_error).ok()
    }

    fn add_watch(pipe: BorrowedFd<'_>) -> Result<Self, Errno> {
        let watching = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let path = format!("/proc/self/fd/{}", pipe.as_raw_fd());
        inotify::add_watch(&watching, path, WatchFlags::OPEN)?;
        Ok(Self(watching))
    }

    /// Whether a process has opened the pipe since the last call.
    pub(crate) fn was_opened(&self) -> Result<bool, Errno> {
        let mut room = [MaybeUninit::uninit(); EVENTS_BYTES];
        let mut events = Reader::new(&self.0, &mut room);
        let mut any = false;
        loop {
            match events.next() {
                Ok(_) => any = true,
                Err(Errno::AGAIN) => return Ok(any),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }
}

impl AsFd for OpenWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;

    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    #[test]
    fn each_open_is_reported_once_and_writes_are_not() {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let openings = OpenWatch::watch_pipe(&reader).unwrap();
        let path = format!("/proc/self/fd/{}", writer.as_raw_fd());
        assert!(!openings.was_opened().unwrap());
        let mut opened = File::options().write(true).open(&path).unwrap();
        assert!(openings.was_opened().unwrap());
        opened.write_all(b"devices").unwrap();
        drop(opened);
        assert!(!openings.was_opened().unwrap());
        drop(File::options().write(true).open(&path).unwrap());
        assert!(openings.was_opened().unwrap(), "somebody else");
    }
}
