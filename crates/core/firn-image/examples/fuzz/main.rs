//! Fuzzes the image reader without a fuzzing engine, on a stable toolchain: mutates good images and
//! reads them.
//!
//! ```text
//!   cargo run --release -p firn-image --example fuzz -- [--seconds 60] [--seed N]
//! ```
//!
//! Half of the mutations are blind; no page that is still read from such a file may differ from the
//! original. The other half has corrected checksums, to reach the parsers behind them. A
//! panic, a case that takes more than two seconds of CPU time, or one that needs more than 2 GiB of
//! memory ends the run, and the file is kept.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use firn_image::{
    AuxBlock, BlockOrganization, Codec, CompressedBlock, FilledBy, Geometry, Image, ImageDraft,
    ImageSections, ImageWriter, LocalityBlockPacker, ReorderOptions, compress_block, reorder_image,
};
use firn_types::{Block, BlockSize, GuestPhys, RegionMap, VcpuId};
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};

mod exercise;
mod mutate;

use exercise::{exercise, rearrange};
use mutate::{Dice, Parts, blindly};

const CASE_MAX: Duration = Duration::from_secs(2);
const MEMORY_MAX: u64 = 2 << 30;

struct Seed {
    bytes: Vec<u8>,
    blocks: HashMap<Block, Vec<u8>>,
}

fn main() -> Result<()> {
    let (mut seconds, mut seed) = (60, 1);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let value = args.next().context("an option without a number")?.parse()?;
        match arg.as_str() {
            "--seconds" => seconds = value,
            "--seed" => seed = value,
            _ => bail!("{arg}?"),
        }
    }
    setrlimit(Resource::As, Rlimit { current: Some(MEMORY_MAX), maximum: Some(MEMORY_MAX) })?;
    let dir = tempfile::tempdir_in("/dev/shm")?;
    let seeds = seeds(dir.path())?;
    fuzz(dir.path(), &seeds, Duration::from_secs(seconds), seed)
}

fn fuzz(dir: &Path, seeds: &[Seed], length: Duration, seed: u64) -> Result<()> {
    let (start, mut dice) = (Instant::now(), Dice::new(seed));
    let (mut cases, mut opened, mut slowest) = (0u64, 0u64, Duration::ZERO);
    while start.elapsed() < length {
        let begun = cpu_time()?;
        let from = &seeds[dice.below(seeds.len())];
        let (file, is_sealed) = mutation(from, &mut dice);
        let path = dir.join("case.firn");
        std::fs::write(&path, &file)?;
        let rewrite = dice.one_in(16);
        let case = || one_case(&path, from, is_sealed, rewrite);
        let is_image = match catch_unwind(AssertUnwindSafe(case)) {
            Ok(is_image) => is_image,
            Err(_) => bail!("case {cases} of seed {seed} panicked: {}", keep(&path)?.display()),
        };
        let took = cpu_time()? - begun;
        if took > CASE_MAX {
            bail!("case {cases} of seed {seed} took {took:?}: {}", keep(&path)?.display());
        }
        slowest = slowest.max(took);
        cases += 1;
        opened += u64::from(is_image);
    }
    println!("{cases} cases, {opened} of them opened as images, the slowest took {slowest:?}");
    Ok(())
}

/// The CPU time of the whole process: a busy machine makes no case slow.
fn cpu_time() -> Result<Duration> {
    Ok(clock_gettime(ClockId::ProcessCPUTime).try_into()?)
}

/// A changed image, and whether its checksums were corrected.
fn mutation(from: &Seed, dice: &mut Dice) -> (Vec<u8>, bool) {
    if dice.one_in(2) {
        let mut parts = Parts::from_image(&from.bytes);
        parts.mutate(dice);
        return (parts.join(dice), true);
    }
    let mut bytes = from.bytes.clone();
    blindly(&mut bytes, dice);
    (bytes, false)
}

fn one_case(path: &Path, from: &Seed, is_sealed: bool, rewrite: bool) -> bool {
    let Some(decoded) = exercise(path) else { return false };
    for (block, bytes) in decoded {
        assert!(is_sealed || from.blocks.get(&block) == Some(&bytes), "{block} is wrong");
    }
    if rewrite {
        let out = path.with_extension("rewritten");
        rearrange(path, &out, BlockOrganization::Access);
        rearrange(path, &out, BlockOrganization::Physical);
    }
    true
}

