//! Written and touched pages, without a fault handler.

use std::ops::Range;

use firn_memory::{
    FaultKind, MemoryEvent, PageFaultError, PageFaults, PageScan, ScanError, TraceMode,
    mapped_pages,
};
use firn_types::Page;

use crate::child::pattern;
use crate::driver::{Child, Who, next, pages};
use crate::memory::filled;

fn written(scan: &PageScan) -> Vec<Range<Page>> {
    let mut out = Vec::new();
    scan.collect_written_and_rearm(pages(0..1000), &mut out).unwrap();
    out
}

fn touched(scan: &PageScan) -> Vec<Range<Page>> {
    let mut out = Vec::new();
    scan.collect_touched(pages(0..1000), &mut out).unwrap();
    out
}

fn scan(child: &Child) -> PageScan {
    PageScan::create(&mut child.tracee(), child.memory.clone()).unwrap()
}

fn armed(child: &Child) -> Option<PageScan> {
    arm(child, scan(child))
}

/// `None`, with a message, if this kernel cannot remember writes.
fn arm(child: &Child, scan: PageScan) -> Option<PageScan> {
    match scan.arm_all() {
        Ok(()) => Some(scan),
        Err(ScanError::Unsupported) => {
            firn_skip::skip_test(ScanError::Unsupported);
            scan.close(&mut child.tracee()).unwrap();
            assert!(!child.is_registered());
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn pages_that_the_hypervisor_maps_are_reported() {
    let mut child = Child::spawn(&[100, 64]);
    child.ask(Who::First, "fill 3 6 1");
    child.ask(Who::Second, "fill 112 114 2");
    let mapped = mapped_pages(&child.memory).unwrap();
    let has = |page: u32| mapped.iter().any(|run| run.contains(&Page(page)));
    assert!([3, 4, 5, 112, 113].into_iter().all(has), "{mapped:?}");
    // The kernel may map neighbours of a touched page, as far as they have memory. Other pages have
    // none.
    assert!([50, 99, 150].into_iter().all(|page| !has(page)), "{mapped:?}");
}

#[test]
fn each_write_is_reported_once() {
    let mut child = Child::spawn(&[100, 64]);
    child.ask(Who::First, "fill 0 50 1");
    let Some(scan) = armed(&child) else { return };
    assert_eq!(written(&scan), []);
    // Pages with memory, a hole, the other region; reads do not count.
    child.ask(Who::First, "fill 3 6 2");
    child.ask(Who::Second, "fill 80 81 2");
    child.ask(Who::Second, "fill 112 114 2");
    child.ask(Who::Second, "sum 0 50");
    let mut peek = Vec::new();
    scan.collect_written(pages(0..1000), &mut peek).unwrap();
    let expected = [pages(3..6), pages(80..81), pages(112..114)];
    assert_eq!(peek, expected);
    assert_eq!(written(&scan), expected);
    assert_eq!(written(&scan), []);
    child.ask(Who::First, "write 4 1");
    assert_eq!(written(&scan), [pages(4..5)]);
    scan.close(&mut child.tracee()).unwrap();
    assert!(!child.is_registered());
    assert_eq!(child.userfaultfds(), 0);
}

#[test]
fn each_write_is_reported_once_if_page_tables_persist() {
    // The first half has memory, a later table nothing at all yet.
    let mut child = Child::spawn(&[2000]);
    child.ask(Who::First, "fill 0 1000 1");
    let Some(scan) = arm(&child, scan(&child).with_lasting_tables()) else { return };
    let reported = |rearms: bool| {
        let mut out = Vec::new();
        match rearms {
            true => scan.collect_written_and_rearm(pages(0..2000), &mut out).unwrap(),
            false => scan.collect_written(pages(0..2000), &mut out).unwrap(),
        }
        out
    };
    assert_eq!(reported(true), []);
    child.ask(Who::First, "fill 3 6 2");
    child.ask(Who::Second, "fill 511 513 2");
    child.ask(Who::Second, "fill 1700 1701 2");
    child.ask(Who::Second, "sum 0 1600");
    let expected = [pages(3..6), pages(511..513), pages(1700..1701)];
    assert_eq!(reported(false), expected);
    assert_eq!(reported(true), expected);
    assert_eq!(reported(true), []);
}

#[test]
fn many_runs_are_all_reported() {
    let mut child = Child::spawn(&[5000]);
    let Some(scan) = armed(&child) else { return };
    for page in (0..5000).step_by(2) {
        child.send(Who::First, &format!("write {page} 1"));
    }
    for _ in 0..2500 {
        child.result(Who::First);
    }
    let mut out = Vec::new();
    scan.collect_written_and_rearm(pages(0..5000), &mut out).unwrap();
    let expected: Vec<_> = (0..5000).step_by(2).map(|page| pages(page..page + 1)).collect();
    assert_eq!(out, expected);
}

#[test]
fn touches_are_reported_page_by_page() {
    let mut child = Child::spawn(&[64]);
    child.ask(Who::First, "fill 0 64 1");
    let scan = scan(&child);
    scan.forget_touches(&mut child.tracee(), pages(0..64)).unwrap();
    assert_eq!(touched(&scan), []);
    child.ask(Who::First, "read 20");
    child.ask(Who::First, "write 22 5");
    assert_eq!(touched(&scan), [pages(20..21), pages(22..23)]);
    scan.forget_touches(&mut child.tracee(), pages(0..64)).unwrap();
    assert_eq!(touched(&scan), []);
    assert_eq!(child.ask(Who::First, "read 21"), pattern(1, 21, 0));
}

#[test]
fn written_pages_stay_recorded_when_touches_are_forgotten() {
    let mut child = Child::spawn(&[64]);
    child.ask(Who::First, "fill 0 64 1");
    let Some(scan) = armed(&child) else { return };
    for read_again in [true, false] {
        child.ask(Who::First, "write 22 5");
        scan.forget_touches(&mut child.tracee(), pages(0..64)).unwrap();
        if read_again {
            child.ask(Who::First, "read 22");
        }
        assert_eq!(written(&scan), [pages(22..23)]);
        assert_eq!(written(&scan), []);
    }
}

#[test]
fn missing_page_tables_are_reported_as_written() {
    let mut child = Child::spawn(&[2000]);
    let all = pages(0..2000);
    child.ask(Who::First, "fill 0 2000 1");
    let Some(scan) = armed(&child) else { return };
    child.ask(Who::First, "fill 0 2000 2");
    scan.forget_touches(&mut child.tracee(), all.clone()).unwrap();
    let reported = |rearms: bool| {
        let mut out = Vec::new();
        match rearms {
            true => scan.collect_written_and_rearm(all.clone(), &mut out).unwrap(),
            false => scan.collect_written(all.clone(), &mut out).unwrap(),
        }
        out
    };
    assert_eq!(reported(false), std::slice::from_ref(&all));
    assert_eq!(reported(true), std::slice::from_ref(&all));
    assert_eq!(reported(true), []);
}

#[test]
fn pages_given_back_are_holes_whether_written_or_not() {
    let mut child = Child::spawn(&[64]);
    child.ask(Who::First, "fill 0 64 1");
    let Some(scan) = armed(&child) else { return };
    child.ask(Who::First, "discard 10 20");
    written(&scan);
    assert_eq!(child.memory.backed_runs().unwrap(), [pages(0..10), pages(20..64)]);
    child.ask(Who::First, "write 12 5");
    assert_eq!(written(&scan), [pages(12..13)]);
}

#[test]
fn a_successor_continues_the_scan() {
    let mut child = Child::spawn(&[64]);
    let Some(scan) = armed(&child) else { return };
    drop(scan);
    child.ask(Who::First, "write 7 5");
    let scan = PageScan::adopt(child.memory.clone()).unwrap().unwrap();
    assert_eq!(written(&scan), [pages(7..8)]);
    drop(scan);
    assert_eq!(PageFaults::close_stale(&mut child.tracee()).unwrap(), 1);
    assert!(!child.is_registered());
}

#[test]
fn private_memory_is_traced_for_writes() {
    let mut child = Child::spawn_private(&[64]);
    child.ask(Who::First, "fill 8 16 1");
    let memory = child.memory.clone();
    assert!(!memory.is_shared());
    // The kernel may have given it a huge page.
    let runs = memory.backed_runs().unwrap();
    assert!(runs.iter().any(|run| run.start <= Page(8) && run.end >= Page(16)), "{runs:?}");
    let refused = PageFaults::create(&mut child.tracee(), memory.clone(), TraceMode::Save);
    assert!(matches!(refused, Err(PageFaultError::Private)), "{refused:?}");
    let dropped = firn_memory::drop_page_tables(&mut child.tracee(), &memory, pages(0..64));
    assert!(dropped.unwrap_err().to_string().contains("private"));
    let faults = child.trace(TraceMode::Writes);
    faults.protect_pages(pages(0..64)).unwrap();
    let unpopulated = faults.features().write_protect_unpopulated;
    for page in if unpopulated { vec![9, 40] } else { vec![9] } {
        child.send(Who::First, &format!("write {page} 77"));
        let (page, tid) = (Page(page), child.tids[0]);
        let expected = MemoryEvent::Fault { page, tid, kind: FaultKind::WriteProtect, write: true };
        assert_eq!(next(&faults), expected);
        let mut out = vec![0xff; 2 * 4096];
        memory.read_pages(page, &mut out).unwrap();
        let before = if page == Page(9) { filled(1, 9) } else { vec![0; 4096] };
        assert_eq!(out[..4096], before);
        faults.unprotect_pages(page..Page(page.0 + 1)).unwrap();
        child.result(Who::First);
        assert_eq!(child.ask(Who::Second, &format!("read {}", page.0)), 77);
    }
    faults.close(&mut child.tracee()).unwrap();
    assert!(!child.is_registered());
    assert_eq!(child.ask(Who::Second, "read 8"), pattern(1, 8, 0));
}

#[test]
fn writes_to_private_memory_are_scanned_for() {
    let mut child = Child::spawn_private(&[64]);
    child.ask(Who::First, "fill 8 16 1");
    let Some(scan) = armed(&child) else { return };
    child.ask(Who::First, "fill 10 12 2");
    child.ask(Who::First, "fill 30 31 2");
    assert_eq!(written(&scan), [pages(10..12), pages(30..31)]);
    assert_eq!(written(&scan), []);
    scan.close(&mut child.tracee()).unwrap();
}
