//! A writer's mistakes are reported, and leave no file.

use std::path::Path;

use firn_image::{
    AuxBlock, BlockOrganization, Codec, CompressedBlock, Geometry, Image, ImageDraft, ImageError,
    ImageSections, ImageWriter, LocalityBlock, LocalityBlockPacker, compress_block,
};
use firn_types::{Block, RegionMap};

use crate::model::Model;

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn filled(geometry: Geometry, block: u32) -> LocalityBlock {
    let raw = vec![1; geometry.block_size.byte_count()];
    let CompressedBlock::Packed(packed) = compress_block(Codec::Lz4, Block(block), &raw) else {
        panic!("not zero")
    };
    let mut packer = LocalityBlockPacker::new(geometry);
    assert_eq!(packer.push_block(packed), None);
    packer.take_filled().unwrap()
}

fn sections(pages: u32) -> ImageSections {
    let regions = RegionMap::lay_out([("ram", u64::from(pages) * 4096)]).unwrap();
    ImageSections { regions, ..ImageSections::default() }
}

fn begin(dir: &Path) -> ImageWriter {
    ImageWriter::create(
        &dir.join("a.firn"),
        &ImageDraft::whole_image(Geometry::new(10), BlockOrganization::Access),
    )
    .unwrap()
}

#[test]
fn mistakes_are_errors_and_leave_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let geometry = Geometry::new(10);
    let mut writer = begin(dir.path());
    writer.append(filled(geometry, 3)).unwrap();
    assert!(matches!(writer.append(filled(geometry, 3)), Err(ImageError::BlockTwice(Block(3)))));
    drop(writer);
    let mut writer = begin(dir.path());
    let past = writer.append(filled(geometry, 5));
    assert!(matches!(past, Err(ImageError::BlockRange { block: Block(5), blocks: 5 })));
    drop(writer);
    let mut writer = begin(dir.path());
    writer.set_zero(Block(1));
    writer.set_zero(Block(1));
    assert!(matches!(writer.finish(sections(10)), Err(ImageError::BlockTwice(Block(1)))));
    let other_regions = begin(dir.path()).finish(sections(11));
    assert!(matches!(other_regions, Err(ImageError::Pages { regions: 11, image: 10 })));
    let working_set = ImageSections { working_set: vec![Block(5)], ..sections(10) };
    assert!(matches!(begin(dir.path()).finish(working_set), Err(ImageError::BlockRange { .. })));
    let aux = AuxBlock { id: "x".repeat(70_000), bytes: vec![] };
    let long_id = ImageSections { aux_blocks: vec![aux], ..sections(10) };
    assert!(matches!(begin(dir.path()).finish(long_id), Err(ImageError::Section { .. })));
    let meta = serde_json::Value::String("x".repeat(17 << 20));
    let too_much = ImageSections { meta, ..sections(10) };
    assert!(matches!(begin(dir.path()).finish(too_much), Err(ImageError::Section { .. })));
    let impossible = Geometry { locality_block_bytes: 5, ..geometry };
    let refused = ImageWriter::create(
        &dir.path().join("a.firn"),
        &ImageDraft::whole_image(impossible, BlockOrganization::Access),
    );
    assert!(matches!(refused, Err(ImageError::Geometry(_))));
    assert_eq!(names(dir.path()), Vec::<String>::new());
}

#[test]
fn an_image_at_the_path_stays_until_the_new_one_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.firn");
    let first = Model::mixed(Geometry::new(50), Codec::Lz4);
    first.write(&path);
    let second = Model::mixed(Geometry::new(70), Codec::Lz4);
    let writer = second.write_blocks(&path);
    let open = Image::open(&path).unwrap();
    first.check(&open);
    drop(writer);
    first.check(&Image::open(&path).unwrap());
    second.write(&path);
    second.check(&Image::open(&path).unwrap());
    first.check(&open);
    assert_eq!(names(dir.path()), ["a.firn"]);
}

#[test]
fn an_image_is_for_its_owner_alone() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.firn");
    Model::mixed(Geometry::new(50), Codec::Lz4).write(&path);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}
