//! Identification of a VM's disks: the files it has open, and a check later whether they are still
//! the same.
//!
//! A checkpoint refers to disks, it does not contain them. If a restore used another file, or one
//! that was written to after the checkpoint, the guest would get a disk that contradicts its
//! memory. So Firn records for each file what identifies it and its contents.
//!
//! ```text
//!   query-named-block-nodes    #block123  qcow2  a.qcow2   backing b.raw      one DiskImage per open image file,
//!                              #block045  file   a.qcow2                      backing files included
//!   stat                       a.qcow2    device, inode, size, mtime
//! ```

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::drives::is_filter;
use crate::qmp::{QmpClient, QmpError};

/// Block drivers of a local file or device. A format driver may be on top of them.
const FILE_DRIVERS: &[&str] = &["file", "host_device", "host_cdrom"];

/// Drivers for which the processor copies the data of a read into guest memory, if they use the
/// page cache.
const COPYING_DRIVERS: [&str; 4] = ["file", "raw", "qcow2", "nbd"];

/// An image that the VM has open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskImage {
    /// QEMU's name for the block node; `#block...` if the user gave none, and then another in every
    /// run.
    pub node: String,
    /// The image, as QEMU names it: a path, or a network address.
    pub file: String,
    /// Its format, such as `qcow2` or `raw`.
    pub format: String,
    /// Whether QEMU has opened it read-only.
    pub read_only: bool,
    /// The size of the disk that the guest sees, in bytes.
    pub size: u64,
    /// The local file; `None` if it is not a file that Firn can access, or was deleted
    /// (`-snapshot`).
    pub identity: Option<FileIdentity>,
}

/// The properties that distinguish one file, with its contents, from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity {
    /// The device it is on.
    pub dev: u64,
    /// Its inode number.
    pub inode: u64,
    /// Its size in bytes.
    pub size: u64,
    /// When it was last written to: nanoseconds since 1970.
    pub mtime_ns: i128,
}

impl FileIdentity {
    /// The identity of the file at `path`.
    pub fn from_path(path: &Path) -> std::io::Result<Self> {
        let file = path.metadata()?;
        let mtime_ns = i128::from(file.mtime()) * 1_000_000_000 + i128::from(file.mtime_nsec());
        Ok(Self { dev: file.dev(), inode: file.ino(), size: file.len(), mtime_ns })
    }
}

/// A node in the reply to `query-named-block-nodes`.
#[derive(Clone, Debug, Deserialize)]
struct DiskNode {
    #[serde(rename = "node-name", default)]
    name: String,
    file: String,
    drv: String,
    ro: bool,
    image: DiskNodeImage,
}

#[derive(Clone, Debug, Deserialize)]
struct DiskNodeImage {
    #[serde(rename = "virtual-size", default)]
    virtual_size: u64,
}

/// Finds the disks of a VM, and identifies their files as `process` sees them.
pub(crate) fn find_disks(
    qmp: &mut QmpClient,
    process: &FileView,
) -> Result<Vec<DiskImage>, QmpError> {
    let nodes = qmp.query("query-named-block-nodes")?;
    let mut disks = group_by_image(nodes);
    disks.iter_mut().for_each(|disk| disk.identity = process.identify_file(&disk.file));
    Ok(disks)
}

/// Whether a disk may be read without the page cache: the kernel, or the storage itself, then
/// writes into guest memory without a page fault when the read ends. Unknown drivers count as such.
pub(crate) fn is_any_read_past_page_cache(qmp: &mut QmpClient) -> Result<bool, QmpError> {
    let nodes: Vec<NodeAccess> = qmp.query("query-named-block-nodes")?;
    Ok(nodes.iter().any(NodeAccess::is_past_page_cache))
}

/// The driver and the cache mode by which QEMU accesses a node.
#[derive(Clone, Debug, Deserialize)]
struct NodeAccess {
    drv: String,
    cache: NodeCacheInfo,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct NodeCacheInfo {
    direct: bool,
}

impl NodeAccess {
    fn is_past_page_cache(&self) -> bool {
        self.cache.direct || !COPYING_DRIVERS.contains(&self.drv.as_str())
    }
}

/// Makes one disk of each image: of the node of its format, or of the node of its file where no
/// format is on top. Filters on top of them are no images. An image that is open twice counts once, and as writable if one of the nodes
/// is.
fn group_by_image(nodes: Vec<DiskNode>) -> Vec<DiskImage> {
    let mut by_file: BTreeMap<String, DiskNode> = BTreeMap::new();
    for mut node in nodes.into_iter().map(DiskNode::with_plain_file).filter(DiskNode::is_image) {
        match by_file.get_mut(&node.file) {
            Some(known) if is_file(&node.drv) || !is_file(&known.drv) => known.ro &= node.ro,
            known => {
                node.ro &= known.is_none_or(|known| known.ro);
                by_file.insert(node.file.clone(), node);
            }
        }
    }
    by_file.into_values().map(disk_from_node).collect()
}

impl DiskNode {
    fn is_image(&self) -> bool {
        !self.file.is_empty() && !is_filter(&self.drv)
    }

