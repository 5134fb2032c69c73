//! Images that build on others.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use firn_image::{
    BlockOrganization, BlockPlacement, Codec, CompressedBlock, FilledBy, Geometry, Image,
    ImageDraft, ImageError, ImageSummary, ImageWriter, LocalityBlockId, LocalityBlockPacker,
    ReadOrder, compare_with_reference, compress_block, merge_chain, rebase_image, verify_image,
};
use firn_types::Block;
use proptest::prelude::*;

use crate::model::{Content, Model};

/// A chain in a directory: `0.firn` is whole, each of the others builds on the one before.
struct Chain {
    dir: tempfile::TempDir,
    now: Model,
    len: usize,
}

impl Chain {
    fn new() -> Self {
        Self::of_pages(700)
    }

    fn of_pages(pages: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let now = Model::mixed(Geometry::new(pages), Codec::Lz4);
        now.write(&dir.path().join("0.firn"));
        let chain = Self { dir, now, len: 1 };
        chain.keep_flat();
        chain
    }

    fn path(&self, n: usize) -> PathBuf {
        self.dir.path().join(format!("{n}.firn"))
    }

    fn flat(&self, n: usize) -> PathBuf {
        self.dir.path().join(format!("{n}.flat"))
    }

    fn keep_flat(&self) {
        std::fs::write(self.flat(self.len - 1), self.now.flat()).unwrap();
    }

    /// Changes memory, and writes the changed blocks.
    fn add(&mut self, changes: &[(u32, Content)]) -> ImageSummary {
        let parent = Image::open(&self.path(self.len - 1)).unwrap();
        let path = self.path(self.len);
        let draft = ImageDraft {
            parent: Some(&parent),
            ..ImageDraft::whole_image(self.now.geometry, BlockOrganization::Access)
        };
        let changed: BTreeMap<u32, Content> = changes.iter().copied().collect();
        for (&block, &content) in &changed {
            self.now.contents[block as usize] = content;
        }
        let blocks: Vec<Block> = changed.into_keys().map(Block).collect();
        let summary = write(&self.now, &path, &draft, &[&blocks]);
        self.len += 1;
        self.keep_flat();
        summary
    }

    fn check(&self, n: usize, path: &Path) -> Image {
        let image = Image::open(path).unwrap();
        assert_eq!(compare_with_reference(&image, &self.flat(n)).unwrap(), []);
        let report = verify_image(&image, 2, &|_, _| ());
        assert!(report.is_clean(), "{report:?}");
        image
    }
}

/// Writes blocks, batch after batch. The last batch has the bytes of the model, the others have
/// noise.
fn write(model: &Model, path: &Path, draft: &ImageDraft<'_>, batches: &[&[Block]]) -> ImageSummary {
    let mut writer = ImageWriter::create(path, draft).unwrap();
    let mut packer = LocalityBlockPacker::filled_by(model.geometry, FilledBy::Sweep);
    for (number, batch) in batches.iter().enumerate() {
        for &block in *batch {
            let bytes = match number + 1 == batches.len() {
                true => model.block_bytes(block),
                false => Content::Noise(99).bytes(model.geometry.block_size.byte_count()),
            };
            match compress_block(Codec::Lz4, block, &bytes) {
                CompressedBlock::Zero => writer.set_zero(block),
                CompressedBlock::Packed(packed) => {
                    if let Some(full) = packer.push_block(packed) {
                        writer.append(full).unwrap();
                    }
                }
            }
        }
        if let Some(rest) = packer.take_filled() {
            writer.append(rest).unwrap();
        }
    }
    writer.finish(model.sections()).unwrap()
}

fn all_kinds(from: u32) -> Vec<(u32, Content)> {
    vec![
        (from, Content::Zero),
        (from + 1, Content::Flat(9)),
        (from + 2, Content::Noise(from.into())),
        (from + 3, Content::Half(7)),
        (from + 4, Content::Zero),
    ]
}

#[test]
fn blocks_that_are_not_stored_are_as_in_the_parent() {
    let mut chain = Chain::new();
    let summary = chain.add(&all_kinds(20));
    assert_eq!((summary.stored_blocks, summary.zero_blocks), (3, 2));
    assert_eq!(summary.inherited_blocks, 345);
    chain.add(&[]);
    chain.add(&all_kinds(22));
    for n in 0..chain.len {
        let image = chain.check(n, &chain.path(n));
        assert_eq!(image.chain_paths().len(), n + 1);
        assert_eq!(image.chain_paths().next(), Some(&*chain.path(n)));
    }
    let image = Image::open(&chain.path(1)).unwrap();
    assert_eq!(image.summary(), summary);
    assert_eq!(image.placement_of(Block(20)), BlockPlacement::Zero);
}

