//! Block devices: finds the disk that holds a file.

use std::fmt;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{major, minor};

use super::profile::{ThrottleError, io_error_at};

/// A whole disk, by its device numbers: `254:0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockDevice {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

impl fmt::Display for BlockDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

impl BlockDevice {
    fn from_number(device: u64) -> Self {
        Self { major: major(device), minor: minor(device) }
    }

    fn from_text(text: &str) -> Option<Self> {
        let (major, minor) = text.trim().split_once(':')?;
        Some(Self { major: major.parse().ok()?, minor: minor.parse().ok()? })
    }

    fn sysfs_path(self) -> PathBuf {
        PathBuf::from(format!("/sys/dev/block/{self}"))
    }

    /// The whole disk of a partition; a disk is its own. Only whole disks can be throttled.
    fn whole_disk(self) -> Self {
        if !self.sysfs_path().join("partition").exists() {
            return self;
        }
        let disk = fs::read_to_string(self.sysfs_path().join("../dev"));
        disk.ok().and_then(|text| Self::from_text(&text)).unwrap_or(self)
    }
}

/// The disk that holds an existing file or directory.
///
/// File systems with their own device numbers (Btrfs) are resolved by their mount source.
pub fn device_of(path: &Path) -> Result<BlockDevice, ThrottleError> {
    let number = fs::metadata(path).map_err(io_error_at(path))?.dev();
    let direct = BlockDevice::from_number(number);
    if direct.sysfs_path().exists() {
        return Ok(direct.whole_disk());
    }
    mounted_from(direct)
        .map(BlockDevice::whole_disk)
        .ok_or_else(|| ThrottleError::NoDevice(path.to_owned()))
}

fn mounted_from(file_system: BlockDevice) -> Option<BlockDevice> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let source = source_of(&mounts, file_system)?;
    let meta = fs::metadata(source).ok()?;
    meta.file_type().is_block_device().then(|| BlockDevice::from_number(meta.rdev()))
}

/// The mount source of a file system in `/proc/self/mountinfo` (proc(5)): third field, then first
/// but one after `-`.
fn source_of(mounts: &str, file_system: BlockDevice) -> Option<&str> {
    let wanted = file_system.to_string();
    mounts.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let is_it = mount.split(' ').nth(2) == Some(wanted.as_str());
        is_it.then(|| kind.split(' ').nth(1)).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
22 1 254:0 / / rw,relatime - ext4 /dev/root rw
30 22 0:27 /sub /data rw shared:1 - btrfs /dev/vdb1 rw,space_cache
31 22 0:28 / /dev/shm rw - tmpfs tmpfs rw";

    #[test]
    fn the_device_of_a_file_system_is_read_from_the_mounts() {
        let source = |major, minor| source_of(MOUNTS, BlockDevice { major, minor });
        assert_eq!(source(0, 27), Some("/dev/vdb1"));
        assert_eq!(source(0, 28), Some("tmpfs"));
        assert_eq!(source(0, 29), None);
    }

    #[test]
    fn device_numbers_are_read_as_sysfs_writes_them() {
        assert_eq!(BlockDevice::from_text("254:16\n"), Some(BlockDevice { major: 254, minor: 16 }));
        assert_eq!(BlockDevice::from_text("254"), None);
    }

    #[test]
    fn a_memory_file_system_has_no_device() {
        assert!(matches!(device_of(Path::new("/proc/self")), Err(ThrottleError::NoDevice(_))));
    }
}
