//! A file that is memory shared with another process, as words that either process may change at
//! any time.

use std::fs::File;
use std::io;
use std::sync::atomic::AtomicU32;

use memmap2::{MmapOptions, MmapRaw};

/// A whole file, mapped to be read and written.
#[derive(Debug)]
pub struct SharedWords {
    mapping: MmapRaw,
}

impl SharedWords {
    /// Maps a file that is open for reading and writing.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn map_file(file: &File) -> io::Result<Self> {
        let len = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX);
        Ok(Self { mapping: MmapOptions::new().len(len).map_raw(file)? })
    }

    /// Its words. Trailing bytes that do not fill a word are left out.
    pub fn words(&self) -> &[AtomicU32] {
        let (start, words) =
            (self.mapping.as_mut_ptr().cast::<AtomicU32>(), self.mapping.len() / 4);
        // SAFETY: the mapping starts at a page, so it is aligned, is as long as that, and stays for
        // as long as `self` is borrowed. It is memory, initialized by the kernel, and other
        // processes may change atomics at any time. (A file that is truncated meanwhile ends the
        // process with SIGBUS; it does not make it continue with wrong data.)
        unsafe { std::slice::from_raw_parts(start, words) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn two_mappings_are_one_memory() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4099).unwrap();
        let (one, other) =
            (SharedWords::map_file(&file).unwrap(), SharedWords::map_file(&file).unwrap());
        one.words()[1023].store(7, Ordering::Release);
        assert_eq!(other.words()[1023].load(Ordering::Acquire), 7);
        assert_eq!(other.words().len(), 1024);
    }
}
