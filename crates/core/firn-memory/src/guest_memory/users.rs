//! Other users of guest RAM: processes besides QEMU that can write to the guest's memory, such as
//! the back end of a vhost-user device.
//!
//! Their writes cause no page fault that Firn receives. So Firn cannot follow them, and refuses a
//! protection and every save that follows writes. A process is found by its memory map:
//! `/proc/PID/maps` of every process of the host (proc(5)) is compared with the VM's RAM files.

use std::fmt;
use std::fs;

use crate::process::maps::{self, MemoryMapping};

/// A file, as `/proc/PID/maps` names it: device (major, minor) and inode.
pub(super) type FileId = ((u32, u32), u64);

/// A process that has a shared, writable mapping of guest RAM. Errors name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RamUser {
    /// Its id.
    pub pid: i32,
    /// Its name, as `ps` shows it.
    pub name: String,
}

impl fmt::Display for RamUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} ({})", self.pid, self.name)
    }
}

impl RamUser {
    /// The process, if it has a shared, writable mapping of one of these files. `None` also if it
    /// has ended, or Firn may not read its memory map.
    pub(super) fn from_pid(pid: i32, files: &[FileId]) -> Option<Self> {
        let list = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
        maps::parse_maps(&list).iter().any(|mapping| is_one_of(mapping, files)).then(|| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            Self { pid, name: name.trim().to_owned() }
        })
    }
}

/// Whether a mapping is shared, writable, and of one of these files.
fn is_one_of(mapping: &MemoryMapping, files: &[FileId]) -> bool {
    mapping.shared && mapping.writable && files.contains(&(mapping.device, mapping.inode))
}

/// The ids of all processes that exist now.
pub(super) fn list_processes() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    #[test]
    fn each_process_that_maps_a_file_is_found() {
        let file = memfd_create("firn-users", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 4096).unwrap();
        let file = fs::File::from(file);
        let pid = std::process::id() as i32;
        assert!(list_processes().any(|other| other == pid));
        let listed = || {
            let list = fs::read_to_string("/proc/self/maps").unwrap();
            let mine =
                maps::parse_maps(&list).into_iter().find(|it| it.path.contains("firn-users"));
            mine.map(|mapping| (mapping.device, mapping.inode))
        };
        assert_eq!(listed(), None);
        let mapped = memmap2::MmapOptions::new().len(4096).map_raw(&file).unwrap();
        let id = listed().unwrap();
        assert_eq!(RamUser::from_pid(pid, &[id]).unwrap().pid, pid);
        assert_eq!(RamUser::from_pid(pid, &[((0, 0), 1)]), None);
        drop(mapped);
        assert_eq!(RamUser::from_pid(pid, &[id]), None);
    }
}
