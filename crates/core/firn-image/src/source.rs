//! The file of an image, and reads of its parts.

use std::fs::File;
use std::io::{self, BufRead, IoSliceMut, Read};
use std::num::NonZero;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use firn_cache::CachedFile;
use firn_files::NotRegular;
use rustix::fs::{Advice, OFlags, fadvise, fcntl_setfl, fstatfs};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use twox_hash::XxHash3_64;

use crate::budget::MemoryBudget;
use crate::error::{ImageError, ImageFlaw};
use crate::footer::{FOOTER_BYTES, Footer, SectionKind, SectionLocation};
use crate::geometry::{Geometry, HEADER_BYTES};
use crate::header::Header;
use crate::keys::key_ring;
use crate::seal::{FileCipher, OpenSeal, SealSection};

/// The bytes at the end of a file that are read at once when it is opened: its footer, and, if they
/// are not larger than usual for an increment, its index and the sections before it. On a disk that
/// has to seek this costs as much as the footer alone.
const TAIL_BYTES: u64 = 64 << 10;

/// A frame whose window is larger than 8 MiB is refused: a decoder allocates a window before it
/// decodes. At the level at which sections are compressed, a window is no larger than half a
/// mebibyte.
const WINDOW_LOG_MAX: u32 = 23;

/// The file of an image.
pub(crate) struct ImageFile {
    /// Replaced when the file is opened again.
    open_file: RwLock<Arc<OpenFile>>,
    /// The end of the file, while it is being opened.
    tail: Vec<u8>,
    pub(crate) path: PathBuf,
    len: u64,
    /// The cipher and the key, if the image is sealed and its seal was opened.
    seal: Option<OpenSeal>,
}

/// The descriptors of a file.
struct OpenFile {
    file: File,
    /// The same file for callers that read from front to back: the kernel keeps its readahead state
    /// with the descriptor.
    in_order: OnceLock<File>,
    /// Device and inode, which identify the file, whatever its name.
    id: (u64, u64),
    is_in_memory: bool,
    /// If it is a file of the cache of objects: not all of its bytes are there.
    cached: Option<CachedFile>,
}

impl ImageFile {
    pub(crate) fn open(path: &Path) -> Result<Self, ImageError> {
        Self::open_from(path, path)
    }

    /// Opens the image that is called `path` by another path: that of a descriptor.
    pub(crate) fn open_from(path: &Path, from: &Path) -> Result<Self, ImageError> {
        let failed = |source| ImageError::Io { step: "open", path: path.to_owned(), source };
        firn_fault::pass_io_point("image.open").map_err(failed)?;
        let file = open_for_reading(from).map_err(|error| match NotRegular::find_in(&error) {
            Some(source) => ImageError::NotRegular { path: path.to_owned(), source },
            None => failed(error),
        })?;
        let metadata = file.metadata().map_err(failed)?;
        // The kernel reads mebibytes ahead of a few sequential reads, and continues from there
        // despite later advice.
        let _ = fadvise(&file, 0, None, Advice::Random);
        let is_in_memory = is_in_memory(&file);
        let id = (metadata.dev(), metadata.ino());
        let in_order = OnceLock::new();
        let cached = CachedFile::find(path, &file).map_err(failed)?;
        let open_file = OpenFile { file, in_order, id, is_in_memory, cached };
        let (path, len, tail) = (path.to_owned(), metadata.len(), Vec::new());
        let open_file = RwLock::new(Arc::new(open_file));
        Ok(Self { open_file, tail, path, len, seal: None })
    }

