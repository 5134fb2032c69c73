//! The command line that starts a VM again on its current disks.

use std::path::PathBuf;

use firn_vmm::command_line::{self, DriveFile};
use firn_vmm::{Drive, Vm};
use serde_json::{Value, json};

use super::key;
use crate::disks::named;
use crate::failure::{Context, Failure};
use crate::meta::Meta;
use crate::start::refused;

/// Returns the words of the command line, and the files that replace others in it.
pub(crate) fn command_line(vm: &mut Vm, meta: &Meta) -> Result<Value, Failure> {
    let drives = vm.drives().doing("asking for the VM's disks")?;
    let files: Vec<DriveFile> = drives.iter().filter_map(|drive| now_of(meta, drive)).collect();
    let plan = command_line::plan(&meta.qemu.user_args).map_err(refused)?;
    let plan = plan.with_drives(&files).map_err(refused)?;
    let replaced: Vec<Value> =
        files.iter().map(|it| json!({ "named": it.named, "file": it.file })).collect();
    Ok(json!({ "command": plan.words(), "replaced": replaced }))
}

/// The file that a drive writes to, if the command line names another one for it.
fn now_of(meta: &Meta, drive: &Drive) -> Option<DriveFile> {
    let named = named(meta, drive)?;
    let path: PathBuf = meta.qemu.directory.join(&named);
    let (file, format) = (drive.file().to_string_lossy().into_owned(), drive.format.clone());
    (key(&path) != key(drive.file())).then_some(DriveFile { named, file, format })
}
