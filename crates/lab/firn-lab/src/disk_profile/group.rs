//! Disk throttle: a control group that limits the I/O of processes, so that a fast disk behaves
//! like a slower one.
//!
//! The kernel has two versions of control groups, with other files for the same limits. Firn uses
//! the version that has the I/O controller:
//!
//! ```text
//!   cgroup v1   /sys/fs/cgroup/blkio/firn-lab-PID-N/blkio.throttle.{read,write}_{iops,bps}_device    "254:0 180"
//!   cgroup v2   /sys/fs/cgroup/firn-lab-PID-N/io.max             "254:0 riops=180 wiops=180 rbps=.. wbps=.."
//! ```

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::Duration;

use super::device::{BlockDevice, device_of};
use super::profile::{DiskLimits, DiskProfile, ThrottleError, io_error_at};

/// A control group with the limits of a disk profile. Processes that are started by
/// [`Self::command`] are in it. Dropping it moves the processes out of the group, and removes the
/// group. The profile `None` needs no group, and limits nothing.
#[derive(Debug)]
pub struct DiskThrottle {
    profile: DiskProfile,
    group: Option<PathBuf>,
}

impl DiskThrottle {
    /// Creates the control group, with the limits of the profile for the block device that holds
    /// the file `on`.
    ///
    /// # Errors
    /// If the file is on no block device, no control group can throttle the device, or the caller
    /// lacks permission (only root has it).
    pub fn new(profile: DiskProfile, on: &Path) -> Result<Self, ThrottleError> {
        let Some(limits) = profile.disk_limits() else { return Ok(Self { profile, group: None }) };
        let device = device_of(on)?;
        let mounts =
            fs::read_to_string("/proc/self/mounts").map_err(io_error_at("/proc/self/mounts"))?;
        let group = find_hierarchies(&mounts)
            .into_iter()
            .find_map(|hierarchy| hierarchy.create_group(device, limits).transpose())
            .ok_or(ThrottleError::NoController)??;
        Ok(Self { profile, group: Some(group) })
    }

    /// The disk profile.
    pub fn profile(&self) -> DiskProfile {
        self.profile
    }

    /// A command that starts a program under the profile, and with it every process that the
    /// program starts.
    ///
    /// The command is a shell that moves itself into the group and then executes the program. So
    /// the limits hold from the program's first read on.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let Some(group) = &self.group else { return Command::new(program) };
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]);
        command.arg(group.join("cgroup.procs")).arg(program);
        command
    }

    /// Moves a running process into the group. Processes that it started before stay outside.
    pub fn add_process(&self, pid: u32) -> Result<(), ThrottleError> {
        let Some(group) = &self.group else { return Ok(()) };
        write_setting(&group.join("cgroup.procs"), &pid.to_string())
    }
}

impl Drop for DiskThrottle {
    fn drop(&mut self) {
        let Some(group) = self.group.take() else { return };
        // The kernel cannot remove a group until the last process in it has ended completely.
        for _ in 0..50 {
            move_to_parent(&group);
            if fs::remove_dir(&group).is_ok() {
                return;
            }
            sleep(Duration::from_millis(20));
        }
    }
}

/// Moves the processes that are still in a group to its parent group.
fn move_to_parent(group: &Path) {
    let Some(parent) = group.parent() else { return };
    let processes = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    for pid in processes.lines() {
        // The process may have ended meanwhile, which has the same effect.
        let _ = fs::write(parent.join("cgroup.procs"), pid);
    }
}

/// The version of a control group hierarchy.
#[derive(Debug, PartialEq, Eq)]
enum CgroupVersion {
    One,
    Two,
}

/// A mounted control group hierarchy: its version and its mount point.
#[derive(Debug, PartialEq, Eq)]
struct CgroupHierarchy {
    version: CgroupVersion,
    root: PathBuf,
}

