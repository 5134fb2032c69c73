//! The seccomp filter of a thread, and whether it allows an injected call.
//!
//! A filter judges calls by their numbers, whichever program wants them made. One that traps or
//! kills for a call that the program itself never makes (Firecracker, Cloud Hypervisor, systemd's
//! `SystemCallFilter=`) ends the process for a call of Firn's. So Firn suspends the filter
//! (`PTRACE_O_SUSPEND_SECCOMP`), which needs CAP_SYS_ADMIN. Without that right Firn injects a call
//! only under a filter that is known to allow it:
//!
//! ```text
//!   QEMU's own (-sandbox on)        forbids a list of calls; none of Firn's is on it (system/qemu-seccomp.c)
//!   inherited, as Firn's own is     Firn and the hypervisor were started in one container or unit: its filter judges both, and
//!                                   Firn has made the same calls before
//! ```

use firn_types::ThreadId;

use crate::process::Process;

/// The filter of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SeccompFilter {
    /// There is none.
    None,
    /// It is known to allow Firn's calls.
    Permissive,
    /// Nothing is known about it.
    Unknown,
}

/// The seccomp state in `/proc/PID/task/TID/status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SeccompStatus {
    /// 0: none, 1: strict, 2: filters.
    mode: u32,
    /// The number of filters (Linux 5.9).
    filters: Option<u32>,
}

/// Finds the filter of a thread.
pub(super) fn filter_of_thread(process: &Process, tid: ThreadId) -> SeccompFilter {
    let thread = parse_status(
        &process.read_proc_file(&format!("task/{}/status", tid.0)).unwrap_or_default(),
    );
    if thread.mode == 0 {
        return SeccompFilter::None;
    }
    let own = parse_status(&read_own("status"));
    let is_shared =
        process.read_proc_file("cgroup").is_ok_and(|cgroup| cgroup == read_own("cgroup"));
    let inherited = own.filters.filter(|_| own.mode == 2 && is_shared).unwrap_or(0);
    classify_filter(thread, own_filters_of(process), inherited)
}

/// Whether the thread has a filter. If its status cannot be read, it has none.
pub(super) fn has_filter(process: &Process, tid: ThreadId) -> bool {
    parse_status(&process.read_proc_file(&format!("task/{}/status", tid.0)).unwrap_or_default())
        .mode
        != 0
}

/// Pure: `installed` is the number of the program's own, known filters; `inherited` filters judge
/// Firn as well.
fn classify_filter(thread: SeccompStatus, installed: Option<u32>, inherited: u32) -> SeccompFilter {
    let (Some(installed), 2) = (installed, thread.mode) else { return SeccompFilter::Unknown };
    match thread.filters {
        Some(filters) if filters <= installed + inherited => SeccompFilter::Permissive,
        None if installed > 0 => SeccompFilter::Permissive,
        _ => SeccompFilter::Unknown,
    }
}

/// The number of filters that the program installs by itself and that allow Firn's calls; `None` if
/// it is not QEMU.
fn own_filters_of(process: &Process) -> Option<u32> {
    let program = std::fs::read_link(format!("/proc/{}/exe", process.pid())).ok()?;
    let is_qemu = program.file_name()?.to_string_lossy().starts_with("qemu");
    let line = process.read_proc_file("cmdline").ok()?;
    is_qemu.then(|| u32::from(has_sandbox(&line)))
}

/// Whether a command line, its words terminated by zeros, enables QEMU's sandbox.
fn has_sandbox(line: &str) -> bool {
    let words: Vec<&str> = line.split('\0').collect();
    let is_on = |value: &str| value.split(',').any(|part| matches!(part, "on" | "enable=on"));
    words.windows(2).any(|pair| matches!(pair[0], "-sandbox" | "--sandbox") && is_on(pair[1]))
}

fn parse_status(status: &str) -> SeccompStatus {
    let number = |key| status.lines().find_map(|line| line.strip_prefix(key)?.trim().parse().ok());
    SeccompStatus { mode: number("Seccomp:").unwrap_or(0), filters: number("Seccomp_filters:") }
}

fn read_own(name: &str) -> String {
    std::fs::read_to_string(format!("/proc/thread-self/{name}")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filters(count: u32) -> SeccompStatus {
        SeccompStatus { mode: 2, filters: Some(count) }
    }

    #[test]
    fn only_known_filters_are_permissive() {
        assert_eq!(classify_filter(filters(1), None, 0), SeccompFilter::Unknown, "no QEMU");
        assert_eq!(
            classify_filter(filters(1), None, 1),
            SeccompFilter::Unknown,
            "no QEMU, in Firn's container"
        );
        assert_eq!(
            classify_filter(filters(1), Some(0), 0),
            SeccompFilter::Unknown,
            "QEMU in a unit of its own"
        );
        assert_eq!(
            classify_filter(filters(1), Some(1), 0),
            SeccompFilter::Permissive,
            "-sandbox on"
        );
        assert_eq!(
            classify_filter(filters(2), Some(1), 0),
            SeccompFilter::Unknown,
            "-sandbox on, in a unit"
        );
        assert_eq!(
            classify_filter(filters(1), Some(0), 1),
            SeccompFilter::Permissive,
            "in Firn's container"
        );
        assert_eq!(classify_filter(filters(3), Some(1), 1), SeccompFilter::Unknown, "one more");
        let old = SeccompStatus { mode: 2, filters: None };
        assert_eq!(classify_filter(old, Some(1), 0), SeccompFilter::Permissive);
        assert_eq!(classify_filter(old, Some(0), 0), SeccompFilter::Unknown);
        assert_eq!(
            classify_filter(SeccompStatus { mode: 1, filters: None }, Some(1), 0),
            SeccompFilter::Unknown
        );
    }

    #[test]
    fn the_status_and_the_sandbox_are_read() {
        let status = "Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t3\n";
        assert_eq!(parse_status(status), SeccompStatus { mode: 2, filters: Some(3) });
        assert_eq!(parse_status(""), SeccompStatus { mode: 0, filters: None });
        assert!(has_sandbox("qemu\0-sandbox\0on,obsolete=deny\0-m\x001G\0"));
        assert!(has_sandbox("qemu\0--sandbox\0enable=on\0"));
        assert!(!has_sandbox("qemu\0-sandbox\0off\0"));
        assert!(!has_sandbox("qemu\0-name\0-sandbox\0"));
    }
}