    fn open_file(&self) -> Arc<OpenFile> {
        Arc::clone(&self.open_file.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads through the descriptors of another opening of the same image from now on.
    pub(crate) fn replace_with(&self, other: &Self) {
        let (old, new) = (self.open_file(), other.open_file());
        if let (Some(old), Some(new)) = (&old.cached, &new.cached) {
            new.continue_for(old);
        }
        *self.open_file.write().unwrap_or_else(PoisonError::into_inner) = new;
    }

    /// Records that these bytes are wrong. Of an object in the cache, the next read fetches them once
    /// more. False if it is another file.
    pub(crate) fn report_wrong_bytes(&self, offset: u64, len: u64) -> bool {
        let open_file = self.open_file();
        let cached = open_file.cached.as_ref();
        cached.inspect(|cached| cached.report_wrong_bytes(offset, len)).is_some()
    }

    /// Requests ranges of an object that will be needed, without waiting for them.
    pub(crate) fn prefetch(&self, ranges: Vec<(u64, u64)>) -> Result<(), ImageError> {
        let failed = |source| ImageError::Io { step: "fetch", path: self.path.clone(), source };
        match &self.open_file().cached {
            Some(cached) => cached.prefetch(ranges).map_err(failed),
            None => Ok(()),
        }
    }

    /// Requests all of an object, without waiting for it.
    pub(crate) fn prefetch_all(&self) -> Result<(), ImageError> {
        self.prefetch(vec![(0, self.len)])
    }

    /// Whether bytes of the file have to be fetched from object storage, as far as is known.
    pub(crate) fn lacks_bytes(&self) -> bool {
        self.open_file().cached.as_ref().is_some_and(|cached| !cached.has_bytes(0, self.len))
    }

    /// Fetches all of an object that is missing in the cache.
    pub(crate) fn fetch_all(&self) -> Result<(), ImageError> {
        let failed = |source| ImageError::Io { step: "fetch", path: self.path.clone(), source };
        match &self.open_file().cached {
            Some(cached) => cached.fetch_all().map_err(failed),
            None => Ok(()),
        }
    }

    /// Another descriptor of the file.
    pub(crate) fn try_clone(&self) -> Result<File, ImageError> {
        let failed = |source| ImageError::Io { step: "duplicate", path: self.path.clone(), source };
        self.open_file().file.try_clone().map_err(failed)
    }

    /// Advises the kernel of the order in which the file is going to be read. If a file system
    /// ignores it, nothing is lost.
    pub(crate) fn advise_kernel(&self, advice: Advice) {
        let _ = fadvise(&self.open_file().file, 0, None, advice);
    }

    /// Reads the end of the file in advance, until [`Self::forget_tail`]. An error is ignored:
    /// these bytes may not be needed, and a later read of them reports it.
    pub(crate) fn read_tail(&mut self) {
        let mut tail = vec![0; self.len.min(TAIL_BYTES) as usize];
        let at = self.len - tail.len() as u64;
        if self.read_exact_at(&mut tail, at).is_ok() {
            self.tail = tail;
        }
    }

    /// Drops the end of the file that was read in advance.
    pub(crate) fn forget_tail(&mut self) {
        self.tail = Vec::new();
    }

    /// The given bytes, if they were read in advance: all of them, or nothing.
    fn cached_tail(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let at = offset.checked_sub(self.len - self.tail.len() as u64)? as usize;
        self.tail.get(at..at.checked_add(len)?).filter(|_| len > 0)
    }

    pub(crate) fn is_same_file(&self, other: &Self) -> bool {
        self.open_file().id == other.open_file().id
    }

    pub(crate) fn flaw_error(&self, flaw: ImageFlaw) -> ImageError {
        flaw.into_error(&self.path)
    }

    pub(crate) fn missing_section(&self, kind: SectionKind) -> ImageError {
        let offset = self.len.saturating_sub(FOOTER_BYTES);
        self.flaw_error(ImageFlaw::new(
            "footer",
            offset,
            format!("it lists no {}", kind.section_name()),
        ))
    }

    pub(crate) fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> Result<(), ImageError> {
        if let Some(ahead) = self.cached_tail(offset, bytes.len()) {
            bytes.copy_from_slice(ahead);
            return Ok(());
        }
        let open_file = self.open_file();
        self.read_exact_of(&open_file, (&open_file.file, false), bytes, offset)
    }

    /// As [`Self::read_exact_at`], for a caller that also needs the bytes that follow: the kernel
    /// reads ahead.
    pub(crate) fn read_exact_in_order(
        &self,
        bytes: &mut [u8],
        offset: u64,
    ) -> Result<(), ImageError> {
        let open_file = self.open_file();
        self.read_exact_of(&open_file, (open_file.sequential_file(), true), bytes, offset)
    }

    fn read_exact_of(
        &self,
        open_file: &OpenFile,
        (file, in_order): (&File, bool),
        bytes: &mut [u8],
        offset: u64,
    ) -> Result<(), ImageError> {
        let read = firn_fault::pass_io_point("image.read").and_then(|()| match &open_file.cached {
            None => file.read_exact_at(bytes, offset),
            Some(cached) => cached.read_exact_at(file, bytes, offset, in_order),
        });
        read.map_err(|source| ImageError::Read {
            path: self.path.clone(),
            offset,
            len: bytes.len(),
            source,
        })
    }

    /// Reads from the page cache and never waits. False if some of the bytes are not there: then
    /// the kernel is advised that they will be needed. File systems that do not support such reads
    /// (`RWF_NOWAIT`, preadv2(2)) never have anything, except those that have everything in memory.
    pub(crate) fn try_read_exact_at(
        &self,
        bytes: &mut [u8],
        offset: u64,
    ) -> Result<bool, ImageError> {
        let open_file = self.open_file();
        let is_there = |cached: &CachedFile| cached.has_bytes(offset, bytes.len() as u64);
        if !open_file.cached.as_ref().is_none_or(is_there) {
            return Ok(false);
        }
        if open_file.is_in_memory {
            return self.read_exact_at(bytes, offset).map(|()| true);
        }
        let len = bytes.len();
        let failed = |source| ImageError::Read { path: self.path.clone(), offset, len, source };
        firn_fault::pass_io_point("image.read").map_err(failed)?;
        let mut vector = [IoSliceMut::new(bytes)];
        match preadv2(&open_file.file, &mut vector, offset, ReadWriteFlags::NOWAIT) {
            Ok(read) if read == len => Ok(true),
            Ok(_) | Err(Errno::AGAIN | Errno::OPNOTSUPP | Errno::INTR) => {
                let _ =
                    fadvise(&open_file.file, offset, NonZero::new(len as u64), Advice::WillNeed);
                Ok(false)
            }
            Err(error) => Err(failed(error.into())),
        }
    }

    pub(crate) fn read_header(&self) -> Result<Header, ImageError> {
        self.check_len()?;
        let mut bytes = vec![0; HEADER_BYTES as usize];
        self.read_exact_at(&mut bytes, 0)?;
        Header::parse(&bytes).map_err(|flaw| self.flaw_error(flaw))
    }

    /// Reads the footer of a file whose blocks have these sizes.
    pub(crate) fn read_footer(&self, geometry: &Geometry) -> Result<Footer, ImageError> {
        self.check_len()?;
        let mut bytes = vec![0; FOOTER_BYTES as usize];
        let at = self.len - FOOTER_BYTES;
        self.read_exact_at(&mut bytes, at)?;
        Footer::parse(&bytes, geometry, self.len).map_err(|flaw| self.flaw_error(flaw.shift_by(at)))
    }

    /// Checks that a footer is of the same image as the header.
    pub(crate) fn check_pair(&self, header: &Header, footer: &Footer) -> Result<(), ImageError> {
        if (footer.identity, footer.version) == (header.identity, header.version) {
            return Ok(());
        }
        let problem = "it belongs to another image than the header";
        Err(self.flaw_error(ImageFlaw::new("footer", self.len - FOOTER_BYTES, problem)))
    }

    /// Gets the key of a sealed image, and checks the parts that are not encrypted.
    ///
    /// # Errors
    /// If the key is not here, or a part is not as it was sealed.
    pub(crate) fn open_seal(&mut self, header: &Header, footer: &Footer) -> Result<(), ImageError> {
        let Some((at, tag)) = footer.find_section(SectionKind::Seal).zip(footer.tag) else {
            return Ok(());
        };
        let (bytes, section) = self.read_seal(at)?;
        let key = key_ring()
            .find_key(section.key_id, &section.wraps)
            .map_err(|problem| ImageError::Locked { path: self.path.clone(), problem })?;
        let cipher = FileCipher::new(&key, &section.salt, header.identity)
            .map_err(|_| self.section_flaw(at, "there is no cipher".to_owned()))?;
        let parent = footer.find_section(SectionKind::Parent);
        let parent = parent.map(|at| self.read_stored(at)).transpose()?.unwrap_or_default();
        let (header, footer) = (header.encode(), footer.encode_without_tag(&header.geometry));
        if !cipher.has_clear_tag(&[&header, &parent, &bytes, &footer], &tag) {
            let problem = "header, parent, seal or footer is not as it was sealed";
            return Err(self.flaw_error(ImageFlaw::new(
                "footer",
                self.len - FOOTER_BYTES,
                problem,
            )));
        }
        let seal = crate::keys::ImageSeal { key, wraps: section.wraps };
        self.seal = Some(OpenSeal { cipher, seal });
        Ok(())
    }

    /// The seal section of a sealed image, as it is stored and parsed.
    pub(crate) fn read_seal(
        &self,
        at: &SectionLocation,
    ) -> Result<(Vec<u8>, SealSection), ImageError> {
        self.check_decoded_len(at, at.kind.bytes_max())?;
        if at.is_zstd {
            return Err(self.section_flaw(at, "it is compressed".to_owned()));
        }
        let bytes = self.read_stored(at)?;
        let section =
            SealSection::parse(&bytes).map_err(|flaw| self.flaw_error(flaw.shift_by(at.offset)))?;
        Ok((bytes, section))
    }

    /// The seal, if the image is sealed.
    pub(crate) fn seal(&self) -> Option<&OpenSeal> {
        self.seal.as_ref()
    }

    fn check_len(&self) -> Result<(), ImageError> {
        if self.len >= HEADER_BYTES + FOOTER_BYTES {
            return Ok(());
        }
        let problem = format!("{} bytes are too few for an image", self.len);
        Err(self.flaw_error(ImageFlaw::new("file", self.len, problem)))
    }

    pub(crate) fn parse_section<T>(
        &self,
        footer: &Footer,
        kind: SectionKind,
        budget: &mut MemoryBudget,
        parse: impl FnOnce(Vec<u8>, &mut MemoryBudget) -> Result<T, ImageFlaw>,
    ) -> Result<Option<T>, ImageError> {
        let Some(at) = footer.find_section(kind) else { return Ok(None) };
        let bytes = self.read_section(at, kind.bytes_max(), budget)?;
        parse(bytes, budget).map(Some).map_err(|flaw| self.flaw_error(flaw.shift_by(at.offset)))
    }

    /// The decoded bytes of a section. Its checksum was checked, and its memory was charged.
    pub(crate) fn read_section(
        &self,
        at: &SectionLocation,
        decoded_max: u64,
        budget: &mut MemoryBudget,
    ) -> Result<Vec<u8>, ImageError> {
        let stored = self.read_stored(at)?;
        self.check_decoded_len(at, decoded_max)?;
        budget
            .charge_section(at.kind, at.decoded_len)
            .map_err(|problem| self.section_flaw(at, problem))?;
        if !at.is_zstd {
            return Ok(stored);
        }
        inflate_section(&stored, at.decoded_len).ok_or_else(|| {
            self.section_flaw(at, format!("it does not make {} bytes", at.decoded_len))
        })
    }

    /// A reader for a section, to read it piece by piece. Its checksum was checked.
    pub(crate) fn section_reader(&self, at: &SectionLocation) -> Result<Box<dyn Read>, ImageError> {
        let stored = io::Cursor::new(self.read_stored(at)?);
        self.check_decoded_len(at, at.kind.bytes_max())?;
        if !at.is_zstd {
            return Ok(Box::new(stored));
        }
        match zstd_decoder(stored) {
            Ok(decoder) => Ok(Box::new(decoder)),
            Err(error) => Err(self.section_flaw(at, error.to_string())),
        }
    }

    fn check_decoded_len(&self, at: &SectionLocation, max: u64) -> Result<(), ImageError> {
        match at.decoded_len <= max {
            true => Ok(()),
            false => {
                Err(self.section_flaw(at, format!("{} bytes, at most {max} fit", at.decoded_len)))
            }
        }
    }

    pub(crate) fn section_flaw(&self, at: &SectionLocation, problem: String) -> ImageError {
        self.flaw_error(ImageFlaw::new(at.kind.section_name(), at.offset, problem))
    }

    /// The length of the file.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.len
    }

    /// A section as it was encoded, decrypted. Its checksum was checked.
    pub(crate) fn read_stored(&self, at: &SectionLocation) -> Result<Vec<u8>, ImageError> {
        let mut stored = self.read_checked(at)?;
        let seal = self.seal.as_ref().filter(|_| !at.kind.is_clear());
        match seal.is_none_or(|seal| seal.cipher.open_section(at.kind, &mut stored)) {
            true => Ok(stored),
            false => Err(self.section_flaw(at, "it is not as it was sealed".to_owned())),
        }
    }

    /// The bytes of a section as they are in the file. Their checksum was checked.
    pub(crate) fn read_checked(&self, at: &SectionLocation) -> Result<Vec<u8>, ImageError> {
        // The footer's own check bounds the length by that of the file.
        let mut stored = vec![0; at.stored_len as usize];
        self.read_exact_at(&mut stored, at.offset)?;
        let (found, expected) = (XxHash3_64::oneshot(&stored), at.checksum);
        if found == expected {
            return Ok(stored);
        }
        let problem = format!("checksum is {found:#018x} instead of {expected:#018x}");
        Err(self.flaw_error(ImageFlaw::new(at.kind.section_name(), at.offset, problem)))
    }

    /// Checks a section that is not needed yet, if there is one.
    pub(crate) fn check_section(
        &self,
        footer: &Footer,
        kind: SectionKind,
    ) -> Result<(), ImageError> {
        footer.find_section(kind).map_or(Ok(()), |at| self.read_stored(at).map(drop))
    }
}

impl OpenFile {
    fn sequential_file(&self) -> &File {
        if let Some(file) = self.in_order.get() {
            return file;
        }
        // By its descriptor: another file may have the name by now (proc_pid_fd(5)).
        let again = PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        match open_for_reading(&again) {
            Ok(file) => self.in_order.get_or_init(|| file),
            Err(_) => &self.file,
        }
    }
}

/// Opens a regular file, and makes the kernel not record its access time, which costs each read.
/// Only the file's owner may do that (open(2)); for other users it is recorded.
fn open_for_reading(path: &Path) -> io::Result<File> {
    let file = firn_files::open_input(path)?;
    let _ = fcntl_setfl(&file, OFlags::NOATIME);
    Ok(file)
}

/// Whether a file is on tmpfs or ramfs (their magic numbers: linux/magic.h).
fn is_in_memory(file: &File) -> bool {
    const TMPFS_MAGIC: u64 = 0x0102_1994;
    const RAMFS_MAGIC: u64 = 0x8584_58f6;
    fstatfs(file).is_ok_and(|it| [TMPFS_MAGIC, RAMFS_MAGIC].contains(&(it.f_type as u64)))
}

/// Decompresses to exactly `len` bytes, which the budget has. The kernel provides memory only for
/// bytes that are written.
pub(crate) fn inflate_section(stored: &[u8], len: u64) -> Option<Vec<u8>> {
    // One more byte, so that reading finds the end without growing the buffer.
    let mut out = Vec::with_capacity(usize::try_from(len).ok()?.checked_add(1)?);
    zstd_decoder(stored).ok()?.take(len + 1).read_to_end(&mut out).ok()?;
    (out.len() as u64 == len).then_some(out)
}

fn zstd_decoder<R: BufRead>(stored: R) -> io::Result<zstd::stream::read::Decoder<'static, R>> {
    let mut decoder = zstd::stream::read::Decoder::with_buffer(stored)?.single_frame();
    decoder.window_log_max(WINDOW_LOG_MAX)?;
    Ok(decoder)
}
