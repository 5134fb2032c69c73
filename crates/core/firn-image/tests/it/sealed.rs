//! Sealed images: read with their keys, closed without them, and never wrong when they were changed,
//! cut off or mixed up by a user who can write to the files and knows the format.

use std::path::{Path, PathBuf};

use firn_image::{
    BlockOrganization, Codec, FOOTER_BYTES, Geometry, Image, ImageDraft, ImageError, ImageKey,
    ImageOutline, ImageSeal, LocalityBlockId, ReorderOptions, WrapMethod, WrappedKey,
    block_checksum, check_sealed_file, compare_with_reference, key_ring, list_chain, merge_chain,
    rebase_image, reorder_image, unlock_chain, verify_image,
};
use firn_types::{Block, BlockSize};

use crate::model::{Content, Model};

const FOOTER: usize = FOOTER_BYTES as usize;

fn seal_with(key: u8) -> ImageSeal {
    let wrap = WrappedKey {
        method: WrapMethod::Age,
        name: format!("age1test{key}"),
        bytes: vec![key; 90],
    };
    ImageSeal { key: ImageKey::from_bytes([key; 32]), wraps: vec![wrap] }
}

/// A seal whose key this process knows.
fn known_seal(key: u8) -> ImageSeal {
    let seal = seal_with(key);
    key_ring().add_key(seal.key.clone());
    seal
}

fn small_geometry() -> Geometry {
    let block_size = BlockSize::new(1).unwrap();
    Geometry { block_size, locality_block_bytes: 16 << 10, total_pages: 40 }
}

fn write(model: &Model, path: &Path, seal: &ImageSeal, parent: Option<&Image>) {
    let whole = ImageDraft::whole_image(model.geometry, BlockOrganization::Access);
    model.write_as(path, &ImageDraft { parent, seal: Some(seal), ..whole });
}

struct Subject {
    dir: tempfile::TempDir,
    model: Model,
    good: Vec<u8>,
}

impl Subject {
    fn new(codec: Codec, key: u8) -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let model = Model::mixed(small_geometry(), codec);
        let path = dir.path().join("good.firn");
        write(&model, &path, &known_seal(key), None);
        let good = std::fs::read(path).unwrap();
        Self { dir, model, good }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("bad.firn")
    }

    /// Opens these bytes as an image, reads everything, and returns whether something was refused.
    /// Panics if a page, or a section, is wrong.
    fn is_refused(&self, bytes: &[u8]) -> bool {
        std::fs::write(self.path(), bytes).unwrap();
        let Ok(image) = Image::open(&self.path()) else { return true };
        let sections = self.model.sections();
        assert_eq!(image.meta(), &sections.meta);
        assert_eq!(image.device_state(), sections.device_state);
        assert_eq!(image.working_set(), sections.working_set);
        let (mut stored, mut out) = (Vec::new(), vec![0; image.geometry().block_size.byte_count()]);
        let mut refused = false;
        for block in (0..self.model.geometry.block_count()).map(Block) {
            match image.read_block(block, &mut stored, &mut out) {
                Ok(_) => assert!(out == self.model.block_bytes(block), "{block} is wrong"),
                Err(_) => refused = true,
            }
        }
        refused || !verify_image(&image, 1, &|_, _| ()).is_clean()
    }

    /// The footer's fields: (kind, offset in the footer, offset and length of the section).
    fn sections(&self) -> Vec<(u32, usize, usize, usize)> {
        let footer = self.good.len() - FOOTER;
        let number = |at: usize| u64::from_le_bytes(self.good[at..at + 8].try_into().unwrap());
        let count = self.good[footer + 12] as usize;
        let rows = (0..count).map(|row| footer + 48 + row * 40);
        let section = |at: usize| {
            let kind = u32::from_le_bytes(self.good[at..at + 4].try_into().unwrap());
            (kind, at, number(at + 8) as usize, number(at + 16) as usize)
        };
        rows.map(section).collect()
    }
}

