//! Backup: receives a VM's epochs into memory that a hypervisor can map.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use firn_cluster::epoch::EpochProgress;
use firn_types::{PAGE_SIZE, Page, RamRegion, RegionMap};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use thiserror::Error;

use crate::endpoint::EpochStream;
use crate::protection_end::ProtectionEnd;
use crate::standby::{StandbyRam, StandbyVm, StandbyVmError};
use crate::wire::{EpochMessage, EpochReader, EpochStreamError, EpochWriter, PrimaryHello};

/// The number of bytes read from the connection at a time.
const READ_BYTES: usize = 1 << 20;

/// How long a peer may take after connecting to send its hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Why no more epochs are received.
#[derive(Debug, Error)]
pub enum BackupReceiveError {
    /// The connection ended, or a message is damaged.
    #[error(transparent)]
    Wire(#[from] EpochStreamError),
    /// The standby can't store a message.
    #[error(transparent)]
    Standby(#[from] StandbyVmError),
    /// The first message is not a hello.
    #[error("protocol error: the peer sent no hello first, so it is no primary")]
    NoHello,
    /// The primary continues alone, and the backup confirmed that the VM does not run here.
    #[error("its primary has released it, and continues alone")]
    Released,
    /// The primary reported how the protection ended.
    #[error("{0}")]
    Ended(ProtectionEnd),
    /// The primary requested to continue alone, and got no confirmation: the VM runs here.
    #[error("its primary requested to continue alone, but the VM is about to run here")]
    TakenUp,
}

/// A VM's memory in files, one for each region.
#[derive(Debug)]
pub struct RamFiles {
    files: Vec<(RamRegion, File)>,
}

impl RamFiles {
    /// Creates files without a name, all zeros.
    ///
    /// # Errors
    /// If the system can't create them.
    pub fn create(regions: &RegionMap) -> io::Result<Self> {
        let file = |region: &RamRegion| {
            let file = memfd_create("firn-ram", MemfdFlags::CLOEXEC)?;
            ftruncate(&file, region.byte_len())?;
            Ok((region.clone(), File::from(file)))
        };
        Ok(Self { files: regions.regions().iter().map(file).collect::<io::Result<_>>()? })
    }

    /// Uses these files, each with the name of its region. `None` if a region has none.
    pub fn from_named_files(regions: &RegionMap, mut files: BTreeMap<&str, File>) -> Option<Self> {
        let file = |region: &RamRegion| Some((region.clone(), files.remove(region.id.as_str())?));
        Some(Self { files: regions.regions().iter().map(file).collect::<Option<_>>()? })
    }

    /// The files, in the order of the regions.
    pub fn files(&self) -> impl Iterator<Item = &File> {
        self.files.iter().map(|(_, file)| file)
    }
}

impl StandbyRam for RamFiles {
    fn write_bytes(&mut self, page: Page, at: usize, bytes: &[u8]) -> io::Result<()> {
        let found = self.files.iter().find(|(region, _)| region.page_range().contains(&page));
        let (region, file) = found.ok_or(io::ErrorKind::NotFound)?;
        let offset = region.offset_of(page) + at as u64;
        match is_page_of_zeros(bytes) {
            // Memory that the guest gave back at the primary takes none here either.
            true => Ok(fallocate(file, PUNCH, offset, bytes.len() as u64)?),
            false => file.write_all_at(bytes, offset),
        }
    }
}

/// Makes a hole in a file, which keeps its size.
const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);

fn is_page_of_zeros(bytes: &[u8]) -> bool {
    static ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];
    bytes == ZEROS
}

/// The receiving end of a connection from a primary.
pub struct BackupReceiver {
    reader: EpochReader<BufReader<EpochStream>>,
    writer: EpochWriter<BufWriter<EpochStream>>,
}

impl BackupReceiver {
    /// Waits for the hello of a primary.
    ///
    /// # Errors
    /// If the peer sends no hello in time.
    pub fn accept_hello(stream: &EpochStream) -> Result<(Self, PrimaryHello), BackupReceiveError> {
        let from =
            BufReader::with_capacity(READ_BYTES, stream.try_clone().map_err(EpochStreamError::Io)?);
        let to = BufWriter::new(stream.try_clone().map_err(EpochStreamError::Io)?);
        let mut receiver = Self { reader: EpochReader::new(from), writer: EpochWriter::new(to) };
        stream.set_read_timeout(Some(HELLO_TIMEOUT)).map_err(EpochStreamError::Io)?;
        let first = receiver.reader.read_message()?;
        stream.set_read_timeout(None).map_err(EpochStreamError::Io)?;
        match first {
            EpochMessage::Hello(hello) => Ok((receiver, *hello)),
            _ => Err(BackupReceiveError::NoHello),
        }
    }

    /// Receives epochs until the connection ends, which is always an error. Committed epochs remain
    /// committed.
    ///
    /// `report_progress` is called with the progress after each epoch. `record_end` is called with
    /// the end that the primary reports, and returns whether it is recorded. After a release, or
    /// any other intended end, the standby must never be run.
    pub fn receive_epochs<R: StandbyRam>(
        &mut self,
        standby: &mut StandbyVm<R>,
        report_progress: &mut dyn FnMut(EpochProgress),
        record_end: &mut dyn FnMut(&ProtectionEnd) -> bool,
    ) -> BackupReceiveError {
        loop {
            if let Err(error) = self.receive_message(standby, report_progress, record_end) {
                if let BackupReceiveError::Standby(refusal) = &error {
                    // The primary may have disconnected.
                    let _ = self.writer.write_refusal(&refusal.to_string());
                }
                return error;
            }
        }
    }

    /// Confirms a release. The caller has recorded before that the standby is never run.
    fn confirm_release(&mut self, agrees: bool) -> BackupReceiveError {
        match agrees {
            false => BackupReceiveError::TakenUp,
            true => self
                .writer
                .write_release()
                .map_or_else(Into::into, |()| BackupReceiveError::Released),
        }
    }

    /// Confirms the primary's end. The caller has recorded it before.
    fn confirm_end(&mut self, end: ProtectionEnd, is_recorded: bool) -> BackupReceiveError {
        match is_recorded {
            false => BackupReceiveError::TakenUp,
            true => self
                .writer
                .write_end_recorded()
                .map_or_else(Into::into, |()| BackupReceiveError::Ended(end)),
        }
    }

    /// Reports to a primary why the VM is never run here.
    pub fn send_decline(&mut self, why: &str) {
        // The primary may have disconnected.
        let _ = self.writer.write_decline(why);
    }

    /// Reports to a primary why its epochs are refused.
    pub fn send_refusal(&mut self, why: &str) {
        // The primary may have disconnected.
        let _ = self.writer.write_refusal(why);
    }

    fn receive_message<R: StandbyRam>(
        &mut self,
        standby: &mut StandbyVm<R>,
        on_progress: &mut dyn FnMut(EpochProgress),
        ends: &mut dyn FnMut(&ProtectionEnd) -> bool,
    ) -> Result<(), BackupReceiveError> {
        let message = self.reader.read_message()?;
        let message = match message {
            EpochMessage::Release => {
                return Err(self.confirm_release(ends(&ProtectionEnd::Released)));
            }
            EpochMessage::ProtectionEnd(end) => {
                let is_recorded = ends(&end);
                return Err(self.confirm_end(end, is_recorded));
            }
            message => message,
        };
        if let Some(progress) = standby.handle_message(message)? {
            self.writer.write_progress(progress)?;
            on_progress(progress);
        }
        Ok(())
    }
}
