//! Active faults: parses `FIRN_FAULT`, counts how often each fault point was passed, and kills the
//! process, fails the step or delays the thread.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::{POINTS, SLEEP_TIME, VARIABLE};

/// How often `WAIT` checks whether its file is still there.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// What happens when the process passes an active fault point.
#[derive(Clone, Debug, PartialEq, Eq)]
enum FaultAction {
    /// The process kills itself.
    Kill,
    /// The step fails.
    Fail(rustix::io::Errno),
    /// The step fails as long as the file exists.
    FailWhile(rustix::io::Errno, PathBuf),
    /// The thread sleeps for [`SLEEP_TIME`] (`HOLD`).
    Sleep,
    /// The thread creates the file and waits until a test removes it (`WAIT`).
    WaitForRemoval(PathBuf),
}

/// A fault point that the environment variable names.
#[derive(Debug)]
struct ActiveFault {
    /// The name of the fault point.
    name: String,
    /// The pass from which on the fault acts; the first is 1.
    first_pass: u32,
    action: FaultAction,
    /// How often the point was passed.
    passes: AtomicU32,
}

/// Passes a fault point in a step that cannot fail. If it is active, it kills the process or delays
/// the thread.
pub fn pass_point(name: &'static str) {
    match count_pass(name) {
        Some(FaultAction::Kill) => kill_process(),
        Some(FaultAction::Fail(_) | FaultAction::FailWhile(..)) | None => {}
        Some(action) => delay_thread(action),
    }
}

/// Passes a fault point in a step that does I/O. If it is active, it kills the process, fails the
/// step or delays the thread.
///
/// # Errors
/// The error that the active fault names.
pub fn pass_io_point(name: &'static str) -> io::Result<()> {
    match count_pass(name) {
        Some(FaultAction::Kill) => kill_process(),
        Some(FaultAction::Fail(errno)) => Err((*errno).into()),
        Some(FaultAction::FailWhile(errno, file)) if file.exists() => Err((*errno).into()),
        Some(action) => {
            delay_thread(action);
            Ok(())
        }
        None => Ok(()),
    }
}

fn delay_thread(action: &FaultAction) {
    match action {
        FaultAction::Sleep => std::thread::sleep(SLEEP_TIME),
        FaultAction::WaitForRemoval(file) => create_and_await_removal(file),
        FaultAction::Kill | FaultAction::Fail(_) | FaultAction::FailWhile(..) => {}
    }
}

/// Creates the file, and returns when it is removed. If it can't be created, the test that waits
/// for it fails.
fn create_and_await_removal(file: &Path) {
    let _ = fs::write(file, "");
    while file.exists() {
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Counts a pass of a fault point. Returns the action if the point is active and due.
fn count_pass(name: &'static str) -> Option<&'static FaultAction> {
    debug_assert!(POINTS.contains(&name), "fault point {name} is not listed in POINTS");
    let fault = active_faults().iter().find(|fault| fault.name == name)?;
    let pass = fault.passes.fetch_add(1, Ordering::Relaxed) + 1;
    let is_due = match fault.action {
        // The file is made, and removed, once.
        FaultAction::WaitForRemoval(_) => pass == fault.first_pass,
        _ => pass >= fault.first_pass,
    };
    is_due.then_some(&fault.action)
}

fn active_faults() -> &'static [ActiveFault] {
    static FAULTS: OnceLock<Vec<ActiveFault>> = OnceLock::new();
    FAULTS.get_or_init(|| {
        let text = std::env::var(VARIABLE).unwrap_or_default();
        text.split(',').filter_map(parse_fault).collect()
    })
}

fn parse_fault(text: &str) -> Option<ActiveFault> {
    let (point, action) = match text.split_once('=') {
        Some((point, action)) => (point, parse_action(action)?),
        None => (text, FaultAction::Kill),
    };
    let (name, first_pass) = match point.split_once('@') {
        Some((name, pass)) => (name, pass.parse().ok()?),
        None => (point, 1),
    };
    Some(ActiveFault { name: name.to_owned(), first_pass, action, passes: AtomicU32::new(0) })
}

fn parse_action(text: &str) -> Option<FaultAction> {
    match text.split_once(':') {
        Some(("WAIT", file)) => Some(FaultAction::WaitForRemoval(file.into())),
        Some((errno, file)) => Some(FaultAction::FailWhile(parse_errno(errno)?, file.into())),
        _ if text == "HOLD" => Some(FaultAction::Sleep),
        _ => parse_errno(text).map(FaultAction::Fail),
    }
}

fn parse_errno(name: &str) -> Option<rustix::io::Errno> {
    match name {
        "ENOSPC" => Some(rustix::io::Errno::NOSPC),
        "EIO" => Some(rustix::io::Errno::IO),
        _ => None,
    }
}

fn kill_process() -> ! {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    // SIGKILL to oneself is delivered before the call returns; this line only satisfies the type.
    std::process::abort()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_faults_of_the_module_documentation_are_parsed() {
        let parsed = |text: &str| {
            let fault = parse_fault(text)?;
            Some((fault.name, fault.first_pass, fault.action))
        };
        let at = |from, action| Some(("save.protected".to_owned(), from, action));
        assert_eq!(parsed("save.protected"), at(1, FaultAction::Kill));
        assert_eq!(parsed("save.protected@3"), at(3, FaultAction::Kill));
        assert_eq!(parsed("save.protected@5=EIO"), at(5, FaultAction::Fail(rustix::io::Errno::IO)));
        let fail = FaultAction::FailWhile(rustix::io::Errno::NOSPC, "/a/file".into());
        assert_eq!(parsed("save.protected=ENOSPC:/a/file"), at(1, fail));
        assert_eq!(parsed("save.protected=HOLD"), at(1, FaultAction::Sleep));
        assert_eq!(
            parsed("save.protected@2=WAIT:/a/file"),
            at(2, FaultAction::WaitForRemoval("/a/file".into()))
        );
        assert_eq!(parsed("save.protected=EWHAT"), None);
    }

    #[test]
    fn a_thread_waits_until_the_file_is_removed() {
        let file = std::env::temp_dir().join(format!("firn-fault-{}", std::process::id()));
        let waiting = std::thread::spawn({
            let file = file.clone();
            move || create_and_await_removal(&file)
        });
        while !file.exists() {
            std::thread::yield_now();
        }
        assert!(!waiting.is_finished());
        fs::remove_file(&file).unwrap();
        waiting.join().unwrap();
    }

    #[test]
    fn names_are_unique() {
        let mut names = POINTS.to_vec();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), POINTS.len());
    }
}
