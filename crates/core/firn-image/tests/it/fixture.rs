//! Images that were written once and must be readable for ever.
//!
//! `fixtures/v1.firn` was written by [`write_the_fixture`] when version 1 of the format was made.
//! It is never written again: a format that changes gets a new version, and a fixture of its own
//! beside this one. `fixtures/v3.firn` was written by [`write_the_sealed_fixture`].

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use firn_image::{
    BlockOrganization, Codec, FilledBy, Geometry, Image, ImageDraft, ImageError, ImageKey,
    ImageSeal, LocalityBlockId, WrapMethod, WrappedKey, key_ring, verify_image,
};
use firn_types::{BlockSize, VcpuId};

use crate::model::Model;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The contents of the fixture: every kind of content, placement and codec.
fn model() -> Model {
    let block_size = BlockSize::new(2).unwrap();
    let geometry = Geometry { block_size, locality_block_bytes: 16 << 10, total_pages: 46 };
    let (zstd, zlib) = (Codec::Zstd { level: 3 }, Codec::Zlib { level: 6 });
    let codecs = vec![Codec::Lz4, zstd, zlib, Codec::None];
    Model { codecs, ..Model::mixed(geometry, Codec::None) }
}

#[test]
#[ignore = "writes a fixture, once in the life of a format version"]
fn write_the_fixture() {
    let path = fixture("v1.firn");
    assert!(!path.exists(), "a fixture is never written again");
    model().write(&path);
}

/// The seal of the fixture of version 3.
fn seal() -> ImageSeal {
    let wrap =
        WrappedKey { method: WrapMethod::KeyFile, name: "fixture".into(), bytes: vec![7; 40] };
    ImageSeal { key: ImageKey::from_bytes([0x5a; 32]), wraps: vec![wrap] }
}

#[test]
#[ignore = "writes a fixture, once in the life of a format version"]
fn write_the_sealed_fixture() {
    let path = fixture("v3.firn");
    assert!(!path.exists(), "a fixture is never written again");
    let (model, seal) = (model(), seal());
    let whole = ImageDraft::whole_image(model.geometry, BlockOrganization::Access);
    model.write_as(&path, &ImageDraft { seal: Some(&seal), ..whole });
}

#[test]
fn version_3_is_readable_with_its_key() {
    let path = fixture("v3.firn");
    assert!(matches!(Image::open(&path), Err(ImageError::Locked { .. })));
    key_ring().add_key(seal().key);
    let image = Image::open(&path).unwrap();
    assert_eq!(image.seal(), Some(&seal()));
    check_contents(&image);
}

#[test]
fn version_1_is_readable() {
    check_contents(&Image::open(&fixture("v1.firn")).unwrap());
}

fn check_contents(image: &Image) {
    let model = model();
    model.check(image);
    assert!(verify_image(image, 1, &|_, _| ()).is_clean());
    let entries = (0..image.locality_blocks()).flat_map(|id| image.entries(LocalityBlockId(id)));
    let kinds: HashSet<_> = entries.map(|entry| entry.stored_as).collect();
    assert_eq!(kinds.len(), 4);
    assert_eq!(image.geometry(), model.geometry);
    assert_eq!(image.organization(), BlockOrganization::Access);
    assert_eq!(image.filled_by(LocalityBlockId(0)), FilledBy::Vcpu(VcpuId(0)));
    let sections = model.sections();
    assert_eq!(image.meta(), &sections.meta);
    assert_eq!(image.regions(), &sections.regions);
    assert_eq!(image.device_state(), sections.device_state);
    assert_eq!(image.aux_blocks().unwrap(), sections.aux_blocks);
    assert_eq!(image.working_set(), sections.working_set);
    assert_eq!(image.page_table_roots(), sections.page_table_roots);
}
