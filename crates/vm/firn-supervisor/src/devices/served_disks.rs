//! The disks of a VM that its supervisor serves, so that they belong to the VM's epochs
//! (`firn-disks`).
//!
//! ```text
//!   launch:     files locked, served on the VM's disks.sock; QEMU connects              journal: id, file, size
//!   successor:  the same files, once they are free; QEMU connects again, and repeats unanswered requests
//!   standby:    new files, empty except for the head of a qcow2 file; epochs are folded into them while QEMU has them open
//! ```
//!
//! A QEMU that waits for a migration does not trust what it has read of a qcow2 file: it reads the
//! file again before the VM runs (`qcow2_co_invalidate_cache`). So it can be started with a file
//! that has only a head, and everything else may change.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use firn_disks::nbd::{NbdExports, NbdServer};
use firn_disks::{DiskFileId, DiskStore, FileStore, LoggedDisk};
use firn_epochs::standby::DiskCopy;
use firn_epochs::wire::DiskHello;
use firn_vmm::Drive;
use firn_vmm::command_line::DiskPlan;

use crate::records::device_records::ServedDisk;
use crate::records::failure::{Failure, FailureContext, FailureKind};

/// The size of the part of a file that a QEMU reads when it starts.
const HEAD_BYTES: u64 = 4096;
/// The default for the bytes that a qcow2 file may have in addition to twice its disk's size.
const QCOW2_EXTRA_BYTES: u64 = 64 << 20;
/// Bytes of memory that a standby uses for a disk's changes before they are folded.
const FOLD_BYTES: usize = 64 << 20;
const QCOW2: &str = "qcow2";

/// All disks that are served, until the value is dropped.
#[derive(Default)]
pub(crate) struct ServedDisks {
    disks: Vec<(ServedDisk, Arc<LoggedDisk>)>,
    _server: Option<NbdServer>,
}

impl ServedDisks {
    /// Opens and serves the disks of a command line. Relative paths start in `directory`.
    pub(crate) fn open_planned(
        plans: &[DiskPlan],
        directory: &Path,
        socket: &Path,
    ) -> Result<Self, Failure> {
        let disk = |plan: &DiskPlan| {
            let file = directory.join(&plan.file);
            let size =
                file_size_max(plan, &file).map_err(|failure| while_opening(failure, &plan.id))?;
            Ok(ServedDisk { id: plan.id.clone(), file, size, is: None })
        };
        let disks: Vec<_> = plans.iter().map(disk).collect::<Result<_, Failure>>()?;
        Self::reopen_disks(&disks, socket)
    }

    /// Opens and serves disks that a supervisor served before.
    pub(crate) fn reopen_disks(disks: &[ServedDisk], socket: &Path) -> Result<Self, Failure> {
        let open = |disk: &ServedDisk| {
            let (opened, is) = LoggedDisk::open_known(&disk.file, Some(disk.size), disk.is)
                .while_doing_as(FailureKind::Usage, format!("opening the disk {}", disk.id))?;
            Ok((ServedDisk { is: Some(is), ..disk.clone() }, Arc::new(opened)))
        };
        Self::serve_disks(disks.iter().map(open).collect::<Result<_, Failure>>()?, socket)
    }

    fn serve_disks(
        disks: Vec<(ServedDisk, Arc<LoggedDisk>)>,
        socket: &Path,
    ) -> Result<Self, Failure> {
        if disks.is_empty() {
            return Ok(Self::default());
        }
        let exports: NbdExports =
            disks.iter().map(|(disk, open)| (disk.id.clone(), Arc::clone(open))).collect();
        let server = NbdServer::start(socket, exports).while_doing("serving the VM's disks")?;
        Ok(Self { disks, _server: Some(server) })
    }

    /// The disks, as the journal records them.
    pub(crate) fn disk_records(&self) -> Vec<ServedDisk> {
        self.disks.iter().map(|(disk, _)| disk.clone()).collect()
    }

    /// Whether a drive is one of the disks: by its id, or by the name of its node.
    pub(crate) fn contains_drive(&self, drive: &Drive) -> bool {
        self.disks.iter().any(|(it, _)| it.id == drive.name || it.id == drive.node)
    }

    /// The disk with this id.
    pub(crate) fn find_disk(&self, id: &str) -> Option<&Arc<LoggedDisk>> {
        self.disks.iter().find(|(it, _)| it.id == id).map(|(_, disk)| disk)
    }

