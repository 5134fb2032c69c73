//! Traces and restores of a stock QEMU, whose firmware touches memory as a guest would.

use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_memory::{
    GuestMemory, InstallOutcome, MemoryEvent, PageFaults, Process, TraceMode, Tracee,
    drop_page_tables,
};
use firn_types::{HostVirt, Page};

use crate::driver::{open, pages};

const RAM_PAGES: u32 = 64 << 8;

/// A QEMU that runs its firmware. Killed when dropped.
struct Qemu {
    child: Child,
    process: Arc<Process>,
    memory: Arc<GuestMemory>,
}

impl Qemu {
    /// `None`, with a message, if there is no QEMU here.
    fn start(more: &[&str]) -> Option<Self> {
        let child = Command::new("qemu-system-x86_64")
            .args([
                "-M",
                "pc,memory-backend=ram",
                "-accel",
                "tcg",
                "-nodefaults",
                "-display",
                "none",
            ])
            .args(["-object", "memory-backend-memfd,id=ram,size=64M,share=on", "-m", "64"])
            .args(["-monitor", "stdio"])
            .args(more)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn();
        let Ok(child) = child else {
            firn_skip::skip_test("there is no qemu-system-x86_64 here");
            return None;
        };
        let process = Arc::new(Process::open(child.id() as i32).unwrap());
        let deadline = Instant::now() + Duration::from_secs(20);
        let hva = loop {
            assert!(Instant::now() < deadline, "QEMU maps no RAM");
            std::thread::sleep(Duration::from_millis(20));
            if let Some(hva) = ram_of(&process) {
                break hva;
            }
        };
        let memory = Arc::new(open(&process, &[u64::from(RAM_PAGES)], &[hva]).unwrap());
        Some(Self { child, process, memory })
    }

    fn tracee(&self) -> Tracee<'_> {
        Tracee::seize(&self.process, &[]).unwrap()
    }

    fn monitor(&mut self, command: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{command}").unwrap();
    }

    fn end(mut self) {
        self.monitor("quit");
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ram_of(process: &Process) -> Option<HostVirt> {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", process.pid())).ok()?;
    let line = maps.lines().find(|line| line.contains("memfd:memory-backend-memfd"))?;
    let (start, end) = line.split(' ').next()?.split_once('-')?;
    let hex = |digits| u64::from_str_radix(digits, 16).ok();
    (hex(end)? - hex(start)? == u64::from(RAM_PAGES) * 4096).then_some(HostVirt(hex(start)?))
}

/// Answers events until none has come for a while; returns the number of faults.
fn serve(faults: &PageFaults, mut answer: impl FnMut(Page)) -> usize {
    let mut events = Vec::new();
    let mut count = 0;
    let end = Instant::now() + Duration::from_secs(5);
    while Instant::now() < end {
        faults.wait_for_events(&mut events, Duration::from_millis(500)).unwrap();
        if events.is_empty() {
            break;
        }
        for event in events.drain(..) {
            let MemoryEvent::Fault { page, .. } = event else { continue };
            answer(page);
            count += 1;
        }
    }
    count
}

#[test]
fn a_running_qemu_is_traced_and_detached_from() {
    let Some(mut qemu) = Qemu::start(&[]) else { return };
    std::thread::sleep(Duration::from_millis(300));
    let faults =
        PageFaults::create(&mut qemu.tracee(), qemu.memory.clone(), TraceMode::Save).unwrap();
    faults.register_all().unwrap();
    faults.protect_pages(pages(0..RAM_PAGES)).unwrap();
    qemu.monitor("system_reset");
    drop_page_tables(&mut qemu.tracee(), &qemu.memory, pages(0..RAM_PAGES)).unwrap();
    let count = serve(&faults, |page| faults.resume_minor(page..Page(page.0 + 1), false).unwrap());
    // A write to a protected hole waits until the page may be written.
    faults.unprotect_pages(pages(0..RAM_PAGES)).unwrap();
    assert!(count > 0);
    faults.close(&mut qemu.tracee()).unwrap();
    qemu.end();
}

#[test]
fn a_qemu_gets_its_memory_page_by_page() {
    let Some(mut qemu) = Qemu::start(&["-S"]) else { return };
    let faults =
        PageFaults::create(&mut qemu.tracee(), qemu.memory.clone(), TraceMode::Restore).unwrap();
    let before: Vec<_> = qemu.memory.backed_runs().unwrap();
    let mut copy = vec![0; RAM_PAGES as usize * 4096];
    qemu.memory.read_pages(Page(0), &mut copy).unwrap();
    qemu.memory.punch_out(pages(0..RAM_PAGES)).unwrap();
    assert_eq!(qemu.memory.backed_runs().unwrap(), []);
    faults.register_all().unwrap();
    qemu.monitor("cont");
    let count = serve(&faults, |page| {
        let bytes = &copy[page.index() * 4096..][..4096];
        assert_eq!(faults.install_pages(page, bytes).unwrap(), InstallOutcome::Done);
    });
    assert!(count > 10, "{count} faults, {before:?}");
    faults.close(&mut qemu.tracee()).unwrap();
    qemu.end();
}
