//! Page faults of a real process: received, distinguished, and answered.

use std::time::Duration;

use firn_memory::{
    FaultKind, InstallAttempt, InstallOutcome, MemoryEvent, PageFaultError, PageFaults, TraceMode,
    drop_page_tables,
};
use firn_types::Page;

use crate::child::pattern;
use crate::driver::{Child, Who, is_quiet, next, pages};
use crate::memory::filled;

fn fault(child: &Child, who: Who, page: u32, kind: FaultKind, write: bool) -> MemoryEvent {
    MemoryEvent::Fault { page: Page(page), tid: child.tids[who as usize], kind, write }
}

#[test]
fn every_first_touch_is_traced_with_its_thread() {
    let mut child = Child::spawn(&[64, 64]);
    child.ask(Who::First, "fill 0 128 1");
    let faults = child.trace(TraceMode::Save);
    drop_page_tables(&mut child.tracee(), &child.memory, pages(0..128)).unwrap();
    for page in 0..128 {
        let who = if page % 3 == 0 { Who::First } else { Who::Second };
        child.send(who, &format!("read {page}"));
        assert_eq!(next(&faults), fault(&child, who, page, FaultKind::Minor, false));
        faults.resume_minor(pages(page..page + 1), false).unwrap();
        assert_eq!(child.result(who), pattern(1, u64::from(page), 0));
    }
    child.ask(Who::First, "sum 0 128");
    assert!(is_quiet(&faults));
}

#[test]
fn missing_pages_are_installed() {
    let mut child = Child::spawn(&[64]);
    let faults = child.trace(TraceMode::Restore);
    child.send(Who::First, "read 9");
    assert_eq!(next(&faults), fault(&child, Who::First, 9, FaultKind::Missing, false));
    let bytes: Vec<u8> = [filled(2, 8), filled(2, 9)].concat();
    assert_eq!(faults.install_pages(Page(8), &bytes).unwrap(), InstallOutcome::Done);
    assert_eq!(child.result(Who::First), pattern(2, 9, 0));
    assert_eq!(child.ask(Who::Second, "read 8"), pattern(2, 8, 0));
    child.send(Who::Second, "write 10 5");
    assert_eq!(next(&faults), fault(&child, Who::Second, 10, FaultKind::Missing, true));
    assert_eq!(faults.install_zeros(pages(10..14)).unwrap(), InstallOutcome::Done);
    child.result(Who::Second);
    assert_eq!(child.ask(Who::First, "read 10"), 5);
    assert_eq!(child.memory.backed_runs().unwrap(), [pages(8..14)]);
}

#[test]
fn pages_that_are_present_are_kept() {
    let mut child = Child::spawn(&[64]);
    child.ask(Who::First, "fill 4 5 1");
    let faults = child.trace(TraceMode::Restore);
    let bytes: Vec<u8> = (3..6).flat_map(|page| filled(2, page)).collect();
    assert_eq!(faults.install_pages(Page(3), &bytes).unwrap(), InstallOutcome::Present);
    let seen = [3, 4, 5].map(|page| child.ask(Who::First, &format!("read {page}")));
    assert_eq!(seen, [pattern(2, 3, 0), pattern(1, 4, 0), pattern(2, 5, 0)]);
    assert_eq!(faults.install_zeros(pages(2..7)).unwrap(), InstallOutcome::Present);
    assert_eq!(child.ask(Who::First, "read 3"), pattern(2, 3, 0));
}

#[test]
fn writes_to_protected_pages_wait() {
    let mut child = Child::spawn(&[64]);
    child.ask(Who::First, "fill 0 32 1");
    let faults = child.trace(TraceMode::Save);
    faults.protect_pages(pages(0..64)).unwrap();
    assert_eq!(child.ask(Who::First, "read 5"), pattern(1, 5, 0));
    child.send(Who::First, "write 5 99");
    assert_eq!(next(&faults), fault(&child, Who::First, 5, FaultKind::WriteProtect, true));
    assert_eq!(child.has_result(Who::First, Duration::from_millis(30)), None);
    let mut before = vec![0; 4096];
    child.memory.read_pages(Page(5), &mut before).unwrap();
    assert_eq!(before, filled(1, 5));
    faults.unprotect_pages(pages(4..6)).unwrap();
    child.result(Who::First);
    assert_eq!(child.ask(Who::Second, "read 5"), 99);
    child.ask(Who::Second, "write 4 1");
    assert!(is_quiet(&faults));
}

