//! Truncated, flipped and mixed-up images: reading gives an error that names the part, or the right
//! page. It never gives a wrong one.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use firn_image::{Codec, Geometry, Image, ImageError, verify_image};
use firn_types::{Block, BlockSize};
use proptest::prelude::*;

use crate::model::Model;

struct Subject {
    dir: tempfile::TempDir,
    model: Model,
    good: Vec<u8>,
}

impl Subject {
    fn new(codec: Codec) -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let block_size = BlockSize::new(1).unwrap();
        let geometry = Geometry { block_size, locality_block_bytes: 16 << 10, total_pages: 40 };
        let model = Model::mixed(geometry, codec);
        let path = dir.path().join("good.firn");
        model.write(&path);
        let good = std::fs::read(path).unwrap();
        Self { dir, model, good }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("bad.firn")
    }

    fn with_file(&self, bytes: &[u8]) -> PathBuf {
        std::fs::write(self.path(), bytes).unwrap();
        self.path()
    }

    /// Opens it, reads everything, and returns the result. Panics if a page is wrong.
    fn judge(&self, path: &Path) -> Verdict {
        let image = match Image::open(path) {
            Ok(image) => image,
            Err(error) => return Verdict::NotOpened(error),
        };
        let (mut stored, mut out) = (Vec::new(), vec![0; image.geometry().block_size.byte_count()]);
        for block in (0..self.model.geometry.block_count()).map(Block) {
            match image.read_block(block, &mut stored, &mut out) {
                Ok(_) => assert!(out == self.model.block_bytes(block), "{block} is wrong"),
                Err(error) => assert_names_the_place(&error, path),
            }
        }
        match verify_image(&image, 1, &|_, _| ()).problems.into_iter().next() {
            None => Verdict::Clean,
            Some(problem) => Verdict::Problem(problem.to_string()),
        }
    }
}

#[derive(Debug)]
enum Verdict {
    Clean,
    Problem(String),
    NotOpened(ImageError),
}

impl Verdict {
    fn assert_found(&self, path: &Path, what: &str) {
        match self {
            Self::Clean => panic!("{what} was not found"),
            Self::Problem(problem) => assert!(problem.contains("byte "), "{what}: {problem}"),
            Self::NotOpened(error) => assert_names_the_place(error, path),
        }
    }
}

fn assert_names_the_place(error: &ImageError, path: &Path) {
    let chain = format!("{:#}", Chain(error));
    assert!(chain.contains(&path.display().to_string()), "{chain}");
    assert!(chain.contains(" byte "), "{chain}");
}

struct Chain<'a>(&'a dyn std::error::Error);

impl std::fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        self.0.source().map_or(Ok(()), |source| write!(f, ": {}", Chain(source)))
    }
}

