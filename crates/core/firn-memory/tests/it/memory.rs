//! Guest memory through its files.

use firn_memory::MemoryError;
use firn_types::{HostVirt, Page};

use crate::child::pattern;
use crate::driver::{Child, Who, open, pages};

/// The bytes with which [`Child`] fills a page.
pub fn filled(seed: u64, page: u32) -> Vec<u8> {
    (0..512).flat_map(|word| pattern(seed, u64::from(page), word).to_le_bytes()).collect()
}

#[test]
fn reads_what_the_guest_wrote() {
    let mut child = Child::spawn(&[64, 32]);
    child.ask(Who::First, "fill 3 5 7");
    child.ask(Who::First, "fill 64 65 8");
    let mut out = vec![0xff; 2 * 4096];
    child.memory.read_pages(Page(4), &mut out).unwrap();
    assert_eq!(out[..4096], filled(7, 4));
    assert!(out[4096..].iter().all(|&byte| byte == 0));
    child.memory.read_pages(Page(63), &mut out).unwrap();
    assert!(out[..4096].iter().all(|&byte| byte == 0));
    assert_eq!(out[4096..], filled(8, 64));
}

#[test]
fn pages_between_and_after_regions_read_as_zeros() {
    let mut child = Child::spawn(&[3, 2]);
    child.ask(Who::First, "fill 2 3 1");
    child.ask(Who::First, "fill 16 18 1");
    let mut out = vec![0xff; 24 * 4096];
    child.memory.read_pages(Page(0), &mut out).unwrap();
    for (page, bytes) in out.chunks(4096).enumerate() {
        let expected =
            if [2, 16, 17].contains(&page) { filled(1, page as u32) } else { vec![0; 4096] };
        assert_eq!(bytes, expected, "page {page}");
    }
    child.memory.read_pages(Page(u32::MAX - 1), &mut out[..4096]).unwrap();
    assert_eq!(child.memory.hva_of(Page(3)), None);
    assert_eq!(child.memory.hva_of(Page(17)), Some(child.hvas[1].offset_by(4096)));
    assert_eq!(child.memory.page_of_hva(child.hvas[1].offset_by(8191)), Some(Page(17)));
    // The regions may be neighbours in the child.
    assert_ne!(child.memory.page_of_hva(child.hvas[1].offset_by(8192)), Some(Page(18)));
    assert_eq!(child.memory.page_of_hva(HostVirt(4096)), None);
}

#[test]
fn reading_holes_does_not_fill_them() {
    let mut child = Child::spawn(&[64, 64]);
    child.ask(Who::First, "fill 10 12 1");
    child.ask(Who::First, "fill 63 66 1");
    child.memory.read_pages(Page(0), &mut vec![0; 128 * 4096]).unwrap();
    let runs = [pages(10..12), pages(63..64), pages(64..66)];
    assert_eq!(child.memory.backed_runs().unwrap(), runs);
    assert!(child.memory.is_backed(pages(0..11)).unwrap());
    assert!(!child.memory.is_backed(pages(12..63)).unwrap());
}

#[test]
fn a_window_reads_the_same() {
    let mut child = Child::spawn(&[60, 64]);
    child.ask(Who::First, "fill 10 30 1");
    child.ask(Who::First, "fill 64 70 2");
    let mut before = vec![0; 130 * 4096];
    child.memory.read_pages(Page(0), &mut before).unwrap();
    child.memory.open_window().unwrap();
    for (first, count) in [(0, 130), (10, 2), (29, 2), (62, 4), (65, 1), (69, 3)] {
        let mut after = vec![0xff; count * 4096];
        child.memory.read_pages(Page(first), &mut after).unwrap();
        assert_eq!(after, before[first as usize * 4096..][..after.len()]);
    }
    assert_eq!(child.memory.backed_runs().unwrap(), [pages(10..30), pages(64..70)]);
    child.ask(Who::First, "fill 11 12 3");
    child.ask(Who::First, "fill 40 41 3");
    child.memory.punch_out(pages(12..14)).unwrap();
    for (page, expected) in [(11, filled(3, 11)), (40, filled(3, 40)), (13, vec![0; 4096])] {
        let mut after = vec![0xff; 4096];
        child.memory.read_pages(Page(page), &mut after).unwrap();
        assert_eq!(after, expected, "page {page}");
    }
    let runs = [pages(10..12), pages(14..30), pages(40..41), pages(64..70)];
    assert_eq!(child.memory.backed_runs().unwrap(), runs);
}

#[test]
fn punched_pages_are_gone_for_the_guest_too() {
    let mut child = Child::spawn(&[64]);
    child.ask(Who::First, "fill 0 64 1");
    child.memory.punch_out(pages(8..40)).unwrap();
    assert_eq!(child.memory.backed_runs().unwrap(), [pages(0..8), pages(40..64)]);
    assert_eq!(child.ask(Who::Second, "read 8"), 0);
    assert_eq!(child.ask(Who::Second, "read 7"), pattern(1, 7, 0));
}

#[test]
fn memory_that_is_not_the_guests_is_refused() {
    let child = Child::spawn(&[64]);
    let elsewhere = open(&child.process, &[64], &[HostVirt(0x1000)]);
    assert!(matches!(elsewhere, Err(MemoryError::Unmapped { .. })), "{elsewhere:?}");
    let too_long = open(&child.process, &[65], &child.hvas);
    let refused =
        matches!(too_long, Err(MemoryError::Unmapped { .. } | MemoryError::Private { .. }));
    assert!(refused, "{too_long:?}");
    let unlocated = open(&child.process, &[64], &[]);
    assert!(matches!(unlocated, Err(MemoryError::Unlocated(_))), "{unlocated:?}");
}

#[test]
fn private_memory_is_refused() {
    let child = Child::spawn(&[1]);
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", child.process.pid())).unwrap();
    let stack = maps.lines().find(|line| line.ends_with("[stack]")).unwrap();
    let start = HostVirt(u64::from_str_radix(stack.split_once('-').unwrap().0, 16).unwrap());
    let error = open(&child.process, &[1], &[start]).unwrap_err();
    assert!(matches!(error, MemoryError::Private { .. }), "{error}");
    assert!(error.to_string().contains("share=on"));
}

#[test]
fn private_memory_can_be_copied() {
    use firn_memory::process_memory::{read_memory, write_memory};
    let mut child = Child::spawn(&[4]);
    child.ask(Who::First, "fill 1 2 5");
    let at = child.hvas[0].offset_by(4096);
    let mut out = vec![0; 4096];
    read_memory(&child.process, at, &mut out).unwrap();
    assert_eq!(out, filled(5, 1));
    write_memory(&child.process, at, &77u64.to_le_bytes()).unwrap();
    assert_eq!(child.ask(Who::First, "read 1"), 77);
    assert!(read_memory(&child.process, HostVirt(0x1000), &mut out).is_err());
    assert!(read_memory(&child.process, HostVirt(u64::MAX - 4), &mut out).is_err());
}