fn keep(path: &Path) -> Result<PathBuf> {
    let kept = std::env::temp_dir().join(format!("firn-fuzz-{}.firn", std::process::id()));
    std::fs::copy(path, &kept)?;
    Ok(kept)
}

/// Small images of every kind.
fn seeds(dir: &Path) -> Result<Vec<Seed>> {
    let mut seeds = Vec::new();
    for (codec, pages) in [("none", 1), ("lz4", 2), ("zstd", 1), ("zlib", 4)] {
        let path = dir.join("seed.firn");
        let (codec, block_size) = (codec.parse()?, BlockSize::new(pages)?);
        write(
            &path,
            codec,
            ImageDraft::whole_image(geometry(block_size), BlockOrganization::Access),
        )?;
        seeds.push(seed(&path)?);
        // It stays at the path at which the mutated images that build on it search for it.
        let parent = dir.join(format!("parent-{pages}.firn"));
        std::fs::rename(&path, &parent)?;
        let parent = Image::open(&parent)?;
        for (parent, again) in [(None, true), (Some(&parent), false), (Some(&parent), true)] {
            let whole = ImageDraft::whole_image(geometry(block_size), BlockOrganization::Access);
            write(&path, codec, ImageDraft { parent, allows_again: again, ..whole })?;
            seeds.push(seed(&path)?);
        }
        let other = dir.join("other.firn");
        reorder_image(
            &parent,
            &ReorderOptions::for_organization(BlockOrganization::Random),
            &other,
            &|_, _| (),
        )?;
        seeds.push(seed(&other)?);
    }
    Ok(seeds)
}

fn seed(path: &Path) -> Result<Seed> {
    let blocks = exercise(path).context("a seed is an image")?.into_iter().collect();
    Ok(Seed { bytes: std::fs::read(path)?, blocks })
}

fn geometry(block_size: BlockSize) -> Geometry {
    let total_pages = 40 * block_size.page_count() as u32;
    Geometry { block_size, locality_block_bytes: 16 << 10, total_pages }
}

fn write(path: &Path, codec: Codec, draft: ImageDraft<'_>) -> Result<()> {
    let (geometry, block_size) = (draft.geometry, draft.geometry.block_size);
    let mut writer = ImageWriter::create(path, &draft)?;
    let mut packers = [FilledBy::Vcpu(VcpuId(0)), FilledBy::Sweep]
        .map(|filled_by| LocalityBlockPacker::filled_by(geometry, filled_by));
    let some = (0..40u32).filter(|number| number % 5 != 0);
    let (some, again): (Vec<u32>, Vec<u32>) = match draft.parent {
        None => (some.collect(), vec![4, 6, 2]),
        Some(_) => (vec![3, 5, 8, 13], vec![8, 3]),
    };
    for number in some.into_iter().chain(again.into_iter().filter(|_| draft.allows_again)) {
        let word = |at: u32| u64::from(number % 3) * u64::from(at % 50).pow(number % 7 + 1);
        let words = block_size.byte_count() as u32 / 8;
        let raw: Vec<u8> = (0..words).flat_map(|at| word(at).to_le_bytes()).collect();
        match compress_block(codec, Block(number), &raw) {
            CompressedBlock::Zero => writer.set_zero(Block(number)),
            CompressedBlock::Packed(packed) => {
                if let Some(full) = packers[number as usize % 2].push_block(packed) {
                    writer.append(full)?;
                }
            }
        }
    }
    for rest in packers.iter_mut().filter_map(LocalityBlockPacker::take_filled) {
        writer.append(rest)?;
    }
    let sections = ImageSections {
        meta: serde_json::json!({"name": "fuzz", "list": [1, 2, 3]}),
        regions: RegionMap::lay_out([("ram", geometry.flat_bytes())])?,
        device_state: b"state".repeat(20),
        aux_blocks: vec![AuxBlock { id: "rom".into(), bytes: vec![7; 100] }],
        working_set: (1..9).map(Block).collect(),
        page_table_roots: vec![GuestPhys(0x1000)],
    };
    writer.finish(sections)?;
    Ok(())
}
