//! Fault points that act: parses `FIRN_FAULT`, counts passes, and kills, fails or delays.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::{HOLD_FOR, POINTS, VARIABLE};

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
#[derive(Debug)]
struct Armed {
    name: String,
    from: u32,
    action: Action,
    passes: AtomicU32,
}

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

/// A test that waits for the file in vain shows that it could not be made.
fn wait_for_removal(file: &Path) {
    let _ = fs::write(file, "");
    while file.exists() {
        std::thread::sleep(LOOK_EVERY);
    }
}

fn hit(name: &'static str) -> Option<&'static Action> {
    debug_assert!(POINTS.contains(&name), "fault point {name} is not listed in POINTS");
    let armed = armed().iter().find(|armed| armed.name == name)?;
    let pass = armed.passes.fetch_add(1, Ordering::Relaxed) + 1;
    let acts = match armed.action {
        // The file is made, and removed, once.
        Action::Wait(_) => pass == armed.from,
        _ => pass >= armed.from,
    };
    acts.then_some(&armed.action)
}

fn armed() -> &'static [Armed] {
    static ARMED: OnceLock<Vec<Armed>> = OnceLock::new();
    ARMED.get_or_init(|| {
        let text = std::env::var(VARIABLE).unwrap_or_default();
        text.split(',').filter_map(parse).collect()
    })
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
    Some(Armed { name: name.to_owned(), from, action, passes: AtomicU32::new(0) })
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
        let armed = |text: &str| {
            let armed = parse(text)?;
            Some((armed.name, armed.from, armed.action))
        };
        let at = |from, action| Some(("save.armed".to_owned(), from, action));
        assert_eq!(armed("save.armed"), at(1, Action::Kill));
        assert_eq!(armed("save.armed@3"), at(3, Action::Kill));
        assert_eq!(armed("save.armed@5=EIO"), at(5, Action::Fail(rustix::io::Errno::IO)));
        let fail = Action::FailWhile(rustix::io::Errno::NOSPC, "/a/file".into());
        assert_eq!(armed("save.armed=ENOSPC:/a/file"), at(1, fail));
        assert_eq!(armed("save.armed=HOLD"), at(1, Action::Hold));
        assert_eq!(armed("save.armed@2=WAIT:/a/file"), at(2, Action::Wait("/a/file".into())));
        assert_eq!(armed("save.armed=EWHAT"), None);
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
