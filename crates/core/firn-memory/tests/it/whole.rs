//! A whole save and a whole restore, in miniature: many threads on one side, busy threads on the
//! other.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use firn_memory::{FaultKind, GuestMemory, MemoryEvent, PageFaults, TraceMode, drop_page_tables};
use firn_types::Page;

use crate::driver::{Child, Who, pages, pause, resume};

const PAGES: u32 = 2048;

/// The pages that were saved so far.
struct Save<'c> {
    memory: &'c GuestMemory,
    faults: &'c PageFaults,
    image: Vec<Mutex<Option<Vec<u8>>>>,
    saved: AtomicUsize,
}

impl Save<'_> {
    /// Copies a page unless it was copied before, and lets it be written.
    fn save(&self, page: Page) {
        let mut place = self.image[page.index()].lock().unwrap();
        if place.is_none() {
            let mut bytes = vec![0; 4096];
            self.memory.read_pages(page, &mut bytes).unwrap();
            *place = Some(bytes);
            self.saved.fetch_add(1, Ordering::Relaxed);
        }
        self.faults.unprotect_pages(page..Page(page.0 + 1)).unwrap();
    }

    /// Answers faults until all is saved.
    fn serve(&self) {
        let mut events = Vec::new();
        while self.saved.load(Ordering::Relaxed) < PAGES as usize {
            self.faults.wait_for_events(&mut events, Duration::from_millis(10)).unwrap();
            for event in events.drain(..) {
                let MemoryEvent::Fault { page, kind, .. } = event else { panic!("{event:?}") };
                self.save(page);
                if kind == FaultKind::Minor {
                    self.faults.resume_minor(page..Page(page.0 + 1), false).unwrap();
                }
            }
        }
    }

    fn sweep(&self) {
        (0..PAGES).map(Page).for_each(|page| {
            self.save(page);
            std::thread::sleep(Duration::from_micros(100));
        });
    }
}

#[test]
fn a_save_while_the_guest_writes_is_exact() {
    let mut child = Child::spawn(&[u64::from(PAGES)]);
    child.ask(Who::First, &format!("fill 0 {PAGES} 1"));
    child.memory.punch_out(pages(512..640)).unwrap();
    child.send(Who::First, &format!("increment 0 {} 1500", PAGES * 2 / 3));
    child.send(Who::Second, &format!("increment {} {PAGES} 1500", PAGES / 3));
    std::thread::sleep(Duration::from_millis(50));
    let faults = child.trace(TraceMode::Save);
    pause(&child);
    let mut reference = vec![0; PAGES as usize * 4096];
    child.memory.read_pages(Page(0), &mut reference).unwrap();
    faults.protect_pages(pages(0..PAGES)).unwrap();
    child.memory.open_window().unwrap();
    resume(&child);
    drop_page_tables(&mut child.tracee(), &child.memory, pages(0..PAGES)).unwrap();
    let image = (0..PAGES).map(|_| Mutex::default()).collect();
    let save = Save { memory: &child.memory, faults: &faults, image, saved: AtomicUsize::new(0) };
    std::thread::scope(|scope| {
        scope.spawn(|| save.serve());
        scope.spawn(|| save.serve());
        scope.spawn(|| save.sweep());
    });
    for (page, (saved, before)) in save.image.iter().zip(reference.chunks(4096)).enumerate() {
        let saved = saved.lock().unwrap();
        assert!(saved.as_deref() == Some(before), "page {page} is not as it was");
    }
    faults.close(&mut child.tracee()).unwrap();
    assert!(child.result(Who::First) > 0);
    assert!(child.result(Who::Second) > 0);
    assert!(!child.is_registered());
}

#[test]
fn a_restore_while_the_guest_reads_is_exact() {
    let mut child = Child::spawn(&[u64::from(PAGES)]);
    child.ask(Who::First, &format!("fill 0 {PAGES} 1"));
    let sums =
        [child.ask(Who::First, &format!("sum 0 {PAGES}")), child.ask(Who::First, "sum 700 1500")];
    let mut image = vec![0; PAGES as usize * 4096];
    child.memory.read_pages(Page(0), &mut image).unwrap();
    let faults = child.trace(TraceMode::Restore);
    child.memory.punch_out(pages(0..PAGES)).unwrap();
    child.send(Who::First, &format!("sum 0 {PAGES}"));
    child.send(Who::Second, "sum 700 1500");
    let install = |page: u32, count: u32| {
        let bytes = &image[page as usize * 4096..(page + count) as usize * 4096];
        faults.install_pages(Page(page), bytes).unwrap()
    };
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let serve = || {
            let mut events = Vec::new();
            while !done.load(Ordering::Relaxed) {
                faults.wait_for_events(&mut events, Duration::from_millis(10)).unwrap();
                for event in events.drain(..) {
                    let MemoryEvent::Fault { page, .. } = event else { panic!("{event:?}") };
                    install(page.0 & !1, 2);
                }
            }
        };
        scope.spawn(serve);
        scope.spawn(serve);
        scope.spawn(|| {
            for page in (0..PAGES).rev().step_by(8) {
                install(page - 7, 8);
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        assert_eq!([child.result(Who::First), child.result(Who::Second)], sums);
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(child.memory.backed_runs().unwrap(), [pages(0..PAGES)]);
    faults.close(&mut child.tracee()).unwrap();
    assert_eq!(child.ask(Who::Second, &format!("sum 0 {PAGES}")), sums[0]);
}
