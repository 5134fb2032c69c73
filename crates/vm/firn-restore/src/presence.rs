//! Presence file: the settled pages, recorded for a successor.
//!
//! If Firn is killed, its successor must know which pages no longer come from the image. The RAM
//! file shows most of them: a page with memory behind it was installed completely. It does not show
//! the pages that the guest gave back: they are holes like those that were never installed, but
//! must read as zeros. So the settled set is kept in a small file in the runtime directory (tmpfs),
//! which outlives the process:
//!
//! ```text
//!   0            8         16          24
//!   | "firnpres" | pages   | word 0    | word 1 ...      little-endian; bit n of word w: page 64 w + n is settled
//! ```
//!
//! | bit | memory behind the page | the page is |
//! |---|---|---|
//! | any | yes | present |
//! | set | no | given back: zeros |
//! | clear | no | still in the image |
//!
//! A bit is set after its page is installed, never before: a page that was decided on but not
//! installed when Firn died comes from the image again. Pages given back are recorded before
//! anything else is answered. The kernel resumes the hypervisor as soon as the event is *read*. So
//! if Firn dies in the microseconds between, a page that the guest gave back has its old contents
//! again; the guest may not read it again without initializing it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use crate::error::RestoreError;
use crate::server::SettledPages;

const MAGIC: &[u8; 8] = b"firnpres";
const HEADER_BYTES: u64 = 16;

/// The file from which a successor learns which pages are settled.
#[derive(Debug)]
pub struct PresenceFile {
    path: PathBuf,
    file: File,
    pages: u32,
    words: Vec<u64>,
    scratch: Mutex<WriteBuffers>,
}

#[derive(Debug, Default)]
struct WriteBuffers {
    changed: Vec<(u32, u64)>,
    bytes: Vec<u8>,
}

impl PresenceFile {
    /// A new file for a VM with `pages` pages, with nothing settled. Replaces an existing file.
    ///
    /// # Errors
    /// If it can't be made.
    pub fn create(path: &Path, pages: u32) -> Result<Self, RestoreError> {
        let failed = |source| presence_error("create", path, source);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true).mode(0o600);
        let file = options.open(path).map_err(failed)?;
        let mut header = MAGIC.to_vec();
        header.extend(u64::from(pages).to_le_bytes());
        let bytes = HEADER_BYTES + words_for(pages) as u64 * 8;
        file.set_len(bytes).map_err(failed)?;
        // Later writes must not fail for want of space.
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) | Err(Errno::OPNOTSUPP) => {}
            Err(errno) => return Err(failed(errno.into())),
        }
        file.write_all_at(&header, 0).map_err(failed)?;
        Ok(Self::from_parts(path, file, pages, Vec::new()))
    }

    /// The file that a dead Firn process left.
    ///
    /// # Errors
    /// If it can't be read, or is not of a VM with `pages` pages.
    pub fn open(path: &Path, pages: u32) -> Result<Self, RestoreError> {
        let failed = |source| presence_error("read", path, source);
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(failed)?;
        let mut bytes = vec![0; HEADER_BYTES as usize + words_for(pages) * 8];
        let whole = match file.read_exact_at(&mut bytes, 0) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => false,
            other => other.map(|()| true).map_err(failed)?,
        };
        let (header, words) = bytes.split_at(HEADER_BYTES as usize);
        if !whole || header[..8] != *MAGIC || header[8..] != u64::from(pages).to_le_bytes() {
            return Err(RestoreError::ForeignPresence { path: path.to_owned(), pages });
        }
        let words = words.chunks_exact(8).map(parse_word).collect();
        Ok(Self::from_parts(path, file, pages, words))
    }

    fn from_parts(path: &Path, file: File, pages: u32, words: Vec<u64>) -> Self {
        Self { path: path.to_owned(), file, pages, words, scratch: Mutex::default() }
    }

    /// The number of pages of the VM.
    pub fn page_count(&self) -> u32 {
        self.pages
    }

    /// The words that the file contained when it was opened; empty for a new file.
    pub(crate) fn words(&self) -> &[u64] {
        &self.words
    }

    /// Writes the words that `take` appends: those that changed since the last call.
    pub(crate) fn write_words(
        &self,
        take: impl FnOnce(&mut Vec<(u32, u64)>),
    ) -> Result<(), RestoreError> {
        // Locked while writing: words must reach the file in the order in which they changed.
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let WriteBuffers { changed, bytes } = &mut *scratch;
        // Words of an attempt that failed may be left: those taken now come after them.
        take(changed);
        for run in changed.chunk_by(|(a, _), (b, _)| a + 1 == *b) {
            bytes.clear();
            bytes.extend(run.iter().flat_map(|(_, word)| word.to_le_bytes()));
            let offset = HEADER_BYTES + u64::from(run[0].0) * 8;
            let written = self.file.write_all_at(bytes, offset);
            written.map_err(|source| presence_error("write", &self.path, source))?;
        }
        changed.clear();
        Ok(())
    }

    /// Takes the changed words of a settled set, for [`Self::write_words`].
    pub(crate) fn take_changes(settled: &mut SettledPages, out: &mut Vec<(u32, u64)>) {
        settled.take_changed(out);
    }
}

fn words_for(pages: u32) -> usize {
    // The last memory block may reach past the last page.
    (pages as usize).next_multiple_of(16).div_ceil(64)
}

fn parse_word(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
}

fn presence_error(step: &'static str, path: &Path, source: io::Error) -> RestoreError {
    RestoreError::Presence { step, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_types::{BlockSize, Page, RegionMap};

    fn settled(pages: u32) -> SettledPages {
        let ram = RegionMap::lay_out([("ram", u64::from(pages) * 4096)]).unwrap();
        SettledPages::new(&ram, BlockSize::new(16).unwrap())
    }

    #[test]
    fn a_successor_reads_the_presence_map() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("presence");
        let presence = PresenceFile::create(&path, 1000).unwrap();
        let mut mine = settled(1000);
        for page in [0, 63, 64, 500, 999] {
            mine.insert(Page(page));
            presence.write_words(|out| PresenceFile::take_changes(&mut mine, out)).unwrap();
        }
        let mut theirs = settled(1000);
        theirs.merge_words(PresenceFile::open(&path, 1000).unwrap().words());
        assert_eq!(mine.words(), theirs.words());
    }

    #[test]
    fn a_presence_map_of_another_vm_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("presence");
        let error = |pages| PresenceFile::open(&path, pages).unwrap_err().to_string();
        assert!(error(1000).starts_with("cannot read"));
        drop(PresenceFile::create(&path, 1000).unwrap());
        assert!(error(1001).ends_with("of a VM with 1001 pages"));
        std::fs::write(&path, b"firn").unwrap();
        assert!(error(1000).ends_with("of a VM with 1000 pages"));
    }

    #[test]
    fn it_is_for_its_owner_alone() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("presence");
        drop(PresenceFile::create(&path, 10).unwrap());
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    }
}
