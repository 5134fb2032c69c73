//! Measures each codec on real memory: the compressed size, the time to compress, and the time that
//! a fault waits for it.
//!
//! ```text
//!   codecs [--blocks N] [--pages P] SOURCE...       SOURCE: a flat file (a guest's RAM file), or the pid of a process
//! ```
//!
//! Of all blocks that are not zero, N (20,000) are taken evenly. Compression is measured in CPU
//! time of this thread; decoding, block by block in shuffled order, as the time that passes: its
//! median is what a fault waits for, checksum included. The numbers behind the default codec are in
//! `docs/design/001-codec.md`.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use firn_image::{
    BlockEntry, BlockOrganization, Codec, CompressedBlock, Geometry, Image, ImageDraft,
    ImageSections, ImageWriter, LocalityBlockId, LocalityBlockPacker, StoredAs, compress_block,
};
use firn_types::{Block, BlockSize, RegionMap};
use rustix::time::{ClockId, clock_gettime};

const CODECS: [&str; 11] = [
    "none", "lz4", "zstd:-7", "zstd:-3", "zstd:-1", "zstd:1", "zstd:3", "zstd:9", "zlib:1",
    "zlib:6", "zlib:9",
];

fn main() -> Result<()> {
    let (mut blocks, mut pages, mut sources) = (20_000, 2u8, Vec::new());
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--blocks" => blocks = args.next().context("--blocks N")?.parse()?,
            "--pages" => pages = args.next().context("--pages P")?.parse()?,
            _ => sources.push(arg),
        }
    }
    ensure!(!sources.is_empty(), "give a flat file or a pid");
    let size = BlockSize::new(pages)?;
    for source in sources {
        let (total, sample) = thin_out(read_source(&source, size)?, blocks);
        println!(
            "\n{source}: {total} blocks of {} bytes are not zero; {} taken",
            size.byte_count(),
            sample.len()
        );
        println!(
            "{:8} {:>6} {:>6} {:>9} | {:>7} {:>7} {:>7} {:>7}",
            "codec", "size%", "raw%", "pack us", "p50 us", "p90 us", "p99 us", "per LB"
        );
        for codec in CODECS {
            measure(codec, &sample, size)?;
        }
    }
    Ok(())
}

/// All blocks of a flat file or a process that are not zero.
fn read_source(source: &str, size: BlockSize) -> Result<Vec<Vec<u8>>> {
    let Ok(pid) = source.parse::<u32>() else {
        let file = File::open(source).with_context(|| source.to_owned())?;
        let len = file.metadata()?.len();
        return read_range(&file, 0..len, size);
    };
    let memory = File::open(format!("/proc/{pid}/mem"))?;
    let mut blocks = Vec::new();
    for line in BufReader::new(File::open(format!("/proc/{pid}/maps"))?).lines() {
        let line = line?;
        let (range, rest) = line.split_once(' ').context("maps")?;
        let (start, end) = range.split_once('-').context("maps")?;
        if rest.starts_with('r') && !line.contains("[v") {
            let range = u64::from_str_radix(start, 16)?..u64::from_str_radix(end, 16)?;
            blocks.extend(read_range(&memory, range, size)?);
        }
    }
    Ok(blocks)
}

fn read_range(file: &File, range: std::ops::Range<u64>, size: BlockSize) -> Result<Vec<Vec<u8>>> {
    let mut blocks = Vec::new();
    let mut block = vec![0; size.byte_count()];
    for offset in range.step_by(size.byte_count()) {
        if file.read_exact_at(&mut block, offset).is_ok() && block.iter().any(|&byte| byte != 0) {
            blocks.push(block.clone());
        }
    }
    Ok(blocks)
}

fn thin_out(blocks: Vec<Vec<u8>>, wanted: usize) -> (usize, Vec<Vec<u8>>) {
    let total = blocks.len();
    let step = total.div_ceil(wanted).max(1);
    (total, blocks.into_iter().step_by(step).collect())
}

fn measure(name: &str, sample: &[Vec<u8>], size: BlockSize) -> Result<()> {
    let codec: Codec = name.parse()?;
    let geometry =
        Geometry { block_size: size, ..Geometry::new((sample.len() * size.page_count()) as u32) };
    let dir = tempfile::tempdir_in("/dev/shm")?;
    let path = dir.path().join("codecs.firn");
    let cpu = pack(codec, sample, geometry, &path)?;
    let image = Image::open(&path)?;
    let mut times = decode_all(&image)?;
    times.sort_unstable();
    let at = |percent: usize| us(times[(times.len() - 1) * percent / 100]);
    let entries = || (0..image.locality_blocks()).flat_map(|id| image.entries(LocalityBlockId(id)));
    let raw = entries().filter(|entry| entry.stored_as == StoredAs::Raw).count();
    let summary = image.summary();
    println!(
        "{name:8} {:6.1} {:6.1} {:9.2} | {:7.2} {:7.2} {:7.2} {:7.1}",
        100.0 * summary.stored_bytes as f64 / (sample.len() * size.byte_count()) as f64,
        100.0 * raw as f64 / sample.len() as f64,
        us(cpu) / sample.len() as f64,
        at(50),
        at(90),
        at(99),
        f64::from(summary.stored_blocks) / f64::from(summary.locality_blocks),
    );
    Ok(())
}

fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Writes an image of the sample. Returns the CPU time that compressing took.
fn pack(codec: Codec, sample: &[Vec<u8>], geometry: Geometry, path: &Path) -> Result<Duration> {
    let mut writer =
        ImageWriter::create(path, &ImageDraft::whole_image(geometry, BlockOrganization::Access))?;
    let mut packer = LocalityBlockPacker::new(geometry);
    let mut cpu = Duration::ZERO;
    for (number, raw) in sample.iter().enumerate() {
        let start = cpu_time()?;
        let compressed = compress_block(codec, Block(number as u32), raw);
        cpu += cpu_time()? - start;
        let CompressedBlock::Packed(packed) = compressed else { continue };
        if let Some(full) = packer.push_block(packed) {
            writer.append(full)?;
        }
    }
    if let Some(rest) = packer.take_filled() {
        writer.append(rest)?;
    }
    let regions = RegionMap::lay_out([("ram", geometry.flat_bytes())])?;
    writer.finish(ImageSections { regions, ..ImageSections::default() })?;
    Ok(cpu)
}

fn cpu_time() -> Result<Duration> {
    Ok(clock_gettime(ClockId::ThreadCPUTime).try_into()?)
}

/// The time each block takes from stored bytes in memory to a checked memory block, in shuffled
/// order.
fn decode_all(image: &Image) -> Result<Vec<Duration>> {
    let mut out = vec![0; image.geometry().block_size.byte_count()];
    let mut units = Vec::new();
    for id in (0..image.locality_blocks()).map(LocalityBlockId) {
        let mut bytes = Vec::new();
        image.read_locality_block(id, &mut bytes)?;
        units.push((image.entries(id), bytes));
    }
    let slots = || {
        units.iter().flat_map(|(entries, bytes)| entries.iter().map(move |entry| (entry, bytes)))
    };
    let mut order: Vec<(&BlockEntry, &Vec<u8>)> = slots().collect();
    order.sort_by_key(|(entry, _)| entry.checksum);
    let mut times = Vec::with_capacity(order.len());
    for (entry, bytes) in order {
        let start = Instant::now();
        image.decode_block(entry, &bytes[entry.range()], &mut out)?;
        times.push(start.elapsed());
    }
    Ok(times)
}
