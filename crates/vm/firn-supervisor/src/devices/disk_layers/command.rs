//! The command line that starts a VM again on its current disks.

use std::path::PathBuf;

use firn_vmm::command_line::{self, DriveFile};
use firn_vmm::{Drive, QemuVm};
use serde_json::{Value, json};

use super::record_files::record_key;
use crate::devices::disk_snapshots::named_file;
use crate::records::failure::command_line_failure;
use crate::records::failure::{Failure, FailureContext};
use crate::records::meta::ImageMeta;

/// Returns the words of the command line, and the files that replace others in it.
pub(crate) fn restart_command_line(vm: &mut QemuVm, meta: &ImageMeta) -> Result<Value, Failure> {
    let drives = vm.drives().while_doing("asking for the VM's disks")?;
    let files: Vec<DriveFile> =
        drives.iter().filter_map(|drive| replaced_file(meta, drive)).collect();
    let plan = command_line::plan_command(&meta.qemu.user_args).map_err(command_line_failure)?;
    let plan = plan.with_drives(&files).map_err(command_line_failure)?;
    let replaced: Vec<Value> =
        files.iter().map(|it| json!({ "named": it.named, "file": it.file })).collect();
    Ok(json!({ "command": plan.words(), "replaced": replaced }))
}

/// The file that a drive writes to, if the command line names another one for it.
fn replaced_file(meta: &ImageMeta, drive: &Drive) -> Option<DriveFile> {
    let named = named_file(meta, drive)?;
    let path: PathBuf = meta.qemu.directory.join(&named);
    let (file, format) = (drive.top_file().to_string_lossy().into_owned(), drive.format.clone());
    (record_key(&path) != record_key(drive.top_file())).then_some(DriveFile { named, file, format })
}
