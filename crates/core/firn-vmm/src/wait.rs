//! Waiting for file descriptors until a deadline.

use std::io;
use std::os::fd::AsFd;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Waits until `fd` is readable. `false` when the deadline has passed.
pub(crate) fn wait_readable(fd: impl AsFd, deadline: Instant) -> io::Result<bool> {
    wait_ready(fd, PollFlags::IN, deadline)
}

/// Waits until `fd` is writable. `false` when the deadline has passed.
pub(crate) fn wait_writable(fd: impl AsFd, deadline: Instant) -> io::Result<bool> {
    wait_ready(fd, PollFlags::OUT, deadline)
}

/// Waits until one of the two is readable, or its peer has closed it. `false` when the deadline has
/// passed before.
pub(crate) fn wait_either_readable(
    fd: impl AsFd,
    other: impl AsFd,
    deadline: Instant,
) -> io::Result<bool> {
    poll_until(&mut [PollFd::new(&fd, PollFlags::IN), PollFd::new(&other, PollFlags::IN)], deadline)
}

fn wait_ready(fd: impl AsFd, what: PollFlags, deadline: Instant) -> io::Result<bool> {
    poll_until(&mut [PollFd::new(&fd, what)], deadline)
}

fn poll_until(fds: &mut [PollFd<'_>], deadline: Instant) -> io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(fds, Some(&left)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}
