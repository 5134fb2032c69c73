//! The predictor with guest memory that is written at any moment: between cuts, between copying
//! ahead and the cut, between a cut and its comparison, or after it. The backup must have the VM's
//! memory of each cut, byte for byte.

use std::collections::BTreeMap;

use firn_types::Page;
use proptest::prelude::*;

use super::*;

const PAGES: u32 = 8;

/// When a page that is copied ahead is protected.
#[derive(Clone, Copy, PartialEq)]
enum Protects {
    BeforeItsCopy,
    /// Wrong: a write in between is in no copy.
    AfterIt,
}

#[derive(Clone, Debug)]
enum Step {
    /// The guest writes a value, perhaps the one that the page has already.
    Write(u32, u8),
    /// Pages are protected and copied ahead of the cut, and meanwhile the guest writes to one.
    Ahead(u32, u8),
    Cut,
    /// The copies of the last cut are compared with the backup's.
    Compare,
}

/// A VM whose writes are found only by write protection, and the memory of its backup.
struct Host {
    memory: Vec<u8>,
    protected: Vec<bool>,
    backup: Vec<u8>,
    predictor: DirtyPagePredictor,
    /// The pages copied ahead of the next cut.
    ahead: BTreeMap<Page, u8>,
    last: Option<(CutPlan, BTreeMap<Page, u8>)>,
    protects: Protects,
}

impl Host {
    fn new(predicts: bool, protects: Protects) -> Self {
        Self::with(DirtyPagePredictor::new(predicts), protects)
    }

    /// The number of pages per epoch that makes the guest busy.
    fn busy(busy: Range<usize>) -> Self {
        Self::with(DirtyPagePredictor::new(true).with_busy_counts(busy), Protects::BeforeItsCopy)
    }

    fn with(predictor: DirtyPagePredictor, protects: Protects) -> Self {
        let (memory, protected) = (vec![0; PAGES as usize], vec![true; PAGES as usize]);
        let ahead = BTreeMap::new();
        Self { backup: memory.clone(), memory, protected, predictor, ahead, last: None, protects }
    }

    /// Takes a step; false if the backup's memory differs from the VM's.
    fn step(&mut self, step: &Step) -> bool {
        match *step {
            Step::Write(page, value) => self.write(page, value),
            Step::Ahead(page, value) => self.copy_ahead(page, value),
            Step::Cut => return self.cut(),
            Step::Compare => self.compare(),
        }
        true
    }

    fn write(&mut self, page: u32, value: u8) {
        self.memory[page as usize] = value;
        self.protected[page as usize] = false;
    }

    fn copy_ahead(&mut self, page: u32, value: u8) {
        let pages = self.predictor.plan_ahead(&self.writable());
        if self.protects == Protects::AfterIt {
            self.copy_to_ahead(&pages);
            self.write(page, value);
        }
        pages.iter().for_each(|page| self.protected[page.index()] = true);
        if self.protects == Protects::BeforeItsCopy {
            self.write(page, value);
            self.copy_to_ahead(&pages);
        }
    }

    fn copy_to_ahead(&mut self, pages: &PageSet) {
        self.ahead.extend(pages.iter().map(|page| (page, self.memory[page.index()])));
    }

    fn writable(&self) -> PageSet {
        (0..PAGES).filter(|&page| !self.protected[page as usize]).map(Page).collect()
    }

    fn cut(&mut self) -> bool {
        self.compare();
        let plan = self.predictor.plan_cut(&self.writable());
        let mut copies = std::mem::take(&mut self.ahead);
        copies.retain(|&page, _| plan.ahead.contains(page));
        copies.extend(plan.copy.iter().map(|page| (page, self.memory[page.index()])));
        assert_eq!(copies.len(), plan.page_count());
        plan.protect.iter().for_each(|page| self.protected[page.index()] = true);
        self.last = Some((plan, copies));
        let sent = self.sent();
        (0..PAGES).map(Page).all(|page| {
            let held = sent.get(&page).copied().unwrap_or(self.backup[page.index()]);
            held == self.memory[page.index()]
        })
    }

