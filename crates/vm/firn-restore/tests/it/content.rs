//! Contents of guest memory, and images of it.

use std::path::Path;

use firn_image::{
    BlockOrganization, Codec, CompressedBlock, Geometry, Image, ImageDraft, ImageSections,
    ImageWriter, LocalityBlockPacker, compress_block,
};
use firn_types::{Block, BlockSize, PAGE_SIZE, Page, RegionMap};

/// A small generator: the same seed gives the same numbers in the test and in the guest.
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.roll() % end.max(1)
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at as u64 + 1) as usize);
        }
    }
}

/// One step of a sum that depends on the order.
pub fn mix(sum: u64, word: u64) -> u64 {
    (sum.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95)
}

/// The expected contents of memory, page by page.
pub struct Model {
    pub map: RegionMap,
    pub bytes: Vec<u8>,
}

impl Model {
    /// Memory of these regions: of eight pages one is zero, and half of every other page can be
    /// compressed.
    pub fn new(sizes: &[u64], seed: u64) -> Self {
        let names: Vec<String> = (0..sizes.len()).map(|region| format!("ram{region}")).collect();
        let regions = names.iter().zip(sizes).map(|(name, pages)| (name.as_str(), pages * 4096));
        let map = RegionMap::lay_out(regions).unwrap();
        let mut bytes = vec![0; map.total_pages() as usize * PAGE_SIZE];
        let mut dice = Dice(seed);
        for region in map.regions() {
            for page in Page::iter_range(region.page_range()).filter(|page| page.0 % 8 != 5) {
                let start = page.index() * PAGE_SIZE;
                let random = &mut bytes[start..start + PAGE_SIZE / 2];
                random.chunks_exact_mut(8).for_each(|word| {
                    word.copy_from_slice(&dice.roll().to_le_bytes());
                });
                bytes[start + PAGE_SIZE / 2..start + PAGE_SIZE].fill(page.0 as u8 | 1);
            }
        }
        Self { map, bytes }
    }

    pub fn page(&self, page: u32) -> &[u8] {
        &self.bytes[page as usize * PAGE_SIZE..(page as usize + 1) * PAGE_SIZE]
    }

    pub fn clear(&mut self, pages: std::ops::Range<u32>) {
        self.bytes[pages.start as usize * PAGE_SIZE..pages.end as usize * PAGE_SIZE].fill(0);
    }

    /// The result of the guest's `sums` for a page.
    pub fn sum_of(&self, page: u32) -> u64 {
        let words = self.page(page).chunks_exact(8);
        words.fold(0, |sum, word| mix(sum, u64::from_le_bytes(word.try_into().unwrap())))
    }

    /// The result of the guest's `sum`.
    pub fn sum(&self, pages: std::ops::Range<u32>) -> u64 {
        pages.fold(0, |sum, page| mix(sum, self.sum_of(page)))
    }

    /// The result of the guest's `random`.
    pub fn random(&self, seed: u64, count: u64, pages: u64) -> u64 {
        let mut dice = Dice(seed);
        (0..count).fold(0, |sum, _| mix(sum, self.sum_of(dice.below(pages) as u32)))
    }

    pub fn geometry(&self, block_pages: u8) -> Geometry {
        let block_size = BlockSize::new(block_pages).unwrap();
        Geometry { block_size, ..Geometry::new(self.map.total_pages()) }
    }

    /// A memory block, filled up with zeros at the end of memory.
    pub fn block(&self, geometry: &Geometry, block: Block) -> Vec<u8> {
        let start = block.index() * geometry.block_size.byte_count();
        let end = (start + geometry.block_size.byte_count()).min(self.bytes.len());
        let mut bytes = self.bytes[start..end].to_vec();
        bytes.resize(geometry.block_size.byte_count(), 0);
        bytes
    }

    /// Writes an image. Blocks are stored in this order; the last eighth of the all-zero ones is
    /// left untouched.
    pub fn write(
        &self,
        path: &Path,
        geometry: Geometry,
        codec: Codec,
        order: &[Block],
        working_set: Vec<Block>,
    ) -> Image {
        let mut writer = ImageWriter::create(
            path,
            &ImageDraft::whole_image(geometry, BlockOrganization::Access),
        )
        .unwrap();
        let mut packer = LocalityBlockPacker::new(geometry);
        let mut zeros = Vec::new();
        for &block in order {
            match compress_block(codec, block, &self.block(&geometry, block)) {
                CompressedBlock::Zero => zeros.push(block),
                CompressedBlock::Packed(packed) => {
                    if let Some(full) = packer.push_block(packed) {
                        writer.append(full).unwrap();
                    }
                }
            }
        }
        if let Some(last) = packer.take_filled() {
            writer.append(last).unwrap();
        }
        zeros[..zeros.len() * 7 / 8].iter().for_each(|&block| writer.set_zero(block));
        let sections =
            ImageSections { regions: self.map.clone(), working_set, ..ImageSections::default() };
        writer.finish(sections).unwrap();
        Image::open(path).unwrap()
    }

    /// All blocks, shuffled.
    pub fn shuffled(&self, geometry: &Geometry, seed: u64) -> Vec<Block> {
        let mut order: Vec<Block> = (0..geometry.block_count()).map(Block).collect();
        Dice(seed).shuffle(&mut order);
        order
    }
}
