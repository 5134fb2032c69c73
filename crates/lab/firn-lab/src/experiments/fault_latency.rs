//! `fault-latency`: how long a guest thread waits for one missing page, if the image is in the page
//! cache.
//!
//! Reproduces no figure of a paper; it bounds what Firn adds to a page fault beyond what the kernel
//! needs.
//!
//! **What varies**: the system that serves the fault. Firn's page server (index, read, decode,
//! check, install, wake; the rest of the locality block by its workers), from an image with the
//! default codec (`p50_us`) and without compression (`none.p50_us`); and the *floor*, a loop of
//! three lines that serves the same faults with the same memory blocks from a copy in memory.
//!
//! **What is held equal**: the process that touches pages, its memory, the pages and their order
//! (one page of each locality block, so that each touch is a fault that no prefetch has
//! anticipated). The systems run alternately; each round is a new process. Times are those of the
//! touching thread, from before the touch until it has the page. Background fill is off: it would
//! install some pages before they are touched. Ratios are those of one round, whose systems ran
//! within a second: a shared host has periods of half a minute in which all of them take half as
//! long again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use firn_guest::stamp::mix;
use firn_image::{
    BlockOrganization, Codec, CompressedBlock, Geometry, Image, ImageDraft, ImageSections,
    ImageWriter, LocalityBlockId, LocalityBlockPacker, compress_block,
};
use firn_memory::{MemoryEvent, PageFaults, TraceMode};
use firn_restore::{BackgroundFill, PresenceFile, RestoreOptions, RunningRestore};
use firn_types::{Block, Page};
use serde_json::json;

use crate::disk_profile::warm_file;
use crate::lab::{Lab, run_interleaved};
use crate::report::Report;
use crate::stats::Sample;
use crate::toucher::{Toucher, region_map};

/// Locality blocks touched in a round, in quick and in full runs.
const TOUCHES: (usize, usize) = (1000, 1000);
/// Rounds, in quick and in full runs.
const ROUNDS: (usize, usize) = (7, 45);
/// Of every eight cache lines, the number that do not compress.
const NOISE_EIGHTHS: usize = 4;

/// The system that serves faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FaultSystem {
    Floor,
    Firn(Codec),
}

impl FaultSystem {
    fn key_prefix(self) -> &'static str {
        match self {
            Self::Floor => "floor_",
            Self::Firn(Codec::None) => "none.",
            Self::Firn(_) => "",
        }
    }
}

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.report("fault-latency");
    let touches = lab.extent.pick(TOUCHES.0, TOUCHES.1);
    let systems =
        [FaultSystem::Firn(Codec::default()), FaultSystem::Floor, FaultSystem::Firn(Codec::None)];
    let mut rounds = vec![Vec::new(); systems.len()];
    let bench = FaultBench::new(lab, touches)?;
    run_interleaved(lab.extent.runs(ROUNDS.0, ROUNDS.1), &[0, 1, 2], |round, &number| {
        let system = systems[number];
        let sample =
            Sample::new(bench.run_round(system, round as u64)?).context("nothing touched")?;
        report.add_repetition(json!({ "system": format!("{system:?}"), "round": round,
            "p50_us": sample.p50(), "p99_us": sample.p99(), "n": sample.count() }));
        rounds[number].push(sample);
        Ok(())
    })?;
    for (system, rounds) in systems.iter().zip(&rounds) {
        for (name, percentile) in PERCENTILES {
            let values = rounds.iter().map(percentile);
            report.add_sample(format!("{}{name}_us", system.key_prefix()), values);
        }
    }
    let [firn, floor, none] = &rounds[..] else { return Ok(report) };
    add_ratios(&mut report, "", firn, floor);
    add_ratios(&mut report, "none.", none, floor);
    Ok(report)
}

type PercentileFn = fn(&Sample) -> f64;

const PERCENTILES: [(&str, PercentileFn); 2] = [("p50", Sample::p50), ("p99", Sample::p99)];

