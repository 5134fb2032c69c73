//! Scheduling policies of the calling thread: `sched_setscheduler(2)`, sched(7).

use std::io;

use nix::errno::Errno;
use nix::libc;

/// Makes the calling thread a real-time thread of the lowest priority, which still runs before all
/// ordinary ones. Threads that it starts are ordinary.
pub(crate) fn set_real_time() -> io::Result<()> {
    let lowest = libc::sched_param { sched_priority: 1 };
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    // SAFETY: the third argument points to a struct sched_param that lives throughout the call, and
    // is only read; thread 0 is the calling one. No memory is changed.
    Errno::result(unsafe { libc::sched_setscheduler(0, policy, &raw const lowest) })?;
    Ok(())
}

/// The policy of the calling thread, if it is an ordinary one: round-robin, batch, or idle.
pub(crate) fn ordinary_policy() -> io::Result<Option<i32>> {
    // SAFETY: takes no pointers; thread 0 is the calling one. No memory is changed.
    let policy =
        Errno::result(unsafe { libc::sched_getscheduler(0) })? & !libc::SCHED_RESET_ON_FORK;
    let is_ordinary = [libc::SCHED_OTHER, libc::SCHED_BATCH, libc::SCHED_IDLE].contains(&policy);
    Ok(is_ordinary.then_some(policy))
}

/// Makes the calling thread an ordinary one again. Its niceness is unchanged. Threads that it
/// starts stay ordinary: only a privileged process could undo that.
pub(crate) fn set_ordinary(policy: i32) -> io::Result<()> {
    let none = libc::sched_param { sched_priority: 0 };
    let policy = policy | libc::SCHED_RESET_ON_FORK;
    // SAFETY: the third argument points to a struct sched_param that lives throughout the call, and
    // is only read. No memory is changed.
    Errno::result(unsafe { libc::sched_setscheduler(0, policy, &raw const none) })?;
    Ok(())
}
