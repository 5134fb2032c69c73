//! File names for the disks of a standby.
//!
//! The name `NAME.DISK.FORMAT` may be taken: by a standby of that name that was lost with its host,
//! or by an earlier disk of the VM itself, after a failover and a failback. Such a file may be all
//! that is left of a disk, so it is kept, and the new one gets a number.

use std::iter;
use std::path::{Path, PathBuf};

use firn_vmm::command_line::DiskPlan;

use crate::records::name::VmName;

/// The first name that no file has.
pub(crate) fn find_free_name(directory: &Path, vm: &VmName, disk: &DiskPlan) -> PathBuf {
    let (stem, format) = (format!("{vm}.{}", disk.id), &disk.format);
    let first = directory.join(format!("{stem}.{format}"));
    let numbered = (2_u32..).map(|number| directory.join(format!("{stem}.{number}.{format}")));
    let mut names = iter::once(first.clone()).chain(numbered);
    // A link to a file that does not exist has the name, too.
    names.find(|name| name.symlink_metadata().is_err()).unwrap_or(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_there_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (id, format) = ("d0".to_owned(), "raw".to_owned());
        let disk = DiskPlan { id, file: "d0.raw".into(), format, size: None };
        let vm = VmName::new("web").unwrap();
        for name in ["web.d0.raw", "web.d0.2.raw", "web.d0.3.raw"] {
            let free = find_free_name(dir.path(), &vm, &disk);
            assert_eq!(free, dir.path().join(name));
            std::fs::write(&free, name).unwrap();
        }
        assert_eq!(std::fs::read(dir.path().join("web.d0.raw")).unwrap(), b"web.d0.raw");
    }
}