/// For each round, its time in relation to the floor's in the same round.
fn add_ratios(report: &mut Report, prefix: &str, rounds: &[Sample], floor: &[Sample]) {
    for (name, percentile) in PERCENTILES {
        let pairs = rounds.iter().zip(floor);
        let values = pairs.map(|(round, floor)| percentile(round) / percentile(floor));
        report.add_sample(format!("{prefix}{name}_to_floor"), values);
    }
}

/// Images, the copy in memory, and the pages to touch.
struct FaultBench<'a> {
    lab: &'a Lab,
    program: std::path::PathBuf,
    pages: u32,
    images: [(Codec, Arc<Image>); 2],
    copy: Arc<Vec<u8>>,
    /// The middle page of each locality block.
    targets: Vec<Page>,
}

impl<'a> FaultBench<'a> {
    fn new(lab: &'a Lab, touches: usize) -> Result<Self> {
        // Enough for `touches` locality blocks of 64 KiB, if memory blocks of 8 KiB compress to
        // half.
        let blocks = touches as u32 * 17;
        let geometry = Geometry::new(blocks * 2);
        let copy: Vec<u8> = (0..blocks).flat_map(|block| block_content(block, geometry)).collect();
        let image = |codec: Codec| {
            let path = lab.file(&format!("latency-{codec}.firn"));
            write_image(&path, codec, geometry, &copy)?;
            warm_file(&path)?;
            anyhow::Ok((codec, Arc::new(Image::open(&path)?)))
        };
        let images = [image(Codec::default())?, image(Codec::None)?];
        let targets = choose_targets(&images[0].1, touches);
        ensure!(targets.len() >= touches * 9 / 10, "the image has too few locality blocks");
        let program = std::env::current_exe()?;
        Ok(Self {
            lab,
            program,
            pages: geometry.total_pages,
            images,
            copy: Arc::new(copy),
            targets,
        })
    }

    /// One round: a new process touches all targets, in the order of this round.
    fn run_round(&self, system: FaultSystem, round: u64) -> Result<Vec<f64>> {
        let mut toucher = Toucher::start(&self.program, self.pages)?;
        let memory = toucher.memory().clone();
        let faults =
            PageFaults::create(&mut toucher.seize_thread()?, memory.clone(), TraceMode::Restore)?;
        let order = shuffle_pages(&self.targets, self.lab.extent.seed ^ round << 32);
        match system {
            FaultSystem::Floor => self.serve_by_floor(&mut toucher, faults, &order),
            FaultSystem::Firn(codec) => self.serve_by_firn(codec, &mut toucher, faults, &order),
        }
    }

    fn serve_by_firn(
        &self,
        codec: Codec,
        toucher: &mut Toucher,
        faults: PageFaults,
        order: &[Page],
    ) -> Result<Vec<f64>> {
        let (_, image) = self.images.iter().find(|(of, _)| *of == codec).context("no image")?;
        let presence = PresenceFile::create(&self.lab.file("presence"), self.pages)?;
        let options = RestoreOptions { fill: BackgroundFill::Off, ..RestoreOptions::default() };
        let on_fatal = Box::new(|error: &firn_restore::RestoreError| eprintln!("{error}"));
        let memory = toucher.memory().clone();
        let restore =
            RunningRestore::begin(image.clone(), memory, faults, options, presence, on_fatal)?;
        restore.await_prefill().map_err(|error| anyhow!(error))?;
        let times = toucher.read_pages(order)?;
        let record = restore.stop()?.record;
        ensure!(record.counts.faults >= order.len() as u64, "some touches were no faults");
        Ok(times)
    }

    fn serve_by_floor(
        &self,
        toucher: &mut Toucher,
        faults: PageFaults,
        order: &[Page],
    ) -> Result<Vec<f64>> {
        faults.register_all()?;
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let floor = scope.spawn(|| answer_from_copy(&faults, &self.copy, &done));
            let times = toucher.read_pages(order);
            done.store(true, Ordering::Relaxed);
            floor.join().map_err(|_| anyhow!("the floor panicked"))??;
            times
        })
    }
}