/// Makes the checksums of a changed image right, as a user does who knows the format.
fn fix_checksums(bytes: &mut [u8]) {
    let len = bytes.len();
    let footer = len - FOOTER;
    let header = block_checksum(&bytes[..4088]);
    bytes[4088..4096].copy_from_slice(&header.to_le_bytes());
    for row in 0..usize::from(bytes[footer + 12]).min(16) {
        let at = footer + 48 + row * 40;
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
        let (start, stored) = (number(at + 8), number(at + 16));
        if let Some(part) = bytes.get(start..start.saturating_add(stored)) {
            let checksum = block_checksum(part);
            bytes[at + 32..at + 40].copy_from_slice(&checksum.to_le_bytes());
        }
    }
    let checksum = block_checksum(&bytes[footer..len - 8]);
    bytes[len - 8..].copy_from_slice(&checksum.to_le_bytes());
}

#[test]
fn a_sealed_image_is_read_with_its_key() {
    for codec in [Codec::None, Codec::Lz4, Codec::Zstd { level: 1 }] {
        let subject = Subject::new(codec, 1);
        let path = subject.dir.path().join("good.firn");
        let image = Image::open(&path).unwrap();
        subject.model.check(&image);
        assert!(image.is_sealed());
        assert_eq!(image.keys(), [seal_with(1).key]);
        assert_eq!(image.aux_blocks().unwrap(), subject.model.sections().aux_blocks);
        assert_eq!(image.page_table_roots(), subject.model.sections().page_table_roots);
        assert!(verify_image(&image, 2, &|_, _| ()).is_clean());
        assert!(!subject.is_refused(&subject.good));
    }
}

