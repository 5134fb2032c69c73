//! The choice of the hypervisor's thread to stop for an injected call.
//!
//! The best one is a helper thread asleep in a futex: its work can wait for a moment, and the
//! kernel restarts its call without the thread's noticing. A vCPU is the last resort, and a thread
//! that cannot be interrupted cannot be used.

use firn_types::ThreadId;
use nix::libc;

use super::filter;
use crate::process::{Process, ProcessError};

/// The activity of a thread, from `/proc/PID/task/TID/{stat,syscall}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ThreadActivity {
    /// Asleep in this system call.
    Call(i64),
    /// Running, or asleep outside a system call (on a page fault).
    Running,
    /// Asleep where no signal wakes it.
    Uninterruptible,
}

/// The threads to try, best first.
pub(super) fn rank_threads(
    process: &Process,
    avoid: &[ThreadId],
) -> Result<Vec<ThreadId>, ProcessError> {
    let main = ThreadId(process.pid());
    let rank_of =
        |tid| rank_thread(thread_activity(process, tid), avoid.contains(&tid), tid == main);
    let threads = process.list_threads()?.into_iter();
    let mut ranked: Vec<_> = threads
        .map(|tid| (sort_key(rank_of(tid), filter::has_filter(process, tid)), tid))
        .collect();
    ranked.sort_by_key(|&(order, _)| order);
    Ok(ranked.into_iter().map(|(_, tid)| tid).collect())
}

/// Threads without a seccomp filter come first: no filter kills them for a call that is not theirs.
fn sort_key(rank: u8, is_filtered: bool) -> (bool, bool, u8) {
    (rank >= UNINTERRUPTIBLE, is_filtered, rank)
}

fn thread_activity(process: &Process, tid: ThreadId) -> ThreadActivity {
    let read = |name| process.read_proc_file(&format!("task/{}/{name}", tid.0)).unwrap_or_default();
    if thread_state(&read("stat")) == Some('D') {
        return ThreadActivity::Uninterruptible;
    }
    let first = |text: &str| text.split_whitespace().next()?.parse().ok();
    match first(&read("syscall")) {
        Some(number) if number >= 0 => ThreadActivity::Call(number),
        _ => ThreadActivity::Running,
    }
}

/// The state letter of a `stat` line: `TID (name, which may hold anything) STATE ...`.
fn thread_state(stat: &str) -> Option<char> {
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

/// Whether the processor checks the thread's returns against a shadow stack (CET).
pub(super) fn has_shadow_stack(process: &Process, tid: ThreadId) -> bool {
    let status = process.read_proc_file(&format!("task/{}/status", tid.0)).unwrap_or_default();
    let features = status.lines().find_map(|line| line.strip_prefix("x86_Thread_features:"));
    features.is_some_and(|features| features.split_whitespace().any(|it| it == "shstk"))
}

/// The rank of a thread that cannot be stopped.
const UNINTERRUPTIBLE: u8 = 16;

fn rank_thread(doing: ThreadActivity, avoid: bool, main: bool) -> u8 {
    let by_role = match (avoid, main) {
        (false, false) => 0,
        (false, true) => 4,
        (true, _) => 8,
    };
    match doing {
        ThreadActivity::Call(libc::SYS_futex) => by_role,
        ThreadActivity::Call(number) if is_restarted(number) => by_role + 1,
        ThreadActivity::Call(_) => by_role + 2,
        ThreadActivity::Running => by_role + 3,
        ThreadActivity::Uninterruptible => UNINTERRUPTIBLE,
    }
}

/// Whether the kernel resumes the call after a stop without the thread's noticing (signal(7)).
fn is_restarted(number: i64) -> bool {
    use libc::{SYS_clock_nanosleep, SYS_nanosleep, SYS_poll, SYS_ppoll, SYS_read, SYS_recvmsg};
    let calls = [SYS_clock_nanosleep, SYS_nanosleep, SYS_poll, SYS_ppoll, SYS_read, SYS_recvmsg];
    calls.contains(&number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sleeping_helper_thread_is_preferred_to_a_vcpu() {
        let helper = rank_thread(ThreadActivity::Call(libc::SYS_futex), false, false);
        let main = rank_thread(ThreadActivity::Call(libc::SYS_ppoll), false, true);
        let vcpu = rank_thread(ThreadActivity::Call(libc::SYS_futex), true, false);
        let stuck = rank_thread(ThreadActivity::Uninterruptible, false, false);
        assert!(helper < main && main < vcpu && vcpu < stuck);
    }

    #[test]
    fn a_thread_without_a_filter_is_preferred() {
        let vcpu = rank_thread(ThreadActivity::Running, true, false);
        let helper = rank_thread(ThreadActivity::Call(libc::SYS_futex), false, false);
        assert!(sort_key(vcpu, false) < sort_key(helper, true));
        assert!(sort_key(helper, true) < sort_key(UNINTERRUPTIBLE, false));
    }

    #[test]
    fn the_name_of_a_thread_may_hold_anything() {
        assert_eq!(thread_state("17 (CPU 0/KVM) S 1 17 17"), Some('S'));
        assert_eq!(thread_state("17 (a) D (b) R 1"), Some('R'));
        assert_eq!(thread_state("17"), None);
    }
}
