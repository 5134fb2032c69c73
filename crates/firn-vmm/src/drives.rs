//! The guest's writable drives, and how their contents are kept as they are at one moment.
//!
//! A *drive* is a device of the guest with an image behind it, and images below that (its *chain*). From the cut on the
//! guest writes to another file, an *overlay*, and what was its image stays as it is:
//!
//! ```text
//!   before                 ahead of the pause            in the pause              afterwards
//!   device -> a.qcow2      device -> a.qcow2             blockdev-snapshot:        device -> overlay -> a.qcow2
//!                          overlay, open, unused         graph changes only                            never written again
//! ```
//!
//! The overlay is opened ahead of the pause (`blockdev-add` with `backing: null`), so that what can fail fails there, and
//! the pause pays for no file to be opened. All drives change in one `transaction`: all or none. On a file system that can
//! share blocks (`FICLONE`, ioctl_ficlone(2)) a clone of the file is taken in the pause instead, and the guest goes on
//! with its own.
//!
//! Source: QEMU `docs/interop/live-block-operations.rst`, `qapi/block-core.json`.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use thiserror::Error;

use crate::disks::{FileIdentity, FileView, plain_file};
use crate::qmp::{Qmp, QmpError};

/// The most images that may lie upon each other. QEMU holds all of them open, and gets slow long before it gives up.
pub const CHAIN_MAX: usize = 64;

/// QEMU's tool for image files.
const TOOL: &str = "qemu-img";

/// A drive that the guest can write to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drive {
    /// What the user calls it: its id, or else its device's path in QEMU.
    pub name: String,
    /// QEMU's name for its topmost node.
    pub node: String,
    /// The images that it consists of, the topmost first: the only one that is written to. As QEMU names them.
    pub chain: Vec<String>,
    /// The topmost image as an absolute path.
    pub file: PathBuf,
    /// Its format: `qcow2` or `raw`, or another that can't be cut.
    pub format: String,
    /// The size of the drive that the guest sees, in bytes.
    pub bytes: u64,
    /// Whether QEMU goes past the page cache.
    direct: bool,
    /// Whether QEMU ignores the guest's flushes.
    no_flush: bool,
    /// Why its contents can't be kept while the VM runs on, if so.
    pub obstacle: Option<String>,
}

/// A file that takes what a guest writes from some moment on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overlay {
    /// QEMU's name for its node.
    pub node: String,
    /// The file, absolute.
    pub path: PathBuf,
}

/// What is to be done to drives in a pause.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriveCut {
    /// The node of a drive, and the overlay to be put on it.
    pub overlays: Vec<(String, Overlay)>,
    /// A file, and the one to become a clone of it.
    pub clones: Vec<(PathBuf, PathBuf)>,
}

