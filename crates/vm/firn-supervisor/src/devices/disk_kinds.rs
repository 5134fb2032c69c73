//! The check of the files that QEMU is about to open as disks: at a FIFO it would wait for a writer,
//! and answer nothing.
//!
//! Regular files and devices are QEMU's to judge; a character device may be a SCSI disk. A name
//! that is no file here may be an address of the network, or QEMU reports that it is missing.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use firn_files::NotRegular;

use crate::records::failure::{Failure, FailureContext, FailureKind};

/// Checks files as a command line names them, relative to the directory of its QEMU.
///
/// # Errors
/// If one of them is a FIFO, a socket or a directory.
pub(crate) fn check_disk_kinds(files: &[String], directory: &Path) -> Result<(), Failure> {
    for named in files {
        let Ok(found) = std::fs::metadata(directory.join(named)) else { continue };
        let found = found.file_type();
        if found.is_fifo() || found.is_socket() || found.is_dir() {
            let doing = format!("{named} can't be a disk");
            NotRegular::require_regular(found).while_doing_as(FailureKind::Usage, doing)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, Mode, mkfifoat};

    #[test]
    fn a_fifo_is_refused_and_possible_disks_are_accepted() {
        let dir = tempfile::tempdir().unwrap();
        mkfifoat(CWD, dir.path().join("fifo"), Mode::RUSR).unwrap();
        std::fs::write(dir.path().join("disk"), "").unwrap();
        let check = |name: &str| check_disk_kinds(&[name.to_owned()], dir.path());
        let refused = check("fifo").unwrap_err().to_string();
        assert!(refused.contains("fifo can't be a disk"), "{refused}");
        assert!(check("/").is_err());
        for name in ["disk", "none", "/dev/null", "nbd:unix:/x", "json:{}"] {
            assert!(check(name).is_ok(), "{name}");
        }
    }
}