    /// The description of the disk with this id, for the standby.
    pub(crate) fn disk_hello(&self, id: &str) -> Result<DiskHello, Failure> {
        let none =
            || Failure::new(FailureKind::Other, format!("Firn does not serve the disk {id}"));
        let disk = self.find_disk(id).ok_or_else(none)?;
        let mut head = vec![0; HEAD_BYTES.min(disk.size()) as usize];
        disk.read_at(0, &mut head).while_doing(format!("reading the disk {id}"))?;
        Ok(DiskHello { id: id.to_owned(), size: disk.size(), head })
    }

    /// Creates and serves new files for the disks of a primary's VM, in the primary's order.
    pub(crate) fn create_for_standby(
        plans: &[DiskPlan],
        hello: &[DiskHello],
        directory: &Path,
        socket: &Path,
    ) -> Result<(Self, Vec<DiskCopy>), Failure> {
        let are_planned = plans.len() == hello.len()
            && plans.iter().zip(hello).all(|(plan, hello)| plan.id == hello.id);
        if !are_planned {
            let text = "the VM's disks do not match its command line";
            return Err(Failure::new(FailureKind::Refused, text));
        }
        let made = NewDiskFiles::default();
        let (mut disks, mut copies) = (Vec::new(), Vec::new());
        for (plan, hello) in plans.iter().zip(hello) {
            let file = directory.join(&plan.file);
            let (store, is) = made.create_file(plan, hello, &file)?;
            let disk = LoggedDisk::new(Box::new(Arc::clone(&store)), hello.size);
            copies.push(DiskCopy::new(hello.size, store, FOLD_BYTES));
            disks.push((
                ServedDisk { id: hello.id.clone(), file, size: hello.size, is: Some(is) },
                Arc::new(disk),
            ));
        }
        let served = Self::serve_disks(disks, socket)?;
        made.keep_files();
        Ok((served, copies))
    }
}

/// New files that are removed when the value is dropped, unless they are kept.
#[derive(Default)]
struct NewDiskFiles(std::cell::RefCell<Vec<PathBuf>>);

impl NewDiskFiles {
    fn create_file(
        &self,
        plan: &DiskPlan,
        hello: &DiskHello,
        file: &Path,
    ) -> Result<(Arc<dyn DiskStore>, DiskFileId), Failure> {
        // A qcow2 file grows by itself.
        let length = if plan.format == QCOW2 { 0 } else { hello.size };
        let hint = || format!("`firn standby --disk {}=PATH` chooses another path", plan.id);
        let creating = format!("creating a file for the disk {}", plan.id);
        let store = FileStore::create(file, length)
            .while_doing_as(FailureKind::Refused, creating.clone())
            .map_err(|failure| failure.with_hint(hint()))?;
        self.0.borrow_mut().push(file.to_owned());
        let written = if plan.format == QCOW2 { store.write_at(0, &hello.head) } else { Ok(()) };
        let is = written.and_then(|()| store.file_id());
        let is =
            is.while_doing_as(FailureKind::Refused, creating).map_err(|it| it.with_hint(hint()))?;
        Ok((Arc::new(store), is))
    }

    fn keep_files(self) {
        self.0.borrow_mut().clear();
    }
}

impl Drop for NewDiskFiles {
    fn drop(&mut self) {
        // An error is ignored, because a failure is reported already.
        self.0.borrow().iter().for_each(|file| drop(std::fs::remove_file(file)));
    }
}

/// The maximum size that the file may ever have.
fn file_size_max(plan: &DiskPlan, file: &Path) -> Result<u64, Failure> {
    const EXAMINING: &str = "examining its file";
    let length = std::fs::metadata(file).while_doing_as(FailureKind::Usage, EXAMINING)?.len();
    let whole = |bytes: u64| bytes.next_multiple_of(1 << 16);
    match (plan.format == QCOW2, plan.size) {
        (true, Some(size)) => Ok(whole(size.max(length))),
        (true, None) => {
            let virtual_size = virtual_size(file).while_doing_as(FailureKind::Usage, EXAMINING)?;
            let size = virtual_size.saturating_mul(2).saturating_add(QCOW2_EXTRA_BYTES);
            Ok(whole(size.min(1 << 62).max(length)))
        }
        (false, None) if length % 512 == 0 => Ok(length),
        (false, None) => {
            let text = format!("{} has {length} bytes, not a multiple of 512", file.display());
            Err(Failure::new(FailureKind::Usage, text)
                .with_hint("make it longer: `truncate -s %512`"))
        }
        (false, Some(_)) => {
            let failure = Failure::new(FailureKind::Usage, "size= is for qcow2, whose file grows");
            Err(failure.with_hint("a raw disk is as large as its file"))
        }
    }
}