/// The hierarchies in `mounts`, the text of `/proc/self/mounts`: that of version 1 with the block
/// I/O controller, and that of version 2. Version 1 comes first, because a controller that version
/// 1 has mounted is not available in version 2.
fn find_hierarchies(mounts: &str) -> Vec<CgroupHierarchy> {
    let found = |version: fn(&str, &str) -> bool| {
        mounts.lines().find_map(move |line| {
            let mut fields = line.split(' ').skip(1);
            let (root, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
            version(kind, options).then(|| PathBuf::from(root))
        })
    };
    let one = found(|kind, options| kind == "cgroup" && options.split(',').any(|o| o == "blkio"));
    let two = found(|kind, _| kind == "cgroup2");
    let one = one.map(|root| CgroupHierarchy { version: CgroupVersion::One, root });
    one.into_iter()
        .chain(two.map(|root| CgroupHierarchy { version: CgroupVersion::Two, root }))
        .collect()
}

impl CgroupHierarchy {
    /// Creates a group with limits, and returns its directory. `None` if this hierarchy has no I/O
    /// controller.
    fn create_group(
        &self,
        device: BlockDevice,
        limits: DiskLimits,
    ) -> Result<Option<PathBuf>, ThrottleError> {
        if !self.has_controller()? {
            return Ok(None);
        }
        let group = self.root.join(next_group_name());
        fs::create_dir(&group).map_err(io_error_at(&group))?;
        for (file, line) in self.limit_settings(device, limits) {
            if let Err(error) = write_setting(&group.join(file), &line) {
                let _ = fs::remove_dir(&group);
                return Err(error);
            }
        }
        Ok(Some(group))
    }

    /// Whether the hierarchy has the I/O controller. In version 2 this also enables the controller
    /// for the groups below the root, if it is not enabled yet.
    fn has_controller(&self) -> Result<bool, ThrottleError> {
        let has = |file: &str| {
            let path = self.root.join(file);
            let text = fs::read_to_string(&path).map_err(io_error_at(path))?;
            Ok::<_, ThrottleError>(text.split_whitespace().any(|controller| controller == "io"))
        };
        match self.version {
            CgroupVersion::One => Ok(true),
            CgroupVersion::Two if !has("cgroup.controllers")? => Ok(false),
            CgroupVersion::Two if has("cgroup.subtree_control")? => Ok(true),
            CgroupVersion::Two => {
                write_setting(&self.root.join("cgroup.subtree_control"), "+io").map(|()| true)
            }
        }
    }

    /// The files of a group to write, and the line to write to each, to limit reads and writes of a
    /// device.
    fn limit_settings(
        &self,
        device: BlockDevice,
        limits: DiskLimits,
    ) -> Vec<(&'static str, String)> {
        let DiskLimits { iops, bytes_per_s: bps } = limits;
        match self.version {
            CgroupVersion::One => vec![
                ("blkio.throttle.read_iops_device", format!("{device} {iops}")),
                ("blkio.throttle.write_iops_device", format!("{device} {iops}")),
                ("blkio.throttle.read_bps_device", format!("{device} {bps}")),
                ("blkio.throttle.write_bps_device", format!("{device} {bps}")),
            ],
            CgroupVersion::Two => vec![(
                "io.max",
                format!("{device} rbps={bps} wbps={bps} riops={iops} wiops={iops}"),
            )],
        }
    }
}

/// A group name that no other throttle has.
fn next_group_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("firn-lab-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Writes a line to a file of a group. An error names the file.
fn write_setting(path: &Path, text: &str) -> Result<(), ThrottleError> {
    let written: io::Result<()> = fs::write(path, text);
    written.map_err(io_error_at(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: &str = "\
cgroup /sys/fs/cgroup/cpu cgroup rw,relatime,cpu 0 0
cgroup /sys/fs/cgroup/blkio cgroup rw,relatime,blkio 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime 0 0";

    #[test]
    fn cgroup_version_one_is_preferred_if_it_has_block_io() {
        let found = find_hierarchies(BOTH);
        assert_eq!(found[0].root, Path::new("/sys/fs/cgroup/blkio"));
        assert_eq!(found[1].version, CgroupVersion::Two);
    }

    #[test]
    fn a_machine_with_version_two_only() {
        let found = find_hierarchies("cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0");
        assert_eq!(
            found,
            [CgroupHierarchy { version: CgroupVersion::Two, root: "/sys/fs/cgroup".into() }]
        );
        assert_eq!(find_hierarchies(""), []);
    }

    #[test]
    fn limits_are_written_as_each_version_reads_them() {
        let device = BlockDevice { major: 254, minor: 0 };
        let limits = DiskProfile::Hdd15k.disk_limits().unwrap();
        let settings = |version| {
            CgroupHierarchy { version, root: PathBuf::new() }.limit_settings(device, limits)
        };
        let read_iops = ("blkio.throttle.read_iops_device", "254:0 180".to_owned());
        assert!(settings(CgroupVersion::One).contains(&read_iops));
        let max = "254:0 rbps=120000000 wbps=120000000 riops=180 wiops=180".to_owned();
        assert_eq!(settings(CgroupVersion::Two), [("io.max", max)]);
    }

    #[test]
    fn no_profile_is_no_group() {
        let throttle = DiskThrottle::new(DiskProfile::None, Path::new("/nowhere")).unwrap();
        assert_eq!(throttle.command("true").get_program(), "true");
        throttle.add_process(1).unwrap();
    }
}
