//! Disk store: the bytes of a disk in a regular file, which is locked against other processes.
//!
//! The range between the end of the file and the end of the disk reads as zeros. A write there
//! extends the file. A qcow2 file grows in this way under QEMU's own driver, for which the disk is
//! larger than the file.
//!
//! The lock is an exclusive lock of the open file description (fcntl(2), `F_OFD_SETLK`) over the
//! whole file. QEMU locks bytes of its images in the same way, so neither opens a file that the
//! other has open. The kernel releases the lock when the process ends, however it ends.

use std::fmt::Debug;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// How long to wait for a lock: the kernel may take a moment to remove a killed owner.
const LOCK_WAIT: Duration = Duration::from_secs(5);
/// The interval between attempts to take the lock.
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(5);
/// The number of zeros written at a time if the file system can't make them by itself.
const ZERO_BUFFER_BYTES: usize = 64 << 10;

/// The bytes of a disk.
pub trait DiskStore: Debug + Send + Sync {
    /// Reads bytes. Bytes that were never written are zeros.
    ///
    /// # Errors
    /// The error of the system.
    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()>;

    /// Writes bytes.
    ///
    /// # Errors
    /// The error of the system. A part may have been written.
    fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()>;

    /// Writes zeros. If they may be a `hole` and holes are supported, they take no space.
    ///
    /// # Errors
    /// The error of the system. A part of the zeros may have been written.
    fn zero_range(&self, at: u64, length: u64, hole: bool) -> io::Result<()>;

    /// Makes a hole, which reads as zeros. Returns `false`, and changes nothing, if holes are not
    /// supported.
    ///
    /// # Errors
    /// The error of the system. A part of the hole may have been made.
    fn punch_hole(&self, at: u64, length: u64) -> io::Result<bool>;

    /// Makes all earlier writes durable: they survive a loss of power.
    ///
    /// # Errors
    /// The error of the system.
    fn sync_data(&self) -> io::Result<()>;

    /// The first range at or after `from` that may contain other bytes than zeros. `None` if there
    /// is none.
    ///
    /// # Errors
    /// The error of the system.
    fn next_data_range(&self, from: u64) -> io::Result<Option<Range<u64>>>;
}

impl<S: DiskStore + ?Sized> DiskStore for Arc<S> {
    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        (**self).read_at(at, into)
    }

    fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        (**self).write_at(at, bytes)
    }

    fn zero_range(&self, at: u64, length: u64, hole: bool) -> io::Result<()> {
        (**self).zero_range(at, length, hole)
    }

    fn punch_hole(&self, at: u64, length: u64) -> io::Result<bool> {
        (**self).punch_hole(at, length)
    }

    fn sync_data(&self) -> io::Result<()> {
        (**self).sync_data()
    }

    fn next_data_range(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        (**self).next_data_range(from)
    }
}

/// Why a file can't be used as a disk.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The file can't be opened or created.
    #[error("{path} can't be opened for reading and writing")]
    Open {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The path names a directory or a device.
    #[error("{path} is no regular file: give the disk as a file, raw or qcow2")]
    NotRegular {
        /// The path.
        path: PathBuf,
    },
    /// Another process has the file open.
    #[error("{path} is in use by another process: stop the VM, or the Firn, that has it open")]
    InUse {
        /// The file.
        path: PathBuf,
    },
}

/// The identity of a file, independent of its path (stat(2), `st_dev` and `st_ino`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskFileId {
    /// The device number of the file system.
    pub device: u64,
    /// The inode number.
    pub inode: u64,
}

/// A disk store in a file.
#[derive(Debug)]
pub struct FileStore {
    file: File,
}

impl FileStore {
    /// Opens a disk's file and locks it.
    ///
    /// # Errors
    /// If it is no regular file, can't be opened, or is in use.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        Self::open_with(OpenOptions::new().read(true).write(true), path)
    }

    /// Creates a sparse file of `length` bytes, accessible only by its owner. A standby begins with
    /// it.
    ///
    /// # Errors
    /// If the file exists already, or can't be created.
    pub fn create(path: &Path, length: u64) -> Result<Self, StoreError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let store = Self::open_with(&options, path)?;
        let opened = |source| StoreError::Open { path: path.to_owned(), source };
        store.file.set_len(length).map_err(opened)?;
        Ok(store)
    }

    /// The identity of the file.
    ///
    /// # Errors
    /// The error of the system.
    pub fn file_id(&self) -> io::Result<DiskFileId> {
        let found = self.file.metadata()?;
        Ok(DiskFileId { device: found.dev(), inode: found.ino() })
    }

    /// The length of the file in bytes.
    ///
    /// # Errors
    /// The error of the system.
    pub fn length(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn open_with(options: &OpenOptions, path: &Path) -> Result<Self, StoreError> {
        let opened = |source| StoreError::Open { path: path.to_owned(), source };
        // Opening a device or a FIFO could block or have side effects.
        if path.exists() && !path.metadata().map_err(opened)?.is_file() {
            return Err(StoreError::NotRegular { path: path.to_owned() });
        }
        let file = options.open(path).map_err(opened)?;
        // The path may name something else by now.
        if !file.metadata().map_err(opened)?.is_file() {
            return Err(StoreError::NotRegular { path: path.to_owned() });
        }
        match lock_file(&file).map_err(opened)? {
            true => Ok(Self { file }),
            false => Err(StoreError::InUse { path: path.to_owned() }),
        }
    }

    fn write_zeros(&self, at: u64, length: u64) -> io::Result<()> {
        let zeros = [0; ZERO_BUFFER_BYTES];
        for from in (at..at + length).step_by(ZERO_BUFFER_BYTES) {
            let count = (at + length - from).min(ZERO_BUFFER_BYTES as u64);
            self.file.write_all_at(&zeros[..count as usize], from)?;
        }
        Ok(())
    }
}

