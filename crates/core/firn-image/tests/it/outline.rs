//! What the end of an image shows, without the rest of it.

use std::convert::Infallible;
use std::ops::Range;

use firn_image::{
    BlockOrganization, Codec, Geometry, Image, ImageDraft, ImageOutline, ImageWriter, OutlineError,
};

use crate::model::Model;

fn read(bytes: &[u8]) -> (Result<ImageOutline, OutlineError<Infallible>>, Vec<Range<u64>>) {
    let mut ranges = Vec::new();
    let outline = ImageOutline::read(bytes.len() as u64, &mut |range| {
        ranges.push(range.clone());
        Ok(bytes[range.start as usize..range.end as usize].to_vec())
    });
    (outline, ranges)
}

/// A whole image, and one that builds on it, in one directory.
fn pair() -> (tempfile::TempDir, Vec<u8>, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let model = Model::mixed(Geometry::new(700), Codec::Lz4);
    let base = dir.path().join("base.firn");
    model.write(&base);
    let child = dir.path().join("child.firn");
    let parent = Image::open(&base).unwrap();
    let draft = ImageDraft {
        parent: Some(&parent),
        ..ImageDraft::whole_image(model.geometry, BlockOrganization::Access)
    };
    let writer = ImageWriter::create(&child, &draft).unwrap();
    writer.finish(model.sections()).unwrap();
    let bytes = |path| std::fs::read(path).unwrap();
    let (base, child) = (bytes(base), bytes(child));
    (dir, base, child)
}

#[test]
fn the_end_shows_what_opening_shows() {
    let (dir, base, child) = pair();
    let (whole, ranges) = read(&base);
    let (whole, opened) = (whole.unwrap(), Image::open(&dir.path().join("base.firn")).unwrap());
    assert_eq!((whole.identity, whole.parent), (opened.identity(), None));
    assert_eq!((&whole.meta, whole.file_bytes), (opened.meta(), base.len() as u64));
    assert!(ranges.len() <= 2 && ranges[0].end == base.len() as u64, "{ranges:?}");
    let parent = read(&child).0.unwrap().parent.unwrap();
    assert_eq!(parent.path.to_str(), Some("base.firn"));
    assert_eq!(parent.identity, opened.identity());
}

#[test]
fn images_with_the_same_bytes_are_recognized() {
    let (_dir, base, child) = pair();
    let outline = |bytes: &[u8]| read(bytes).0.unwrap();
    assert!(outline(&base).has_same_bytes(&outline(&base)));
    assert!(!outline(&base).has_same_bytes(&outline(&child)));
}

#[test]
fn a_changed_or_missing_byte_of_the_end_is_an_error_or_changes_nothing() {
    let (_dir, _, child) = pair();
    let good = read(&child).0.unwrap();
    for at in child.len().saturating_sub(6000)..child.len() {
        let mut bad = child.clone();
        bad[at] ^= 1;
        // A byte of a part that the outline does not read changes nothing.
        let outline = read(&bad).0;
        assert!(outline.is_err() || outline.is_ok_and(|found| found == good), "byte {at}");
    }
    for footer in child.len() - 1024..child.len() {
        let mut bad = child.clone();
        bad[footer] ^= 0x80;
        assert!(read(&bad).0.is_err(), "byte {footer} of the footer");
    }
    for len in (0..child.len()).step_by(7) {
        assert!(read(&child[..len]).0.is_err(), "{len} bytes");
    }
}