#[test]
fn a_write_to_a_protected_hole_is_seen() {
    let mut child = Child::spawn(&[64]);
    let faults = child.trace(TraceMode::Save);
    faults.protect_pages(pages(0..64)).unwrap();
    child.send(Who::First, "write 40 1");
    assert_eq!(next(&faults), fault(&child, Who::First, 40, FaultKind::WriteProtect, true));
    faults.unprotect_pages(pages(40..41)).unwrap();
    child.result(Who::First);
    assert_eq!(child.ask(Who::Second, "read 40"), 1);
}

#[test]
fn protection_outlives_dropped_page_tables() {
    let mut child = Child::spawn(&[64]);
    child.ask(Who::First, "fill 0 64 1");
    let faults = child.trace(TraceMode::Save);
    faults.protect_pages(pages(0..64)).unwrap();
    drop_page_tables(&mut child.tracee(), &child.memory, pages(0..64)).unwrap();
    child.send(Who::First, "read 7");
    assert_eq!(next(&faults), fault(&child, Who::First, 7, FaultKind::Minor, false));
    match faults.resume_minor(pages(6..8), true) {
        Ok(()) => {
            child.result(Who::First);
            child.send(Who::First, "write 7 3");
            assert_eq!(next(&faults), fault(&child, Who::First, 7, FaultKind::WriteProtect, true));
            faults.unprotect_pages(pages(7..8)).unwrap();
        }
        Err(error) => {
            assert!(!faults.features().resume_protected, "{error}");
            assert!(error.to_string().contains("UFFDIO_CONTINUE_MODE_WP"), "{error}");
            faults.resume_minor(pages(6..8), false).unwrap();
        }
    }
    child.result(Who::First);
    // Without `protect`, one answer is enough for a write.
    child.send(Who::Second, "write 20 3");
    assert_eq!(next(&faults), fault(&child, Who::Second, 20, FaultKind::Minor, true));
    faults.resume_minor(pages(20..21), false).unwrap();
    child.result(Who::Second);
    assert!(is_quiet(&faults));
}

/// Pages of the RAM file that are not mapped, and holes.
#[test]
fn a_page_that_was_read_is_still_protected() {
    let mut child = Child::spawn(&[64]);
    child.ask(Who::First, "fill 0 32 1");
    let mut faults = child.trace(TraceMode::Save);
    faults.protect_pages(pages(0..64)).unwrap();
    drop_page_tables(&mut child.tracee(), &child.memory, pages(0..64)).unwrap();
    is_seen_after_a_read(&mut child, &faults, 7, FaultKind::Minor);
    // A hole is mapped by the kernel.
    child.ask(Who::First, "read 40");
    child.send(Who::First, "write 40 3");
    assert_eq!(next(&faults), fault(&child, Who::First, 40, FaultKind::WriteProtect, true));
    faults.unprotect_pages(pages(40..41)).unwrap();
    child.result(Who::First);
    faults.unregister_all().unwrap();
    faults.report_holes();
    faults.register_all().unwrap();
    faults.protect_pages(pages(0..64)).unwrap();
    is_seen_after_a_read(&mut child, &faults, 50, FaultKind::Missing);
}

fn is_seen_after_a_read(child: &mut Child, faults: &PageFaults, page: u32, kind: FaultKind) {
    child.send(Who::First, &format!("read {page}"));
    assert_eq!(next(faults), fault(child, Who::First, page, kind, false));
    faults.resume_reader(Page(page), kind).unwrap();
    child.result(Who::First);
    child.send(Who::First, &format!("write {page} 3"));
    assert_eq!(next(faults), fault(child, Who::First, page, FaultKind::WriteProtect, true));
    faults.unprotect_pages(pages(page..page + 1)).unwrap();
    child.result(Who::First);
    assert_eq!(child.ask(Who::Second, &format!("read {page}")), 3);
}

#[test]
fn dropping_page_tables_loses_nothing() {
    let mut child = Child::spawn(&[300, 64]);
    child.ask(Who::First, "fill 0 300 1");
    child.ask(Who::First, "fill 304 368 2");
    let sums = [child.ask(Who::First, "sum 0 300"), child.ask(Who::First, "sum 304 368")];
    drop_page_tables(&mut child.tracee(), &child.memory, pages(0..1000)).unwrap();
    assert_eq!([child.ask(Who::Second, "sum 0 300"), child.ask(Who::Second, "sum 304 368")], sums);
}

