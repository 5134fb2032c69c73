//! An image that is read has the contents that were written.

use firn_image::{
    BlockOrganization, BlockPlacement, Codec, Geometry, Image, LocalityBlockId, ReadOrder,
    compare_with_reference, verify_image,
};
use firn_types::{Block, BlockSize};
use proptest::prelude::*;

use crate::model::{Content, Model};

#[test]
fn an_image_holds_what_was_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.firn");
    let model = Model::mixed(Geometry::new(999), Codec::Lz4);
    let summary = model.write(&path);
    let image = Image::open(&path).unwrap();
    assert_eq!(image.summary(), summary);
    assert_eq!(summary.file_bytes, std::fs::metadata(&path).unwrap().len());
    assert_eq!(image.organization(), BlockOrganization::Access);
    assert_eq!(image.meta(), &model.sections().meta);
    assert_eq!(image.regions(), &model.sections().regions);
    assert_eq!(image.device_state(), model.sections().device_state);
    assert_eq!(image.aux_blocks().unwrap(), model.sections().aux_blocks);
    assert_eq!(image.working_set(), model.sections().working_set);
    assert_eq!(image.page_table_roots(), model.sections().page_table_roots);
    model.check(&image);
}

#[test]
fn an_empty_guest_is_an_image() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.firn");
    let geometry = Geometry::new(1);
    let model = Model {
        geometry,
        contents: vec![Content::Untouched],
        order: vec![],
        codecs: vec![Codec::None],
    };
    model.write(&path);
    let image = Image::open(&path).unwrap();
    assert_eq!(
        (image.locality_blocks(), image.placement_of(Block(0))),
        (0, BlockPlacement::Untouched)
    );
    assert!(verify_image(&image, 1, &|_, _| ()).is_clean());
}

fn codecs() -> impl Strategy<Value = Codec> {
    prop_oneof![
        Just(Codec::None),
        Just(Codec::Lz4),
        (-7i8..=4).prop_map(|level| Codec::Zstd { level }),
        (1u8..=9).prop_map(|level| Codec::Zlib { level }),
    ]
}

fn contents() -> impl Strategy<Value = Content> {
    prop_oneof![
        Just(Content::Untouched),
        Just(Content::Zero),
        any::<u8>().prop_map(Content::Flat),
        any::<u64>().prop_map(Content::Half),
        any::<u64>().prop_map(Content::Noise),
    ]
}

prop_compose! {
    pub fn models()(
        pages_log in 0u32..5,
        locality_log in 14u32..18,
        codec in codecs(),
        slack in 0u32..16,
        contents in proptest::collection::vec(contents(), 1..60),
        seed: u64,
    ) -> Model {
        let block_size = BlockSize::new(1 << pages_log).unwrap();
        let locality_block_bytes = (1 << locality_log).max(block_size.byte_count() as u32);
        // The last memory block may reach past the last page.
        let slack = slack % block_size.page_count() as u32;
        let total_pages = contents.len() as u32 * block_size.page_count() as u32 - slack;
        let geometry = Geometry { block_size, locality_block_bytes, total_pages };
        let mut model = Model::mixed(geometry, codec);
        model.contents = contents;
        if slack > 0 {
            *model.contents.last_mut().unwrap() = Content::Zero;
        }
        let shuffle_key = |block: u32| firn_image::block_checksum(&(seed ^ u64::from(block)).to_le_bytes());
        model.order.sort_by_key(|(block, _)| shuffle_key(block.0));
        model
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_memory_is_read_as_written(model in models()) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.firn");
        model.write(&path);
        let image = Image::open(&path).unwrap();
        model.check(&image);
        let report = verify_image(&image, 2, &|_, _| ());
        prop_assert!(report.is_clean(), "{:?}", report.problems);
        for block in (0..model.geometry.block_count()).map(Block) {
            let expected = model.contents[block.index()];
            match image.placement_of(block) {
                BlockPlacement::Untouched => prop_assert_eq!(expected, Content::Untouched),
                BlockPlacement::Zero => prop_assert_eq!(expected, Content::Zero),
                BlockPlacement::Stored { locality_block, slot } => {
                    prop_assert_eq!(image.entries(locality_block)[usize::from(slot)].block, block);
                }
            }
        }
        let flat = dir.path().join("flat");
        std::fs::write(&flat, model.flat()).unwrap();
        prop_assert_eq!(compare_with_reference(&image, &flat).unwrap(), vec![]);
    }
}

#[test]
fn each_kind_of_read_gives_the_same_bytes() {
    for parent in [std::env::temp_dir(), "/dev/shm".into()] {
        let dir = tempfile::tempdir_in(parent).unwrap();
        let path = dir.path().join("a.firn");
        Model::mixed(Geometry::new(500), Codec::Lz4).write(&path);
        let image = Image::open(&path).unwrap();
        let count = image.locality_blocks();
        let size = image.geometry().locality_block_bytes as usize;
        let (mut all, mut one, mut tried) = (Vec::new(), Vec::new(), Vec::new());
        let but_one = LocalityBlockId(1)..LocalityBlockId(count);
        image.read_locality_blocks(but_one.clone(), ReadOrder::Sequential, &mut all).unwrap();
        image.read_locality_blocks(but_one, ReadOrder::Random, &mut one).unwrap();
        assert_eq!(all, one);
        for id in (1..count).map(LocalityBlockId) {
            image.read_locality_block(id, &mut one).unwrap();
            assert_eq!(one.len(), image.used_bytes(id));
            assert!(all[(id.index() - 1) * size..].starts_with(&one));
            assert!(image.try_read_locality_block(id, &mut tried).unwrap(), "it was just read");
            assert_eq!(tried, one);
            for entry in image.entries(id) {
                let (mut stored, mut tried) = (Vec::new(), Vec::new());
                image.read_entry(entry, id, &mut stored).unwrap();
                assert!(image.try_read_entry(entry, id, &mut tried).unwrap());
                assert_eq!(stored, one[entry.range()]);
                assert_eq!(tried, stored);
            }
        }
        let none = LocalityBlockId(1)..LocalityBlockId(1);
        image.read_locality_blocks(none, ReadOrder::Random, &mut all).unwrap();
        assert!(all.is_empty());
        assert!(image.read_locality_block(LocalityBlockId(count), &mut one).is_err());
        let past = LocalityBlockId(0)..LocalityBlockId(count + 1);
        assert!(image.read_locality_blocks(past, ReadOrder::Random, &mut one).is_err());
    }
}