#[test]
fn without_the_key_it_stays_closed_and_names_its_recipient() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("web.firn");
    write(&Model::mixed(small_geometry(), Codec::Lz4), &path, &seal_with(200), None);
    let error = Image::open(&path).unwrap_err();
    assert!(matches!(error, ImageError::Locked { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("age1test200") && text.contains("web.firn"), "{text}");
}

#[test]
fn no_plaintext_is_in_the_file() {
    let subject = Subject::new(Codec::None, 2);
    let contains = |part: &[u8]| subject.good.windows(part.len()).any(|it| it == part);
    for block in (0..subject.model.geometry.block_count()).map(Block) {
        let content = subject.model.contents[block.index()];
        if matches!(content, Content::Noise(_) | Content::Half(_) | Content::Flat(_)) {
            let bytes = subject.model.block_bytes(block);
            assert!(!contains(&bytes[..16]), "{block}");
            assert!(!contains(&bytes[2048..2064]), "{block}");
        }
    }
    for part in [&b"device state"[..], b"vga.vram", b"qemu", b"cpus", b"\"ram\""] {
        assert!(!contains(part), "{}", String::from_utf8_lossy(part));
    }
    assert!(contains(b"age1test2"), "the name of the recipient is not secret");
}

#[test]
fn two_images_with_one_key_have_nothing_in_common() {
    let (one, other) = (Subject::new(Codec::None, 3), Subject::new(Codec::None, 3));
    let used = 4096..4096 + 8192;
    let same = one.good[used.clone()].iter().zip(&other.good[used]).filter(|(a, b)| a == b).count();
    assert!(same < 200, "{same} of 8192 bytes are the same");
}

/// Each bit of all regions but those of memory blocks, of which a part.
#[test]
fn every_flipped_bit_is_refused() {
    let subject = Subject::new(Codec::Lz4, 4);
    let (len, sections_start) = (subject.good.len(), subject.sections()[0].2);
    let memory = (4096 * 8..sections_start * 8).step_by(97);
    let header = (0..4096 * 8).step_by(61).chain(0..48 * 8);
    let rest = (sections_start * 8..(len - FOOTER) * 8).step_by(7);
    let footer = ((len - FOOTER) * 8..len * 8).step_by(3);
    let mut flipped = 0;
    for bit in header.chain(memory).chain(rest).chain(footer) {
        let mut bad = subject.good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(subject.is_refused(&bad), "bit {bit}");
        flipped += 1;
    }
    assert!(flipped > 3000, "{flipped}");
}

/// As above, by a user who makes the checksums right again. Padding is checked by `verify`, which
/// the loop includes; it is no guest's memory.
#[test]
fn flipped_bits_with_right_checksums_are_refused() {
    let subject = Subject::new(Codec::Zstd { level: 1 }, 5);
    let (len, sections_start) = (subject.good.len(), subject.sections()[0].2);
    let header = 0..4088 * 8;
    let rest = sections_start * 8..(len - 8) * 8;
    let mut changed = 0;
    for bit in header.step_by(41).chain(rest.step_by(5)) {
        let mut bad = subject.good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        fix_checksums(&mut bad);
        // A bit of a checksum is as it was again.
        assert!(bad == subject.good || subject.is_refused(&bad), "bit {bit}");
        changed += u32::from(bad != subject.good);
    }
    assert!(changed > 2000, "{changed}");
}

#[test]
fn every_truncation_is_refused() {
    let subject = Subject::new(Codec::Lz4, 6);
    for len in
        (0..subject.good.len()).step_by(31).chain(subject.good.len() - 1100..subject.good.len())
    {
        assert!(subject.is_refused(&subject.good[..len]), "{len} bytes");
    }
    let longer = [&subject.good[..], &[0; 16]].concat();
    assert!(subject.is_refused(&longer));
}

#[test]
fn memory_blocks_that_changed_their_place_are_refused() {
    let subject = Subject::new(Codec::None, 7);
    // Without compression every stored block has 4096 bytes.
    let at = |slot: usize| 4096 + slot * 4096..4096 + (slot + 1) * 4096;
    let slots = (subject.sections()[0].2 - 4096) / 4096;
    for (one, other) in [(0, 1), (0, 4), (1, 5), (2, 3)] {
        assert!(other < slots);
        let mut bad = subject.good.clone();
        let (first, second) = (bad[at(one)].to_vec(), bad[at(other)].to_vec());
        bad[at(one)].copy_from_slice(&second);
        bad[at(other)].copy_from_slice(&first);
        assert!(subject.is_refused(&bad), "{one} and {other}");
    }
}

#[test]
fn parts_of_two_images_with_one_key_are_refused() {
    let one = Subject::new(Codec::None, 8);
    // What is random in an image is a few bytes longer or shorter at times.
    let is_alike = |other: &Subject| one.sections() == other.sections();
    let other = (0..1000).map(|_| Subject::new(Codec::None, 8)).find(is_alike).unwrap();
    assert_eq!(one.good.len(), other.good.len());
    let start = one.sections()[0].2;
    let mut ranges = vec![0..4096, 4096..start, 4096..8192, start..one.good.len()];
    ranges.extend(one.sections().iter().map(|&(_, _, at, len)| at..at + len));
    ranges.push(one.good.len() - FOOTER..one.good.len());
    for range in ranges {
        for fixes in [false, true] {
            let mut bad = one.good.clone();
            bad[range.clone()].copy_from_slice(&other.good[range.clone()]);
            if fixes {
                fix_checksums(&mut bad);
            }
            assert!(one.is_refused(&bad), "{range:?}");
        }
    }
}

#[test]
fn sections_that_changed_their_place_are_refused() {
    let subject = Subject::new(Codec::Lz4, 9);
    let sections = subject.sections();
    for (number, one) in sections.iter().enumerate() {
        for other in &sections[number + 1..] {
            // Their kinds are swapped, and the order of the file stays.
            let mut bad = subject.good.clone();
            let (first, second) = (one.0.to_le_bytes(), other.0.to_le_bytes());
            bad[one.1..one.1 + 4].copy_from_slice(&second);
            bad[other.1..other.1 + 4].copy_from_slice(&first);
            fix_checksums(&mut bad);
            assert!(subject.is_refused(&bad), "{} and {}", one.0, other.0);
        }
    }
}

/// A directory with a base and an image that builds on it, each with a key of its own.
fn chain(keys: (u8, u8)) -> (tempfile::TempDir, Model) {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut model = Model::mixed(small_geometry(), Codec::Lz4);
    write(&model, &dir.path().join("base.firn"), &known_seal(keys.0), None);
    let parent = Image::open(&dir.path().join("base.firn")).unwrap();
    model.contents[4] = Content::Noise(77);
    model.contents[3] = Content::Zero;
    let changed = Model {
        order: model.order.iter().copied().filter(|(block, _)| [3, 4].contains(&block.0)).collect(),
        ..model.clone()
    };
    write(&changed, &dir.path().join("web.firn"), &known_seal(keys.1), Some(&parent));
    std::fs::write(dir.path().join("flat"), model.flat()).unwrap();
    (dir, model)
}

#[test]
fn a_chain_has_a_key_for_each_image() {
    let (dir, _) = chain((20, 21));
    let (path, flat) = (dir.path().join("web.firn"), dir.path().join("flat"));
    let image = Image::open(&path).unwrap();
    assert_eq!(image.keys(), [seal_with(21).key, seal_with(20).key]);
    assert_eq!(compare_with_reference(&image, &flat).unwrap(), []);
    assert!(verify_image(&image, 2, &|_, _| ()).is_clean());
    let again = Image::open_from(&path, &image.try_clone_files().unwrap()).unwrap();
    assert_eq!(compare_with_reference(&again, &flat).unwrap(), []);
    image.reopen().unwrap();
    let parts = list_chain(&path).unwrap();
    assert!(parts.iter().all(|part| part.is_sealed) && parts[0].identity == image.identity());
    let named: Vec<_> = parts.into_iter().map(|part| part.path).collect();
    assert_eq!(named, [path.clone(), dir.path().join("base.firn")]);
    assert_eq!(unlock_chain(&path).unwrap(), image.keys());
}

#[test]
fn a_rewritten_image_stays_sealed() {
    let (dir, _) = chain((22, 23));
    let (path, flat) = (dir.path().join("web.firn"), dir.path().join("flat"));
    let image = Image::open(&path).unwrap();
    let out = |name: &str| dir.path().join(name);
    merge_chain(&image, &out("merged.firn"), 2, &|_, _| ()).unwrap();
    let parent = Image::open(&out("base.firn")).unwrap();
    rebase_image(&image, &parent, &out("rebased.firn"), 2, &|_, _| ()).unwrap();
    let how = ReorderOptions {
        codec: Some(Codec::Zstd { level: 1 }),
        ..ReorderOptions::for_organization(BlockOrganization::Physical)
    };
    reorder_image(&image, &how, &out("reordered.firn"), &|_, _| ()).unwrap();
    for name in ["merged.firn", "rebased.firn", "reordered.firn"] {
        let rewritten = Image::open(&out(name)).unwrap();
        assert_eq!(rewritten.seal(), image.seal(), "{name}");
        assert_eq!(compare_with_reference(&rewritten, &flat).unwrap(), [], "{name}");
        assert!(verify_image(&rewritten, 2, &|_, _| ()).is_clean(), "{name}");
        assert_eq!(rewritten.aux_blocks().unwrap(), image.aux_blocks().unwrap(), "{name}");
    }
    // The parent may be rewritten: its child knows its key, not its bytes.
    merge_chain(&parent, &out("base.firn"), 1, &|_, _| ()).unwrap();
    assert_eq!(compare_with_reference(&Image::open(&path).unwrap(), &flat).unwrap(), []);
}

#[test]
fn a_chain_is_sealed_as_a_whole() {
    let (dir, model) = chain((24, 25));
    let clear = dir.path().join("clear.firn");
    model.write(&clear);
    let whole = ImageDraft::whole_image(model.geometry, BlockOrganization::Access);
    let (sealed, clear) =
        (Image::open(&dir.path().join("base.firn")).unwrap(), Image::open(&clear).unwrap());
    let seal = seal_with(26);
    for draft in [
        ImageDraft { parent: Some(&sealed), ..whole },
        ImageDraft { parent: Some(&clear), seal: Some(&seal), ..whole },
    ] {
        let error = firn_image::ImageWriter::create(&dir.path().join("x.firn"), &draft).err();
        assert!(matches!(error, Some(ImageError::MixedSeals { .. })), "{error:?}");
    }
}

#[test]
fn files_that_were_swapped_in_a_chain_are_refused() {
    let (dir, model) = chain((27, 28));
    let path = |name: &str| dir.path().join(name);
    let good = std::fs::read(path("base.firn")).unwrap();
    let refused = |what: &str| {
        let error = Image::open(&path("web.firn")).err();
        assert!(error.is_some(), "{what}");
    };
    // Another image with the same key.
    write(&model, &path("base.firn"), &known_seal(27), None);
    refused("another image");
    // An image without a seal, with the parent's identity.
    model.write(&path("base.firn"));
    let mut forged = std::fs::read(path("base.firn")).unwrap();
    let footer = forged.len() - FOOTER;
    forged[24..40].copy_from_slice(&good[24..40]);
    forged[footer + 16..footer + 32].copy_from_slice(&good[24..40]);
    fix_checksums(&mut forged);
    std::fs::write(path("base.firn"), &forged).unwrap();
    assert!(Image::open(&path("base.firn")).is_ok(), "it is a good forgery");
    refused("an image that is not sealed");
    // The two files of the chain.
    std::fs::copy(path("web.firn"), path("base.firn")).unwrap();
    refused("the image itself");
    std::fs::write(path("base.firn"), &good).unwrap();
    assert!(Image::open(&path("web.firn")).is_ok());
}

#[test]
fn a_copy_is_checked_without_the_key() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("web.firn");
    write(&Model::mixed(small_geometry(), Codec::Lz4), &path, &seal_with(201), None);
    assert!(Image::open(&path).is_err());
    let good = std::fs::read(&path).unwrap();
    let check = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        check_sealed_file(&path, &std::fs::File::open(&path).unwrap(), &|_, _| ())
    };
    check(&good).unwrap();
    for bit in (0..good.len() * 8).step_by(211) {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(check(&bad).is_err(), "bit {bit}");
    }
    for len in (0..good.len()).step_by(997) {
        assert!(check(&good[..len]).is_err(), "{len} bytes");
    }
}