/// The virtual size of a qcow2 disk, in bytes (QEMU, `docs/interop/qcow2.txt`).
fn virtual_size(file: &Path) -> std::io::Result<u64> {
    let mut head = [0; 32];
    firn_files::open_disk(file)?.read_exact(&mut head)?;
    let size = *head[24..].first_chunk::<8>().unwrap_or(&[0; 8]);
    match head.starts_with(b"QFI\xfb") {
        true => Ok(u64::from_be_bytes(size)),
        false => Err(std::io::Error::other(format!("{} is no qcow2 file", file.display()))),
    }
}

fn while_opening(failure: Failure, id: &str) -> Failure {
    failure.while_doing(format!("opening the disk {id}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(file: &Path, format: &str, size: Option<u64>) -> DiskPlan {
        DiskPlan { id: "d".into(), file: file.to_owned(), format: format.to_owned(), size }
    }

    #[test]
    fn a_disk_is_as_large_as_its_file_may_be() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("disk");
        let write = |bytes: &[u8]| std::fs::write(&file, bytes).unwrap();
        let size = |format, said| super::file_size_max(&plan(&file, format, said), &file);
        assert!(size("raw", None).is_err(), "there is none");
        write(&[0; 1024]);
        assert_eq!(size("raw", None).unwrap(), 1024);
        assert!(size("raw", Some(4096)).is_err() && size("qcow2", None).is_err());
        write(&[0; 1000]);
        assert!(size("raw", None).unwrap_err().to_string().contains("1000 bytes"));
        let mut head = [&b"QFI\xfb\0\0\0\x03"[..], &[0; 16], &(1_u64 << 20).to_be_bytes()].concat();
        write(&head);
        assert_eq!(size("qcow2", None).unwrap(), (2 << 20) + QCOW2_EXTRA_BYTES);
        assert_eq!(size("qcow2", Some(1)).unwrap(), 1 << 16);
        head[24..].fill(0xff);
        write(&head);
        assert_eq!(size("qcow2", None).unwrap(), 1 << 62);
    }

    #[test]
    fn a_standby_has_new_files_of_its_own_or_none() {
        let dir = tempfile::tempdir().unwrap();
        let (one, other) = (dir.path().join("one"), dir.path().join("other"));
        std::fs::write(&other, "a user's").unwrap();
        let plans = [plan(&one, "raw", None), plan(&other, "raw", None)];
        let hello = |id: &str| DiskHello { id: id.into(), size: 4096, head: vec![1] };
        let socket = dir.path().join("socket");
        let standby = |count: usize, id: &str| {
            let hello = vec![hello(id); count];
            ServedDisks::create_for_standby(&plans[..count], &hello, dir.path(), &socket)
        };
        let refused = standby(2, "d").err().unwrap();
        assert!(refused.to_string().contains("other"), "{refused}");
        assert!(!one.exists(), "nothing is left");
        assert_eq!(std::fs::read(&other).unwrap(), b"a user's");
        assert!(standby(1, "e").is_err());
        let (served, copies) = standby(1, "d").unwrap();
        assert_eq!((served.disk_records().len(), copies.len()), (1, 1));
        assert!(
            one.exists() && ServedDisks::reopen_disks(&served.disk_records(), &socket).is_err(),
            "it is locked"
        );
        let list = served.disk_records();
        // Both have the file open.
        drop((served, copies));
        assert_eq!(ServedDisks::reopen_disks(&list, &socket).unwrap().disk_records(), list);
        std::fs::copy(&one, dir.path().join("copy")).unwrap();
        std::fs::rename(dir.path().join("copy"), &one).unwrap();
        let refused = ServedDisks::reopen_disks(&list, &socket).err().unwrap();
        assert!(refused.to_string().contains("another file"), "{refused}");
    }
}
