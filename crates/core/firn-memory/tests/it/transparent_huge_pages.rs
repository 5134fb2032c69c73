//! Transparent huge pages: what tracing splits is put together again, and no byte changes.

use std::ops::Range;

use firn_memory::transparent_huge_pages::{collapse_pages, collapsible_parts, huge_mapped_runs};
use firn_memory::{FaultKind, MemoryEvent, PageFaults, TraceMode};
use firn_types::Page;

use crate::child::pattern;
use crate::driver::{Child, Who, next, pages};

/// At least three aligned 2 MiB, wherever the kernel maps them.
const PAGES: u32 = 2048;

/// A child with private memory in huge pages, all of it filled. None where the kernel has no such pages.
fn child_in_huge_pages() -> Option<(Child, Vec<Range<Page>>)> {
    let setting = "/sys/kernel/mm/transparent_hugepage/enabled";
    let enabled = std::fs::read_to_string(setting).unwrap_or_default();
    if enabled.is_empty() || enabled.contains("[never]") {
        firn_skip::skip_test(format!("no transparent huge pages: {setting} is {enabled:?}"));
        return None;
    }
    let mut child = Child::spawn_private(&[u64::from(PAGES)]);
    child.ask(Who::First, "huge");
    child.ask(Who::First, &format!("fill 0 {PAGES} 1"));
    // What the kernel had no huge page for at first.
    for part in collapsible_parts(&child.memory, &[pages(0..PAGES)]).unwrap() {
        collapse_pages(&child.memory, part).unwrap();
    }
    let huge = huge_mapped_runs(&child.memory).unwrap();
    assert!(count(&huge) >= 3 * 512, "{huge:?}");
    Some((child, huge))
}

fn count(runs: &[Range<Page>]) -> usize {
    runs.iter().map(Page::count_in).sum()
}

/// Writes to a page while it is protected, and answers the fault.
fn write_traced(child: &mut Child, faults: &PageFaults, page: Page) {
    child.send(Who::First, &format!("write {} {}", page.0, pattern(2, u64::from(page.0), 0)));
    let event = next(faults);
    assert!(matches!(event, MemoryEvent::Fault { kind: FaultKind::WriteProtect, .. }), "{event:?}");
    faults.unprotect_pages(page..Page(page.0 + 1)).unwrap();
    child.result(Who::First);
}

/// Traces the child, and writes to one page of each 2 MiB.
fn split(child: &mut Child, huge: &[Range<Page>]) -> Vec<Page> {
    let written: Vec<Page> = huge
        .iter()
        .flat_map(|run| (run.start.0..run.end.0).step_by(512).map(|page| Page(page + 7)))
        .collect();
    let faults = child.trace(TraceMode::Writes);
    faults.protect_pages(child.memory.all_pages()).unwrap();
    written.iter().for_each(|page| write_traced(child, &faults, *page));
    faults.close(&mut child.tracee()).unwrap();
    written
}

#[test]
fn what_tracing_split_is_put_together() {
    let Some((mut child, huge)) = child_in_huge_pages() else { return };
    let written = split(&mut child, &huge);
    assert!(huge_mapped_runs(&child.memory).unwrap().is_empty(), "each was written to");
    let sum = child.ask(Who::Second, &format!("sum 0 {PAGES}"));
    let parts = collapsible_parts(&child.memory, &huge).unwrap();
    assert_eq!(count(&parts), count(&huge));
    parts.into_iter().for_each(|part| collapse_pages(&child.memory, part).unwrap());
    assert_eq!(huge_mapped_runs(&child.memory).unwrap(), huge);
    assert_eq!(child.ask(Who::Second, &format!("sum 0 {PAGES}")), sum);
    for page in written {
        let expected = pattern(2, u64::from(page.0), 0);
        assert_eq!(child.ask(Who::First, &format!("read {}", page.0)), expected);
    }
}

/// While a thread writes to it without rest.
#[test]
fn no_write_is_lost_meanwhile() {
    let Some((mut child, huge)) = child_in_huge_pages() else { return };
    split(&mut child, &huge);
    let before = child.ask(Who::Second, &format!("read {}", huge[0].start.0));
    child.send(Who::First, &format!("increment {} {} 500", huge[0].start.0, huge[0].end.0));
    let mut rounds = None;
    while rounds.is_none() {
        for part in collapsible_parts(&child.memory, &huge).unwrap() {
            // Pages that are in use at this moment can't be moved.
            let _ = collapse_pages(&child.memory, part);
        }
        rounds = child.has_result(Who::First, std::time::Duration::from_millis(1));
    }
    let after = child.ask(Who::Second, &format!("read {}", huge[0].start.0));
    assert_eq!(after, before.wrapping_add(rounds.unwrap()));
}

/// Putting them together would give memory back to the child that it has given up.
#[test]
fn a_part_with_a_hole_stays_as_it_is() {
    let Some((mut child, huge)) = child_in_huge_pages() else { return };
    split(&mut child, &huge);
    let hole = huge[0].start.0 + 9;
    child.ask(Who::Main, &format!("discard {hole} {}", hole + 1));
    let parts = collapsible_parts(&child.memory, &huge).unwrap();
    assert_eq!(count(&parts), count(&huge) - 512);
    assert!(parts.iter().all(|part| !part.contains(&Page(hole))));
}

/// Shared memory has none where the host's settings say so, and nothing is reported.
#[test]
fn ordinary_memory_has_none() {
    let mut child = Child::spawn(&[u64::from(PAGES)]);
    child.ask(Who::First, "fill 0 100 1");
    if child.memory.may_be_in_large_pages() {
        firn_skip::skip_test("shared memory may be in large pages on this host");
        return;
    }
    assert_eq!(huge_mapped_runs(&child.memory).unwrap(), []);
}
