//! Sessions with a saved guest, which tests use one after another: a guest takes seconds to boot.
//!
//! ```text
//!   a test begins -- is one free? -- yes --> takes it
//!                          \------- no ---> boots a guest, saves it as `base.firn`, notes all files
//!   it passed ------ VMs end, files that were not noted are removed, the others have not changed ---> free
//!                          \------- one has changed, or the test has failed ---> removed
//! ```
//!
//! So a test finds what the first one found. There are as many as tests run at once.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::session::{Session, text};

/// Files up to this size are written anew where they have changed: records of disks.
const RECORD_BYTES_MAX: u64 = 1 << 20;

/// Disks of a guest, with their formats.
pub type Disks = Vec<(PathBuf, &'static str)>;

/// A saved guest that a test returns when it is over.
pub struct Saved {
    disks: Disks,
    files: BTreeMap<PathBuf, FirstState>,
    _remover: Remover,
}

/// How a file was when its guest had been saved.
struct FirstState {
    identity: (u64, u64, u32, i64, i64),
    /// Of small files.
    content: Option<Vec<u8>>,
}

impl FirstState {
    fn read_file(file: &Path) -> Self {
        let is_small = fs::metadata(file).unwrap().len() <= RECORD_BYTES_MAX;
        let content = is_small.then(|| fs::read(file).unwrap());
        Self { identity: identity(file).unwrap(), content }
    }

    /// Writes the file anew where it is small; false if it is not as it was.
    fn restore(&self, file: &Path) -> bool {
        match &self.content {
            _ if identity(file) == Some(self.identity) => true,
            Some(content) => fs::write(file, content).is_ok(),
            None => false,
        }
    }
}

fn identity(file: &Path) -> Option<(u64, u64, u32, i64, i64)> {
    let it = fs::symlink_metadata(file).ok()?;
    Some((it.ino(), it.len(), it.mode(), it.mtime(), it.mtime_nsec()))
}

/// Free sessions, with what was saved in them.
static FREE: Mutex<Vec<(Session, Saved)>> = Mutex::new(Vec::new());

fn free() -> MutexGuard<'static, Vec<(Session, Saved)>> {
    FREE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A free session whose guest has disks, or has none.
pub fn take(has_disks: bool) -> Option<(Session, Saved, Disks)> {
    let mut free = free();
    let at = free.iter().position(|(_, saved)| saved.disks.is_empty() != has_disks)?;
    let (session, saved) = free.swap_remove(at);
    let disks = saved.disks.clone();
    Some((session, saved, disks))
}

/// Notes the files of a session whose guest has been saved.
pub fn note(session: &Session, disks: &Disks) -> Saved {
    end_of_test(session, |_| true);
    let files = entries(&session.path("")).into_iter().filter(|path| path.is_file());
    let files = files.map(|path| (path.clone(), FirstState::read_file(&path))).collect();
    Saved { disks: disks.clone(), files, _remover: Remover::start(&session.path("")) }
}

/// Returns a session when its test is over.
pub fn put_back(mut session: Session, saved: Saved) {
    session.arm(None);
    end_of_test(&session, |path| saved.files.contains_key(path));
    let is_first = |path: &PathBuf| saved.files.contains_key(path) || is_of_session(&session, path);
    let has_more = !entries(&session.path("")).iter().all(is_first);
    if !has_more && saved.files.iter().all(|(file, first)| first.restore(file)) {
        free().push((session, saved));
    }
}

/// Ends all VMs, and removes directories and the files that are not kept. An empty runtime directory
/// stays: what Firn has learned there of the storage is of no use to another test.
fn end_of_test(session: &Session, is_kept: impl Fn(&Path) -> bool) {
    session.end_vms();
    remove(entries(&session.runtime_dir()));
    let added = entries(&session.path("")).into_iter();
    let stays = |path: &PathBuf| is_of_session(session, path) || (path.is_file() && is_kept(path));
    remove(added.filter(|path| !stays(path)));
}

/// Whether a directory is one of the session itself. The key of its images stays.
fn is_of_session(session: &Session, path: &Path) -> bool {
    [session.runtime_dir(), session.state_dir()].iter().any(|it| it == path)
}

fn remove(paths: impl IntoIterator<Item = PathBuf>) {
    for path in paths {
        let is_directory = fs::symlink_metadata(&path).is_ok_and(|it| it.is_dir());
        // What is still there is found by who returns the session.
        let _ = if is_directory { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
    }
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// A shell that removes a directory when this process ends, which drops nothing that is static.
struct Remover(Child);

impl Remover {
    fn start(directory: &Path) -> Self {
        let script = ["-c", "read -r _; rm -rf \"$1\"", "remove", text(directory)];
        Self(Command::new("sh").args(script).stdin(Stdio::piped()).spawn().unwrap())
    }
}

impl Drop for Remover {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
