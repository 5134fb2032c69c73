//! Reference copy, for tests: a flat copy of all RAM, made while the VM is paused, that the image
//! must equal.

use std::io::{BufWriter, Write};
use std::path::Path;

use firn_memory::GuestMemory;
use firn_types::{PAGE_SIZE, Page};

use crate::error::SaveError;

/// Pages per write.
const CHUNK_PAGES: u32 = 1024;

/// Writes every page of the RAM page space to `path`, if one is given.
pub(crate) fn write_reference(memory: &GuestMemory, path: Option<&Path>) -> Result<(), SaveError> {
    let Some(path) = path else { return Ok(()) };
    let failed = |source| SaveError::Reference { path: path.to_owned(), source };
    let mut file = BufWriter::new(firn_files::create_output(path).map_err(failed)?);
    let mut buffer = vec![0; CHUNK_PAGES as usize * PAGE_SIZE];
    let total = memory.region_map().total_pages();
    for first in (0..total).step_by(CHUNK_PAGES as usize) {
        let bytes = (total - first).min(CHUNK_PAGES) as usize * PAGE_SIZE;
        memory.read_pages(Page(first), &mut buffer[..bytes])?;
        file.write_all(&buffer[..bytes]).map_err(failed)?;
    }
    file.flush().map_err(failed)
}