#[test]
fn locked_memory_is_traced_too() {
    let mut child = Child::spawn(&[64]);
    child.ask(Who::First, "fill 0 64 1");
    child.ask(Who::Main, "lock");
    let faults = child.trace(TraceMode::Save);
    drop_page_tables(&mut child.tracee(), &child.memory, pages(0..64)).unwrap();
    child.send(Who::First, "read 3");
    assert_eq!(next(&faults), fault(&child, Who::First, 3, FaultKind::Minor, false));
    faults.close(&mut child.tracee()).unwrap();
    assert_eq!(child.result(Who::First), pattern(1, 3, 0));
}

#[test]
fn the_next_firn_takes_over() {
    let mut child = Child::spawn(&[64]);
    child.ask(Who::First, "fill 0 8 1");
    let faults = child.trace(TraceMode::Restore);
    child.send(Who::First, "read 30");
    // The first Firn has read the fault, and dies before it answers.
    next(&faults);
    drop(faults);
    let faults = PageFaults::adopt(&child.process, child.memory.clone()).unwrap().unwrap();
    assert_eq!(faults.trace_mode(), TraceMode::Restore);
    assert_eq!(next(&faults), fault(&child, Who::First, 30, FaultKind::Missing, false));
    faults.install_pages(Page(30), &filled(3, 30)).unwrap();
    assert_eq!(child.result(Who::First), pattern(3, 30, 0));
    assert_eq!(child.userfaultfds(), 1);
    faults.close(&mut child.tracee()).unwrap();
    assert_eq!(child.userfaultfds(), 0);
    assert!(PageFaults::adopt(&child.process, child.memory.clone()).unwrap().is_none());
}

#[test]
fn closing_leaves_no_trace() {
    for trace in [TraceMode::Save, TraceMode::Restore] {
        let mut child = Child::spawn(&[64, 64]);
        child.ask(Who::First, "fill 0 16 1");
        let faults = child.trace(trace);
        assert!(child.is_registered());
        if trace == TraceMode::Save {
            faults.protect_pages(pages(0..128)).unwrap();
        }
        faults.close(&mut child.tracee()).unwrap();
        assert!(!child.is_registered());
        assert_eq!(child.userfaultfds(), 0);
        child.ask(Who::First, "fill 0 128 2");
        assert_eq!(child.ask(Who::Second, "read 127"), pattern(2, 127, 0));
    }
}

#[test]
fn a_descriptor_of_a_dead_firn_can_be_closed() {
    let child = Child::spawn(&[64]);
    drop(child.trace(TraceMode::Save));
    assert_eq!(PageFaults::close_stale(&mut child.tracee()).unwrap(), 1);
    assert_eq!(child.userfaultfds(), 0);
    assert!(!child.is_registered());
}

#[test]
fn unregistering_wakes_waiting_threads() {
    let mut child = Child::spawn(&[64]);
    child.ask(Who::First, "fill 0 64 1");
    let faults = child.trace(TraceMode::Save);
    faults.protect_pages(pages(0..64)).unwrap();
    drop_page_tables(&mut child.tracee(), &child.memory, pages(0..32)).unwrap();
    child.send(Who::First, "read 3");
    next(&faults);
    child.send(Who::Second, "write 40 1");
    next(&faults);
    faults.unregister_all().unwrap();
    assert_eq!(child.result(Who::First), pattern(1, 3, 0));
    child.result(Who::Second);
}

#[test]
fn two_firns_do_not_share_memory() {
    let child = Child::spawn(&[64]);
    let first = child.trace(TraceMode::Save);
    let second =
        PageFaults::create(&mut child.tracee(), child.memory.clone(), TraceMode::Save).unwrap();
    assert!(matches!(second.register_all(), Err(PageFaultError::Taken { .. })));
    second.close(&mut child.tracee()).unwrap();
    assert!(child.is_registered());
    first.close(&mut child.tracee()).unwrap();
    assert!(!child.is_registered());
}

