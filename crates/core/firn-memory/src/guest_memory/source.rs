//! The source of a region's bytes: a RAM file, or private memory. Offsets count from the start of
//! the region.

use std::fs::File;
use std::io;
use std::ops::{ControlFlow, Range};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use firn_types::{HostVirt, PAGE_SIZE};
use rustix::fs::{FallocateFlags, OFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;

use crate::process::{Process, ProcessError};
use crate::process_memory;
use crate::sys::pagemap::Pagemap;
use crate::sys::uffd::AddressSpan;

/// The source of a region's bytes.
#[derive(Debug)]
pub(super) enum RamSource {
    File(RamFile),
    Private(PrivateRam),
    Template(TemplateRam),
}

/// A private mapping of a template. A page is the template's until the guest writes it; then it is
/// private memory.
#[derive(Debug)]
pub(super) struct TemplateRam {
    pub(super) own: PrivateRam,
    pub(super) template: RamFile,
}

/// Shared memory: a file that Firn has opened too.
#[derive(Debug)]
pub(super) struct RamFile {
    pub(super) file: File,
    /// The offset of the region in the file, in bytes.
    pub(super) start: u64,
    pub(super) inode: u64,
}

/// Private anonymous memory of the hypervisor.
#[derive(Debug)]
pub(super) struct PrivateRam {
    process: Arc<Process>,
    pagemap: Pagemap,
    hva: HostVirt,
}

impl RamSource {
    /// The offset in a file at which the region starts; 0 for private memory.
    pub(super) fn file_start(&self) -> u64 {
        match self {
            Self::File(file) | Self::Template(TemplateRam { template: file, .. }) => file.start,
            Self::Private(_) => 0,
        }
    }

    pub(super) fn read_bytes(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        match self {
            Self::File(file) => file.file.read_exact_at(out, file.start + offset),
            Self::Private(private) => private.read_bytes(offset, out),
            Self::Template(ram) => ram.read_bytes(offset, out),
        }
    }

    /// The first run of backed bytes, in whole pages.
    pub(super) fn first_run(&self, part: Range<u64>) -> io::Result<Option<Range<u64>>> {
        match self {
            Self::File(file) => file.first_run(part),
            Self::Private(private) => private.first_run(part),
            Self::Template(ram) => ram.first_run(part),
        }
    }

    /// Whether no byte of a part was given back: see [`super::GuestMemory::has_kept`].
    pub(super) fn has_kept(&self, part: Range<u64>) -> io::Result<bool> {
        match self {
            Self::File(file) => Ok(file.first_run(part.clone())? == Some(part)),
            Self::Private(private) | Self::Template(TemplateRam { own: private, .. }) => {
                let start = private.hva.0 + part.start;
                private.pagemap.are_protected(AddressSpan { start, len: part.end - part.start })
            }
        }
    }

    pub(super) fn punch_out(&self, offset: u64, len: u64) -> io::Result<()> {
        match self {
            Self::File(file) => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                Ok(fallocate(&file.file, flags, file.start + offset, len)?)
            }
            Self::Private(_) | Self::Template(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

impl RamFile {
    pub(super) fn first_run(&self, part: Range<u64>) -> io::Result<Option<Range<u64>>> {
        let data = match seek(&self.file, SeekFrom::Data(self.start + part.start)) {
            Err(Errno::NXIO) => return Ok(None),
            other => other?,
        };
        if data >= self.start + part.end {
            return Ok(None);
        }
        let hole = seek(&self.file, SeekFrom::Hole(data))?.next_multiple_of(PAGE_SIZE as u64);
        Ok(Some(data - self.start..(hole - self.start).min(part.end)))
    }
}

impl TemplateRam {
    /// Reads through the hypervisor's page tables, which have the page that the guest has.
    fn read_bytes(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.own.read_runs(offset, out, |part| self.first_run(part))
    }

    /// The first run of bytes that the template or the hypervisor has.
    fn first_run(&self, part: Range<u64>) -> io::Result<Option<Range<u64>>> {
        let runs = [self.own.first_run(part.clone())?, self.template.first_run(part)?];
        Ok(runs.into_iter().flatten().min_by_key(|run| (run.start, std::cmp::Reverse(run.end))))
    }
}

impl PrivateRam {
    pub(super) fn open(process: Arc<Process>, hva: HostVirt) -> Result<Self, ProcessError> {
        let pagemap = process.open_file("pagemap", OFlags::RDONLY);
        let pagemap =
            pagemap.map_err(|error| process.operation_error("opening the pagemap", error))?;
        Ok(Self { process, pagemap: Pagemap::new(pagemap), hva })
    }

    /// Reads the backed pages. Pages that were never backed are not touched, and are zeros in
    /// `out`.
    fn read_bytes(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.read_runs(offset, out, |part| self.first_run(part))
    }

    /// Reads the pages of the runs that `first_run` finds; the others are not touched, and are zeros
    /// in `out`.
    fn read_runs(
        &self,
        offset: u64,
        out: &mut [u8],
        first_run: impl Fn(Range<u64>) -> io::Result<Option<Range<u64>>>,
    ) -> io::Result<()> {
        let end = offset + out.len() as u64;
        let mut at = offset;
        while let Some(run) = first_run(at..end)? {
            let (from, to) = ((run.start - offset) as usize, (run.end - offset) as usize);
            out[(at - offset) as usize..from].fill(0);
            let start = self.hva.offset_by(run.start);
            process_memory::read_memory(&self.process, start, &mut out[from..to])
                .map_err(io::Error::other)?;
            at = run.end;
        }
        out[(at - offset) as usize..].fill(0);
        Ok(())
    }

    pub(super) fn first_run(&self, part: Range<u64>) -> io::Result<Option<Range<u64>>> {
        let span = AddressSpan { start: self.hva.0 + part.start, len: part.end - part.start };
        let mut run: Option<Range<u64>> = None;
        self.pagemap.scan_present(span, true, |start, end| {
            let (start, end) = (start - self.hva.0, end - self.hva.0);
            match &mut run {
                None => run = Some(start..end),
                Some(run) if run.end == start => run.end = end,
                Some(_) => return ControlFlow::Break(()),
            }
            ControlFlow::Continue(())
        })?;
        Ok(run)
    }
}