/// Why an overlay or a clone could not be made.
#[derive(Debug, Error)]
pub enum DriveError {
    /// The tool is not there, or can't be run.
    #[error("cannot run {TOOL}, which makes overlays (Debian: qemu-utils)")]
    Tool(#[source] io::Error),
    /// The tool refused.
    #[error("{TOOL} cannot make {path}: {said}", path = .path.display())]
    Create {
        /// The overlay.
        path: PathBuf,
        /// What the tool said.
        said: String,
    },
    /// A file could not be cloned, or given to its owner.
    #[error("cannot {doing} {path}", path = .path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// What `query-block` says of a device.
#[derive(Clone, Debug, Deserialize)]
struct Device {
    #[serde(default)]
    device: String,
    #[serde(default)]
    qdev: String,
    inserted: Option<Inserted>,
}

#[derive(Clone, Debug, Deserialize)]
struct Inserted {
    #[serde(rename = "node-name", default)]
    node: String,
    file: String,
    drv: String,
    ro: bool,
    #[serde(default)]
    encrypted: bool,
    image: Layer,
    cache: Cache,
}

#[derive(Clone, Debug, Deserialize)]
struct Layer {
    filename: String,
    #[serde(rename = "virtual-size", default)]
    virtual_size: u64,
    #[serde(rename = "backing-image")]
    backing: Option<Box<Layer>>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct Cache {
    direct: bool,
    #[serde(rename = "no-flush")]
    no_flush: bool,
}

#[derive(Clone, Debug, Deserialize)]
struct Job {
    device: String,
    #[serde(rename = "type")]
    kind: String,
}

/// The drives that the guest can write to.
pub(crate) fn find(qmp: &mut Qmp, view: &FileView) -> Result<Vec<Drive>, QmpError> {
    let devices: Vec<Device> = qmp.query("query-block")?;
    let jobs: Vec<Job> = qmp.query("query-block-jobs")?;
    let mut drives: Vec<Drive> =
        devices.into_iter().filter_map(|device| drive(device, view)).collect();
    for drive in &mut drives {
        let job = jobs.iter().find(|job| [&drive.name, &drive.node].contains(&&job.device));
        let busy = job.map(|job| format!("a block job ({}) is at work on it", job.kind));
        drive.obstacle = drive.obstacle.take().or(busy);
    }
    Ok(drives)
}

fn drive(device: Device, view: &FileView) -> Option<Drive> {
    let Device { device, qdev, inserted } = device;
    let inserted = inserted.filter(|inserted| !inserted.ro)?;
    let file = view.absolute(&plain_file(&inserted.file));
    let obstacle = obstacle(&inserted, view, file.as_deref());
    Some(Drive {
        name: if device.is_empty() { qdev } else { device },
        node: inserted.node,
        chain: chain(&inserted.image),
        file: file.unwrap_or_default(),
        format: inserted.drv,
        bytes: inserted.image.virtual_size,
        direct: inserted.cache.direct,
        no_flush: inserted.cache.no_flush,
        obstacle,
    })
}

fn chain(top: &Layer) -> Vec<String> {
    let layers = std::iter::successors(Some(top), |layer| layer.backing.as_deref());
    layers.map(|layer| plain_file(&layer.filename)).collect()
}

fn obstacle(drive: &Inserted, view: &FileView, file: Option<&Path>) -> Option<String> {
    if !matches!(&*drive.drv, "qcow2" | "raw") {
        return Some(format!("its format is {}; only qcow2 and raw can be kept", drive.drv));
    }
    if drive.encrypted {
        return Some("it is encrypted".to_owned());
    }
    let depth = chain(&drive.image).len();
    if depth >= CHAIN_MAX {
        return Some(format!(
            "it has {depth} images upon each other already; merge some (qemu-img commit)"
        ));
    }
    let Some(file) = file.filter(|file| view.is_mine(file)) else {
        return Some(format!("{} is no file that Firn can see", drive.file));
    };
    let metadata = match file.metadata() {
        Ok(metadata) => metadata,
        Err(error) => return Some(format!("{} can't be looked at: {error}", file.display())),
    };
    if metadata.file_type().is_block_device() {
        return Some(format!(
            "{} is a device, which has no place for files beside it",
            file.display()
        ));
    }
    let is_part =
        drive.drv == "raw" && metadata.len().next_multiple_of(512) != drive.image.virtual_size;
    is_part.then(|| format!("it is only a part of {}", file.display()))
}

/// Makes the file of an overlay on `below`, with the owner and the mode of that. `program` is the hypervisor, whose own
/// tool is preferred.
pub fn create_overlay(
    program: &str,
    below: &Path,
    format: &str,
    bytes: u64,
    path: &Path,
) -> Result<(), DriveError> {
    let mut command = Command::new(tool(program));
    // Unsafe only in that it does not look at what is below, which the hypervisor has locked.
    command.args(["create", "-q", "-f", "qcow2", "-u", "-F", format, "-b"]);
    let output = command.arg(below).arg(path).arg(bytes.to_string()).output();
    let output = output.map_err(DriveError::Tool)?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        // It begins with its own name and the file's.
        let said =
            said.trim().trim_start_matches(&format!("{TOOL}: {}: ", path.display())).to_owned();
        return Err(DriveError::Create { path: path.to_owned(), said });
    }
    like(below, path).map_err(io_error("give the owner of its disk to", path))
}

fn tool(program: &str) -> PathBuf {
    let beside = Path::new(program).with_file_name(TOOL);
    if program.contains('/') && beside.exists() { beside } else { TOOL.into() }
}

/// Gives a file the owner and the mode of another.
fn like(other: &Path, file: &Path) -> io::Result<()> {
    let metadata = other.metadata()?;
    let mine = file.metadata()?;
    if (mine.uid(), mine.gid()) != (metadata.uid(), metadata.gid()) {
        std::os::unix::fs::chown(file, Some(metadata.uid()), Some(metadata.gid()))?;
    }
    // Whoever may only read the disk may not read what is written to it from now on.
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(metadata.mode() & 0o660))
}

/// Makes `to` a clone of `from`, if the file system can. Both share their blocks until one of them is written to.
pub fn clone_file(from: &Path, to: &Path) -> Result<bool, DriveError> {
    let source = File::open(from).map_err(io_error("open", from))?;
    let target = File::create(to).map_err(io_error("create", to))?;
    match rustix::fs::ioctl_ficlone(&target, &source) {
        Ok(()) => {
            like(from, to).map(|()| true).map_err(io_error("give the owner of its disk to", to))
        }
        Err(errno) => {
            let _ = std::fs::remove_file(to);
            match errno {
                rustix::io::Errno::OPNOTSUPP
                | rustix::io::Errno::NOTTY
                | rustix::io::Errno::INVAL
                | rustix::io::Errno::XDEV
                | rustix::io::Errno::NOSYS => Ok(false),
                errno => Err(io_error("clone into", to)(errno.into())),
            }
        }
    }
}

fn io_error<'a>(
    doing: &'static str,
    path: &'a Path,
) -> impl FnOnce(io::Error) -> DriveError + use<'a> {
    move |source| DriveError::Io { doing, path: path.to_owned(), source }
}

