//! The same checkpoint in another block organization.

use std::path::{Path, PathBuf};

use firn_image::{
    BlockEntry, BlockOrganization, Codec, FilledBy, Geometry, Image, ImageDraft, ImageError,
    LocalityBlockId, ReorderOptions, StoredAs, compare_with_reference, reorder_by_need,
    reorder_image, verify_image,
};
use firn_types::{Block, BlockSize, VcpuId};

use crate::model::Model;

struct Checkpoint {
    dir: tempfile::TempDir,
    model: Model,
    image: Image,
}

impl Checkpoint {
    fn new(codec: Codec) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let model = Model::mixed(Geometry::new(700), codec);
        let path = dir.path().join("access.firn");
        model.write(&path);
        std::fs::write(dir.path().join("flat"), model.flat()).unwrap();
        Self { dir, model, image: Image::open(&path).unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Reorders, and checks that memory and sections are the same.
    fn reorder(&self, from: &Image, how: &ReorderOptions, name: &str) -> Image {
        let out = self.path(name);
        let summary = reorder_image(from, how, &out, &|_, _| ()).unwrap();
        let image = Image::open(&out).unwrap();
        assert_eq!(image.summary(), summary);
        assert_eq!(image.organization(), how.by);
        assert_eq!(compare_with_reference(&image, &self.path("flat")).unwrap(), []);
        assert!(verify_image(&image, 2, &|_, _| ()).is_clean());
        assert_eq!(image.device_state(), self.image.device_state());
        assert_eq!(image.meta(), self.image.meta());
        image
    }
}

fn locality_blocks(image: &Image) -> Vec<(FilledBy, Vec<BlockEntry>)> {
    let ids = (0..image.locality_blocks()).map(LocalityBlockId);
    ids.map(|id| (image.filled_by(id), image.entries(id).to_vec())).collect()
}

fn order(image: &Image) -> Vec<Block> {
    let blocks = locality_blocks(image).into_iter().flat_map(|(_, entries)| entries);
    blocks.map(|entry| entry.block).collect()
}

#[test]
fn physical_is_by_number() {
    let from = Checkpoint::new(Codec::Lz4);
    let physical = from.reorder(
        &from.image,
        &ReorderOptions::for_organization(BlockOrganization::Physical),
        "physical",
    );
    assert!(order(&physical).is_sorted());
    assert!(!order(&from.image).is_sorted());
}

#[test]
fn random_is_by_seed() {
    let from = Checkpoint::new(Codec::Lz4);
    let seeded = |seed| ReorderOptions {
        seed,
        ..ReorderOptions::for_organization(BlockOrganization::Random)
    };
    let one = from.reorder(&from.image, &seeded(1), "one");
    let again = from.reorder(&one, &seeded(1), "again");
    let two = from.reorder(&from.image, &seeded(2), "two");
    assert_eq!(order(&one), order(&again));
    assert_ne!(order(&one), order(&two));
}

#[test]
fn what_is_needed_first_is_in_front() {
    let from = Checkpoint::new(Codec::Lz4);
    let needed: Vec<Block> = order(&from.image).into_iter().rev().step_by(7).collect();
    let out = from.path("needed");
    let how = ReorderOptions::for_organization(BlockOrganization::Physical);
    reorder_by_need(&from.image, &needed, &how, &out, &|_, _| ()).unwrap();
    let image = Image::open(&out).unwrap();
    assert_eq!(compare_with_reference(&image, &from.path("flat")).unwrap(), []);
    assert!(verify_image(&image, 2, &|_, _| ()).is_clean());
    assert_eq!(image.working_set(), needed);
    assert_eq!(order(&image)[..needed.len()], needed);
    let rest: Vec<Block> =
        order(&from.image).into_iter().filter(|it| !needed.contains(it)).collect();
    assert_eq!(order(&image)[needed.len()..], rest);
}

#[test]
fn the_access_order_survives_any_detour() {
    let from = Checkpoint::new(Codec::Lz4);
    let detours =
        [BlockOrganization::Random, BlockOrganization::Physical, BlockOrganization::Random];
    let mut path = None;
    for (leg, by) in detours.into_iter().enumerate() {
        let image = path.map_or_else(
            || Image::open(&from.path("access.firn")).unwrap(),
            |path: PathBuf| Image::open(&path).unwrap(),
        );
        let name = format!("leg{leg}");
        from.reorder(
            &image,
            &ReorderOptions { threads: 3, ..ReorderOptions::for_organization(by) },
            &name,
        );
        path = Some(from.path(&name));
    }
    let far = Image::open(&path.unwrap()).unwrap();
    let back =
        from.reorder(&far, &ReorderOptions::for_organization(BlockOrganization::Access), "back");
    assert_eq!(locality_blocks(&back), locality_blocks(&from.image));
    let copy = from.reorder(
        &from.image,
        &ReorderOptions::for_organization(BlockOrganization::Access),
        "copy",
    );
    assert_eq!(locality_blocks(&copy), locality_blocks(&from.image));
}

#[test]
fn recompressed_it_is_the_same_memory() {
    let from = Checkpoint::new(Codec::Zlib { level: 6 });
    for codec in [Codec::None, Codec::Lz4, Codec::Zstd { level: 3 }] {
        for by in [BlockOrganization::Access, BlockOrganization::Physical] {
            let how = ReorderOptions {
                codec: Some(codec),
                threads: 2,
                ..ReorderOptions::for_organization(by)
            };
            let image = from.reorder(&from.image, &how, "recompressed");
            let expected = match codec {
                Codec::None => StoredAs::Raw,
                Codec::Lz4 => StoredAs::Lz4,
                _ => StoredAs::Zstd,
            };
            let mut entries = locality_blocks(&image).into_iter().flat_map(|(_, entries)| entries);
            assert!(entries.all(|it| it.stored_as == expected || it.stored_as == StoredAs::Raw));
        }
    }
}

#[test]
fn vcpus_stay_apart_when_sizes_change() {
    let from = Checkpoint::new(Codec::Lz4);
    let how = ReorderOptions {
        locality_block_bytes: Some(16 << 10),
        ..ReorderOptions::for_organization(BlockOrganization::Access)
    };
    let image = from.reorder(&from.image, &how, "smaller");
    assert!(image.locality_blocks() > from.image.locality_blocks());
    let touched_by = |image: &Image, by| -> Vec<Block> {
        let blocks = locality_blocks(image).into_iter().filter(|(filled_by, _)| *filled_by == by);
        blocks.flat_map(|(_, entries)| entries).map(|entry| entry.block).collect()
    };
    for by in [FilledBy::Vcpu(VcpuId(0)), FilledBy::Vcpu(VcpuId(1)), FilledBy::Sweep] {
        assert!(!touched_by(&image, by).is_empty());
        assert_eq!(touched_by(&image, by), touched_by(&from.image, by));
    }
}

#[test]
fn memory_blocks_may_change_size() {
    let from = Checkpoint::new(Codec::Lz4);
    for pages in [1, 4, 16] {
        let block_size = Some(BlockSize::new(pages).unwrap());
        for by in [BlockOrganization::Random, BlockOrganization::Access] {
            let how = ReorderOptions { block_size, ..ReorderOptions::for_organization(by) };
            let image = from.reorder(&from.image, &how, "resized");
            assert_eq!(image.geometry().block_size.page_count(), usize::from(pages));
            let back = ReorderOptions {
                block_size: Some(from.model.geometry.block_size),
                ..ReorderOptions::for_organization(BlockOrganization::Access)
            };
            from.reorder(&image, &back, "back");
        }
    }
}

/// An image that has never been organized by access: made by a writer, not by reordering.
fn born_physical(path: &Path, working_set: &[u32]) -> Image {
    let geometry = Geometry::new(20);
    let mut writer = firn_image::ImageWriter::create(
        path,
        &ImageDraft::whole_image(geometry, BlockOrganization::Physical),
    )
    .unwrap();
    let mut packer = firn_image::LocalityBlockPacker::new(geometry);
    for block in (0..10).map(Block) {
        let raw = vec![block.0 as u8 + 1; 8192];
        let compressed = firn_image::compress_block(Codec::None, block, &raw);
        let firn_image::CompressedBlock::Packed(packed) = compressed else { panic!("not zero") };
        if let Some(full) = packer.push_block(packed) {
            writer.append(full).unwrap();
        }
    }
    writer.append(packer.take_filled().unwrap()).unwrap();
    let regions = firn_types::RegionMap::lay_out([("ram", 20 * 4096)]).unwrap();
    let working_set = working_set.iter().copied().map(Block).collect();
    let sections = firn_image::ImageSections { regions, working_set, ..Default::default() };
    writer.finish(sections).unwrap();
    Image::open(path).unwrap()
}

#[test]
fn without_an_order_there_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let (path, out) = (dir.path().join("a.firn"), dir.path().join("b.firn"));
    let by_access = ReorderOptions::for_organization(BlockOrganization::Access);
    let unknown = born_physical(&path, &[]);
    let error = reorder_image(&unknown, &by_access, &out, &|_, _| ()).unwrap_err();
    assert!(matches!(error, ImageError::NoAccessOrder { .. }), "{error}");
    assert!(!out.exists());
    let known = born_physical(&path, &[7, 2, 7, 5]);
    reorder_image(&known, &by_access, &out, &|_, _| ()).unwrap();
    let expected = [7, 2, 5, 0, 1, 3, 4, 6, 8, 9].map(Block);
    assert_eq!(order(&Image::open(&out).unwrap()), expected);
}

#[test]
fn an_image_may_replace_itself() {
    let from = Checkpoint::new(Codec::Lz4);
    from.reorder(
        &from.image,
        &ReorderOptions::for_organization(BlockOrganization::Random),
        "access.firn",
    );
    assert!(from.model.geometry.block_count() > 0);
}

#[test]
fn damage_is_not_copied() {
    use std::os::unix::fs::FileExt;
    let from = Checkpoint::new(Codec::None);
    let file = std::fs::File::options().write(true).open(from.path("access.firn")).unwrap();
    let (_, entry) = (0..9).find_map(|block| from.image.entry_of(Block(block))).unwrap();
    file.write_all_at(b"damage", 4096 + u64::from(entry.offset) + 100).unwrap();
    let out = from.path("out.firn");
    let error = reorder_image(
        &from.image,
        &ReorderOptions::for_organization(BlockOrganization::Physical),
        &out,
        &|_, _| (),
    )
    .unwrap_err();
    assert!(matches!(error, ImageError::Block(_)), "{error}");
    assert!(!out.exists());
}
