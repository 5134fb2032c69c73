//! The guest's writable drives, and the preservation of their contents as of one instant.
//!
//! A *drive* is a device of the guest with an image, which may have backing images (its *chain*).
//! From the cut on the guest writes to another file, an *overlay*, and the earlier image is not
//! written any more:
//!
//! ```text
//!   before                 before the pause              in the pause              afterwards
//!   device -> a.qcow2      device -> a.qcow2             blockdev-snapshot:        device -> overlay -> a.qcow2
//!                          overlay, open, unused         graph changes only                            never written again
//! ```
//!
//! The overlay is opened before the pause (`blockdev-add` with `backing: null`), so that errors
//! occur there, and the pause opens no file. All drives change in one `transaction`: all or none.
//! On a file system that can share blocks (`FICLONE`, ioctl_ficlone(2)) Firn clones the file in the
//! pause instead, and the guest continues with its own.
//!
//! Filters, such as a throttle, may be between the device and the topmost image. They change no
//! data: an overlay is put below them, and a copy is made of what is below them.
//!
//! Source: QEMU `docs/interop/live-block-operations.rst`, `qapi/block-core.json`.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use thiserror::Error;

use crate::backup::{self, DriveCopy};
use crate::device_state::DeviceStateError;
use crate::disks::{FileIdentity, FileView, plain_file};
use crate::flush;
use crate::network_disks::{is_network_address, is_network_driver};
use crate::qcow2;
use crate::qmp::{QmpClient, QmpError};
use crate::storage_snapshot::{StorageSnapshot, StorageSnapshotError};

/// The maximum number of images in a chain. QEMU holds all of them open, and gets slow long before
/// it fails.
pub const CHAIN_MAX: usize = 64;

/// QEMU's tool for image files.
const TOOL: &str = "qemu-img";

/// A drive that the guest can write to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drive {
    /// The user's name for it: its id, or else its device's path in QEMU.
    pub name: String,
    /// QEMU's name for the node of its topmost image.
    pub node: String,
    /// The device's own node: that of the topmost image, or of a filter on top of it.
    root: DriveRoot,
    /// The images that it consists of, the topmost first, which is the only one that is written to.
    /// Absolute paths, except where an image is not a file.
    pub chain: Vec<PathBuf>,
    /// The formats of these images.
    pub formats: Vec<String>,
    /// QEMU's name for the topmost image.
    pub named: String,
    /// Its format: `qcow2` or `raw`, or another that can't be cut.
    pub format: String,
    /// The size of the drive that the guest sees, in bytes.
    pub bytes: u64,
    /// Whether QEMU bypasses the page cache.
    direct: bool,
    /// Whether QEMU ignores the guest's flushes.
    no_flush: bool,
    /// Whether its topmost image is a block device and not a file: it can only be copied.
    pub is_device: bool,
    /// Whether QEMU reaches it over the network: it can only be copied, too.
    pub is_remote: bool,
    /// A path that belongs to the user to whom its copies are to belong.
    owner: PathBuf,
    /// The reason why its contents can't be preserved, if there is one.
    pub obstacle: Option<String>,
    /// The reason why it can't be mirrored, if there is one.
    pub mirror_obstacle: Option<String>,
}

/// The node of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
struct DriveRoot {
    node: String,
    /// QEMU's name for what the node has.
    file: String,
}

/// The properties of a drive that must not have changed when the pause has begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpectedDrive {
    /// QEMU's name for its topmost node.
    pub node: String,
    /// QEMU's name for its topmost image.
    pub file: String,
    /// The size of the drive that the guest sees, in bytes.
    pub bytes: u64,
}

/// A file that takes the guest's writes from some instant on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overlay {
    /// QEMU's name for its node.
    pub node: String,
    /// The file, absolute.
    pub path: PathBuf,
}

/// The changes to drives in a pause.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriveCut {
    /// The node of a drive, and the overlay to be put on it.
    pub overlays: Vec<(String, Overlay)>,
    /// A file, and the path of its clone.
    pub clones: Vec<(PathBuf, PathBuf)>,
    /// The snapshots that commands of the user's make.
    pub storage: Vec<StorageSnapshot>,
    /// The copies to begin.
    pub copies: Vec<DriveCopy>,
    /// Files to flush before the pause, which would wait for the flush otherwise.
    pub flushed: Vec<PathBuf>,
    /// The drives for which all of this was planned.
    pub expected: Vec<ExpectedDrive>,
}

