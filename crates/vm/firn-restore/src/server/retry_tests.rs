//! What failed stays in the retry schedule until it is done, case by case.

use std::time::Duration;

use firn_types::{Block, BlockSize, Page, RegionMap};

use super::*;

const NOW: Duration = Duration::from_secs(1);

/// Units of two memory blocks of two pages.
fn server(units: u32, rules: PageServerRules) -> PageServer<()> {
    let block_size = BlockSize::default();
    let ram = RegionMap::lay_out([("ram", 4096 * 4 * u64::from(units))]).unwrap();
    let mut plan = ReadPlan::new(2 * units);
    (0..units).for_each(|unit| {
        plan.push_unit([Block(2 * unit), Block(2 * unit + 1)]);
    });
    let settled = SettledPages::new(&ram, block_size);
    PageServer::new(block_size, plan, settled, rules, Duration::ZERO)
}

/// A vCPU waits for a page, and its unit can't be read.
fn fail_on_demand(server: &mut PageServer<()>, page: Page) {
    let FaultAnswer::TryPageCache(fetch) = server.answer_fault(NOW, page) else { panic!() };
    let _ = server.record_cache_miss(&fetch);
    assert!(matches!(server.take_read(NOW, false), ReadDecision::Read(_)));
    assert!(server.record_failed_read(NOW, fetch.unit, ReadReason::Demand));
    server.check_schedule(0);
}

#[test]
fn a_failed_unit_that_another_read_brings_is_installed() {
    let mut server = server(2, PageServerRules::default());
    fail_on_demand(&mut server, Page(0));
    assert!(
        server.record_arrival(NOW, ReadUnit(0), UnitSource::PageCache, ReadReason::Fill).workers
    );
    server.check_schedule(0);
    let Some(InstallWork::Install(install)) = server.take_urgent() else { panic!() };
    assert_eq!(install.wanted, Some(Page(0)));
    assert!(!server.has_failed());
}

#[test]
fn a_failed_unit_that_is_lost_once_more_is_read_by_one_reader() {
    let mut server = server(1, PageServerRules::default());
    let FaultAnswer::TryPageCache(fetch) = server.answer_fault(NOW, Page(0)) else { panic!() };
    let _ = server.record_cache_hit(ReadUnit(0), UnitSource::PageCache);
    let _ = server.record_install(&fetch);
    let FaultAnswer::Install(first) = server.answer_fault(NOW, Page(2)) else { panic!() };
    let FaultAnswer::Install(second) = server.answer_fault(NOW, Page(3)) else { panic!() };
    let _ = server.record_cache_loss(&first);
    assert!(matches!(server.take_read(NOW, false), ReadDecision::Read(_)));
    assert!(server.record_failed_read(NOW, ReadUnit(0), ReadReason::Demand));
    let _ = server.record_cache_loss(&second);
    server.check_schedule(0);
    let due = NOW + PageServerRules::default().retry_min;
    assert_eq!(server.take_read(NOW, false), ReadDecision::At(due), "the pause counts for both");
    assert!(matches!(server.take_read(due, false), ReadDecision::Read(_)));
    assert_eq!(server.take_read(due, false), ReadDecision::Idle);
}

#[test]
fn a_block_stays_scheduled_until_its_last_page_is_settled() {
    let mut server = server(1, PageServerRules { account_use: true, ..PageServerRules::default() });
    let FaultAnswer::TryPageCache(fetch) = server.answer_fault(NOW, Page(2)) else { panic!() };
    let _ = server.record_cache_hit(ReadUnit(0), UnitSource::PageCache);
    let _ = server.record_install(&fetch);
    let FaultAnswer::Install(first) = server.answer_fault(NOW, Page(0)) else { panic!() };
    let FaultAnswer::Install(second) = server.answer_fault(NOW, Page(1)) else { panic!() };
    let _ = server.set_aside(NOW, &first);
    let _ = server.record_install(&second);
    server.check_schedule(0);
    let due = NOW + PageServerRules::default().retry_min;
    let Some(InstallWork::Install(again)) = server.take_retry(due) else { panic!() };
    assert_eq!((again.wanted, again.pages), (Some(Page(0)), PageMask(0b01)));
    let _ = server.record_install(&again);
    assert!(!server.has_failed());
}

#[test]
fn a_page_given_back_while_its_install_failed_is_answered_with_zeros() {
    let mut server = server(1, PageServerRules::default());
    let FaultAnswer::TryPageCache(fetch) = server.answer_fault(NOW, Page(0)) else { panic!() };
    let _ = server.record_cache_hit(ReadUnit(0), UnitSource::PageCache);
    let _ = server.record_removal(Page(0)..Page(1));
    assert!(server.set_aside(NOW, &fetch).workers);
    server.check_schedule(0);
    assert_eq!(server.take_urgent(), Some(InstallWork::AlreadySettled(Page(0))));
    assert_eq!(server.failed_request(), None);
    assert!(server.has_failed(), "the other page of the block is missing");
}

#[test]
fn a_failed_unit_that_the_guest_gives_back_is_no_longer_scheduled() {
    let mut server = server(1, PageServerRules::default());
    fail_on_demand(&mut server, Page(1));
    assert!(server.record_removal(Page(0)..Page(4)).finished);
    server.check_schedule(0);
    assert!(!server.has_failed());
    assert_eq!(server.take_urgent(), Some(InstallWork::AlreadySettled(Page(1))));
}
