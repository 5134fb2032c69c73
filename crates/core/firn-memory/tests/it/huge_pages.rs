//! RAM in huge pages: a fault stands for the whole huge page, and an answer is for all of it.
//!
//! Region 1 begins at page 16, so that no huge page begins at a multiple of 512 RAM pages.

use std::time::Duration;

use firn_memory::{
    FaultKind, HUGE_PAGE_BYTES, InstallOutcome, MemoryEvent, PageFaults, PageScan, TraceMode,
    drop_page_tables,
};
use firn_skip::HugePages;
use firn_types::Page;

use crate::child::pattern;
use crate::driver::{Child, Who, is_quiet, next, pages};
use crate::memory::filled;

/// Ordinary RAM, and two huge pages after it.
const SHARED: [&str; 2] = ["16", "h1024"];
const PRIVATE: [&str; 1] = ["g1024"];
const FIRST: std::ops::Range<u32> = 16..528;
const SECOND: std::ops::Range<u32> = 528..1040;

/// Other tests' children get theirs beside these.
fn reserve() -> Option<HugePages> {
    HugePages::reserve(4)
}

fn fault(child: &Child, page: u32, kind: FaultKind, write: bool) -> MemoryEvent {
    MemoryEvent::Fault { page: Page(page), tid: child.tids[0], kind, write }
}

#[track_caller]
fn has_page(child: &Child, page: u32, expected: &[u8]) {
    let mut bytes = vec![0xee; 4096];
    child.memory.read_pages(Page(page), &mut bytes).unwrap();
    assert!(bytes == expected, "page {page}");
}

#[test]
fn the_pages_of_one_entry_are_known() {
    let Some(_pages) = reserve() else { return };
    let child = Child::spawn_mixed(&SHARED);
    let memory = &child.memory;
    assert!(memory.has_huge_pages() && memory.is_shared() && !memory.has_only_like_huge_pages());
    assert_eq!(memory.entry_of(Page(3)), pages(3..4));
    assert_eq!(
        (memory.entry_of(Page(16)), memory.entry_of(Page(527))),
        (pages(FIRST), pages(FIRST))
    );
    assert_eq!(memory.huge_page_of(Page(528)), Some(pages(SECOND)));
    assert_eq!(memory.huge_page_of(Page(15)), None);
    assert_eq!(memory.with_whole_huge_pages(pages(3..17)), pages(3..528));
    assert_eq!(memory.with_whole_huge_pages(pages(527..529)), pages(16..1040));
    assert_eq!(memory.with_whole_huge_pages(pages(20..20)), pages(20..20));
    assert!(Child::spawn_mixed(&PRIVATE).memory.has_only_like_huge_pages());
}

#[test]
fn a_write_waits_until_the_whole_huge_page_is_released() {
    let Some(_pages) = reserve() else { return };
    let mut child = Child::spawn_mixed(&SHARED);
    child.ask(Who::First, "fill 0 1040 1");
    for mode in [TraceMode::Save, TraceMode::Writes] {
        let faults = child.trace(mode);
        faults.protect_pages(child.memory.all_pages()).unwrap();
        assert_eq!(child.ask(Who::First, "read 700"), pattern(1, 700, 0));
        child.send(Who::First, "write 700 9");
        assert_eq!(next(&faults), fault(&child, SECOND.start, FaultKind::WriteProtect, true));
        // A part of it can't be released, and is not widened.
        faults.unprotect_pages(pages(700..702)).unwrap_err();
        faults.protect_pages(pages(20..22)).unwrap_err();
        assert_eq!(child.has_result(Who::First, Duration::from_millis(30)), None);
        has_page(&child, 700, &filled(1, 700));
        faults.unprotect_pages(pages(SECOND)).unwrap();
        child.result(Who::First);
        // The control: the other pages of it are writable now, those of the other one are not.
        child.ask(Who::First, "write 1039 9");
        assert!(is_quiet(&faults));
        child.send(Who::First, "write 17 9");
        assert_eq!(next(&faults), fault(&child, FIRST.start, FaultKind::WriteProtect, true));
        faults.close(&mut child.tracee()).unwrap();
        child.result(Who::First);
        assert!(!child.is_registered());
        child.ask(Who::First, "fill 0 1040 1");
    }
}

