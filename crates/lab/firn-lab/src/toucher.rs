//! A process whose only job is to touch its memory and time each touch.
//!
//! It replaces a hypervisor where a whole one would blur the measurement: shared memory in a memfd,
//! and one thread that touches pages in the order it is given. It has no knowledge of Firn. It is
//! this program, started as `firn-lab touch-memory`:
//!
//! ```text
//!   <- {"hva":139812345,"tid":4711}           address of its memory, thread that touches it
//!   -> {"writes":false,"pages":[17,4,99]}     touch these pages
//!   <- [11250,9800,10100]                     duration of each touch, in nanoseconds
//! ```
//!
//! A touch is `process_vm_readv(2)` or `process_vm_writev(2)` of the process by itself: eight
//! bytes, with the page fault taken by the calling thread inside the kernel. It costs a system call
//! more than a load or a store and needs no raw pointer.

use std::io::{self, BufRead, BufReader, IoSlice, IoSliceMut, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use firn_memory::{GuestMemory, Process, RegionLocation, Tracee};
use firn_types::{HostVirt, PAGE_SIZE, Page, RegionMap, ThreadId};
use memmap2::MmapRaw;
use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::Pid;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use serde::{Deserialize, Serialize};

/// The verb that starts the touching process.
pub const VERB: &str = "touch-memory";

/// Name of its one RAM region.
const REGION: &str = "ram";

/// The first message of the touching process.
#[derive(Serialize, Deserialize)]
struct ToucherHello {
    hva: u64,
    tid: i32,
}

/// A request to touch pages.
#[derive(Serialize, Deserialize)]
struct TouchRequest {
    writes: bool,
    pages: Vec<u32>,
}

/// Serves requests on standard input until it ends.
pub fn serve_touches(pages: u32) -> Result<()> {
    let toucher = std::thread::Builder::new().name("toucher".into());
    let toucher = toucher.spawn(move || touch_all(pages))?;
    toucher.join().map_err(|_| anyhow::anyhow!("the touching thread panicked"))?
}

fn touch_all(pages: u32) -> Result<()> {
    let memfd = memfd_create("ram", MemfdFlags::CLOEXEC)?;
    ftruncate(&memfd, ram_bytes(pages))?;
    let map = MmapRaw::map_raw(&memfd)?;
    let start = map.as_mut_ptr() as usize;
    let tid = rustix::thread::gettid().as_raw_nonzero().get();
    write_json_line(&ToucherHello { hva: start as u64, tid })?;
    for line in io::stdin().lines() {
        let asked: TouchRequest = serde_json::from_str(&line?)?;
        ensure!(asked.pages.iter().all(|&page| page < pages), "a page past the end");
        let touch = if asked.writes { time_write } else { time_read };
        let addresses = asked.pages.into_iter().map(|page| start + page as usize * PAGE_SIZE);
        write_json_line(&addresses.map(touch).collect::<Result<Vec<u64>>>()?)?;
    }
    Ok(())
}

fn time_read(address: usize) -> Result<u64> {
    let mut word = [0; 8];
    let remote = [RemoteIoVec { base: address, len: word.len() }];
    let start = Instant::now();
    process_vm_readv(Pid::this(), &mut [IoSliceMut::new(&mut word)], &remote)?;
    Ok(start.elapsed().as_nanos() as u64)
}

fn time_write(address: usize) -> Result<u64> {
    let remote = [RemoteIoVec { base: address, len: 8 }];
    let start = Instant::now();
    process_vm_writev(Pid::this(), &[IoSlice::new(&[1; 8])], &remote)?;
    Ok(start.elapsed().as_nanos() as u64)
}

fn write_json_line(what: &impl Serialize) -> Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, what)?;
    writeln!(out)?;
    Ok(out.flush()?)
}

fn ram_bytes(pages: u32) -> u64 {
    u64::from(pages) * PAGE_SIZE as u64
}

/// The region map of a toucher with this number of pages.
pub fn region_map(pages: u32) -> Result<RegionMap> {
    Ok(RegionMap::lay_out([(REGION, ram_bytes(pages))])?)
}

/// The client of a touching process. Dropping it kills the process.
pub struct Toucher {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    memory: Arc<GuestMemory>,
    tid: ThreadId,
}

impl Toucher {
    /// Starts a process with this number of pages. `lab` is the path of the `firn-lab` program.
    pub fn start(lab: &Path, pages: u32) -> Result<Self> {
        let mut child = Command::new(lab)
            .args([VERB, &pages.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", lab.display()))?;
        let stdin = child.stdin.take().context("no standard input")?;
        let mut stdout = BufReader::new(child.stdout.take().context("no standard output")?);
        let hello: ToucherHello = read_answer(&mut stdout)?;
        let memory = open_toucher_memory(child.id() as i32, pages, HostVirt(hello.hva))?;
        Ok(Self { child, stdin, stdout, memory, tid: ThreadId(hello.tid) })
    }

    /// The process's memory.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Stops one of its threads with ptrace, not the one that touches pages.
    pub fn seize_thread(&self) -> Result<Tracee<'_>> {
        Ok(Tracee::seize(self.memory.process(), &[self.tid])?)
    }

    /// Reads pages one after the other in the process; returns the duration of each touch, in
    /// microseconds.
    pub fn read_pages(&mut self, pages: &[Page]) -> Result<Vec<f64>> {
        self.touch_pages(false, pages)
    }

    /// Writes pages in the process, otherwise like [`Self::read_pages`].
    pub fn write_pages(&mut self, pages: &[Page]) -> Result<Vec<f64>> {
        self.touch_pages(true, pages)
    }

    fn touch_pages(&mut self, writes: bool, pages: &[Page]) -> Result<Vec<f64>> {
        let asked = TouchRequest { writes, pages: pages.iter().map(|page| page.0).collect() };
        writeln!(self.stdin, "{}", serde_json::to_string(&asked)?)?;
        let nanoseconds: Vec<u64> = read_answer(&mut self.stdout)?;
        Ok(nanoseconds.into_iter().map(|ns| ns as f64 / 1e3).collect())
    }
}

impl Drop for Toucher {
    fn drop(&mut self) {
        // It is reaped either way; nothing is lost with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_answer<T: for<'de> Deserialize<'de>>(from: &mut impl BufRead) -> Result<T> {
    let mut line = String::new();
    ensure!(from.read_line(&mut line)? > 0, "the touching process has ended");
    Ok(serde_json::from_str(&line)?)
}

fn open_toucher_memory(pid: i32, pages: u32, hva: HostVirt) -> Result<Arc<GuestMemory>> {
    let process = Arc::new(Process::open(pid)?);
    let map = region_map(pages)?;
    let locations: Vec<_> =
        map.regions().iter().map(|region| RegionLocation { region: region.clone(), hva }).collect();
    Ok(Arc::new(GuestMemory::open(process, map, &locations)?))
}