#[test]
fn the_death_of_the_hypervisor_is_reported() {
    let mut child = Child::spawn(&[64]);
    let faults = child.trace(TraceMode::Restore);
    child.kill();
    let error = faults.wait_for_events(&mut Vec::new(), Duration::from_secs(5)).unwrap_err();
    assert!(matches!(error, PageFaultError::Process(_)), "{error}");
    let error = faults.install_pages(Page(0), &[0; 4096]).unwrap_err();
    assert!(error.to_string().contains("does not exist"), "{error}");
    assert!(faults.protect_pages(pages(0..1)).is_err());
    assert!(faults.unregister_all().is_err());
}

#[test]
fn pages_given_back_are_reported() {
    let mut child = Child::spawn(&[64]);
    child.ask(Who::First, "fill 0 64 1");
    let faults = child.trace(TraceMode::Restore);
    child.send(Who::First, "discard 10 20");
    assert_eq!(next(&faults), MemoryEvent::Removed { pages: pages(10..20) });
    child.result(Who::First);
    child.send(Who::First, "read 15");
    assert_eq!(next(&faults), fault(&child, Who::First, 15, FaultKind::Missing, false));
    faults.install_zeros(pages(15..16)).unwrap();
    assert_eq!(child.result(Who::First), 0);
}

#[test]
fn an_install_waits_for_a_removal() {
    let mut child = Child::spawn(&[64]);
    child.ask(Who::First, "fill 0 32 1");
    let faults = child.trace(TraceMode::Restore);
    child.send(Who::First, "discard 10 20");
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(faults.install_pages(Page(40), &filled(2, 40)).unwrap(), InstallOutcome::Done);
    child.result(Who::First);
    assert_eq!(next(&faults), MemoryEvent::Removed { pages: pages(10..20) });
    child.send(Who::First, "discard 40 41");
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(faults.install_pages(Page(40), &filled(3, 40)).unwrap(), InstallOutcome::Removed);
    child.result(Who::First);
    assert_eq!(next(&faults), MemoryEvent::Removed { pages: pages(40..41) });
}

#[test]
fn a_hypervisor_without_rights_is_traced_by_a_firn_with_rights() {
    if !rustix::process::geteuid().is_root() {
        firn_skip::skip_test("only root can start a child as nobody");
        return;
    }
    let mut child = Child::spawn_as_nobody(&[64]);
    child.ask(Who::First, "fill 0 64 1");
    let before = descriptors(&child);
    let faults = child.trace(TraceMode::Save);
    faults.protect_pages(pages(0..64)).unwrap();
    drop_page_tables(&mut child.tracee(), &child.memory, pages(0..64)).unwrap();
    child.send(Who::First, "read 3");
    assert_eq!(next(&faults), fault(&child, Who::First, 3, FaultKind::Minor, false));
    faults.resume_minor(pages(3..4), false).unwrap();
    child.result(Who::First);
    faults.close(&mut child.tracee()).unwrap();
    assert_eq!(descriptors(&child), before);
    assert!(!child.is_registered());
}

fn descriptors(child: &Child) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", child.process.pid())).unwrap().count()
}

#[test]
fn an_attempt_leaves_events_to_the_reader() {
    let mut child = Child::spawn(&[64]);
    child.ask(Who::First, "fill 0 32 1");
    let faults = child.trace(TraceMode::Restore);
    assert!(!faults.is_giving_back());
    assert_eq!(faults.try_install(Page(32), &filled(2, 32)).unwrap(), InstallAttempt::Done);
    assert_eq!(faults.try_install(Page(31), &filled(2, 31)).unwrap(), InstallAttempt::Present);
    child.send(Who::First, "discard 10 20");
    std::thread::sleep(Duration::from_millis(50));
    assert!(faults.is_giving_back());
    assert_eq!(faults.try_install(Page(40), &filled(2, 40)).unwrap(), InstallAttempt::Busy);
    assert_eq!(faults.try_install_zeros(pages(40..41)).unwrap(), InstallAttempt::Busy);
    assert_eq!(next(&faults), MemoryEvent::Removed { pages: pages(10..20) });
    child.result(Who::First);
    assert!(!faults.is_giving_back());
    assert_eq!(faults.try_install_zeros(pages(39..41)).unwrap(), InstallAttempt::Done);
    assert_eq!(child.ask(Who::First, "read 32"), pattern(2, 32, 0));
}