#[test]
fn every_first_touch_of_a_huge_page_is_traced() {
    let Some(_pages) = reserve() else { return };
    let mut child = Child::spawn_mixed(&SHARED);
    child.ask(Who::First, "fill 0 1040 1");
    let faults = child.trace(TraceMode::Save);
    faults.protect_pages(child.memory.all_pages()).unwrap();
    for region in [0..16, 16..1040] {
        drop_page_tables(&mut child.tracee(), &child.memory, pages(region)).unwrap();
    }
    child.send(Who::First, "read 600");
    assert_eq!(next(&faults), fault(&child, SECOND.start, FaultKind::Minor, false));
    faults.resume_minor(pages(600..602), true).unwrap_err();
    // Protected or not, one answer is for all pages of it; it is mapped once.
    faults.resume_minor(pages(SECOND), true).unwrap();
    assert_eq!(child.result(Who::First), pattern(1, 600, 0));
    child.send(Who::First, "write 601 5");
    assert_eq!(next(&faults), fault(&child, SECOND.start, FaultKind::WriteProtect, true));
    faults.resume_minor(pages(SECOND), false).unwrap();
    faults.unprotect_pages(pages(SECOND)).unwrap();
    child.result(Who::First);
    child.send(Who::First, "write 20 5");
    assert_eq!(next(&faults), fault(&child, FIRST.start, FaultKind::Minor, true));
    faults.resume_minor(pages(FIRST), false).unwrap();
    child.result(Who::First);
    child.ask(Who::First, "sum 16 1040");
    assert!(is_quiet(&faults));
    has_page(&child, 21, &filled(1, 21));
}

/// In pages that have contents but no entry, and in holes.
#[test]
fn a_huge_page_that_was_read_is_still_protected() {
    let Some(_pages) = reserve() else { return };
    let mut child = Child::spawn_mixed(&SHARED);
    child.ask(Who::First, "fill 16 528 1");
    let (memory, mode) = (child.memory.clone(), TraceMode::Save);
    let mut faults = PageFaults::create(&mut child.tracee(), memory, mode).unwrap();
    faults.report_holes();
    faults.register_all().unwrap();
    faults.protect_pages(child.memory.all_pages()).unwrap();
    drop_page_tables(&mut child.tracee(), &child.memory, pages(FIRST)).unwrap();
    for (huge, kind) in [(FIRST, FaultKind::Minor), (SECOND, FaultKind::Missing)] {
        let page = huge.start + 7;
        child.send(Who::First, &format!("read {page}"));
        assert_eq!(next(&faults), fault(&child, huge.start, kind, false));
        faults.resume_reader(Page(page), kind).unwrap();
        child.result(Who::First);
        child.send(Who::First, &format!("write {page} 3"));
        assert_eq!(next(&faults), fault(&child, huge.start, FaultKind::WriteProtect, true));
        faults.unprotect_pages(pages(huge)).unwrap();
        child.result(Who::First);
    }
    assert!(is_quiet(&faults));
}

/// Protects memory whose holes fault, and checks what fills a hole, and what does not.
#[track_caller]
fn holes_fault(child: &mut Child, mode: TraceMode, start: u32) -> PageFaults {
    let memory = child.memory.clone();
    let mut faults = PageFaults::create(&mut child.tracee(), memory.clone(), mode).unwrap();
    faults.report_holes();
    faults.register_all().unwrap();
    faults.protect_pages(memory.all_pages()).unwrap();
    let free = HugePages::count_free().unwrap();
    let hole = pages(start + 512..start + 1024);
    memory.open_window().unwrap();
    has_page(child, start + 600, &[0; 4096]);
    assert_eq!(HugePages::count_free().unwrap(), free, "reading fills no hole");
    child.send(Who::First, &format!("write {} 5", start + 600));
    assert_eq!(next(&faults), fault(child, start + 512, FaultKind::Missing, true));
    has_page(child, start + 600, &[0; 4096]);
    assert_eq!(faults.install_zeros(hole.clone()).unwrap(), InstallOutcome::Done);
    child.result(Who::First);
    assert_eq!(child.ask(Who::Second, &format!("read {}", start + 600)), 5);
    assert_eq!(faults.install_zeros(hole).unwrap(), InstallOutcome::Present);
    assert_eq!(child.ask(Who::Second, &format!("read {}", start + 600)), 5);
    faults
}

