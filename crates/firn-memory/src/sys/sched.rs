//! Scheduling policies of the calling thread: `sched_setscheduler(2)`, sched(7).

use std::io;

use nix::errno::Errno;
use nix::libc;

/// Makes the calling thread a real-time thread of the lowest priority, which still comes before all ordinary ones. What it starts is not.
pub(crate) fn real_time() -> io::Result<()> {
    let lowest = libc::sched_param { sched_priority: 1 };
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    // SAFETY: the third argument points to a struct sched_param that lives throughout the call, and is only read; thread 0 is the
    // calling one. No memory is changed.
    Errno::result(unsafe { libc::sched_setscheduler(0, policy, &raw const lowest) })?;
    Ok(())
}

/// How the calling thread is scheduled, if it is an ordinary one: by turns, in batches, or when nobody else runs.
pub(crate) fn ordinary() -> io::Result<Option<i32>> {
    // SAFETY: takes no pointers; thread 0 is the calling one. No memory is changed.
    let policy =
        Errno::result(unsafe { libc::sched_getscheduler(0) })? & !libc::SCHED_RESET_ON_FORK;
    let is_ordinary = [libc::SCHED_OTHER, libc::SCHED_BATCH, libc::SCHED_IDLE].contains(&policy);
    Ok(is_ordinary.then_some(policy))
}

/// Makes it an ordinary one again. Its niceness is as it was; that what it starts is ordinary stays so, which only a privileged one could undo.
pub(crate) fn set_ordinary(policy: i32) -> io::Result<()> {
    let none = libc::sched_param { sched_priority: 0 };
    let policy = policy | libc::SCHED_RESET_ON_FORK;
    // SAFETY: the third argument points to a struct sched_param that lives throughout the call, and is only read. No memory is changed.
    Errno::result(unsafe { libc::sched_setscheduler(0, policy, &raw const none) })?;
    Ok(())
}
