//! The template in its holder: made, and sealed.

use std::fs::File;
use std::io;

use firn_types::RamRegion;
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::error::TemplateError;
use super::filled_pages::FilledPages;

/// The name of the files. `/proc/PID/maps` shows it.
const FILE_NAME: &str = "firn-template";

/// The memory of this process, as a file that other processes can use.
const OWN_MEMORY: &str = "/proc/self/mem";

/// A template in the process that holds it. Dropping it ends the possibility to fill it.
#[derive(Debug)]
pub struct HeldTemplate {
    memory: File,
    filled: File,
    blocks: Vec<HeldBlock>,
}

#[derive(Debug)]
struct HeldBlock {
    file: File,
    /// Written by system calls only, of this process and of others.
    mapping: MmapRaw,
}

impl HeldTemplate {
    /// Makes an empty template with a file for each region, and seals it.
    ///
    /// # Errors
    /// If the kernel refuses a file or a mapping.
    pub fn create(regions: &[RamRegion]) -> Result<Self, TemplateError> {
        let creating = |error: io::Error| TemplateError::new("creating", error);
        let memory = File::options().read(true).write(true).open(OWN_MEMORY);
        let memory = memory.map_err(creating)?;
        let pages = regions.iter().map(|region| region.page_range().end.0).max();
        let filled = FilledPages::create_file(pages.unwrap_or(0)).map_err(creating)?;
        let blocks = regions.iter().map(HeldBlock::create).collect::<Result<Vec<_>, _>>()?;
        for block in &blocks {
            let seals = SealFlags::FUTURE_WRITE | SealFlags::GROW | SealFlags::SHRINK;
            fcntl_add_seals(&block.file, seals | SealFlags::SEAL)
                .map_err(|errno| TemplateError::new("sealing", errno))?;
        }
        Ok(Self { memory, filled, blocks })
    }

    /// The address of each file's mapping in this process.
    pub fn addresses(&self) -> Vec<u64> {
        self.blocks.iter().map(|block| block.mapping.as_ptr().addr() as u64).collect()
    }

    /// The descriptors that [`super::TemplateWriter::new`] needs: the memory of this process, the
    /// bits of filled pages, then the files.
    ///
    /// # Errors
    /// If the process has too many open files.
    pub fn clone_descriptors(&self) -> io::Result<Vec<File>> {
        let files = self.blocks.iter().map(|block| &block.file);
        [&self.memory, &self.filled].into_iter().chain(files).map(File::try_clone).collect()
    }
}

impl HeldBlock {
    fn create(region: &RamRegion) -> Result<Self, TemplateError> {
        let file = memfd_create(FILE_NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|errno| TemplateError::new("creating", errno))?;
        ftruncate(&file, region.byte_len())
            .map_err(|errno| TemplateError::new("creating", errno))?;
        let mapping = MmapOptions::new().len(region.byte_len() as usize).map_raw(&file);
        let mapping = mapping.map_err(|error| TemplateError::new("mapping", error))?;
        Ok(Self { file: file.into(), mapping })
    }
}
