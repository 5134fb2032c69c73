//! What failed stays in the retry schedule until it is done, case by case.

use std::time::Duration;

use firn_types::{Block, BlockSize, Page, RegionMap};

use super::*;

const NOW: Duration = Duration::from_secs(1);

/// Units of two memory blocks of two pages.
fn server(units: u32, rules: Rules) -> Server<()> {
    let block_size = BlockSize::default();
    let ram = RegionMap::lay_out([("ram", 4096 * 4 * u64::from(units))]).unwrap();
    let mut plan = Plan::new(2 * units);
    (0..units).for_each(|unit| {
        plan.push([Block(2 * unit), Block(2 * unit + 1)]);
    });
    let settled = Settled::new(&ram, block_size);
    Server::new(block_size, plan, settled, rules, Duration::ZERO)
}

/// A vCPU waits for a page, and its unit can't be read.
fn fail_on_demand(server: &mut Server<()>, page: Page) {
    let Answer::Fetch(fetch) = server.fault(NOW, page) else { panic!() };
    let _ = server.missed(&fetch);
    assert!(matches!(server.take_read(NOW, false), Take::Read(_)));
    assert!(server.failed(NOW, fetch.unit, Why::Demand));
    server.check_schedule(0);
}

#[test]
fn a_failed_unit_that_another_read_brings_is_installed() {
    let mut server = server(2, Rules::default());
    fail_on_demand(&mut server, Page(0));
    assert!(server.arrived(NOW, Unit(0), Source::PageCache, Why::Fill).workers);
    server.check_schedule(0);
    let Some(Work::Install(install)) = server.take_urgent() else { panic!() };
    assert_eq!(install.wanted, Some(Page(0)));
    assert!(!server.has_failed());
}

#[test]
fn a_failed_unit_that_is_lost_once_more_is_read_by_one_reader() {
    let mut server = server(1, Rules::default());
    let Answer::Fetch(fetch) = server.fault(NOW, Page(0)) else { panic!() };
    let _ = server.fetched(NOW, Unit(0), Source::PageCache);
    let _ = server.installed(&fetch);
    let Answer::Install(first) = server.fault(NOW, Page(2)) else { panic!() };
    let Answer::Install(second) = server.fault(NOW, Page(3)) else { panic!() };
    let _ = server.lost(&first);
    assert!(matches!(server.take_read(NOW, false), Take::Read(_)));
    assert!(server.failed(NOW, Unit(0), Why::Demand));
    let _ = server.lost(&second);
    server.check_schedule(0);
    let due = NOW + Rules::default().retry_min;
    assert_eq!(server.take_read(NOW, false), Take::At(due), "the pause counts for both");
    assert!(matches!(server.take_read(due, false), Take::Read(_)));
    assert_eq!(server.take_read(due, false), Take::Idle);
}

#[test]
fn a_block_stays_scheduled_until_its_last_page_is_settled() {
    let mut server = server(1, Rules { account_use: true, ..Rules::default() });
    let Answer::Fetch(fetch) = server.fault(NOW, Page(2)) else { panic!() };
    let _ = server.fetched(NOW, Unit(0), Source::PageCache);
    let _ = server.installed(&fetch);
    let Answer::Install(first) = server.fault(NOW, Page(0)) else { panic!() };
    let Answer::Install(second) = server.fault(NOW, Page(1)) else { panic!() };
    let _ = server.set_aside(NOW, &first);
    let _ = server.installed(&second);
    server.check_schedule(0);
    let due = NOW + Rules::default().retry_min;
    let Some(Work::Install(again)) = server.take_retry(due) else { panic!() };
    assert_eq!((again.wanted, again.pages), (Some(Page(0)), PageMask(0b01)));
    let _ = server.installed(&again);
    assert!(!server.has_failed());
}

#[test]
fn a_page_given_back_while_its_install_failed_is_answered_with_zeros() {
    let mut server = server(1, Rules::default());
    let Answer::Fetch(fetch) = server.fault(NOW, Page(0)) else { panic!() };
    let _ = server.fetched(NOW, Unit(0), Source::PageCache);
    let _ = server.removed(Page(0)..Page(1));
    assert!(server.set_aside(NOW, &fetch).workers);
    server.check_schedule(0);
    assert_eq!(server.take_urgent(), Some(Work::Late(Page(0))));
    assert_eq!(server.requested_in_vain(), None);
    assert!(server.has_failed(), "the other page of the block is missing");
}

#[test]
fn a_failed_unit_that_the_guest_gives_back_is_no_longer_scheduled() {
    let mut server = server(1, Rules::default());
    fail_on_demand(&mut server, Page(1));
    assert!(server.removed(Page(0)..Page(4)).finished);
    server.check_schedule(0);
    assert!(!server.has_failed());
    assert_eq!(server.take_urgent(), Some(Work::Late(Page(1))));
}