/// The reason why a VM could not be stopped with its disks and devices saved.
#[derive(Debug, Error)]
pub enum CutError {
    /// Its devices could not be saved.
    #[error("the VM's devices could not be saved")]
    DeviceState(#[from] DeviceStateError),
    /// Its disks could not be preserved.
    #[error("the state of the VM's disks could not be preserved")]
    Drives(#[source] QmpError),
    /// A disk changed after the save began.
    #[error("disk {node} was changed or removed while the VM was being saved; save it again")]
    Changed {
        /// QEMU's name for the node that was its topmost.
        node: String,
    },
    /// A job changes disks from within the hypervisor.
    #[error("a block job ({kind}) began on the VM's disks while the VM was being saved")]
    Busy {
        /// The type of the job.
        kind: String,
    },
}

/// The reason why an overlay or a clone could not be made.
#[derive(Debug, Error)]
pub enum DriveError {
    /// The tool is missing, or can't be run.
    #[error("cannot run {TOOL}, which makes overlays (Debian: qemu-utils)")]
    Tool(#[source] io::Error),
    /// The tool refused.
    #[error("{TOOL} cannot make {path}: {said}", path = .path.display())]
    Create {
        /// The overlay.
        path: PathBuf,
        /// The tool's error message.
        said: String,
    },
    /// The file system has too little room for a copy.
    #[error("cannot reserve {bytes} bytes for {path}", path = .path.display())]
    Room {
        /// The number of bytes.
        bytes: u64,
        /// The copy.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The storage could not make a snapshot.
    #[error(transparent)]
    Storage(#[from] StorageSnapshotError),
    /// A file could not be cloned, or given to its owner.
    #[error("cannot {doing} {path}", path = .path.display())]
    Io {
        /// The operation that failed.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// A device in the reply to `query-block`.
#[derive(Clone, Debug, Deserialize)]
struct BlockInfo {
    #[serde(default)]
    device: String,
    #[serde(default)]
    qdev: String,
    inserted: Option<BlockDeviceInfo>,
}

#[derive(Clone, Debug, Deserialize)]
struct BlockDeviceInfo {
    #[serde(rename = "node-name", default)]
    node: String,
    file: String,
    drv: String,
    ro: bool,
    #[serde(default)]
    encrypted: bool,
    image: ImageLayer,
    cache: DriveCacheInfo,
}

#[derive(Clone, Debug, Deserialize)]
struct ImageLayer {
    filename: String,
    #[serde(default)]
    format: String,
    #[serde(rename = "virtual-size", default)]
    virtual_size: u64,
    #[serde(default)]
    encrypted: bool,
    #[serde(rename = "backing-image")]
    backing: Option<Box<ImageLayer>>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct DriveCacheInfo {
    direct: bool,
    #[serde(rename = "no-flush")]
    no_flush: bool,
}

#[derive(Clone, Debug, Deserialize)]
struct BlockJobInfo {
    device: String,
    #[serde(rename = "type")]
    kind: String,
}

/// Finds the drives that the guest can write to.
pub(crate) fn find_drives(qmp: &mut QmpClient, view: &FileView) -> Result<Vec<Drive>, QmpError> {
    let devices: Vec<BlockInfo> = qmp.query("query-block")?;
    let jobs: Vec<BlockJobInfo> = qmp.query("query-block-jobs")?;
    let nodes: Vec<BlockDeviceInfo> = match devices.iter().any(BlockInfo::has_filter) {
        true => qmp.query("query-named-block-nodes")?,
        false => Vec::new(),
    };
    let mut drives: Vec<Drive> =
        devices.iter().filter_map(|it| describe_drive(it, &nodes, view)).collect();
    let shared = shared_files(&devices, view);
    let addresses: Vec<String> = drives.iter().map(|drive| drive.named.clone()).collect();
    for drive in &mut drives {
        let is_shared = match drive.is_remote {
            true => addresses.iter().filter(|address| **address == drive.named).count() > 1,
            false => drive.chain.first().is_some_and(|top| shared.contains(&file_id(top))),
        };
        // Firn can't find out which images a job changes. Some jobs hide the drive below a node of
        // their own.
        let job = jobs.first().map(|BlockJobInfo { device, kind }| {
            format!("a block job is at work ({kind}, {device})")
        });
        let shared = is_shared.then(|| "another device has the same file".to_owned());
        for obstacle in [&mut drive.obstacle, &mut drive.mirror_obstacle] {
            *obstacle = job.clone().or(obstacle.take()).or(shared.clone());
        }
    }
    Ok(drives)
}

/// The device and inode number of a file, whatever its name.
fn file_id(path: &Path) -> Option<(u64, u64)> {
    FileIdentity::from_path(path).ok().map(|it| (it.dev, it.inode))
}

/// The files that are in the chains of more than one device.
fn shared_files(devices: &[BlockInfo], view: &FileView) -> Vec<Option<(u64, u64)>> {
    let files = |inserted: &BlockDeviceInfo| -> HashSet<(u64, u64)> {
        chain_paths(inserted, view).iter().filter_map(|path| file_id(path)).collect()
    };
    let inserted = devices.iter().filter_map(|device| device.inserted.as_ref());
    let mut seen = HashMap::new();
    inserted.flat_map(files).for_each(|file| *seen.entry(file).or_insert(0) += 1);
    seen.into_iter().filter(|&(_, count)| count > 1).map(|(file, _)| Some(file)).collect()
}

/// Whether a driver passes data through. `query-block` has what is below its node as a backing image.
pub(crate) fn is_filter(driver: &str) -> bool {
    matches!(driver, "throttle" | "copy-on-read")
}

impl BlockInfo {
    fn has_filter(&self) -> bool {
        self.inserted.as_ref().is_some_and(BlockDeviceInfo::is_filter)
    }
}

impl BlockDeviceInfo {
    fn is_filter(&self) -> bool {
        is_filter(&self.drv)
    }

    /// The node below the filters, itself if there is none. `nodes` are all nodes; a filter whose
    /// lower node is not the only one of its image is returned itself.
    fn below_filters<'a>(&'a self, nodes: &'a [Self]) -> &'a Self {
        let mut top = self;
        // Each node is passed once at most, whatever QEMU answers.
        for _ in nodes {
            if !top.is_filter() {
                break;
            }
            let Some(image) = &top.image.backing else { return top };
            let is_below =
                |node: &&Self| node.drv == image.format && node.image.filename == image.filename;
            let mut below = nodes.iter().filter(is_below);
            match (below.next(), below.next()) {
                (Some(node), None) => top = node,
                _ => return top,
            }
        }
        top
    }
}

fn describe_drive(device: &BlockInfo, nodes: &[BlockDeviceInfo], view: &FileView) -> Option<Drive> {
    let root = device.inserted.as_ref().filter(|inserted| !inserted.ro)?;
    let inserted = root.below_filters(nodes);
    let chain = chain_paths(inserted, view);
    let name = if device.device.is_empty() { &device.qdev } else { &device.device };
    let is_remote = is_network_address(&inserted.file);
    let obstacle = match is_remote {
        true => check_remote(inserted),
        false => check_drive(inserted, &chain, view),
    };
    let top = chain.first().filter(|_| !is_remote);
    Some(Drive {
        name: name.clone(),
        node: inserted.node.clone(),
        root: DriveRoot { node: root.node.clone(), file: root.file.clone() },
        is_device: top.is_some_and(|top| is_block_device(top)),
        is_remote,
        owner: top.cloned().unwrap_or_else(|| view.owner_path()),
        obstacle: obstacle.err(),
        mirror_obstacle: find_mirror_obstacle(inserted),
        formats: chain_formats(&inserted.image),
        chain,
        named: inserted.file.clone(),
        format: inserted.drv.clone(),
        bytes: inserted.image.virtual_size,
        direct: inserted.cache.direct,
        no_flush: inserted.cache.no_flush,
    })
}

/// Whatever QEMU can read can be mirrored. But a copy of an encrypted drive would not be encrypted.
fn find_mirror_obstacle(drive: &BlockDeviceInfo) -> Option<String> {
    let mut layers = std::iter::successors(Some(&drive.image), |layer| layer.backing.as_deref());
    let is_encrypted = drive.encrypted || layers.any(|layer| layer.encrypted);
    is_encrypted.then(|| "it is encrypted, and the standby's disk would not be".to_owned())
}

fn is_block_device(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.file_type().is_block_device())
}

fn chain_paths(inserted: &BlockDeviceInfo, view: &FileView) -> Vec<PathBuf> {
    let lower =
        std::iter::successors(inserted.image.backing.as_deref(), |layer| layer.backing.as_deref());
    let names = std::iter::once(&inserted.file).chain(lower.map(|layer| &layer.filename));
    names.map(|name| plain_file(name)).map(|name| view.absolute_path(&name)).collect()
}

fn chain_formats(image: &ImageLayer) -> Vec<String> {
    let layers = std::iter::successors(Some(image), |layer| layer.backing.as_deref());
    layers.map(|layer| plain_format(&layer.format).to_owned()).collect()
}

/// As [`check_drive`], for a drive on the network.
fn check_remote(drive: &BlockDeviceInfo) -> Result<(), String> {
    if !matches!(&*drive.drv, "qcow2" | "raw") && !is_network_driver(&drive.drv) {
        return Err(format!("its format is {}; only qcow2 and raw can be preserved", drive.drv));
    }
    match (drive.encrypted, drive.image.backing.is_some()) {
        (true, _) => Err("it is encrypted".to_owned()),
        (_, true) => Err("it has backing files, and is on the network".to_owned()),
        (false, false) => Ok(()),
    }
}

/// Returns the reason as an error if a drive's contents can't be preserved.
fn check_drive(drive: &BlockDeviceInfo, chain: &[PathBuf], view: &FileView) -> Result<(), String> {
    if !matches!(&*drive.drv, "qcow2" | "raw") {
        return Err(format!("its format is {}; only qcow2 and raw can be preserved", drive.drv));
    }
    if drive.encrypted {
        return Err("it is encrypted".to_owned());
    }
    let Some(top) = chain.first().filter(|top| view.has_open(top)) else {
        return Err(format!("{} is not a file that Firn can access", drive.file));
    };
    let metadata = top.metadata().map_err(|error| format!("{}: {error}", top.display()))?;
    if !metadata.is_file() && !metadata.file_type().is_block_device() {
        return Err(format!("{} is neither a file nor a block device", top.display()));
    }
    let layers = std::iter::successors(Some(&drive.image), |layer| layer.backing.as_deref());
    let layers: Vec<(&Path, &ImageLayer)> =
        chain.iter().map(PathBuf::as_path).zip(layers).collect();
    (0..layers.len()).try_for_each(|at| check_layer(layers[at], layers.get(at + 1).copied()))
}

/// Checks that a layer, and its backing file, are those that a restore will find, which relies on
/// the files alone.
fn check_layer(
    (file, layer): (&Path, &ImageLayer),
    below: Option<(&Path, &ImageLayer)>,
) -> Result<(), String> {
    let name = file.display();
    if layer.format != "qcow2" {
        let metadata = file.metadata().map_err(|error| format!("{name}: {error}"))?;
        let is_whole =
            !metadata.is_file() || metadata.len().next_multiple_of(512) == layer.virtual_size;
        return match below {
            Some(_) => {
                Err(format!("{name} is {}, and has a backing file all the same", layer.format))
            }
            None if !is_whole => Err(format!("it is only a part of {name}")),
            None => Ok(()),
        };
    }
    let head = qcow2::read_header(file).map_err(|error| format!("{name}: {error}"))?;
    let head = head.ok_or_else(|| format!("{name} is no qcow2 file"))?;
    if head.is_encrypted {
        return Err(format!("{name} is encrypted"));
    }
    if head.has_data_file {
        return Err(format!("{name} has its data in another file"));
    }
    match (&head.backing_file, below) {
        (None, None) => Ok(()),
        (Some(named), Some((below, layer)))
            if file_id(named).is_some_and(|it| file_id(below) == Some(it)) =>
        {
            match head.backing_format.as_deref() {
                Some(format) if format == plain_format(&layer.format) => Ok(()),
                // QEMU would probe the format by itself, from data that a guest may have written.
                None if layer.format == "qcow2" => Ok(()),
                _ => Err(format!(
                    "{name} does not record that its backing file is {} (qemu-img rebase -u -F)",
                    plain_format(&layer.format)
                )),
            }
        }
        _ => Err(format!(
            "the backing file that QEMU uses for {name} is not the one that {name} names"
        )),
    }
}

/// The format of a node; a file or a device without a format driver is raw.
fn plain_format(format: &str) -> &str {
    match format {
        "file" | "host_device" => "raw",
        format => format,
    }
}

/// The image that an overlay is made on.
#[derive(Clone, Copy, Debug)]
pub struct OverlayBase<'a> {
    /// The file, absolute.
    pub file: &'a Path,
    /// The name that a hypervisor uses that has it open.
    pub named: &'a str,
    /// Its format: `qcow2` or `raw`.
    pub format: &'a str,
    /// The size of the drive, in bytes.
    pub bytes: u64,
}

impl OverlayBase<'_> {
    /// The backing file name for the overlay at `path`: the hypervisor's name, if that means the
    /// same file in the overlay. With another name, the hypervisor takes it for another file, and
    /// writes out the whole lower chain in the name of each later overlay.
    pub(crate) fn backing_name(&self, path: &Path) -> PathBuf {
        let is_beside = path.parent() == self.file.parent();
        // A name with a colon would be a protocol.
        let is_plain = !self.named.contains(':');
        match is_beside && is_plain && self.file.file_name() == Some(self.named.as_ref()) {
            true => self.named.into(),
            false => self.file.to_owned(),
        }
    }
}

/// Makes the file of an overlay, with the owner and the mode of its base. `program` is the
/// hypervisor, whose own tool is preferred.
pub fn create_overlay(
    program: &str,
    below: &OverlayBase<'_>,
    path: &Path,
) -> Result<(), DriveError> {
    create_qcow2(program, Some(below), path, below.bytes)?;
    copy_owner(below.file, path).map_err(io_error("give the owner of its disk to", path))
}

/// Makes a qcow2 file for a drive of `bytes` bytes.
pub(crate) fn create_qcow2(
    program: &str,
    below: Option<&OverlayBase<'_>>,
    path: &Path,
    bytes: u64,
) -> Result<(), DriveError> {
    let mut command = Command::new(find_tool(program));
    command.args(["create", "-q", "-f", "qcow2"]);
    if let Some(below) = below {
        // `-u` is unsafe only in that the tool does not open the base, which the hypervisor has
        // locked.
        command.args(["-u", "-F", below.format, "-b"]).arg(below.backing_name(path));
    }
    let output = command.arg(path).arg(bytes.to_string()).output().map_err(DriveError::Tool)?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        // The message begins with the names of the tool and the file.
        let said =
            said.trim().trim_start_matches(&format!("{TOOL}: {}: ", path.display())).to_owned();
        return Err(DriveError::Create { path: path.to_owned(), said });
    }
    Ok(())
}

fn find_tool(program: &str) -> PathBuf {
    let beside = Path::new(program).with_file_name(TOOL);
    if program.contains('/') && beside.exists() { beside } else { TOOL.into() }
}

/// Gives a file the owner and the mode of another. A user that may not change the owner keeps the
/// file, and runs the hypervisor then; if the group can't be changed either, the file is for its
/// owner alone.
pub(crate) fn copy_owner(other: &Path, file: &Path) -> io::Result<()> {
    let metadata = other.metadata()?;
    let mine = file.metadata()?;
    if (mine.uid(), mine.gid()) != (metadata.uid(), metadata.gid()) {
        let (uid, gid) = (Some(metadata.uid()), Some(metadata.gid()));
        let given = chown(file, uid, gid).or_else(|_| chown(file, None, gid));
        if given.is_err() {
            return std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o600));
        }
    }
    // A user that may only read the disk must not read what is written to it from now on.
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(metadata.mode() & 0o660 | 0o600))
}

/// Whether files in `dir` can be clones of `from`. Leaves no file behind.
pub fn can_clone(from: &Path, dir: &Path) -> Result<bool, DriveError> {
    let source = firn_files::open_disk(from).map_err(io_error("open", from))?;
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let probe = match rustix::fs::open(dir, flags, Mode::from_raw_mode(0o600)) {
        Ok(probe) => probe,
        // A file system without unnamed files cannot clone either.
        Err(Errno::OPNOTSUPP | Errno::ISDIR) => return Ok(false),
        Err(errno) => return Err(io_error("make files in", dir)(errno.into())),
    };
    match rustix::fs::ioctl_ficlone(&probe, &source) {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP | Errno::NOTTY | Errno::INVAL | Errno::XDEV | Errno::NOSYS) => {
            Ok(false)
        }
        Err(errno) => Err(io_error("clone", from)(errno.into())),
    }
}

