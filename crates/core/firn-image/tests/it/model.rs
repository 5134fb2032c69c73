//! A guest's memory in a test, and images of it.

use std::collections::BTreeMap;
use std::path::Path;

use firn_image::{
    AuxBlock, BlockOrganization, Codec, CompressedBlock, FilledBy, Geometry, Image, ImageDraft,
    ImageError, ImageSections, ImageSummary, ImageWriter, LocalityBlockPacker, compress_block,
};
use firn_types::{Block, GuestPhys, RegionMap, VcpuId};

/// The content of one memory block of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    Untouched,
    Zero,
    /// The same byte throughout.
    Flat(u8),
    /// Compresses to about half.
    Half(u64),
    /// Does not compress.
    Noise(u64),
}

/// A guest's memory, with the order and the origin of the touches of its blocks.
#[derive(Clone, Debug)]
pub struct Model {
    pub geometry: Geometry,
    pub contents: Vec<Content>,
    /// The order in which blocks are packed.
    pub order: Vec<(Block, FilledBy)>,
    /// Used in turn, by block number.
    pub codecs: Vec<Codec>,
}

impl Content {
    pub fn bytes(self, len: usize) -> Vec<u8> {
        match self {
            Self::Untouched | Self::Zero => vec![0; len],
            Self::Flat(byte) => vec![byte.max(1); len],
            Self::Half(seed) => {
                let noise = noise(seed, len / 2);
                noise.chunks(32).flat_map(|part| [part, &[7; 32][..part.len()]].concat()).collect()
            }
            Self::Noise(seed) => noise(seed, len),
        }
    }
}

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let word = |i: u64| firn_image::block_checksum(&(seed ^ (i << 32)).to_le_bytes()).to_le_bytes();
    (0..len.div_ceil(8) as u64).flat_map(word).take(len).collect()
}

impl Model {
    /// All kinds of content in turn, touched by two vCPUs, then swept.
    pub fn mixed(geometry: Geometry, codec: Codec) -> Self {
        let kind = |block: u32| match block % 7 {
            0 => Content::Untouched,
            1 | 2 => Content::Zero,
            3 => Content::Flat(block as u8),
            4 => Content::Noise(block.into()),
            _ => Content::Half(block.into()),
        };
        let blocks = geometry.block_count();
        let by = |block: u32| match block % 4 {
            0 => FilledBy::Vcpu(VcpuId(0)),
            1 => FilledBy::Vcpu(VcpuId(1)),
            2 => FilledBy::Device,
            _ => FilledBy::Sweep,
        };
        // A stride that visits every block, not in order.
        let stride = (1..).map(|i| i * 2 + 31).find(|s| gcd(*s, blocks) == 1).unwrap();
        let visited =
            (0..blocks).map(|i| (u64::from(i) * u64::from(stride) % u64::from(blocks)) as u32);
        Self {
            geometry,
            contents: (0..blocks).map(kind).collect(),
            order: visited.map(|block| (Block(block), by(block))).collect(),
            codecs: vec![codec],
        }
    }

    pub fn block_bytes(&self, block: Block) -> Vec<u8> {
        self.contents[block.index()].bytes(self.geometry.block_size.byte_count())
    }

    /// The flat copy of its memory, page 0 first.
    pub fn flat(&self) -> Vec<u8> {
        let blocks = (0..self.geometry.block_count()).map(Block);
        let mut flat: Vec<u8> = blocks.flat_map(|block| self.block_bytes(block)).collect();
        flat.truncate(self.geometry.flat_bytes() as usize);
        flat
    }

    pub fn sections(&self) -> ImageSections {
        let bytes = self.geometry.flat_bytes();
        ImageSections {
            meta: serde_json::json!({"qemu": "7.2", "cpus": 2}),
            regions: RegionMap::lay_out([("ram", bytes)]).unwrap(),
            device_state: b"device state ".repeat(100),
            aux_blocks: vec![AuxBlock { id: "vga.vram".into(), bytes: vec![0x20; 5000] }],
            working_set: self.order.iter().map(|(block, _)| *block).take(50).collect(),
            page_table_roots: vec![GuestPhys(0x1000), GuestPhys(0x7000)],
        }
    }

    fn codec_of(&self, block: Block) -> Codec {
        self.codecs[block.index() % self.codecs.len()]
    }

    /// Writes it as a save does: one packer for each that fills locality blocks.
    pub fn write(&self, path: &Path) -> ImageSummary {
        self.try_write(path).unwrap()
    }

    pub fn try_write(&self, path: &Path) -> Result<ImageSummary, ImageError> {
        let draft = ImageDraft::whole_image(self.geometry, BlockOrganization::Access);
        self.try_write_blocks(path, &draft)?.finish(self.sections())
    }

    /// Writes it with a seal, and perhaps a parent.
    pub fn write_as(&self, path: &Path, draft: &ImageDraft<'_>) -> ImageSummary {
        self.try_write_blocks(path, draft).unwrap().finish(self.sections()).unwrap()
    }

    /// An image that lacks only its end.
    pub fn write_blocks(&self, path: &Path) -> ImageWriter {
        let draft = ImageDraft::whole_image(self.geometry, BlockOrganization::Access);
        self.try_write_blocks(path, &draft).unwrap()
    }

    fn try_write_blocks(
        &self,
        path: &Path,
        draft: &ImageDraft<'_>,
    ) -> Result<ImageWriter, ImageError> {
        let mut writer = ImageWriter::create(path, draft)?;
        let mut packers = BTreeMap::new();
        for &(block, by) in &self.order {
            if self.contents[block.index()] == Content::Untouched {
                continue;
            }
            let packer = packers
                .entry(by)
                .or_insert_with(|| LocalityBlockPacker::filled_by(self.geometry, by));
            match compress_block(self.codec_of(block), block, &self.block_bytes(block)) {
                CompressedBlock::Zero => writer.set_zero(block),
                CompressedBlock::Packed(packed) => {
                    if let Some(full) = packer.push_block(packed) {
                        writer.append(full)?;
                    }
                }
            }
        }
        for rest in packers.values_mut().filter_map(LocalityBlockPacker::take_filled) {
            writer.append(rest)?;
        }
        Ok(writer)
    }

    /// Reads every block back by locality block, and checks it.
    pub fn check(&self, image: &Image) {
        let (mut stored, mut out) =
            (Vec::new(), vec![0xee; image.geometry().block_size.byte_count()]);
        let mut flat = vec![0; (self.flat().len()).next_multiple_of(out.len())];
        for id in (0..image.locality_blocks()).map(firn_image::LocalityBlockId) {
            image.read_locality_block(id, &mut stored).unwrap();
            for entry in image.entries(id) {
                image.decode_block(entry, &stored[entry.range()], &mut out).unwrap();
                let start = entry.block.index() * out.len();
                flat[start..start + out.len()].copy_from_slice(&out);
            }
        }
        flat.truncate(self.flat().len());
        assert!(flat == self.flat(), "the image holds what was written");
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}
