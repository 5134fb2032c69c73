//! Images that no writer of Firn writes: taken apart, changed, and put together so that every checksum is right.

use std::path::Path;

use firn_image::block_checksum;

const HEADER_BYTES: usize = 4096;
const FOOTER_BYTES: usize = 1024;

/// Kinds of sections (docs/format.md).
pub const METADATA: u32 = 1;
pub const REGIONS: u32 = 2;
pub const DEVICE_STATE: u32 = 3;
pub const AUXILIARY: u32 = 4;
pub const WORKING_SET: u32 = 5;
pub const ROOTS: u32 = 6;
pub const ACCESS_ORDER: u32 = 7;
pub const INDEX: u32 = 8;
pub const PARENT: u32 = 9;

/// A section, decoded.
#[derive(Clone)]
pub struct Section {
    pub kind: u32,
    pub bytes: Vec<u8>,
}

/// An image in parts.
#[derive(Clone)]
pub struct Forge {
    pub header: Vec<u8>,
    pub locality_blocks: Vec<u8>,
    pub sections: Vec<Section>,
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> usize {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize
}

impl Forge {
    /// Takes a good image apart.
    pub fn read(path: &Path) -> Self {
        let file = std::fs::read(path).unwrap();
        let footer = &file[file.len() - FOOTER_BYTES..];
        let mut blocks_end = file.len() - FOOTER_BYTES;
        let mut sections = Vec::new();
        for number in 0..u32_at(footer, 12) as usize {
            let entry = &footer[48 + number * 40..];
            let (offset, len) = (u64_at(entry, 8), u64_at(entry, 16));
            blocks_end = blocks_end.min(offset);
            let stored = &file[offset..offset + len];
            let bytes = match u32_at(entry, 4) {
                0 => stored.to_vec(),
                _ => zstd::bulk::decompress(stored, u64_at(entry, 24)).unwrap(),
            };
            sections.push(Section { kind: u32_at(entry, 0), bytes });
        }
        let header = file[..HEADER_BYTES].to_vec();
        Self { header, locality_blocks: file[HEADER_BYTES..blocks_end].to_vec(), sections }
    }

    /// The decoded bytes of a section, which is added if there is none: before the index.
    pub fn section(&mut self, kind: u32) -> &mut Vec<u8> {
        if !self.sections.iter().any(|section| section.kind == kind) {
            self.sections.insert(0, Section { kind, bytes: Vec::new() });
        }
        &mut self.sections.iter_mut().find(|section| section.kind == kind).unwrap().bytes
    }

    pub fn set_version(&mut self, version: u32) {
        self.header[8..12].copy_from_slice(&version.to_le_bytes());
    }

    /// The sizes of the header.
    pub fn set_geometry(&mut self, block_pages: u8, locality_block_bytes: u32, pages: u32) {
        self.header[13] = block_pages;
        self.header[16..20].copy_from_slice(&locality_block_bytes.to_le_bytes());
        self.header[20..24].copy_from_slice(&pages.to_le_bytes());
    }

    /// Puts it together. Every section is compressed.
    pub fn write(&self, path: &Path) {
        let locality_block_bytes = u32_at(&self.header, 16).max(1);
        let mut file = self.header[..HEADER_BYTES - 8].to_vec();
        file.extend(block_checksum(&file).to_le_bytes());
        file.extend(&self.locality_blocks);
        let mut table = Vec::new();
        for Section { kind, bytes } in &self.sections {
            let stored = zstd::bulk::compress(bytes, 1).unwrap();
            table.extend(kind.to_le_bytes());
            table.extend(1u32.to_le_bytes());
            table.extend((file.len() as u64).to_le_bytes());
            table.extend((stored.len() as u64).to_le_bytes());
            table.extend((bytes.len() as u64).to_le_bytes());
            table.extend(block_checksum(&stored).to_le_bytes());
            file.extend(stored);
        }
        let mut footer = b"FIRN-END".to_vec();
        footer.extend(&self.header[8..12]);
        footer.extend((self.sections.len() as u32).to_le_bytes());
        footer.extend(&self.header[24..40]);
        footer.extend(((file.len() + FOOTER_BYTES) as u64).to_le_bytes());
        let count = self.locality_blocks.len() as u32 / locality_block_bytes;
        footer.extend(count.to_le_bytes());
        footer.extend([0; 4]);
        footer.extend(table);
        footer.resize(FOOTER_BYTES - 8, 0);
        footer.extend(block_checksum(&footer).to_le_bytes());
        file.extend(footer);
        std::fs::write(path, file).unwrap();
    }
}

/// An index without locality blocks: runs of zero blocks, (first, how many).
pub fn index_of_zeros(runs: &[(u32, u32)]) -> Vec<u8> {
    let head = [0, 0, runs.len() as u32, 0];
    let firsts = runs.iter().map(|run| run.0);
    let lens = runs.iter().map(|run| run.1 - 1);
    head.into_iter().chain(firsts).chain(lens).flat_map(u32::to_le_bytes).collect()
}