    /// The pages of the last cut that are sent to the backup: those whose copy differs, and those
    /// known to be written.
    fn sent(&self) -> BTreeMap<Page, u8> {
        let Some((plan, copies)) = &self.last else { return BTreeMap::new() };
        let differs = |page: Page, value: u8| {
            plan.written.contains(page) || self.backup[page.index()] != value
        };
        let copies = copies.iter().filter(|&(&page, &value)| differs(page, value));
        copies.map(|(&page, &value)| (page, value)).collect()
    }

    fn compare(&mut self) {
        let sent = self.sent();
        let Some((plan, copies)) = self.last.take() else { return };
        let same: PageSet =
            copies.keys().copied().filter(|page| !sent.contains_key(page)).collect();
        self.predictor.record_unchanged(&plan, &same);
        sent.into_iter().for_each(|(page, value)| self.backup[page.index()] = value);
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..PAGES, 0..3_u8).prop_map(|(page, value)| Step::Write(page, value)),
        2 => (0..PAGES, 0..3_u8).prop_map(|(page, value)| Step::Ahead(page, value)),
        2 => Just(Step::Cut),
        1 => Just(Step::Compare),
    ];
    prop::collection::vec(step, 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_written_page_is_ever_missed(
        steps in steps(),
        predicts: bool,
        busy in (0_usize..4, 0_usize..9),
    ) {
        let predictor = DirtyPagePredictor::new(predicts).with_busy_counts(busy.0..busy.1);
        let mut host = Host::with(predictor, Protects::BeforeItsCopy);
        for (at, step) in steps.iter().enumerate() {
            prop_assert!(host.step(step), "step {at} of {steps:?}");
        }
    }
}

#[test]
fn protecting_a_page_after_it_was_copied_would_lose_a_write() {
    let steps = [Step::Write(0, 1), Step::Ahead(0, 2), Step::Cut];
    let right = |protects| {
        let mut host = Host::new(true, protects);
        steps.iter().all(|step| host.step(step))
    };
    assert!(right(Protects::BeforeItsCopy));
    assert!(!right(Protects::AfterIt), "the test would not notice a lost write");
}

/// Writes a page before and after it is copied ahead, so that it becomes hot.
fn heated(page: u32) -> Host {
    let mut host = Host::new(true, Protects::BeforeItsCopy);
    for step in [Step::Write(page, 1), Step::Ahead(page, 2), Step::Cut, Step::Compare] {
        assert!(host.step(&step));
    }
    host
}

#[test]
fn a_page_written_up_to_each_cut_costs_a_fault_in_four() {
    let mut host = heated(3);
    for value in 3..=10 {
        assert!(!host.protected[3]);
        for step in [Step::Ahead(3, value), Step::Cut, Step::Compare] {
            assert!(host.step(&step));
        }
    }
    let PredictionCounts { faulted, predicted, unchanged } = host.predictor.counts();
    assert_eq!((faulted, predicted, unchanged), (3, 6, 0));
}

#[test]
fn a_page_written_only_early_in_each_epoch_is_hot_for_four() {
    let mut host = heated(3);
    let mut copied_in_pause = 0;
    for value in 3..=10 {
        for step in [Step::Write(3, value), Step::Ahead(4, value), Step::Cut] {
            assert!(host.step(&step));
        }
        let (plan, _) = host.last.as_ref().unwrap();
        copied_in_pause += u32::from(plan.copy.contains(Page(3)));
    }
    assert!(copied_in_pause < TRIALS && !host.predictor.hot_pages().contains(Page(3)));
}

#[test]
fn pages_not_written_late_are_not_copied_in_the_pause() {
    let mut host = Host::new(true, Protects::BeforeItsCopy);
    for step in [Step::Write(3, 1), Step::Ahead(4, 1), Step::Cut] {
        assert!(host.step(&step));
    }
    let (plan, _) = host.last.as_ref().unwrap();
    let pages = |set: &PageSet| set.iter().collect::<Vec<_>>();
    assert_eq!((pages(&plan.ahead), pages(&plan.copy)), (vec![Page(3)], vec![Page(4)]));
    assert!(host.protected[3] && host.protected[4] && host.predictor.hot_pages().is_empty());
}