/// Makes `to`, which must not exist, a clone of `from`: both share their blocks until one of them
/// is written to.
fn clone_file(from: &Path, to: &Path) -> Result<(), DriveError> {
    let source = firn_files::open_disk(from).map_err(io_error("open", from))?;
    let target = File::create_new(to).map_err(io_error("create", to))?;
    let cloned = rustix::fs::ioctl_ficlone(&target, &source).map_err(io::Error::from);
    cloned.and_then(|()| copy_owner(from, to)).map_err(|error| {
        let _ = std::fs::remove_file(to);
        io_error("clone into", to)(error)
    })
}

fn io_error<'a>(
    doing: &'static str,
    path: &'a Path,
) -> impl FnOnce(io::Error) -> DriveError + use<'a> {
    move |source| DriveError::Io { doing, path: path.to_owned(), source }
}

/// Opens an overlay that will be put on a drive.
pub(crate) fn open_overlay(
    qmp: &mut QmpClient,
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
pub(crate) fn close_overlay(qmp: &mut QmpClient, overlay: &Overlay) -> Result<bool, QmpError> {
    if !is_node_open(qmp, &overlay.node)? {
        return Ok(true);
    }
    match qmp.execute("blockdev-del", json!({ "node-name": overlay.node })) {
        Ok(_) => Ok(true),
        Err(QmpError::Refused { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

fn is_node_open(qmp: &mut QmpClient, node: &str) -> Result<bool, QmpError> {
    #[derive(Deserialize)]
    struct NamedNode {
        #[serde(rename = "node-name", default)]
        name: String,
    }
    let nodes: Vec<NamedNode> = qmp.query("query-named-block-nodes")?;
    Ok(nodes.iter().any(|it| it.name == node))
}

impl DriveCut {
    /// The transaction that puts overlays on drives and begins copies; `None` if there is nothing
    /// to do. `fails_alone` if this QEMU can let a copy fail instead of a guest's write.
    pub(crate) fn build_transaction(&self, fails_alone: bool) -> Option<Value> {
        let action = |(node, overlay): &(String, Overlay)| json!({ "type": "blockdev-snapshot", "data": { "node": node, "overlay": overlay.node } });
        let copies = backup::build_actions(&self.copies, fails_alone);
        let actions: Vec<_> = self.overlays.iter().map(action).chain(copies).collect();
        (!actions.is_empty()).then(|| json!({ "actions": actions }))
    }

    /// Clones files, and has the storage make its snapshots. Their VM is paused.
    pub fn make_snapshots(&self) -> Result<(), DriveError> {
        self.clones.iter().try_for_each(|(from, to)| clone_file(from, to))?;
        Ok(self.storage.iter().try_for_each(StorageSnapshot::create)?)
    }

    /// Flushes the files from the page cache, while the VM runs.
    pub fn flush_files(&self) {
        flush::flush_files(&self.flushed);
    }
}

impl DriveCut {
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.overlays.is_empty()
            && self.clones.is_empty()
            && self.storage.is_empty()
            && self.copies.is_empty()
            && self.expected.is_empty()
    }

    /// Checks by the replies to `query-block` and `query-block-jobs` that drives are as expected.
    pub(crate) fn check_unchanged(&self, said: Value, jobs: Value) -> Result<(), CutError> {
        let unexpected = |error: serde_json::Error| {
            CutError::Drives(QmpError::unexpected("query-block-jobs", error.to_string()))
        };
        let jobs: Vec<BlockJobInfo> = serde_json::from_value(jobs).map_err(unexpected)?;
        if let (Some(job), false) = (jobs.first(), self.expected.is_empty()) {
            return Err(CutError::Busy { kind: job.kind.clone() });
        }
        match self.find_changed(said).map_err(CutError::Drives)? {
            Some(drive) => Err(CutError::Changed { node: drive.node.clone() }),
            None => Ok(()),
        }
    }

    fn find_changed(&self, said: Value) -> Result<Option<&ExpectedDrive>, QmpError> {
        let devices: Vec<BlockInfo> = serde_json::from_value(said)
            .map_err(|error| QmpError::unexpected("query-block", error.to_string()))?;
        let inserted: Vec<_> = devices.into_iter().filter_map(|device| device.inserted).collect();
        let is_there = |expected: &&ExpectedDrive| {
            inserted.iter().any(|it| {
                it.node == expected.node
                    && it.file == expected.file
                    && it.image.virtual_size == expected.bytes
            })
        };
        Ok(self.expected.iter().find(|expected| !is_there(expected)))
    }
}

impl Drive {
    /// Whether QEMU knows the drive by this id, or by this name of its node.
    pub fn has_id(&self, id: &str) -> bool {
        [&self.name, &self.node, &self.root.node].into_iter().any(|it| it == id)
    }

    /// Whether no file of the host holds its contents, so that it can only be copied.
    pub fn is_copied_only(&self) -> bool {
        self.is_device || self.is_remote
    }

    /// A path with the owner and the mode that files for it get.
    pub(crate) fn owner_path(&self) -> &Path {
        &self.owner
    }

    /// The topmost image.
    pub fn top_file(&self) -> &Path {
        self.chain.first().map_or(Path::new(""), PathBuf::as_path)
    }

    /// The properties that it must still have in the pause.
    pub fn to_expected(&self) -> ExpectedDrive {
        let DriveRoot { node, file } = self.root.clone();
        ExpectedDrive { node, file, bytes: self.bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(drv: &str, file: &str, bytes: u64) -> BlockInfo {
        let image = json!({
            "filename": file,
            "format": drv,
            "virtual-size": bytes,
            "backing-image": { "filename": "/base", "virtual-size": bytes },
        });
        let cache = json!({ "direct": true, "no-flush": false, "writeback": true });
        let inserted = json!({ "node-name": "#block1", "file": file, "drv": drv, "ro": false,
            "encrypted": false, "image": image, "cache": cache });
        serde_json::from_value(json!({ "device": "disk0", "inserted": inserted })).unwrap()
    }

    fn found(device: &BlockInfo) -> Drive {
        describe_drive(device, &[], &FileView::of_process(None)).unwrap()
    }

    #[test]
    fn only_writable_block_devices_are_drives() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, vec![0; 1000]).unwrap();
        let text = path.to_str().unwrap();
        let mut plain = device("raw", text, 1024);
        plain.inserted.as_mut().unwrap().image.backing = None;
        let drive = found(&plain);
        assert_eq!((drive.obstacle.as_deref(), drive.top_file()), (None, &*path));
        assert_eq!(found(&device("raw", text, 1024)).chain, [path.clone(), "/base".into()]);
        plain.inserted.as_mut().unwrap().ro = true;
        assert!(super::describe_drive(&plain, &[], &FileView::of_process(None)).is_none());
        let empty = BlockInfo { device: "cd".into(), qdev: String::new(), inserted: None };
        assert!(super::describe_drive(&empty, &[], &FileView::of_process(None)).is_none());
    }

    #[test]
    fn an_image_below_filters_is_found() {
        let options = r#"json:{"driver":"throttle","file":{"driver":"raw","file":{"driver":"file","filename":"/a"}}}"#;
        let cache = |direct: bool| json!({ "direct": direct, "no-flush": false });
        let node = |name: &str, drv: &str, file: &str, image: Value| {
            json!({ "node-name": name, "file": file, "drv": drv, "ro": false, "image": image,
                "cache": cache(drv == "raw") })
        };
        let base = json!({ "filename": "/base", "format": "raw", "virtual-size": 512 });
        let raw = json!({ "filename": "/a", "format": "raw", "virtual-size": 512,
            "backing-image": base });
        let filtered = json!({ "filename": options, "format": "throttle", "virtual-size": 512,
            "backing-image": raw });
        let root = node("t", "throttle", options, filtered);
        let parse = |value: &Value| serde_json::from_value::<BlockDeviceInfo>(value.clone());
        let device =
            BlockInfo { device: String::new(), qdev: "scsi0".into(), inserted: parse(&root).ok() };
        assert!(device.has_filter());
        let below = [node("r", "raw", "/a", raw), node("b", "raw", "/base", base)];
        let mut nodes: Vec<_> =
            [&root, &below[0], &below[1]].iter().map(|node| parse(node).unwrap()).collect();
        let view = FileView::of_process(None);
        let drive = describe_drive(&device, &nodes, &view).unwrap();
        assert_eq!((&*drive.node, &*drive.format, drive.direct), ("r", "raw", true));
        assert_eq!(drive.chain, ["/a", "/base"].map(PathBuf::from));
        let ExpectedDrive { node, file, .. } = drive.to_expected();
        assert_eq!((&*node, &*file), ("t", options));
        // Two nodes of one image: which one is below the filter is not known.
        nodes.push(nodes[1].clone());
        let drive = describe_drive(&device, &nodes, &view).unwrap();
        assert!(drive.obstacle.unwrap().contains("throttle"));
    }

    #[test]
    fn a_disk_that_cannot_be_snapshotted_has_a_reason() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, vec![0; 2048]).unwrap();
        let text = path.to_str().unwrap();
        let why = |device: &BlockInfo| found(device).obstacle.unwrap_or_default();
        let alone = |drv, file, bytes| {
            let mut device = device(drv, file, bytes);
            device.inserted.as_mut().unwrap().image.backing = None;
            device
        };
        assert!(why(&alone("vmdk", text, 2048)).contains("vmdk"));
        assert!(why(&alone("raw", text, 1024)).contains("only a part of"));
        assert!(why(&alone("raw", "/nowhere/b", 1024)).contains("/nowhere/b is not a file"));
        assert!(why(&alone("raw", "/dev", 1024)).contains("is neither a file nor"));
        assert!(why(&alone("qcow2", text, 2048)).contains("is no qcow2 file"));
        assert_eq!(why(&alone("raw", text, 2048)), "");
        assert!(why(&device("raw", text, 2048)).contains("has a backing file all the same"));
        let mut secret = device("qcow2", text, 2048);
        secret.inserted.as_mut().unwrap().encrypted = true;
        assert!(why(&secret).contains("encrypted"));
        let mirror = |device: &BlockInfo| found(device).mirror_obstacle;
        assert!(mirror(&secret).unwrap().contains("encrypted"));
        assert_eq!(mirror(&alone("vmdk", text, 2048)), None);
        secret.inserted.as_mut().unwrap().encrypted = false;
        secret.inserted.as_mut().unwrap().image.backing.as_mut().unwrap().encrypted = true;
        assert!(mirror(&secret).is_some());
    }

    #[test]
    fn a_file_of_two_devices_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["a", "b"] {
            std::fs::write(path(name), name).unwrap();
        }
        let of = |name: &str| device("raw", path(name).to_str().unwrap(), 512);
        let view = FileView::of_process(None);
        assert!(shared_files(&[of("a"), of("b")], &view).is_empty());
        assert_eq!(shared_files(&[of("a"), of("b"), of("a")], &view), [file_id(&path("a"))]);
        let mut above = of("b");
        let inserted = above.inserted.as_mut().unwrap();
        inserted.image.backing.as_mut().unwrap().filename = path("a").to_str().unwrap().into();
        assert_eq!(shared_files(&[of("a"), above], &view), [file_id(&path("a"))]);
    }

    #[test]
    fn a_drive_that_has_changed_is_an_error() {
        let drive = found(&device("raw", "/a", 512));
        let cut = DriveCut { expected: vec![drive.to_expected()], ..DriveCut::default() };
        let said = |file: &str, bytes: u64| {
            let image = json!({ "filename": file, "virtual-size": bytes });
            let cache = json!({ "direct": true, "no-flush": false });
            json!([{ "device": "disk0", "inserted": { "node-name": "#block1", "file": file, "drv": "raw",
                "ro": false, "image": image, "cache": cache } }, { "device": "cd" }])
        };
        assert_eq!(cut.find_changed(said("/a", 512)).unwrap(), None);
        assert_eq!(cut.find_changed(said("/b", 512)).unwrap(), Some(&cut.expected[0]));
        assert!(cut.find_changed(said("/a", 1024)).unwrap().is_some());
        assert!(cut.find_changed(json!([])).unwrap().is_some());
        assert!(cut.find_changed(json!(7)).is_err());
        assert!(cut.check_unchanged(said("/a", 512), json!([])).is_ok());
        let job = json!([{ "device": "j", "type": "commit" }]);
        assert!(matches!(cut.check_unchanged(said("/a", 512), job), Err(CutError::Busy { .. })));
    }

    #[test]
    fn all_overlays_are_put_on_at_once() {
        let overlay = |name: &str| Overlay { node: name.to_owned(), path: "/o".into() };
        assert_eq!(DriveCut::default().build_transaction(false), None);
        let overlays = vec![("a".into(), overlay("x")), ("b".into(), overlay("y"))];
        let actions =
            DriveCut { overlays, ..DriveCut::default() }.build_transaction(false).unwrap();
        assert_eq!(actions["actions"].as_array().unwrap().len(), 2);
        assert_eq!(actions["actions"][1]["data"], json!({ "node": "b", "overlay": "y" }));
    }

    #[test]
    fn a_file_system_that_cannot_clone_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("a"), dir.path().join("b"));
        std::fs::write(&from, "contents").unwrap();
        let can = can_clone(&from, dir.path()).unwrap();
        assert_eq!(clone_file(&from, &to).is_ok(), can);
        assert_eq!(to.exists(), can);
        assert!(can_clone(&from, &dir.path().join("c")).is_err());
        assert!(matches!(clone_file(&dir.path().join("c"), &to), Err(DriveError::Io { .. })));
    }
}
