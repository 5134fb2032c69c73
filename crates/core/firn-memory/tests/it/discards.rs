//! Pages that the process gives back: which queries and which faults show it.

use std::ops::Range;
use std::time::Duration;

use firn_memory::{FaultKind, InstallOutcome, MemoryEvent, PageFaults, PageScan, TraceMode};
use firn_types::Page;

use crate::child::pattern;
use crate::driver::{Child, Who, is_quiet, next, pages};

fn has_kept(child: &Child, range: Range<u32>) -> bool {
    child.memory.has_kept(pages(range)).unwrap()
}

fn is_backed(child: &Child, page: u32) -> bool {
    child.memory.is_backed(pages(page..page + 1)).unwrap()
}

/// Registers all memory, with its holes, and protects it.
fn protect_with_holes(child: &Child, mode: TraceMode) -> PageFaults {
    let memory = child.memory.clone();
    let mut faults = PageFaults::create(&mut child.tracee(), memory, mode).unwrap();
    faults.report_holes();
    faults.register_all().unwrap();
    faults.protect_pages(child.memory.all_pages()).unwrap();
    faults
}

#[test]
fn a_hole_in_shared_memory_stays_one_until_its_fault_is_answered() {
    for mode in [TraceMode::Writes, TraceMode::Save] {
        let mut child = Child::spawn(&[100]);
        child.ask(Who::First, "fill 0 10 1");
        let faults = protect_with_holes(&child, mode);
        assert!(has_kept(&child, 0..10) && !has_kept(&child, 9..11));
        child.ask(Who::First, "discard 4 6");
        assert!(has_kept(&child, 0..4) && has_kept(&child, 6..10));
        assert!(!has_kept(&child, 0..6) && !has_kept(&child, 5..10));
        for (page, access) in [(4, "read 4"), (5, "write 5 9"), (50, "read 50")] {
            child.send(Who::First, access);
            let write = access.starts_with("write");
            let fault = next(&faults);
            let expected = MemoryEvent::Fault {
                page: Page(page),
                tid: child.tids[0],
                kind: FaultKind::Missing,
                write,
            };
            assert_eq!(fault, expected, "{mode:?}");
            // Neither the access nor a copy by Firn fills it.
            child.memory.read_pages(Page(page), &mut [0; 4096]).unwrap();
            assert!(!is_backed(&child, page) && is_quiet(&faults));
            assert_eq!(faults.install_zeros(pages(page..page + 1)).unwrap(), InstallOutcome::Done);
            assert_eq!(child.result(Who::First), 0);
            assert!(is_backed(&child, page));
        }
        assert_eq!(child.ask(Who::Second, "read 5"), 9);
        faults.close(&mut child.tracee()).unwrap();
        assert!(!child.is_registered());
    }
}

#[test]
fn private_memory_loses_its_protection_with_its_contents() {
    let mut child = Child::spawn_private(&[100]);
    child.ask(Who::First, "fill 0 10 1");
    let faults = child.trace(TraceMode::Writes);
    if !faults.features().write_protect_unpopulated {
        eprintln!("SKIPPED: this kernel cannot protect pages that were never written (Linux 6.4)");
        return faults.close(&mut child.tracee()).unwrap();
    }
    assert!(!has_kept(&child, 0..1), "not protected yet");
    faults.protect_pages(child.memory.all_pages()).unwrap();
    // Reading, by the process or by Firn, changes nothing: neither where there are contents nor where
    // there are none.
    child.ask(Who::First, "sum 0 100");
    child.memory.read_pages(Page(0), &mut vec![0; 100 * 4096]).unwrap();
    assert!(has_kept(&child, 0..100));
    child.ask(Who::First, "discard 4 7");
    assert!(has_kept(&child, 0..4) && has_kept(&child, 7..100));
    assert!([4, 5, 6].into_iter().all(|page| !has_kept(&child, page..page + 1)));
    // No fault reports that it is touched again, and it is recognized all the same.
    child.ask(Who::First, "write 4 9");
    child.ask(Who::First, "read 5");
    assert!(is_quiet(&faults));
    assert!([4, 5, 6].into_iter().all(|page| !has_kept(&child, page..page + 1)));
    faults.close(&mut child.tracee()).unwrap();
}

#[test]
fn the_bytes_of_the_files_show_that_pages_were_given_back() {
    let mut child = Child::spawn(&[100, 64]);
    child.ask(Who::First, "fill 0 10 1");
    child.ask(Who::First, "fill 112 120 1");
    let bytes = |child: &Child| child.memory.file_bytes().unwrap();
    let before = bytes(&child);
    child.ask(Who::First, "fill 0 10 2");
    assert_eq!(bytes(&child), before, "a write to a page that is there");
    child.ask(Who::First, "discard 3 5");
    child.ask(Who::Second, "discard 113 114");
    assert_eq!(bytes(&child), before - 3 * 4096);
    child.ask(Who::Second, "read 3");
    assert_eq!(bytes(&child), before - 2 * 4096);
    assert_eq!(Child::spawn_private(&[8]).memory.file_bytes().unwrap(), 0);
}

/// What a scan reports after pages 4 to 6 were given back, and page 5 was read afterwards.
fn written_after_discard(child: &mut Child, scan: &PageScan) -> Vec<Range<Page>> {
    let written = |scan: &PageScan| {
        let mut out = Vec::new();
        scan.collect_written_and_rearm(pages(0..100), &mut out).unwrap();
        out
    };
    scan.arm_all().unwrap();
    assert_eq!(written(scan), []);
    child.ask(Who::First, "discard 4 7");
    child.send(Who::First, "read 5");
    let mut events = Vec::new();
    scan.page_faults().wait_for_events(&mut events, Duration::from_millis(500)).unwrap();
    for event in events {
        let MemoryEvent::Fault { page, kind: FaultKind::Missing, .. } = event else {
            unreachable!("{event:?}")
        };
        scan.page_faults().install_zeros(page..Page(page.0 + 1)).unwrap();
    }
    assert_eq!(child.result(Who::First), 0);
    let found = written(scan);
    assert_eq!(written(scan), []);
    found
}

#[test]
fn a_scan_reports_discarded_pages_or_their_fills() {
    let mut shared = Child::spawn(&[100]);
    shared.ask(Who::First, "fill 0 10 1");
    let memory = shared.memory.clone();
    let scan = match PageScan::create_with_holes(&mut shared.tracee(), memory) {
        Ok(scan) if scan.page_faults().trace_mode() == TraceMode::Scan => scan,
        _ => return eprintln!("SKIPPED: this kernel cannot remember writes"),
    };
    // The others are holes, which the file shows.
    assert_eq!(written_after_discard(&mut shared, &scan), [pages(5..6)]);
    assert_eq!(shared.memory.backed_runs().unwrap(), [pages(0..4), pages(5..6), pages(7..10)]);
    assert_eq!(shared.ask(Who::Second, "read 7"), pattern(1, 7, 0));
    scan.close(&mut shared.tracee()).unwrap();

    let mut private = Child::spawn_private(&[100]);
    private.ask(Who::First, "fill 0 10 1");
    let scan = PageScan::create(&mut private.tracee(), private.memory.clone()).unwrap();
    assert_eq!(written_after_discard(&mut private, &scan), [pages(4..7)]);
    scan.close(&mut private.tracee()).unwrap();
}
