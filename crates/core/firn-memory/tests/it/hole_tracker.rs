//! A copy of a process's memory that follows it from cut to cut, as a standby does, while pages are given back. Reading `pread`
//! fills no hole, so that comparing changes nothing.
//!
//! ```text
//!   between two cuts    write, read, give back, in any order; some pages are protected and copied ahead
//!   at a cut            find holes, scan, protect, copy: the copy is the memory
//! ```

use std::sync::Arc;

use firn_memory::{HoleTracker, PageScan, ScanError};
use firn_types::Page;

use crate::driver::{Child, Who};

/// The first region has more than one page table.
const SIZES: [u64; 2] = [1200, 80];
const PAGE: usize = 4096;
const CUTS: usize = 60;

/// Numbers that are the same in each run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// How pages that were given back are found.
#[derive(Clone, Copy, PartialEq)]
enum Search {
    Tracker,
    /// By nothing but the scan.
    ScanOnly,
}

/// A copy of a process's memory.
struct Copy {
    child: Child,
    scan: Arc<PageScan>,
    holes: Option<HoleTracker>,
    bytes: Vec<u8>,
}

impl Copy {
    /// `None` if this kernel cannot remember writes.
    fn start(child: Child, search: Search) -> Option<Self> {
        let memory = child.memory.clone();
        let tracks_holes = memory.is_shared() && search == Search::Tracker;
        let scan = match tracks_holes {
            true => PageScan::create_with_holes(&mut child.tracee(), memory)
                .map(PageScan::with_lasting_tables),
            false => PageScan::create(&mut child.tracee(), memory),
        };
        let scan = Arc::new(scan.unwrap());
        match scan.arm_all() {
            Ok(()) => {}
            Err(ScanError::Unsupported) => {
                firn_skip::skip_test(ScanError::Unsupported);
                return None;
            }
            Err(error) => panic!("{error}"),
        }
        let holes = tracks_holes.then(|| HoleTracker::start_thread(Arc::clone(&scan)));
        holes.iter().for_each(|holes| holes.record_backed().unwrap());
        let bytes = vec![0; child.memory.all_pages().end.0 as usize * PAGE];
        let mut copy = Self { child, scan, holes, bytes };
        let backed = copy.child.memory.backed_runs().unwrap();
        backed.into_iter().flat_map(Page::iter_range).for_each(|page| copy.take(page));
        Some(copy)
    }

    fn take(&mut self, page: Page) {
        let at = page.index() * PAGE;
        self.child.memory.read_pages(page, &mut self.bytes[at..at + PAGE]).unwrap();
    }

    fn take_runs(&mut self, runs: Vec<std::ops::Range<Page>>) {
        for page in runs.into_iter().flat_map(Page::iter_range) {
            self.scan.arm_range(page..Page(page.0 + 1)).unwrap();
            self.take(page);
        }
    }

    /// Protects and copies some of the written pages, while the process runs.
    fn copy_ahead(&mut self) {
        let mut written = Vec::new();
        self.scan.collect_written(self.child.memory.all_pages(), &mut written).unwrap();
        self.holes.iter().for_each(|holes| holes.record_written(&written));
        written.truncate(written.len() / 2 + 1);
        self.take_runs(written);
    }

    /// Copies what has changed, while the process does nothing.
    fn cut(&mut self) {
        let discarded = self.holes.as_ref().map(|holes| holes.find_discarded().unwrap());
        let mut changed = Vec::new();
        self.scan.collect_written(self.child.memory.all_pages(), &mut changed).unwrap();
        self.holes.iter().for_each(|holes| holes.record_written(&changed));
        changed.extend(discarded.into_iter().flatten());
        self.take_runs(changed);
    }

    /// The first page of the copy that is wrong.
    fn wrong_page(&self) -> Option<u32> {
        let mut now = vec![0; self.bytes.len()];
        self.child.memory.read_pages(Page(0), &mut now).unwrap();
        let mut pages = (0..).zip(now.chunks(PAGE).zip(self.bytes.chunks(PAGE)));
        pages.find(|(_, (now, copied))| now != copied).map(|(page, _)| page)
    }

    fn close(mut self) {
        self.scan.unregister_all().unwrap();
        self.holes.iter_mut().for_each(HoleTracker::join_thread);
        self.scan.close(&mut self.child.tracee()).unwrap();
        assert!(!self.child.is_registered());
        assert_eq!(self.child.userfaultfds(), 0);
    }
}