    fn with_plain_file(mut self) -> Self {
        self.file = plain_file(&self.file);
        self
    }
}

/// Extracts the path of an image. Where options keep QEMU from naming an image by its path, QEMU
/// prints them: `json:{"driver": "qcow2", "file": {"driver": "file", "filename": "a.qcow2"}, ...}`.
/// They contain the path, below as many nodes as there are on top of the file.
pub(crate) fn plain_file(name: &str) -> String {
    let options = name.strip_prefix("json:");
    let options: Option<Value> = options.and_then(|json| serde_json::from_str(json).ok());
    let nodes = std::iter::successors(options.as_ref(), |node| node.get("file"));
    let path = nodes.filter_map(|node| node.get("filename")?.as_str()).next();
    path.unwrap_or(name).to_owned()
}

fn is_file(driver: &str) -> bool {
    FILE_DRIVERS.contains(&driver)
}

fn disk_from_node(node: DiskNode) -> DiskImage {
    let format = if is_file(&node.drv) { "raw".to_owned() } else { node.drv };
    let (node, file, read_only, size) = (node.name, node.file, node.ro, node.image.virtual_size);
    DiskImage { node, file, format, read_only, size, identity: None }
}

/// Files as the hypervisor sees them: it may have another root or working directory than Firn.
#[derive(Clone, Debug)]
pub(crate) struct FileView {
    root: PathBuf,
    cwd: PathBuf,
    /// The directory with its open descriptors.
    fds: Option<PathBuf>,
}

impl FileView {
    /// The files of a process; those of Firn itself where the process is unknown.
    pub(crate) fn of_process(pid: Option<i32>) -> Self {
        match pid {
            Some(pid) => {
                let proc = PathBuf::from(format!("/proc/{pid}"));
                Self { root: proc.join("root"), cwd: proc.join("cwd"), fds: Some(proc.join("fd")) }
            }
            None => Self { root: "/".into(), cwd: ".".into(), fds: None },
        }
    }

    fn identify_file(&self, file: &str) -> Option<FileIdentity> {
        let path = match file.strip_prefix('/') {
            Some(inside) => self.root.join(inside),
            None => self.cwd.join(file),
        };
        FileIdentity::from_path(&path).ok()
    }

    /// The absolute path by which the process knows a file. A name that is no file stays as it is.
    pub(crate) fn absolute_path(&self, name: &str) -> PathBuf {
        let file = Path::new(name);
        let cwd = std::fs::canonicalize(&self.cwd).ok().filter(|_| !file.is_absolute());
        cwd.map(|cwd| cwd.join(file))
            .filter(|path| path.exists())
            .unwrap_or_else(|| file.to_owned())
    }

    /// A path that belongs to the process's user.
    pub(crate) fn owner_path(&self) -> PathBuf {
        self.fds.clone().unwrap_or_else(|| self.cwd.clone())
    }

    /// Whether an absolute path names, for Firn, a file that the process has open.
    pub(crate) fn has_open(&self, file: &Path) -> bool {
        let which = |path: &Path| FileIdentity::from_path(path).ok().map(|it| (it.dev, it.inode));
        let Some(mine) = which(file) else { return false };
        match &self.fds {
            None => true,
            Some(fds) => {
                let fds = std::fs::read_dir(fds).into_iter().flatten().flatten();
                fds.into_iter().any(|fd| which(&fd.path()) == Some(mine))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(json: serde_json::Value) -> Vec<DiskNode> {
        serde_json::from_value(json).unwrap()
    }

    fn node(name: &str, drv: &str, file: &str) -> serde_json::Value {
        let image = serde_json::json!({ "virtual-size": 512, "filename": file });
        serde_json::json!({ "node-name": name, "drv": drv, "file": file, "ro": false, "image": image })
    }

    #[test]
    fn a_disk_with_direct_io_is_reported() {
        let is_past = |drv: &str, direct: bool| {
            let way =
                serde_json::json!({ "drv": drv, "cache": { "direct": direct, "writeback": true } });
            serde_json::from_value::<NodeAccess>(way).unwrap().is_past_page_cache()
        };
        assert!(!is_past("file", false) && !is_past("qcow2", false) && !is_past("nbd", false));
        assert!(is_past("file", true) && is_past("host_device", false) && is_past("nvme", false));
    }

    #[test]
    fn a_format_stands_for_its_file() {
        let all = vec![
            node("#block1", "file", "a.qcow2"),
            node("#block2", "qcow2", "a.qcow2"),
            node("#block3", "file", "b"),
            node("n", "nbd", "nbd://host:10809/x"),
            node("#block4", "file", "z"),
            node("#block5", "qcow2", r#"json:{"driver": "qcow2", "file": {"filename": "z"}}"#),
            node("t", "throttle", r#"json:{"file": {"file": {"filename": "z"}}}"#),
        ];
        let disks = group_by_image(nodes(all.into()));
        let seen: Vec<_> = disks.iter().map(|disk| (&*disk.node, &*disk.format)).collect();
        let expected =
            [("#block2", "qcow2"), ("#block3", "raw"), ("n", "nbd"), ("#block5", "qcow2")];
        assert_eq!(seen, expected);
    }

    #[test]
    fn an_image_that_is_open_twice_is_writable_if_it_is_so_once() {
        let mut writable = node("#block2", "raw", "a");
        writable["ro"] = false.into();
        let mut all = vec![node("#block1", "file", "a"), writable];
        all[0]["ro"] = true.into();
        for _ in 0..2 {
            let disks = group_by_image(nodes(all.clone().into()));
            assert_eq!((disks.len(), disks[0].read_only), (1, false));
            all.reverse();
        }
    }

    #[test]
    fn a_file_that_is_written_to_has_another_identity() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        std::fs::write(&path, "one").unwrap();
        let before = FileIdentity::from_path(&path).unwrap();
        assert_eq!(FileIdentity::from_path(&path).unwrap(), before);
        std::fs::write(&path, "three").unwrap();
        assert_ne!(FileIdentity::from_path(&path).unwrap(), before);
    }

    #[test]
    fn files_are_looked_up_where_the_process_sees_them() {
        let me = FileView::of_process(Some(std::process::id() as i32));
        assert!(me.identify_file("Cargo.toml").is_some(), "relative to the working directory");
        assert!(me.identify_file("/proc/self/exe").is_some());
        assert!(me.identify_file("nbd://host/x").is_none());
    }
}
