//! The names of processes in errors and notes, and the processes that have a socket or a file open.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The beginnings of the names of programs that run VMs.
const HYPERVISORS: &[&str] = &["qemu", "kvm"];

/// A process, for a message: its id, and its name if this user can see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProcessName {
    pub(crate) pid: i32,
    name: Option<String>,
}

impl ProcessName {
    /// The process of this id, whether it runs or not.
    pub(crate) fn with_id(pid: i32) -> Self {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok();
        // A process chooses its own name, so only printable text of it may reach a terminal.
        let name = name.map(|name| name.trim_end().escape_debug().to_string());
        Self { pid, name }
    }
}

impl fmt::Display for ProcessName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(f, "process {} ({name})", self.pid),
            None => write!(f, "process {}", self.pid),
        }
    }
}

/// The user id of a process.
pub(crate) fn user_of(pid: i32) -> Option<u32> {
    fs::metadata(format!("/proc/{pid}")).ok().map(|process| process.uid())
}

/// The process that has one of these sockets open. `None` if this user can see none.
pub(crate) fn find_socket_user(inodes: &[u32]) -> Option<i32> {
    let links: Vec<PathBuf> =
        inodes.iter().map(|inode| PathBuf::from(format!("socket:[{inode}]"))).collect();
    list_pids().find(|&pid| open_files(pid).iter().any(|file| links.contains(file)))
}

/// The hypervisor, of any user, that has this file open.
pub(crate) fn hypervisor_with_file(path: &Path) -> Option<i32> {
    let path = path.canonicalize().ok()?;
    list_pids().filter(|&pid| is_hypervisor(pid)).find(|&pid| open_files(pid).contains(&path))
}

fn is_hypervisor(pid: i32) -> bool {
    let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    HYPERVISORS.iter().any(|beginning| name.starts_with(beginning))
}

fn list_pids() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The targets of a process's descriptors; none if this user cannot see them.
fn open_files(pid: i32) -> Vec<PathBuf> {
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    fds.filter_map(|fd| fs::read_link(fd.path()).ok()).collect()
}

/// The name of the VM that a process is the supervisor of, if it is one.
pub(crate) fn supervised_by(pid: i32) -> Option<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words: Vec<_> = line.split(|&byte| byte == 0).map(String::from_utf8_lossy).collect();
    let is_supervisor =
        words.get(1).is_some_and(|word| *word == crate::processes::spawn::SUPERVISE);
    is_supervisor.then(|| words.get(2).map(|name| name.escape_debug().to_string())).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_process_is_named_with_its_open_file() {
        let me = std::process::id() as i32;
        let (socket, _other) = UnixStream::pair().unwrap();
        let inode = rustix::fs::fstat(socket.as_fd()).unwrap().st_ino as u32;
        assert_eq!(find_socket_user(&[0, inode]), Some(me));
        assert_eq!(find_socket_user(&[]), None);
        assert!(ProcessName::with_id(me).to_string().starts_with(&format!("process {me} (")));
        assert_eq!(ProcessName::with_id(i32::MAX).to_string(), format!("process {}", i32::MAX));
        assert_eq!(user_of(me), Some(rustix::process::geteuid().as_raw()));
        assert_eq!(supervised_by(me), None);
    }

    #[test]
    fn a_file_that_no_hypervisor_has_open_is_of_none() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(hypervisor_with_file(file.path()), None);
        assert_eq!(hypervisor_with_file(Path::new("/nonexistent")), None);
    }
}