#[test]
fn neighbours_in_different_files_are_read_together() {
    let mut chain = Chain::new();
    for from in [0, 30, 60] {
        chain.add(&all_kinds(from));
    }
    let image = chain.check(3, &chain.path(3));
    let (count, len) = (image.locality_blocks(), image.geometry().locality_block_bytes as usize);
    let (mut all, mut one) = (Vec::new(), Vec::new());
    let every = LocalityBlockId(0)..LocalityBlockId(count);
    image.read_locality_blocks(every, ReadOrder::Sequential, &mut all).unwrap();
    let mut last = 0;
    for id in (0..count).map(LocalityBlockId) {
        image.read_locality_block(id, &mut one).unwrap();
        let start = id.index() * len;
        assert_eq!(all[start..start + one.len()], one);
        assert!(image.offset_of(id) > last, "one behind another");
        last = image.offset_of(id);
    }
}

#[test]
fn a_block_given_again_counts_as_given_last() {
    let dir = tempfile::tempdir().unwrap();
    let model = Model::mixed(Geometry::new(700), Codec::Lz4);
    std::fs::write(dir.path().join("flat"), model.flat()).unwrap();
    let all: Vec<Block> = (0..350).map(Block).collect();
    let some: Vec<Block> = all.iter().copied().filter(|block| block.0 % 3 == 0).collect();
    let draft = ImageDraft {
        allows_again: true,
        ..ImageDraft::whole_image(model.geometry, BlockOrganization::Access)
    };
    let path = dir.path().join("a.firn");
    let summary = write(&model, &path, &draft, &[&some, &some, &all]);
    let image = Image::open(&path).unwrap();
    assert_eq!(image.summary(), summary);
    assert_eq!(compare_with_reference(&image, &dir.path().join("flat")).unwrap(), []);
    assert!(verify_image(&image, 2, &|_, _| ()).is_clean());
    let listed: usize =
        (0..image.locality_blocks()).map(|id| image.entries(LocalityBlockId(id)).len()).sum();
    assert_eq!(listed as u32, summary.stored_blocks);
}

#[test]
fn a_merged_image_has_no_parent_and_a_rebased_one_a_shorter_chain() {
    let mut chain = Chain::new();
    for from in [10, 12, 50] {
        chain.add(&all_kinds(from));
    }
    let image = Image::open(&chain.path(3)).unwrap();
    let out = chain.dir.path().join("out.firn");
    let summary = merge_chain(&image, &out, 2, &|_, _| ()).unwrap();
    let merged = chain.check(3, &out);
    assert_eq!((merged.chain_paths().len(), merged.summary()), (1, summary));
    assert_eq!(merged.identity(), image.identity());
    let base = Image::open(&chain.path(0)).unwrap();
    for from in [&image, &merged] {
        let short = chain.dir.path().join("short.firn");
        let summary = rebase_image(from, &base, &short, 2, &|_, _| ()).unwrap();
        assert!(summary.stored_blocks + summary.zero_blocks <= 12, "{summary:?}");
        assert_eq!(chain.check(3, &short).chain_paths().len(), 2);
    }
    let other = Model { contents: vec![Content::Flat(1); 350], ..chain.now.clone() };
    other.write(&out);
    let short = chain.dir.path().join("short.firn");
    rebase_image(&image, &Image::open(&out).unwrap(), &short, 1, &|_, _| ()).unwrap();
    chain.check(3, &short);
}

#[test]
fn the_middle_of_a_chain_may_be_merged_in_its_place() {
    let mut chain = Chain::new();
    for from in [10, 12, 50] {
        chain.add(&all_kinds(from));
    }
    let path = chain.path(2);
    merge_chain(&Image::open(&path).unwrap(), &path, 1, &|_, _| ()).unwrap();
    std::fs::remove_file(chain.path(0)).unwrap();
    std::fs::remove_file(chain.path(1)).unwrap();
    assert_eq!(chain.check(3, &chain.path(3)).chain_paths().len(), 2);
}

#[test]
fn a_parent_is_known_by_its_identity() {
    let mut chain = Chain::new();
    chain.add(&all_kinds(10));
    let moved = chain.dir.path().join("moved.firn");
    std::fs::rename(chain.path(0), &moved).unwrap();
    let error = Image::open(&chain.path(1)).unwrap_err();
    assert!(matches!(error, ImageError::Parent { .. }), "{error}");
    chain.now.write(&chain.path(0));
    let error = Image::open(&chain.path(1)).unwrap_err();
    assert!(matches!(error, ImageError::WrongParent { .. }), "{error}");
    assert!(Image::open_with_parent(&chain.path(1), &chain.path(0)).is_err());
    let image = Image::open_with_parent(&chain.path(1), &moved).unwrap();
    let parent = Image::open(&moved).unwrap();
    rebase_image(&image, &parent, &chain.path(1), 1, &|_, _| ()).unwrap();
    assert_eq!(chain.check(1, &chain.path(1)).chain_paths().nth(1), Some(&*moved));
}

