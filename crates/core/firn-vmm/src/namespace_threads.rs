//! Threads of a QEMU in a PID namespace of its own, such as in a container: QEMU reports the numbers
//! that its threads have there, and Firn needs the numbers that they have here.
//!
//! ```text
//!   /proc/4711/task/4715/status      NSpid:  4715  9        here 4715, in the namespace 9
//! ```
//!
//! The line is described in proc_pid_status(5): one number for each namespace, from that of the
//! procfs to that of the thread.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use firn_types::ThreadId;

/// Translates numbers of threads of a process from its PID namespace to this one. `None` for a
/// number that no thread of the process has.
pub(crate) fn translate_threads(
    process: i32,
    threads: &[ThreadId],
) -> io::Result<Vec<Option<ThreadId>>> {
    let of_process = PathBuf::from(format!("/proc/{process}"));
    if namespace_numbers(&of_process)?.len() < 2 {
        return Ok(threads.iter().copied().map(Some).collect());
    }
    let mut known = BTreeMap::new();
    for task in fs::read_dir(of_process.join("task"))? {
        // A thread may end meanwhile.
        let Ok(numbers) = namespace_numbers(&task?.path()) else { continue };
        if let (Some(here), Some(there)) = (numbers.first(), numbers.last()) {
            known.insert(*there, ThreadId(*here));
        }
    }
    Ok(threads.iter().map(|thread| known.get(&thread.0).copied()).collect())
}

/// Finds the process, in any PID namespace below this one, that has a thread of that number in its
/// namespace, and whose command line `is_wanted`.
pub fn find_namespaced_process(thread: ThreadId, is_wanted: impl Fn(i32) -> bool) -> Option<i32> {
    let processes = fs::read_dir("/proc").ok()?;
    let numbers = processes.filter_map(|it| it.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let mut wanted = numbers.filter(|process| is_wanted(*process));
    wanted.find(|process| {
        translate_threads(*process, &[thread]).is_ok_and(|found| {
            found
                .first()
                .copied()
                .flatten()
                .is_some_and(|it| Path::new(&format!("/proc/{process}/task/{}", it.0)).exists())
        })
    })
}

/// The numbers of a process or thread, from this namespace to its own.
fn namespace_numbers(directory: &Path) -> io::Result<Vec<i32>> {
    Ok(parse_numbers(&fs::read_to_string(directory.join("status"))?))
}

fn parse_numbers(status: &str) -> Vec<i32> {
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    line.unwrap_or_default().split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_from_this_namespace_to_the_innermost() {
        assert_eq!(parse_numbers("Name:\tqemu\nNSpid:\t4715\t9\nVmRSS: 1 kB\n"), [4715, 9]);
        assert!(parse_numbers("Name:\tqemu\n").is_empty());
    }

    #[test]
    fn threads_of_this_namespace_keep_their_numbers() {
        let me = std::process::id() as i32;
        let translated = translate_threads(me, &[ThreadId(me), ThreadId(1)]).unwrap();
        assert_eq!(translated, [Some(ThreadId(me)), Some(ThreadId(1))]);
        assert_eq!(find_namespaced_process(ThreadId(me), |process| process == me), Some(me));
        assert_eq!(find_namespaced_process(ThreadId(me), |_| false), None);
    }
}