fn filled(shared: bool) -> Child {
    let mut child = if shared { Child::spawn(&SIZES) } else { Child::spawn_private(&SIZES) };
    for pages in ["0 700", "900 1000", "1200 1240"] {
        child.ask(Who::First, &format!("fill {pages} 1"));
    }
    child
}

/// Something that a guest does: pages of the second region begin at 1200.
fn command(numbers: &mut Numbers) -> String {
    let (start, end) = if numbers.below(4) == 0 { (1200, 1280) } else { (0, 1200) };
    let first = start + numbers.below(end - start);
    match numbers.below(8) {
        0..3 => format!("write {first} {}", numbers.below(1000)),
        3..5 => format!("read {first}"),
        // As a balloon takes: page by page, or as free pages are reported: whole page tables.
        5..7 => format!("discard {first} {}", (first + 1 + numbers.below(40)).min(end)),
        _ if start == 0 => "discard 512 1024".to_owned(),
        _ => format!("sum {first} {}", (first + 20).min(end)),
    }
}

/// Follows a process through many cuts. Returns the first cut after which the copy was wrong.
fn follow(shared: bool, search: Search, seed: u64) -> Option<usize> {
    let mut copy = Copy::start(filled(shared), search)?;
    let mut numbers = Numbers(seed);
    for cut in 0..CUTS {
        for _ in 0..numbers.below(40) {
            let command = command(&mut numbers);
            copy.child.ask(Who::First, &command);
            if numbers.below(20) == 0 {
                copy.copy_ahead();
            }
        }
        copy.cut();
        if let Some(page) = copy.wrong_page() {
            eprintln!("page {page} is wrong after cut {cut}");
            return Some(cut);
        }
    }
    copy.close();
    None
}

#[test]
fn a_copy_follows_shared_memory_that_is_given_back() {
    for seed in 1..6 {
        assert_eq!(follow(true, Search::Tracker, seed), None, "seed {seed}");
    }
}

#[test]
fn a_copy_follows_private_memory_that_is_given_back() {
    for seed in 1..6 {
        assert_eq!(follow(false, Search::Tracker, seed), None, "seed {seed}");
    }
}

/// The two tests above would fail if pages that were given back were not found.
#[test]
fn without_the_tracker_the_copy_of_shared_memory_is_wrong() {
    let can_remember = Copy::start(filled(true), Search::ScanOnly).map(Copy::close).is_some();
    assert_eq!(follow(true, Search::ScanOnly, 1).is_some(), can_remember);
}

/// Threads that write and give back all the time, while pages are copied ahead and searches run.
#[test]
fn a_copy_follows_a_process_that_does_not_stop() {
    let Some(mut copy) = Copy::start(filled(true), Search::Tracker) else { return };
    let mut numbers = Numbers(7);
    for round in 0..8 {
        copy.child.send(Who::First, "increment 300 700 250");
        while copy.child.has_result(Who::First, std::time::Duration::ZERO).is_none() {
            let first = 250 + numbers.below(500);
            copy.child.ask(Who::Second, &format!("discard {first} {}", first + 8));
            copy.child.ask(Who::Second, &format!("read {}", first + 4));
            copy.copy_ahead();
            copy.cut();
        }
        copy.cut();
        assert_eq!(copy.wrong_page(), None, "round {round}");
    }
    copy.close();
}

/// What a dead Firn left: a thread that waits for a hole is resumed, and reads zeros.
#[test]
fn a_thread_that_waits_for_a_hole_is_resumed_by_a_successor() {
    let Some(mut copy) = Copy::start(filled(true), Search::Tracker) else { return };
    copy.child.ask(Who::First, "discard 10 20");
    // No thread answers any more.
    copy.holes.iter_mut().for_each(HoleTracker::join_thread);
    copy.child.send(Who::First, "read 12");
    let soon = std::time::Duration::from_millis(100);
    assert_eq!(copy.child.has_result(Who::First, soon), None, "it waits");
    let Copy { mut child, scan, .. } = copy;
    drop(scan);
    let adopted = firn_memory::PageFaults::adopt(&child.process, child.memory.clone()).unwrap();
    adopted.unwrap().unregister_all().unwrap();
    assert_eq!(child.result(Who::First), 0);
    let mut tracee = firn_memory::Tracee::seize(&child.process, &child.tids).unwrap();
    firn_memory::PageFaults::close_stale(&mut tracee).unwrap();
    drop(tracee);
    assert_eq!(child.ask(Who::Second, "read 12"), 0);
    assert!(!child.is_registered());
}
