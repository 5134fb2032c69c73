//! Measures the cost of the calls on the path of a page fault on this machine.
//!
//! `cargo run --release -p firn-memory --example fault_latency [PAGES]`
//!
//! The example runs itself again as the process whose pages are missing. That process touches them
//! one after another and takes the time of each touch; this one answers.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use firn_memory::{
    GuestMemory, MemoryEvent, PageFaults, Process, RegionLocation, TraceMode, Tracee,
    drop_page_tables,
};
use firn_types::{HostVirt, Page, RegionMap};
use memmap2::MmapRaw;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

const PAGE: usize = 4096;
/// Pages answered at once: a memory block.
const BLOCK: usize = 2;
const CHILD: &str = "--touch";

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.as_slice() {
        [flag, pages] if flag == CHILD => touch(pages.parse()?),
        [] => measure(16384),
        [pages] => measure(pages.parse::<usize>()?.next_multiple_of(BLOCK).max(BLOCK)),
        _ => bail!("usage: fault_latency [PAGES]"),
    }
}

/// The traced process: for each line on its standard input, touches one page of each block and
/// prints the nanoseconds.
fn touch(pages: usize) -> Result<()> {
    let file = File::from(memfd_create("ram", MemfdFlags::CLOEXEC)?);
    ftruncate(&file, (pages * PAGE) as u64)?;
    let map = MmapRaw::map_raw(&file)?;
    println!("{}", map.as_ptr().addr());
    for _ in std::io::stdin().lock().lines() {
        let mut out = Vec::new();
        for page in (0..pages).step_by(BLOCK) {
            let start = Instant::now();
            // SAFETY: the address lies in a live mapping; the access is volatile as another process
            // fills the page.
            unsafe { map.as_ptr().wrapping_add(page * PAGE).read_volatile() };
            out.extend((start.elapsed().as_nanos() as u64).to_le_bytes());
        }
        std::io::stdout().write_all(&out)?;
        std::io::stdout().flush()?;
    }
    Ok(())
}

struct Touching {
    child: std::process::Child,
    output: BufReader<std::process::ChildStdout>,
    memory: Arc<GuestMemory>,
    pages: usize,
}

fn measure(pages: usize) -> Result<()> {
    let mut touching = Touching::start(pages)?;
    missing(&mut touching)?;
    reading("reading a block", &touching.memory, pages)?;
    touching.memory.open_window()?;
    reading("reading a block through a window", &touching.memory, pages)?;
    touched(&mut touching)?;
    touching.child.kill()?;
    touching.child.wait()?;
    Ok(())
}

impl Touching {
    fn start(pages: usize) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args([CHILD, &pages.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut output = BufReader::new(child.stdout.take().context("no output")?);
        let mut line = String::new();
        output.read_line(&mut line)?;
        let hva = HostVirt(line.trim().parse()?);
        let process = Arc::new(Process::open(child.id() as i32)?);
        let map = RegionMap::lay_out([("ram", (pages * PAGE) as u64)])?;
        let location = RegionLocation { region: map.regions()[0].clone(), hva };
        let memory = Arc::new(GuestMemory::open(process, map, &[location])?);
        Ok(Self { child, output, memory, pages })
    }

    /// Lets it touch all blocks while `answer` serves the faults. Prints the time of a touch.
    fn run(
        &mut self,
        what: &str,
        faults: &PageFaults,
        answer: impl Fn(Page) -> Result<()>,
    ) -> Result<()> {
        self.child.stdin.as_mut().context("no input")?.write_all(b"\n")?;
        let mut events = Vec::with_capacity(64);
        let mut answers = Vec::with_capacity(self.pages / BLOCK);
        while answers.len() < self.pages / BLOCK {
            faults.wait_for_events(&mut events, Duration::from_secs(5))?;
            for event in events.drain(..) {
                let MemoryEvent::Fault { page, .. } = event else { continue };
                let start = Instant::now();
                answer(page)?;
                answers.push(start.elapsed().as_nanos() as u64);
            }
        }
        let mut times = vec![0; answers.len() * 8];
        self.output.read_exact(&mut times)?;
        let times: Vec<u64> = times
            .chunks_exact(8)
            .map(|t| u64::from_le_bytes(t.try_into().unwrap_or_default()))
            .collect();
        println!("{what}, from touch to wake: {}", percentiles(times));
        println!("  of which the answer: {}", percentiles(answers));
        Ok(())
    }
}

/// Median and 99th percentile of some nanoseconds.
fn percentiles(mut times: Vec<u64>) -> String {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize] as f64 / 1e3;
    format!("p50 {:.2} us, p99 {:.2} us", at(0.5), at(0.99))
}

fn tracee(memory: &GuestMemory) -> Result<Tracee<'_>> {
    Ok(Tracee::seize(memory.process(), &[])?)
}

fn missing(touching: &mut Touching) -> Result<()> {
    let memory = touching.memory.clone();
    let start = Instant::now();
    let faults = PageFaults::create(&mut tracee(&memory)?, memory.clone(), TraceMode::Restore)?;
    faults.register_all()?;
    println!("attached and registered in {:.2} ms", start.elapsed().as_secs_f64() * 1e3);
    let block = [0x5a; BLOCK * PAGE];
    touching.run("missing, installed by block", &faults, |page| {
        faults.install_pages(page, &block)?;
        Ok(())
    })?;
    faults.close(&mut tracee(&memory)?)?;
    Ok(())
}

fn reading(what: &str, memory: &GuestMemory, pages: usize) -> Result<()> {
    let mut block = [0; BLOCK * PAGE];
    let mut times = Vec::new();
    for page in (0..pages).step_by(BLOCK) {
        let start = Instant::now();
        memory.read_pages(Page(page as u32), &mut block)?;
        times.push(start.elapsed().as_nanos() as u64);
    }
    println!("{what}: {}", percentiles(times));
    Ok(())
}

fn touched(touching: &mut Touching) -> Result<()> {
    let memory = touching.memory.clone();
    let all = Page(0)..Page(touching.pages as u32);
    let faults = PageFaults::create(&mut tracee(&memory)?, memory.clone(), TraceMode::Save)?;
    faults.register_all()?;
    let gib = (touching.pages * PAGE) as f64 / f64::from(1 << 30);
    let start = Instant::now();
    faults.protect_pages(all.clone())?;
    println!("write-protecting: {:.2} ms per GiB", start.elapsed().as_secs_f64() * 1e3 / gib);
    let start = Instant::now();
    drop_page_tables(&mut tracee(&memory)?, &memory, all)?;
    println!("dropping page tables: {:.2} ms per GiB", start.elapsed().as_secs_f64() * 1e3 / gib);
    touching.run("not mapped, copied, then resumed", &faults, |page| {
        let mut block = [0; BLOCK * PAGE];
        memory.read_pages(page, &mut block)?;
        faults.resume_minor(page..Page(page.0 + BLOCK as u32), true)?;
        Ok(())
    })?;
    faults.close(&mut tracee(&memory)?)?;
    Ok(())
}
