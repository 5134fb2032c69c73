//! Memory that the library allocates for areas.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::ptr::NonNull;

use rustix::fs::MemfdFlags;

use crate::error::Error;
use crate::span::{PAGE, PageSpan};
use crate::sys::mapping::OwnedMapping;

/// Pages that the application uses, and a second mapping of them if the tracker needs one.
///
/// The pages stay mapped until the last owner is dropped: an [`crate::Area`] can outlive its
/// session.
#[derive(Debug)]
pub struct AreaMemory {
    main: OwnedMapping,
    second: Option<OwnedMapping>,
}

impl AreaMemory {
    /// Maps private memory.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn anonymous(bytes: usize) -> Result<Self, Error> {
        let main = OwnedMapping::map_anonymous(bytes)
            .map_err(Error::system("mapping memory for an area"))?;
        Ok(Self { main, second: None })
    }

    /// Maps a memory file twice, both times writable.
    pub(crate) fn map_twice(bytes: usize) -> Result<Self, Error> {
        Self::map_memfd(bytes, OwnedMapping::map_shared)
    }

    /// Maps a memory file twice: the first mapping copies each page that is written; the second is
    /// the file.
    pub(crate) fn map_copying(bytes: usize) -> Result<Self, Error> {
        Self::map_memfd(bytes, OwnedMapping::map_private)
    }

    /// Creates a memory file and maps it: by `map` for the application, and a second time shared and
    /// writable for the tracker.
    fn map_memfd(
        bytes: usize,
        map: impl Fn(std::os::fd::BorrowedFd<'_>, usize) -> Result<OwnedMapping, rustix::io::Errno>,
    ) -> Result<Self, Error> {
        let len = bytes.max(1).next_multiple_of(PAGE);
        let file = rustix::fs::memfd_create("firn-app", MemfdFlags::CLOEXEC)
            .map(File::from)
            .map_err(Error::system("memfd_create"))?;
        file.set_len(len as u64).map_err(Error::io("giving a memory file its size"))?;
        let main = map(file.as_fd(), len).map_err(Error::system("mapping an area"))?;
        let second = OwnedMapping::map_shared(file.as_fd(), len)
            .map_err(Error::system("mapping an area twice"))?;
        Ok(Self { main, second: Some(second) })
    }

    /// All its pages.
    pub fn span(&self) -> PageSpan {
        self.main.span()
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.main.start()
    }

    /// The second mapping's address.
    pub(crate) fn second_address(&self) -> Option<usize> {
        self.second.as_ref().map(|second| second.start().as_ptr().expose_provenance())
    }

    /// The second mapping.
    pub(crate) fn second_mapping(&self) -> Option<&OwnedMapping> {
        self.second.as_ref()
    }
}