#[test]
fn an_unsuitable_parent_is_refused() {
    let mut chain = Chain::new();
    chain.add(&all_kinds(10));
    let parent = Image::open(&chain.path(1)).unwrap();
    let refused = |path: &Path, geometry| {
        let draft = ImageDraft {
            parent: Some(&parent),
            ..ImageDraft::whole_image(geometry, BlockOrganization::Access)
        };
        ImageWriter::create(path, &draft).map(drop).unwrap_err()
    };
    let geometry = chain.now.geometry;
    for n in [0, 1] {
        let error = refused(&chain.path(n), geometry);
        assert!(matches!(error, ImageError::WrongParent { .. }), "{error}");
    }
    let error = refused(&chain.path(2), Geometry { total_pages: 702, ..geometry });
    assert!(matches!(error, ImageError::OtherRam { .. }), "{error}");
    let base = Image::open(&chain.path(0)).unwrap();
    let error = rebase_image(&base, &parent, &chain.path(5), 1, &|_, _| ()).unwrap_err();
    assert!(matches!(error, ImageError::WrongParent { .. }), "{error}");
    assert_eq!(std::fs::read_dir(chain.dir.path()).unwrap().count(), 4);
}

#[test]
fn an_image_may_be_opened_by_a_link() {
    let mut chain = Chain::new();
    chain.add(&all_kinds(10));
    let elsewhere = tempfile::tempdir().unwrap();
    let link = elsewhere.path().join("latest.firn");
    std::os::unix::fs::symlink(chain.path(1), &link).unwrap();
    assert_eq!(chain.check(1, &link).chain_paths().len(), 2);
}

/// Damage in any file of a chain is found, and named by its file.
#[test]
fn every_flipped_byte_of_an_ancestor_is_seen() {
    let mut chain = Chain::new();
    chain.add(&all_kinds(10));
    let good = std::fs::read(chain.path(0)).unwrap();
    for at in (0..good.len()).step_by(good.len() / 200) {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        std::fs::write(chain.path(0), &bad).unwrap();
        let text = match Image::open(&chain.path(1)) {
            Err(error) => {
                format!("{error} {:?}", std::error::Error::source(&error).map(ToString::to_string))
            }
            Ok(image) => {
                let report = verify_image(&image, 1, &|_, _| ());
                let own = Image::open(&chain.path(0)).is_err();
                assert!(own || !report.is_clean(), "byte {at} of {}", good.len());
                if at < 4096 {
                    let problem = report.problems[0].to_string();
                    assert!(problem.contains("0.firn") && problem.contains("header"), "{problem}");
                }
                format!("{:?}", report.problems)
            }
        };
        assert!(text.contains("0.firn") || text == "[]", "{text}");
    }
}

#[test]
fn a_chain_has_an_end() {
    let mut chain = Chain::of_pages(20);
    for _ in 1..firn_image::CHAIN_MAX {
        chain.add(&[]);
    }
    let last = Image::open(&chain.path(firn_image::CHAIN_MAX - 1)).unwrap();
    assert_eq!(last.chain_paths().len(), firn_image::CHAIN_MAX);
    let draft = ImageDraft {
        parent: Some(&last),
        ..ImageDraft::whole_image(chain.now.geometry, BlockOrganization::Access)
    };
    let refused = ImageWriter::create(&chain.path(999), &draft).map(drop);
    assert!(matches!(refused, Err(ImageError::ChainTooLong { .. })));
}

fn change() -> impl Strategy<Value = (u32, Content)> {
    let content = prop_oneof![
        Just(Content::Zero),
        any::<u8>().prop_map(Content::Flat),
        any::<u64>().prop_map(Content::Noise),
        any::<u64>().prop_map(Content::Half),
    ];
    (0u32..350, content)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_chain_gives_the_memory_that_was_saved(
        changes in proptest::collection::vec(proptest::collection::vec(change(), 0..40), 1..6),
    ) {
        let mut chain = Chain::new();
        changes.iter().for_each(|changes| drop(chain.add(changes)));
        (0..chain.len).for_each(|n| drop(chain.check(n, &chain.path(n))));
        let last = chain.len - 1;
        let image = Image::open(&chain.path(last)).unwrap();
        let out = chain.dir.path().join("out.firn");
        for parent in 0..last {
            let parent = Image::open(&chain.path(parent)).unwrap();
            rebase_image(&image, &parent, &out, 1, &|_, _| ()).unwrap();
            chain.check(last, &out);
        }
        merge_chain(&image, &out, 1, &|_, _| ()).unwrap();
        chain.check(last, &out);
    }
}
