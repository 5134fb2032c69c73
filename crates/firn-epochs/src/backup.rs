//! Backup: receives a VM's epochs into memory that a hypervisor can map.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use firn_cluster::epoch::Progress;
use firn_types::{Page, RamRegion, RegionMap};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use thiserror::Error;

use crate::endpoint::Stream;
use crate::primary_end::PrimaryEnd;
use crate::standby::{Ram, Standby, StandbyError};
use crate::wire::{Hello, Message, Reader, WireError, Writer};

/// The number of bytes read from the connection at a time.
const READ_BYTES: usize = 1 << 20;

/// How long a peer may take after connecting to send its hello.
const HELLO_MAX: Duration = Duration::from_secs(10);

/// Why no more epochs are received.
#[derive(Debug, Error)]
pub enum BackupError {
    /// The connection ended, or a message is damaged.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The standby can't store a message.
    #[error(transparent)]
    Standby(#[from] StandbyError),
    /// The first message is not a hello.
    #[error("protocol error: the peer sent no hello first, so it is no primary")]
    NoHello,
    /// The primary continues alone, and the backup confirmed that the VM does not run here.
    #[error("its primary has released it, and continues alone")]
    Released,
    /// The primary reported how the protection ended.
    #[error("{0}")]
    Ended(PrimaryEnd),
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
            ftruncate(&file, region.bytes())?;
            Ok((region.clone(), File::from(file)))
        };
        Ok(Self { files: regions.regions().iter().map(file).collect::<io::Result<_>>()? })
    }

    /// Uses these files, each with the name of its region. `None` if a region has none.
    pub fn named(regions: &RegionMap, mut files: BTreeMap<&str, File>) -> Option<Self> {
        let file = |region: &RamRegion| Some((region.clone(), files.remove(region.id.as_str())?));
        Some(Self { files: regions.regions().iter().map(file).collect::<Option<_>>()? })
    }

    /// The files, in the order of the regions.
    pub fn files(&self) -> impl Iterator<Item = &File> {
        self.files.iter().map(|(_, file)| file)
    }
}

impl Ram for RamFiles {
    fn write(&mut self, page: Page, at: usize, bytes: &[u8]) -> io::Result<()> {
        let found = self.files.iter().find(|(region, _)| region.range().contains(&page));
        let (region, file) = found.ok_or(io::ErrorKind::NotFound)?;
        file.write_all_at(bytes, region.offset_of(page) + at as u64)
    }
}

/// The receiving end of a connection from a primary.
pub struct Receiver {
    reader: Reader<BufReader<Stream>>,
    writer: Writer<BufWriter<Stream>>,
}

impl Receiver {
    /// Waits for the hello of a primary.
    ///
    /// # Errors
    /// If the peer sends no hello in time.
    pub fn meet(stream: &Stream) -> Result<(Self, Hello), BackupError> {
        let from = BufReader::with_capacity(READ_BYTES, stream.try_clone().map_err(WireError::Io)?);
        let to = BufWriter::new(stream.try_clone().map_err(WireError::Io)?);
        let mut receiver = Self { reader: Reader::new(from), writer: Writer::new(to) };
        stream.set_patience(Some(HELLO_MAX)).map_err(WireError::Io)?;
        let first = receiver.reader.receive()?;
        stream.set_patience(None).map_err(WireError::Io)?;
        match first {
            Message::Hello(hello) => Ok((receiver, *hello)),
            _ => Err(BackupError::NoHello),
        }
    }

    /// Receives epochs until the connection ends, which is always an error. Committed epochs remain
    /// committed.
    ///
    /// `report_progress` is called with the progress after each epoch. `record_end` is called with
    /// the end that the primary reports, and returns whether it is recorded. After a release, or
    /// any other intended end, the standby must never be run.
    pub fn receive<R: Ram>(
        &mut self,
        standby: &mut Standby<R>,
        told: &mut dyn FnMut(Progress),
        ends: &mut dyn FnMut(&PrimaryEnd) -> bool,
    ) -> BackupError {
        loop {
            if let Err(error) = self.receive_one(standby, told, ends) {
                if let BackupError::Standby(refusal) = &error {
                    // The primary may have disconnected.
                    let _ = self.writer.refusal(&refusal.to_string());
                }
                return error;
            }
        }
    }

    /// Confirms a release. The caller has recorded before that the standby is never run.
    fn agree(&mut self, agrees: bool) -> BackupError {
        match agrees {
            false => BackupError::TakenUp,
            true => self.writer.release().map_or_else(Into::into, |()| BackupError::Released),
        }
    }

    /// Confirms the primary's end. The caller has recorded it before.
    fn note(&mut self, end: PrimaryEnd, is_noted: bool) -> BackupError {
        match is_noted {
            false => BackupError::TakenUp,
            true => self.writer.end_noted().map_or_else(Into::into, |()| BackupError::Ended(end)),
        }
    }

    /// Reports to a primary why the VM is never run here.
    pub fn decline(&mut self, why: &str) {
        // The primary may have disconnected.
        let _ = self.writer.decline(why);
    }

    /// Reports to a primary why its epochs are refused.
    pub fn refuse(&mut self, why: &str) {
        // The primary may have disconnected.
        let _ = self.writer.refusal(why);
    }

    fn receive_one<R: Ram>(
        &mut self,
        standby: &mut Standby<R>,
        told: &mut dyn FnMut(Progress),
        ends: &mut dyn FnMut(&PrimaryEnd) -> bool,
    ) -> Result<(), BackupError> {
        let message = self.reader.receive()?;
        let message = match message {
            Message::Release => return Err(self.agree(ends(&PrimaryEnd::Released))),
            Message::PrimaryEnd(end) => {
                let is_noted = ends(&end);
                return Err(self.note(end, is_noted));
            }
            message => message,
        };
        if let Some(progress) = standby.receive(message)? {
            self.writer.progress(progress)?;
            told(progress);
        }
        Ok(())
    }
}