/// Opens an overlay that is to be put on a drive.
pub(crate) fn open_overlay(
    qmp: &mut Qmp,
    drive: &Drive,
    overlay: &Overlay,
) -> Result<(), QmpError> {
    let cache = json!({ "direct": drive.direct, "no-flush": drive.no_flush });
    let arguments = json!({
        "driver": "qcow2",
        "node-name": overlay.node,
        "backing": null,
        "cache": cache,
        "file": { "driver": "file", "filename": overlay.path, "cache": cache },
    });
    qmp.execute("blockdev-add", arguments).map(drop)
}

/// Closes an overlay. `false` if it is in use: it has been put on its drive.
pub(crate) fn close_overlay(qmp: &mut Qmp, overlay: &Overlay) -> Result<bool, QmpError> {
    if !is_known(qmp, &overlay.node)? {
        return Ok(true);
    }
    match qmp.execute("blockdev-del", json!({ "node-name": overlay.node })) {
        Ok(_) => Ok(true),
        Err(QmpError::Refused { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

fn is_known(qmp: &mut Qmp, node: &str) -> Result<bool, QmpError> {
    #[derive(Deserialize)]
    struct Node {
        #[serde(rename = "node-name", default)]
        name: String,
    }
    let nodes: Vec<Node> = qmp.query("query-named-block-nodes")?;
    Ok(nodes.iter().any(|it| it.name == node))
}

impl DriveCut {
    /// The transaction that puts overlays on drives; `None` if there is nothing to put.
    pub(crate) fn transaction(&self) -> Option<Value> {
        let action = |(node, overlay): &(String, Overlay)| json!({ "type": "blockdev-snapshot", "data": { "node": node, "overlay": overlay.node } });
        let actions: Vec<_> = self.overlays.iter().map(action).collect();
        (!actions.is_empty()).then(|| json!({ "actions": actions }))
    }

    /// Clones files, whose VM stands still.
    pub fn clone_files(&self) -> Result<(), DriveError> {
        self.clones.iter().try_for_each(|(from, to)| match clone_file(from, to)? {
            true => Ok(()),
            false => Err(io_error("clone into", to)(io::ErrorKind::Unsupported.into())),
        })
    }
}

impl Drive {
    /// What identifies its topmost image, and its contents.
    pub fn identity(&self) -> io::Result<FileIdentity> {
        FileIdentity::of(&self.file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(drv: &str, file: &str, bytes: u64) -> Device {
        let image = json!({
            "filename": file,
            "virtual-size": bytes,
            "backing-image": { "filename": "/base", "virtual-size": bytes },
        });
        let cache = json!({ "direct": true, "no-flush": false, "writeback": true });
        let inserted = json!({ "node-name": "#block1", "file": file, "drv": drv, "ro": false,
            "encrypted": false, "image": image, "cache": cache });
        serde_json::from_value(json!({ "device": "disk0", "inserted": inserted })).unwrap()
    }

    #[test]
    fn a_drive_is_what_can_be_written_to() {
        let view = FileView::of(None);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, vec![0; 1000]).unwrap();
        let text = path.to_str().unwrap();
        let found = drive(device("raw", text, 1024), &view).unwrap();
        assert_eq!((found.obstacle.as_deref(), found.file.as_path()), (None, &*path));
        assert_eq!(found.chain, [text, "/base"]);
        let mut read_only = device("raw", text, 1024);
        read_only.inserted.as_mut().unwrap().ro = true;
        assert!(drive(read_only, &view).is_none());
        let empty = Device { device: "cd".into(), qdev: String::new(), inserted: None };
        assert!(drive(empty, &view).is_none());
    }

    #[test]
    fn what_cannot_be_kept_says_why() {
        let view = FileView::of(None);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, vec![0; 2048]).unwrap();
        let text = path.to_str().unwrap();
        let why = |device| drive(device, &view).unwrap().obstacle.unwrap_or_default();
        assert!(why(device("vmdk", text, 2048)).contains("vmdk"));
        assert!(why(device("raw", text, 1024)).contains("only a part of"));
        assert!(why(device("raw", "/nowhere/b", 1024)).contains("/nowhere/b is no file"));
        let mut secret = device("qcow2", text, 2048);
        secret.inserted.as_mut().unwrap().encrypted = true;
        assert!(why(secret).contains("encrypted"));
        let mut deep = device("qcow2", text, 2048);
        for _ in 0..CHAIN_MAX {
            let image = &mut deep.inserted.as_mut().unwrap().image;
            image.backing = Some(Box::new(image.clone()));
        }
        assert!(why(deep).contains("upon each other"));
    }

    #[test]
    fn all_overlays_are_put_on_at_once() {
        let overlay = |name: &str| Overlay { node: name.to_owned(), path: "/o".into() };
        assert_eq!(DriveCut::default().transaction(), None);
        let overlays = vec![("a".into(), overlay("x")), ("b".into(), overlay("y"))];
        let actions = DriveCut { overlays, clones: Vec::new() }.transaction().unwrap();
        assert_eq!(actions["actions"].as_array().unwrap().len(), 2);
        assert_eq!(actions["actions"][1]["data"], json!({ "node": "b", "overlay": "y" }));
    }

    #[test]
    fn a_file_system_that_cannot_clone_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("a"), dir.path().join("b"));
        std::fs::write(&from, "contents").unwrap();
        match clone_file(&from, &to).unwrap() {
            true => assert_eq!(std::fs::read(&to).unwrap(), b"contents"),
            false => assert!(!to.exists()),
        }
        assert!(matches!(clone_file(&dir.path().join("c"), &to), Err(DriveError::Io { .. })));
    }
}