#[test]
fn holes_of_shared_huge_pages_are_counted() {
    let Some(_pages) = reserve() else { return };
    let mut child = Child::spawn_mixed(&SHARED);
    child.ask(Who::First, "fill 16 528 1");
    let before = child.memory.file_bytes().unwrap();
    assert_eq!(before, HUGE_PAGE_BYTES);
    let faults = holes_fault(&mut child, TraceMode::Save, 16);
    assert_eq!(child.memory.file_bytes().unwrap(), before + HUGE_PAGE_BYTES);
    child.ask(Who::First, "discard 16 528");
    assert_eq!(child.memory.file_bytes().unwrap(), before);
    child.send(Who::First, "read 17");
    assert_eq!(next(&faults), fault(&child, 16, FaultKind::Missing, false));
    faults.close(&mut child.tracee()).unwrap();
    assert_eq!(child.result(Who::First), 0);
}

#[test]
fn private_huge_pages_are_traced_for_writes() {
    let Some(_pages) = reserve() else { return };
    let mut child = Child::spawn_mixed(&PRIVATE);
    child.ask(Who::First, "fill 0 512 1");
    assert!(!child.memory.is_shared());
    assert_eq!(child.memory.backed_runs().unwrap(), [pages(0..512)]);
    let faults = holes_fault(&mut child, TraceMode::Writes, 0);
    child.send(Who::First, "write 7 9");
    assert_eq!(next(&faults), fault(&child, 0, FaultKind::WriteProtect, true));
    has_page(&child, 7, &filled(1, 7));
    faults.unprotect_pages(pages(0..512)).unwrap();
    child.result(Who::First);
    assert!(child.memory.has_kept(pages(0..1024)).unwrap());
    child.ask(Who::First, "discard 0 512");
    assert!(!child.memory.has_kept(pages(511..514)).unwrap(), "it is gone");
    assert!(child.memory.has_kept(pages(512..1024)).unwrap());
    child.send(Who::First, "read 7");
    assert_eq!(next(&faults), fault(&child, 0, FaultKind::Missing, false));
    faults.close(&mut child.tracee()).unwrap();
    assert_eq!(child.result(Who::First), 0);
}

#[test]
fn a_scan_reports_huge_pages_as_a_whole() {
    let Some(_pages) = reserve() else { return };
    for (memfds, start) in [(&SHARED[..], 16), (&PRIVATE[..], 0)] {
        let mut child = Child::spawn_mixed(memfds);
        child.ask(Who::First, &format!("fill {start} {} 1", start + 512));
        let scan = PageScan::create(&mut child.tracee(), child.memory.clone()).unwrap();
        if let Err(error) = scan.arm_all() {
            return firn_skip::skip_test(error);
        }
        let (one, other) = (start..start + 512, start + 512..start + 1024);
        let written = |range: std::ops::Range<u32>| {
            let mut runs = Vec::new();
            scan.collect_written_and_rearm(pages(range), &mut runs).unwrap();
            runs
        };
        let all = 0..start + 1024;
        assert_eq!(written(all.clone()), []);
        child.ask(Who::First, &format!("read {}", start + 3));
        assert_eq!(written(all.clone()), []);
        child.ask(Who::First, &format!("write {} 5", start + 3));
        assert_eq!(written(all.clone()), [pages(one.clone())]);
        assert_eq!(written(all.clone()), []);
        // Also one that had no contents; and a part stands for the whole.
        child.ask(Who::First, &format!("write {} 5", start + 900));
        assert_eq!(written(one.start..one.start + 3), []);
        assert_eq!(written(other.start..other.start + 3), [pages(other.clone())]);
        assert_eq!(written(all), []);
        scan.close(&mut child.tracee()).unwrap();
        assert!(!child.is_registered());
    }
}