#[test]
fn the_outline_of_a_sealed_image_shows_its_parent_and_no_more() {
    let (dir, _) = chain((29, 30));
    let bytes = std::fs::read(dir.path().join("web.firn")).unwrap();
    let outline = ImageOutline::read(bytes.len() as u64, &mut |range| {
        Ok::<_, std::io::Error>(bytes[range.start as usize..range.end as usize].to_vec())
    });
    let outline = outline.unwrap();
    assert!(outline.is_sealed && outline.meta.is_null());
    assert_eq!(outline.parent.unwrap().path.to_str(), Some("base.firn"));
}

/// Blocks that are listed again: the earlier listing has a tag of its own.
#[test]
fn a_block_that_was_copied_again_is_read_as_it_was_last() {
    use firn_image::{CompressedBlock, ImageWriter, LocalityBlockPacker, compress_block};
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("web.firn");
    let model = Model::mixed(small_geometry(), Codec::Lz4);
    let (seal, whole) =
        (known_seal(31), ImageDraft::whole_image(model.geometry, BlockOrganization::Access));
    let draft = ImageDraft { allows_again: true, seal: Some(&seal), ..whole };
    let mut writer = ImageWriter::create(&path, &draft).unwrap();
    for round in 0..3u8 {
        let mut packer = LocalityBlockPacker::new(model.geometry);
        for block in 0..10 {
            let bytes = vec![round + 1 + block as u8; 4096];
            let CompressedBlock::Packed(packed) = compress_block(Codec::Lz4, Block(block), &bytes)
            else {
                panic!("not zero")
            };
            assert!(packer.push_block(packed).is_none());
        }
        writer.append(packer.take_filled().unwrap()).unwrap();
    }
    writer.finish(model.sections()).unwrap();
    let image = Image::open(&path).unwrap();
    let (mut stored, mut out) = (Vec::new(), vec![0; 4096]);
    for block in 0..10 {
        image.read_block(Block(block), &mut stored, &mut out).unwrap();
        assert_eq!(out, vec![3 + block as u8; 4096]);
    }
    assert_eq!(image.entries(LocalityBlockId(0)), []);
}
