//! Named fault points: the places where a test makes Firn die, or its I/O fail.
//!
//! A promise such as "a checkpoint is whole or it does not exist" is worth what breaks it on purpose. Each step that
//! matters calls [`point`] (or [`io()`], where the step is I/O) with its name. Nothing happens unless the environment
//! variable `FIRN_FAULT` names it:
//!
//! ```text
//!   FIRN_FAULT=save.armed             the process kills itself with SIGKILL when it gets there
//!   FIRN_FAULT=save.armed@3           ... the third time
//!   FIRN_FAULT=image.write=ENOSPC     the I/O step fails with that error (ENOSPC, EIO), as if the disk had said so
//!   FIRN_FAULT=image.write@5=EIO      ... from the fifth time on
//!   FIRN_FAULT=image.read=EIO:/a/file ... as long as that file exists: a test breaks storage, and repairs it
//!   FIRN_FAULT=save.retraced=HOLD     the thread that gets there stays for HOLD_FOR: a test can look at what is half done
//!   FIRN_FAULT=save.armed=WAIT:/a/file  the thread that gets there makes that file, and goes on when it is gone: a test
//!                                     can break something else just then (kill the hypervisor), however slow it all is
//! ```
//!
//! [`POINTS`] lists every name, so that a test can walk them all; a name that is not listed is a bug and panics in
//! debug builds.

#![forbid(unsafe_code)]

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

mod points;

pub use points::POINTS;

/// The environment variable that arms one fault point.
pub const VARIABLE: &str = "FIRN_FAULT";

/// How long `HOLD` holds. Long enough for whatever a test does meanwhile on a busy machine.
pub const HOLD_FOR: Duration = Duration::from_secs(8);

/// How often `WAIT` looks whether its file is still there.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// What an armed fault point does.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Action {
    Kill,
    Fail(rustix::io::Errno),
    FailWhile(rustix::io::Errno, PathBuf),
    Hold,
    Wait(PathBuf),
}

/// One armed fault point.
#[derive(Debug, PartialEq, Eq)]
struct Armed {
    name: String,
    from: u32,
    action: Action,
}

static PASSES: AtomicU32 = AtomicU32::new(0);

/// Dies here by SIGKILL if the environment says so.
pub fn point(name: &'static str) {
    match hit(name) {
        Some(Action::Kill) => die(),
        Some(Action::Fail(_) | Action::FailWhile(..)) | None => {}
        Some(action) => stay(action),
    }
}

/// Dies or fails here if the environment says so. For steps that do I/O.
pub fn io(name: &'static str) -> io::Result<()> {
    match hit(name) {
        Some(Action::Kill) => die(),
        Some(Action::Fail(errno)) => Err((*errno).into()),
        Some(Action::FailWhile(errno, file)) if file.exists() => Err((*errno).into()),
        Some(action) => {
            stay(action);
            Ok(())
        }
        None => Ok(()),
    }
}

fn stay(action: &Action) {
    match action {
        Action::Hold => std::thread::sleep(HOLD_FOR),
        Action::Wait(file) => wait_for_removal(file),
        Action::Kill | Action::Fail(_) | Action::FailWhile(..) => {}
    }
}

/// A file that can't be made is told by a test that waits for it in vain.
fn wait_for_removal(file: &Path) {
    let _ = fs::write(file, "");
    while file.exists() {
        std::thread::sleep(LOOK_EVERY);
    }
}

fn hit(name: &'static str) -> Option<&'static Action> {
    debug_assert!(POINTS.contains(&name), "fault point {name} is not listed in POINTS");
    let armed = armed()?;
    if armed.name != name {
        return None;
    }
    let pass = PASSES.fetch_add(1, Ordering::Relaxed) + 1;
    let acts = match armed.action {
        // Whoever removes the file does so once.
        Action::Wait(_) => pass == armed.from,
        _ => pass >= armed.from,
    };
    acts.then_some(&armed.action)
}

fn armed() -> Option<&'static Armed> {
    static ARMED: OnceLock<Option<Armed>> = OnceLock::new();
    ARMED.get_or_init(|| parse(&std::env::var(VARIABLE).ok()?)).as_ref()
}

fn parse(text: &str) -> Option<Armed> {
    let (place, action) = match text.split_once('=') {
        Some((place, action)) => (place, action_named(action)?),
        None => (text, Action::Kill),
    };
    let (name, from) = match place.split_once('@') {
        Some((name, from)) => (name, from.parse().ok()?),
        None => (place, 1),
    };
    Some(Armed { name: name.to_owned(), from, action })
}

fn action_named(text: &str) -> Option<Action> {
    match text.split_once(':') {
        Some(("WAIT", file)) => Some(Action::Wait(file.into())),
        Some((errno, file)) => Some(Action::FailWhile(errno_named(errno)?, file.into())),
        _ if text == "HOLD" => Some(Action::Hold),
        _ => errno_named(text).map(Action::Fail),
    }
}

fn errno_named(name: &str) -> Option<rustix::io::Errno> {
    match name {
        "ENOSPC" => Some(rustix::io::Errno::NOSPC),
        "EIO" => Some(rustix::io::Errno::IO),
        _ => None,
    }
}

fn die() -> ! {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    // SIGKILL to oneself is delivered before the call returns; this line only satisfies the type.
    std::process::abort()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_its_documentation_shows() {
        let name = || "save.armed".to_owned();
        assert_eq!(
            parse("save.armed"),
            Some(Armed { name: name(), from: 1, action: Action::Kill })
        );
        assert_eq!(
            parse("save.armed@3"),
            Some(Armed { name: name(), from: 3, action: Action::Kill })
        );
        let fail = Action::Fail(rustix::io::Errno::IO);
        assert_eq!(parse("save.armed@5=EIO"), Some(Armed { name: name(), from: 5, action: fail }));
        let fail = Action::FailWhile(rustix::io::Errno::NOSPC, "/a/file".into());
        let while_there = parse("restore.copy=ENOSPC:/a/file");
        assert_eq!(while_there, Some(Armed { name: "restore.copy".into(), from: 1, action: fail }));
        let hold = Armed { name: name(), from: 1, action: Action::Hold };
        assert_eq!(parse("save.armed=HOLD"), Some(hold));
        let wait = Armed { name: name(), from: 2, action: Action::Wait("/a/file".into()) };
        assert_eq!(parse("save.armed@2=WAIT:/a/file"), Some(wait));
        assert_eq!(parse("save.armed=EWHAT"), None);
    }

    #[test]
    fn a_thread_waits_until_the_file_is_removed() {
        let file = std::env::temp_dir().join(format!("firn-fault-{}", std::process::id()));
        let waiting = std::thread::spawn({
            let file = file.clone();
            move || wait_for_removal(&file)
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
