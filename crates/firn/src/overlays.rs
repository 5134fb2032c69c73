//! The files that a VM's disks are written to and no image stands on: whoever ends or forgets a VM is told where they are.

use std::path::PathBuf;

use firn_supervisor::{RuntimeDir, VmName, inspect};

/// Those of a VM, as far as anything is known of it.
pub fn of(base: &RuntimeDir, name: &VmName) -> Vec<PathBuf> {
    inspect(base, &base.vm(name)).map(|status| status.overlays).unwrap_or_default()
}

/// Those that are there still.
pub fn left(overlays: Vec<PathBuf>) -> Vec<PathBuf> {
    overlays.into_iter().filter(|path| path.exists()).collect()
}

/// A line for each.
pub fn lines(overlays: &[PathBuf]) -> String {
    overlays.iter().map(|path| format!("its disk: {}\n", path.display())).collect()
}