impl DiskStore for FileStore {
    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        firn_fault::pass_io_point("disk.read")?;
        let mut done = 0;
        while done < into.len() {
            match self.file.read_at(&mut into[done..], at + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        into[done..].fill(0);
        Ok(())
    }

    fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        firn_fault::pass_io_point("disk.write")?;
        self.file.write_all_at(bytes, at)
    }

    fn zero_range(&self, at: u64, length: u64, hole: bool) -> io::Result<()> {
        if hole && self.punch_hole(at, length)? {
            return Ok(());
        }
        match accept_unsupported(fallocate(&self.file, FallocateFlags::ZERO_RANGE, at, length))? {
            true => Ok(()),
            false => self.write_zeros(at, length),
        }
    }

    fn punch_hole(&self, at: u64, length: u64) -> io::Result<bool> {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        accept_unsupported(fallocate(&self.file, hole, at, length))
    }

    fn sync_data(&self) -> io::Result<()> {
        firn_fault::pass_io_point("disk.sync")?;
        self.file.sync_data()
    }

    fn next_data_range(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        // No other code uses the file position, which this call changes.
        match seek(&self.file, SeekFrom::Data(from)) {
            Ok(start) => Ok(Some(start..seek(&self.file, SeekFrom::Hole(start))?)),
            Err(rustix::io::Errno::NXIO) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Accepts that the file system does not support an operation: `true` if the operation was done,
/// `false` if it is not supported, and any other error as it is.
fn accept_unsupported(result: rustix::io::Result<()>) -> io::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::OPNOTSUPP) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

fn lock_file(file: &File) -> io::Result<bool> {
    let all = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    let since = Instant::now();
    loop {
        match fcntl(file, FcntlArg::F_OFD_SETLK(&all)) {
            Ok(_) => return Ok(true),
            Err(Errno::EAGAIN | Errno::EACCES) if since.elapsed() < LOCK_WAIT => {
                thread::sleep(LOCK_RETRY_INTERVAL);
            }
            Err(Errno::EAGAIN | Errno::EACCES) => return Ok(false),
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_reads_as_zeros_beyond_its_end_and_grows() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::create(&dir.path().join("disk"), 10).unwrap();
        let mut bytes = [7; 8];
        store.read_at(6, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 8]);
        store.write_at(100, b"abc").unwrap();
        store.read_at(98, &mut bytes).unwrap();
        assert_eq!(&bytes, b"\0\0abc\0\0\0");
        assert_eq!(store.length().unwrap(), 103);
        store.zero_range(100, 50, true).unwrap();
        assert_eq!(store.length().unwrap(), 103);
        store.zero_range(100, 50, false).unwrap();
        store.read_at(98, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 8]);
    }

    #[test]
    fn holes_are_known_and_made() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::create(&dir.path().join("disk"), 4 << 20).unwrap();
        assert_eq!(store.next_data_range(0).unwrap(), None);
        store.write_at(1 << 20, &[1; 1 << 20]).unwrap();
        assert_eq!(store.next_data_range(0).unwrap(), Some(1 << 20..2 << 20));
        assert_eq!(
            store.next_data_range((1 << 20) + 4096).unwrap(),
            Some((1 << 20) + 4096..2 << 20)
        );
        assert!(store.punch_hole(1 << 20, 1 << 19).unwrap());
        assert_eq!(store.next_data_range(0).unwrap(), Some((1 << 20) + (1 << 19)..2 << 20));
        store.write_zeros(1 << 20, 100_000).unwrap();
        let mut bytes = vec![1; 1 << 19];
        store.read_at(1 << 20, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 0));
    }

    #[test]
    fn a_path_that_is_no_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let refused = FileStore::open(dir.path()).unwrap_err();
        assert!(matches!(refused, StoreError::NotRegular { .. }), "{refused}");
        let device = FileStore::open(Path::new("/dev/null")).unwrap_err();
        assert!(matches!(device, StoreError::NotRegular { .. }), "{device}");
        let none = FileStore::open(&dir.path().join("none")).unwrap_err();
        assert!(matches!(none, StoreError::Open { .. }), "{none}");
    }
}
