//! Large pages of shared memory: whether the kernel may use them.
//!
//! `fallocate(2)` removes a page of shared memory, and a query reports a hole from then on. If the
//! page is a part of a larger one, the kernel fills it with zeros and splits the larger one; if it
//! cannot split it (a thread reads from it), the zeros stay, and no hole appears
//! (`truncate_inode_partial_folio` in `mm/truncate.c`). Then a page that was given back
//! looks like one that the guest has cleared.
//!
//! ```text
//!   memfd                   /sys/kernel/mm/transparent_hugepage/shmem_enabled          [never] or [deny]
//!                           .../hugepages-64kB/shmem_enabled, for each size            [never] or [inherit]
//!   file of a mounted tmpfs also the option `huge` of the mount (/proc/PID/mountinfo)  huge=never, or none
//! ```

use std::path::Path;

use crate::process::Process;

const SETTINGS: &str = "/sys/kernel/mm/transparent_hugepage";

/// Whether files on these devices (major, minor) may have large pages. If that is unknown, they may.
pub(super) fn may_be_used(process: &Process, devices: &[(u32, u32)]) -> bool {
    let mounts = process.read_proc_file("mountinfo").unwrap_or_default();
    may_use_by_settings(Path::new(SETTINGS)) || may_use_by_mounts(&mounts, devices)
}

fn may_use_by_settings(settings: &Path) -> bool {
    let Ok(sizes) = std::fs::read_dir(settings) else {
        // A kernel without large pages has no settings.
        return false;
    };
    let sizes = sizes.filter_map(|entry| Some(entry.ok()?.path().join("shmem_enabled")));
    let all = std::iter::once(settings.join("shmem_enabled")).chain(sizes);
    let texts = all.filter_map(|path| std::fs::read_to_string(path).ok());
    texts.into_iter().any(|text| !is_off(&text))
}

/// Whether a setting, a list of words with the chosen one in brackets, allows no large pages.
fn is_off(setting: &str) -> bool {
    let chosen = setting.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    matches!(chosen, Some(("never" | "deny" | "inherit", _)))
}

/// Whether a mount of one of the devices has the option `huge`. A memfd is on no mount.
fn may_use_by_mounts(mounts: &str, devices: &[(u32, u32)]) -> bool {
    let is_of = |line: &str| {
        let device = line.split(' ').nth(2).and_then(|word| word.split_once(':'));
        device.is_some_and(|(major, minor)| {
            devices
                .iter()
                .any(|device| (major.parse(), minor.parse()) == (Ok(device.0), Ok(device.1)))
        })
    };
    let options = |line: &str| line.rsplit(' ').next().unwrap_or_default().to_owned();
    let is_large = |option: &str| option.starts_with("huge=") && option != "huge=never";
    mounts.lines().filter(|line| is_of(line)).any(|line| options(line).split(',').any(is_large))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_is_its_word_in_brackets() {
        assert!(is_off("always within_size advise [never] deny force\n"));
        assert!(is_off("always [inherit] within_size advise never\n"));
        assert!(!is_off("always within_size [advise] never deny force\n"));
        assert!(!is_off("never"), "an unknown form counts as on");
    }

    #[test]
    fn settings_of_each_size_count() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        std::fs::create_dir(dir.path().join("hugepages-64kB")).unwrap();
        write("shmem_enabled", "always [never]");
        write("enabled", "[always] never");
        write("hugepages-64kB/shmem_enabled", "always [inherit] never");
        assert!(!may_use_by_settings(dir.path()));
        write("hugepages-64kB/shmem_enabled", "[always] inherit never");
        assert!(may_use_by_settings(dir.path()));
        assert!(!may_use_by_settings(&dir.path().join("none")));
    }

    #[test]
    fn the_option_of_the_mount_counts() {
        let mounts = "22 1 0:21 / /dev/shm rw,nosuid - tmpfs tmpfs rw,huge=always\n\
            23 1 0:22 / /run rw - tmpfs tmpfs rw,size=5k,huge=never\n\
            24 1 0:23 / /tmp rw - tmpfs tmpfs rw\n";
        assert!(may_use_by_mounts(mounts, &[(0, 21)]));
        assert!(!may_use_by_mounts(mounts, &[(0, 22), (0, 23), (0, 1)]));
    }
}