/// Lengths around every boundary of the format, and a stride through all others.
fn length_classes(len: usize, geometry: &Geometry) -> Vec<usize> {
    let locality = geometry.locality_block_bytes as usize;
    let boundaries = (0..).map(|i| 4096 + i * locality).take_while(|&at| at < len);
    let mut lengths: Vec<_> = boundaries
        .chain([0, 8, 40, 4088, len - 1024, len - 8, len])
        .flat_map(|at| at.saturating_sub(2)..(at + 3).min(len))
        .chain((0..len).step_by(97))
        .chain(len - 3000..len)
        .collect();
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

#[test]
fn every_truncation_is_found_when_opening() {
    let subject = Subject::new(Codec::Lz4);
    let file = File::options().write(true).open(subject.with_file(&subject.good)).unwrap();
    for len in length_classes(subject.good.len(), &subject.model.geometry).into_iter().rev() {
        file.set_len(len as u64).unwrap();
        let Verdict::NotOpened(error) = subject.judge(&subject.path()) else {
            panic!("{len} bytes of {} were opened", subject.good.len())
        };
        assert_names_the_place(&error, &subject.path());
    }
}

#[test]
fn more_bytes_than_there_should_be_are_found() {
    let subject = Subject::new(Codec::Lz4);
    for extra in [1, 1023, 1024, 4096] {
        let path = subject.with_file(&[&subject.good[..], &vec![0; extra]].concat());
        subject.judge(&path).assert_found(&path, "a longer file");
    }
}

/// Positions throughout the file, and more densely at its end: sections, index, footer.
#[test]
fn ten_thousand_single_bit_flips() {
    let mut flipped = 0;
    for codec in [Codec::None, Codec::Lz4, Codec::Zstd { level: 1 }, Codec::Zlib { level: 1 }] {
        let subject = Subject::new(codec);
        let path = subject.with_file(&subject.good);
        let file = File::options().write(true).open(&path).unwrap();
        let bits = subject.good.len() * 8;
        let flips = (0..bits).step_by((bits / 2600).max(1));
        let tail = (subject.good.len() - 2500) * 8..bits;
        for bit in flips.chain(tail.step_by(13)) {
            let (at, good) = (bit / 8, subject.good[bit / 8]);
            file.write_all_at(&[good ^ (1 << (bit % 8))], at as u64).unwrap();
            subject.judge(&path).assert_found(&path, &format!("bit {bit} ({codec})"));
            flipped += 1;
            file.write_all_at(&[good], at as u64).unwrap();
        }
        assert!(matches!(subject.judge(&path), Verdict::Clean));
    }
    assert!(flipped >= 10_000, "{flipped}");
}

#[test]
fn parts_of_two_images_make_none() {
    let (one, other) = (Subject::new(Codec::None), Subject::new(Codec::None));
    assert_eq!(one.good.len(), other.good.len());
    let mixed = [&one.good[..4096], &other.good[4096..]].concat();
    let path = one.with_file(&mixed);
    let Verdict::NotOpened(error) = one.judge(&path) else { panic!("opened") };
    assert!(error.to_string().contains("another image"), "{error}");
}

#[test]
fn a_file_that_is_no_image_is_an_error() {
    let subject = Subject::new(Codec::None);
    let path = subject.with_file(&[b'x'; 10_000]);
    let error = Image::open(&path).unwrap_err();
    assert!(error.to_string().contains("no image"), "{error}");
    assert!(matches!(Image::open(subject.dir.path()), Err(ImageError::NotRegular { .. })));
    let missing = subject.dir.path().join("missing");
    assert!(matches!(Image::open(&missing), Err(ImageError::Io { step: "open", .. })));
    let mut newer = subject.good.clone();
    newer[8] = 4;
    let error = Image::open(&subject.with_file(&newer)).unwrap_err();
    assert!(error.to_string().contains("format version 4"), "{error}");
}

#[test]
fn an_image_cut_while_open_is_an_error() {
    let subject = Subject::new(Codec::None);
    let path = subject.with_file(&subject.good);
    let image = Image::open(&path).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(4096).unwrap();
    let (id, entry) = (0..40).find_map(|block| image.entry_of(Block(block))).unwrap();
    let error = image.read_entry(entry, id, &mut Vec::new()).unwrap_err();
    assert_names_the_place(&error, &path);
    assert!(!verify_image(&image, 2, &|_, _| ()).is_clean());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Several bytes overwritten anywhere, and perhaps the end cut off.
    #[test]
    fn overwritten_bytes_are_found(
        writes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let subject = Subject::new(Codec::Lz4);
        let mut bad = subject.good.clone();
        for (at, byte) in writes {
            let at = at.index(bad.len());
            bad[at] = byte;
        }
        if let Some(cut) = cut {
            bad.truncate(cut.index(bad.len()));
        }
        let path = subject.with_file(&bad);
        let verdict = subject.judge(&path);
        if bad != subject.good {
            verdict.assert_found(&path, "damage");
        }
    }
}
