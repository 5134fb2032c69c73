//! `firn-guest disk-dma`: DMA of a disk into and from guest memory, past every cache.
//!
//! Blocks are transferred with `O_DIRECT`, so the device's DMA fills the buffer and reads it. Every
//! page on the disk is stamped as in memory, with its number on the disk as index. Three modes:
//!
//! ```text
//!   prepare   write every block once, sequence 0, and end
//!   read      read prepared blocks and check them: the disk never changes, so it is right after any restore
//!   write     check that a block is as it was last written, write it again, read it back, check: needs a disk that is
//!             restored with the checkpoint, and detects one that is older or newer than memory
//! ```

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::{Args, ValueEnum};
use serde_json::json;
use zerocopy::IntoBytes as _;

use crate::arena::PageArena;
use crate::rate_limiter::RateLimiter;
use crate::stamp::{self, PageStamp, StampStyle, mix};

/// Region number of pages on a disk. It differs from those in memory, so that a buffer found in an
/// image is recognized.
pub const REGION: u32 = 0xd15c;
const PAGE_BYTES: u64 = 4096;

/// Reads and writes a disk past every cache, and checks it.
#[derive(Args, Clone, Debug)]
pub struct DiskDma {
    /// The mode.
    #[arg(value_enum)]
    mode: DiskMode,
    /// The disk. All but `read` overwrite it from its beginning.
    #[arg(long, default_value = "/dev/vda")]
    device: PathBuf,
    /// The part of the disk that is used, in MiB.
    #[arg(long, default_value_t = 16)]
    mib: u64,
    /// Size of a request.
    #[arg(long, default_value_t = 64)]
    block_kib: u64,
    /// Requests per second; 0 is as fast as possible.
    #[arg(long, default_value_t = 0.0)]
    rate: f64,
    /// Ends after this many seconds; 0 runs for ever.
    #[arg(long, default_value_t = 0.0)]
    seconds: f64,
    /// Chooses the order of blocks.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DiskMode {
    Prepare,
    Read,
    Write,
}

/// Runs to the end. False if a block was wrong.
pub fn run(args: &DiskDma) -> Result<bool> {
    let mut disk = StampedDisk::open_device(args)?;
    if args.mode == DiskMode::Prepare {
        (0..disk.blocks).try_for_each(|block| disk.write_block(block, 0))?;
        println!("{}", json!({"done": true, "requests": disk.blocks, "wrong": 0}));
        return Ok(true);
    }
    println!("{}", json!({"ready": true, "blocks": disk.blocks}));
    let (start, mut limiter) = (Instant::now(), RateLimiter::new(args.rate));
    let (mut reported, mut requests) = (start, 0_u64);
    let mut sequences = vec![0; disk.blocks as usize];
    while args.seconds <= 0.0 || start.elapsed().as_secs_f64() < args.seconds {
        let block = mix(args.seed ^ requests) % disk.blocks;
        let sequence = &mut sequences[block as usize];
        if args.mode == DiskMode::Write {
            if *sequence > 0 {
                disk.read_and_check(block, *sequence)?;
            }
            *sequence += 1;
            disk.write_block(block, *sequence)?;
        }
        disk.read_and_check(block, *sequence)?;
        requests += 1;
        if reported.elapsed() > Duration::from_secs(1) {
            reported = Instant::now();
            println!("{}", json!({"progress": requests, "wrong": disk.wrong}));
        }
        limiter.wait_for(1);
    }
    println!("{}", json!({"done": true, "requests": requests, "wrong": disk.wrong}));
    Ok(disk.wrong == 0)
}

struct StampedDisk {
    file: File,
    blocks: u64,
    buffer: PageArena,
    wrong: u64,
}

impl StampedDisk {
    fn open_device(args: &DiskDma) -> Result<Self> {
        let pages = args.block_kib * 1024 / PAGE_BYTES;
        ensure!(pages > 0, "a block has at least one page");
        let blocks = args.mib * 1024 / args.block_kib;
        ensure!(blocks > 0, "the disk's part is smaller than a block");
        let file = OpenOptions::new()
            .read(true)
            .write(args.mode != DiskMode::Read)
            .custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32)
            .open(&args.device)
            .with_context(|| format!("cannot open {}", args.device.display()))?;
        Ok(Self { file, blocks, buffer: PageArena::new(pages as usize), wrong: 0 })
    }

    fn write_block(&mut self, block: u64, sequence: u64) -> Result<()> {
        let first = block * self.buffer.page_count() as u64;
        let style = StampStyle::compressing_to(50, false);
        for (page, index) in self.buffer.all_pages_mut().iter_mut().zip(first..) {
            stamp::fill_page(page, PageStamp { region: REGION, index, sequence }, style);
        }
        self.file
            .write_all_at(self.buffer.all_pages().as_bytes(), first * PAGE_BYTES)
            .with_context(|| format!("cannot write block {block}"))
    }

    fn read_and_check(&mut self, block: u64, sequence: u64) -> Result<()> {
        let first = block * self.buffer.page_count() as u64;
        self.buffer.all_pages_mut().as_mut_bytes().fill(0xee);
        self.file
            .read_exact_at(self.buffer.all_pages_mut().as_mut_bytes(), first * PAGE_BYTES)
            .with_context(|| format!("cannot read block {block}"))?;
        for (page, index) in self.buffer.all_pages().iter().zip(first..) {
            let expected = PageStamp { region: REGION, index, sequence };
            let found = stamp::check_page(page);
            if found != Ok(expected) {
                self.wrong += 1;
                eprintln!("disk-dma: {expected:?} expected, found {found:?}");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(mode: DiskMode, device: PathBuf) -> DiskDma {
        DiskDma { mode, device, mib: 1, block_kib: 64, rate: 0.0, seconds: 0.05, seed: 3 }
    }

    #[test]
    fn own_blocks_and_foreign_blocks_are_distinguished() {
        // A file stands in for the disk; not every file system has O_DIRECT.
        let directory = tempfile::tempdir_in(".").unwrap();
        let device = directory.path().join("disk");
        File::create(&device).unwrap().set_len(1 << 20).unwrap();
        if StampedDisk::open_device(&args(DiskMode::Read, device.clone())).is_err() {
            return;
        }
        assert!(run(&args(DiskMode::Prepare, device.clone())).unwrap());
        assert!(run(&args(DiskMode::Read, device.clone())).unwrap());
        assert!(run(&args(DiskMode::Write, device.clone())).unwrap());
        assert!(!run(&args(DiskMode::Read, device)).unwrap(), "sequence numbers have moved on");
    }
}