#[test]
fn a_page_no_longer_written_is_protected_again() {
    let mut host = heated(3);
    for step in [Step::Cut, Step::Compare, Step::Ahead(4, 1)] {
        assert!(!host.protected[3]);
        assert!(host.step(&step));
    }
    assert!(host.step(&Step::Cut));
    assert!(host.protected[3] && host.predictor.hot_pages().is_empty());
}

#[test]
fn without_prediction_nothing_stays_writable() {
    let mut host = Host::new(false, Protects::BeforeItsCopy);
    for step in [Step::Write(3, 1), Step::Ahead(3, 2), Step::Cut] {
        assert!(host.step(&step));
    }
    assert!(host.protected[3] && host.predictor.hot_pages().is_empty());
}

fn take(host: &mut Host, steps: &[Step]) {
    steps.iter().for_each(|step| assert!(host.step(step)));
}

/// An epoch in which the first pages are written before the others are copied ahead.
fn epoch(pages: u32, value: u8) -> Vec<Step> {
    let written = (0..pages).map(|page| Step::Write(page, value));
    written.chain([Step::Ahead(0, value), Step::Cut, Step::Compare]).collect()
}

#[test]
fn pages_that_a_busy_guest_rewrites_cause_no_fault() {
    let mut host = Host::busy(4..7);
    (1..=6).for_each(|value| take(&mut host, &epoch(5, value)));
    let PredictionCounts { faulted, predicted, unchanged } = host.predictor.counts();
    // One is hot from the first epoch on, the others from the second.
    assert_eq!((faulted, predicted, unchanged), (5 + 4, 1 + 4 * 5, 0));
    assert!(host.protected[5] && !host.protected[4] && !host.predictor.is_copying_ahead());
}

#[test]
fn pages_that_a_busy_guest_leaves_are_protected_again() {
    let mut host = Host::busy(4..7);
    (1..=3).for_each(|value| take(&mut host, &epoch(5, value)));
    let patience = IDLE_EPOCHS_MAX as u8;
    for value in 4..4 + patience {
        assert!(!host.protected[4] && !host.predictor.is_copying_ahead());
        take(&mut host, &epoch(2, value));
    }
    take(&mut host, &epoch(2, 4 + patience));
    assert!(host.predictor.is_copying_ahead());
    assert!(host.protected[2..].iter().all(|&it| it));
}

#[test]
fn pages_written_in_each_round_of_a_loop_cause_no_fault() {
    let mut host = Host::busy(4..7);
    (1..=3).for_each(|value| take(&mut host, &epoch(5, value)));
    let faulted = host.predictor.counts().faulted;
    for round in 2..6 {
        for value in 0..IDLE_EPOCHS_MAX as u8 {
            let pages = if value == 3 { 5 } else { 1 };
            take(&mut host, &epoch(pages, round * 10 + value));
        }
    }
    assert_eq!(host.predictor.counts().faulted, faulted);
}

#[test]
fn a_guest_that_writes_too_much_to_be_copied_in_a_pause_is_not_busy() {
    let mut host = Host::busy(2..4);
    (1..=3).for_each(|value| take(&mut host, &epoch(3, value)));
    assert!(!host.predictor.is_copying_ahead());
    (4..=5).for_each(|value| take(&mut host, &epoch(5, value)));
    assert!(host.predictor.is_copying_ahead());
}

#[test]
fn a_guest_that_goes_through_its_memory_is_seldom_copied_in_pauses() {
    let mut predictor = DirtyPagePredictor::new(true).with_busy_counts(100..8000);
    let (mut writable, mut copied) = (PageSet::new(), Vec::new());
    for epoch in 0..200 {
        let new: PageSet = (epoch * 100..(epoch + 1) * 100).map(Page).collect();
        writable.extend_from(&new);
        writable.subtract(&predictor.plan_ahead(&writable));
        let plan = predictor.plan_cut(&writable);
        writable.subtract(&plan.protect);
        copied.push(plan.copy.len());
        let mut same = plan.copy.clone();
        same.subtract(&new);
        predictor.record_unchanged(&plan, &same);
    }
    assert!(copied.iter().all(|&pages| pages <= 600), "{copied:?}");
    assert!(copied.iter().sum::<usize>() < 200 * 50, "{copied:?}");
}
