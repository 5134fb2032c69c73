//! The overrides of a restore: changes of `firn restore` to the command line and disks of the
//! image.

use std::path::Path;

use firn_vmm::command_line::{self, CommandOverrides};

use crate::records::failure::{self, Failure, FailureContext, FailureKind};
use crate::records::meta::{ImageMeta, QemuFacts};

impl ImageMeta {
    /// The same VM with another command line and with disks that have moved.
    pub(crate) fn with_overrides(mut self, overrides: &CommandOverrides) -> Result<Self, Failure> {
        self = self.with_disks_moved(overrides)?;
        let QemuFacts { user_args, directory, .. } = &self.qemu;
        let args = match overrides.same_identity {
            true => user_args.clone(),
            false => command_line::replace_generation_id(user_args, &random_uuid()?),
        };
        self.qemu.user_args =
            overrides.apply_to(&args, directory).map_err(failure::command_line_failure)?;
        Ok(self)
    }

    /// The description with the paths of disks that the user gives; the command line stays.
    pub(crate) fn with_disks_moved(
        mut self,
        overrides: &CommandOverrides,
    ) -> Result<Self, Failure> {
        for (old, new) in &overrides.disks {
            self.move_disk(old, new)?;
        }
        Ok(self)
    }

    /// Moves a disk, which is named as the image or as the command line names it. Its contents are
    /// compared as always.
    fn move_disk(&mut self, old: &str, new: &str) -> Result<(), Failure> {
        let directory = self.qemu.directory.clone();
        let is_old = |file: &Path| directory.join(file) == directory.join(old);
        let mut found = false;
        for drive in &mut self.drives {
            let is_named = is_old(Path::new(&drive.named));
            let is_kept = is_old(&drive.file);
            if is_named && !is_kept && directory.join(&drive.named) != drive.file {
                let kept = drive.file.display();
                let text = format!("the image has the contents of {old} in {kept}");
                let hint = format!("--disk {kept}=NEW gives the new path of that file");
                return Err(Failure::new(FailureKind::Usage, text).with_hint(hint));
            }
            if is_kept {
                drive.file = directory.join(new);
            }
            if is_named {
                new.clone_into(&mut drive.named);
            }
            found |= is_named || is_kept;
        }
        for disk in self.disks.iter_mut().filter(|disk| is_old(Path::new(&disk.file))) {
            new.clone_into(&mut disk.file);
            found = true;
        }
        match found {
            true => Ok(()),
            false => Err(no_disk(self, old)),
        }
    }
}

/// A UUID that no other has.
pub(crate) fn random_uuid() -> Result<String, Failure> {
    let uuid = std::fs::read_to_string("/proc/sys/kernel/random/uuid");
    uuid.map(|uuid| uuid.trim().to_owned()).while_doing("making a UUID")
}

fn no_disk(meta: &ImageMeta, old: &str) -> Failure {
    let text = format!("--disk: the image has no disk {old}");
    let kept = meta.drives.iter().map(|drive| drive.file.display().to_string());
    let others = meta.disks.iter().map(|disk| disk.file.clone());
    let names: Vec<String> = kept.chain(others).collect();
    let failure = Failure::new(FailureKind::Usage, text);
    match names.is_empty() {
        true => failure,
        false => failure.with_hint(format!("its disks are {}", names.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::meta::FrozenDrive;
    use firn_vmm::FileIdentity;

    fn meta(file: &str) -> ImageMeta {
        let words = "qemu -drive file=a.qcow2,id=d".split(' ').map(str::to_owned);
        let qemu = QemuFacts {
            user_args: words.collect(),
            directory: "/vms".into(),
            ..QemuFacts::default()
        };
        let drive = FrozenDrive {
            named: "a.qcow2".into(),
            file: file.into(),
            format: "qcow2".into(),
            bytes: 1,
            identity: FileIdentity { dev: 1, inode: 2, size: 3, mtime_ns: 4 },
            is_clone: false,
            is_storage_snapshot: false,
        };
        ImageMeta { qemu, drives: vec![drive], ..ImageMeta::default() }
    }

    fn moved(file: &str, old: &str) -> Result<ImageMeta, Failure> {
        let disks = vec![(old.to_owned(), "/mnt/b".to_owned())];
        meta(file).with_overrides(&CommandOverrides { disks, ..CommandOverrides::default() })
    }

    #[test]
    fn a_disk_that_has_moved_is_found_under_its_new_name() {
        for old in ["a.qcow2", "/vms/a.qcow2"] {
            let moved = moved("/vms/a.qcow2", old).unwrap();
            assert_eq!(moved.drives[0].file, Path::new("/mnt/b"), "{old}");
            assert_eq!(moved.drives[0].named, "/mnt/b", "{old}");
            assert_eq!(moved.qemu.user_args[2], "file=/mnt/b,id=d", "{old}");
        }
    }

    #[test]
    fn files_of_a_moved_image_are_named_by_its_path() {
        let other = moved("/vms/a.qcow2.web-1", "/vms/a.qcow2.web-1").unwrap();
        assert_eq!(other.drives[0].file, Path::new("/mnt/b"));
        assert_eq!(other.drives[0].named, "a.qcow2");
        assert_eq!(other.qemu.user_args, meta("").qemu.user_args);
        let unclear = moved("/vms/a.qcow2.web-1", "a.qcow2").unwrap_err();
        assert!(unclear.to_string().contains("/vms/a.qcow2.web-1"), "{unclear}");
        let none = moved("/vms/a.qcow2", "c").unwrap_err();
        assert!(none.hint.unwrap().contains("/vms/a.qcow2"));
    }
}