/// The floor: only the necessary steps.
fn answer_from_copy(faults: &PageFaults, copy: &[u8], done: &AtomicBool) -> Result<()> {
    let size = firn_types::BlockSize::default();
    let mut events = Vec::new();
    while !done.load(Ordering::Relaxed) {
        events.clear();
        faults.wait_for_events(&mut events, Duration::from_millis(50))?;
        for event in &events {
            let MemoryEvent::Fault { page, .. } = event else { continue };
            let block = size.block_of(*page);
            let start = block.index() * size.byte_count();
            faults
                .install_pages(size.first_page(block), &copy[start..start + size.byte_count()])?;
        }
    }
    Ok(())
}

/// A memory block: of every eight cache lines some contain noise, the others one word repeated.
fn block_content(block: u32, geometry: Geometry) -> Vec<u8> {
    let word = |index: usize| match index / 8 % 8 < NOISE_EIGHTHS {
        true => mix(u64::from(block) << 16 | index as u64),
        false => u64::from(block) + 1,
    };
    (0..geometry.block_size.byte_count() / 8).flat_map(|index| word(index).to_le_bytes()).collect()
}

fn write_image(
    path: &std::path::Path,
    codec: Codec,
    geometry: Geometry,
    copy: &[u8],
) -> Result<()> {
    let mut writer =
        ImageWriter::create(path, &ImageDraft::whole_image(geometry, BlockOrganization::Access))?;
    let mut packer = LocalityBlockPacker::new(geometry);
    for (number, raw) in copy.chunks(geometry.block_size.byte_count()).enumerate() {
        let block = Block(number as u32);
        match compress_block(codec, block, raw) {
            CompressedBlock::Zero => writer.set_zero(block),
            CompressedBlock::Packed(packed) => {
                if let Some(full) = packer.push_block(packed) {
                    writer.append(full)?;
                }
            }
        }
    }
    if let Some(last) = packer.take_filled() {
        writer.append(last)?;
    }
    let regions = region_map(geometry.total_pages)?;
    writer.finish(ImageSections { regions, ..ImageSections::default() })?;
    Ok(())
}

/// The first page of a memory block in the middle of each locality block, for `most` of them.
fn choose_targets(image: &Image, most: usize) -> Vec<Page> {
    let size = image.geometry().block_size;
    let middle = |id| {
        let entries = image.entries(LocalityBlockId(id));
        entries.get(entries.len() / 2).map(|entry| size.first_page(entry.block))
    };
    (0..image.locality_blocks()).filter_map(middle).take(most).collect()
}

/// The pages in an order that the seed determines.
fn shuffle_pages(pages: &[Page], seed: u64) -> Vec<Page> {
    let mut order = pages.to_vec();
    order.sort_by_key(|page| mix(u64::from(page.0) ^ mix(seed)));
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_has_every_page() {
        let pages: Vec<Page> = (0..100).map(Page).collect();
        let (one, two) = (shuffle_pages(&pages, 1), shuffle_pages(&pages, 2));
        assert_ne!(one, two);
        let sorted = |mut order: Vec<Page>| {
            order.sort();
            order
        };
        assert_eq!(sorted(one), pages);
        assert_eq!(sorted(two), pages);
    }

    #[test]
    fn content_compresses_to_about_half() {
        let geometry = Geometry::new(200);
        let raw = block_content(7, geometry);
        assert_eq!(raw.len(), geometry.block_size.byte_count());
        let CompressedBlock::Packed(packed) = compress_block(Codec::Lz4, Block(7), &raw) else {
            panic!()
        };
        let percent = packed.stored.len() * 100 / raw.len();
        assert!((40..=65).contains(&percent), "{percent} %");
    }

    #[test]
    fn an_image_has_a_target_in_each_locality_block() {
        let dir = tempfile::tempdir().unwrap();
        let geometry = Geometry::new(64);
        let copy: Vec<u8> = (0..32).flat_map(|block| block_content(block, geometry)).collect();
        let path = dir.path().join("image");
        write_image(&path, Codec::None, geometry, &copy).unwrap();
        let image = Image::open(&path).unwrap();
        let found = choose_targets(&image, 100);
        assert_eq!(found, [4, 12, 20, 28].map(|block| Page(block * 2)));
    }
}
