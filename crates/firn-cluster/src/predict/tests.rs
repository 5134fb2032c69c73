//! The predictor against guest memory that is written at any moment: between cuts, between a cut and its comparison, or
//! after it. The backup must hold what the VM held at each cut, byte for byte.

use std::collections::BTreeMap;

use firn_types::Page;
use proptest::prelude::*;

use super::*;

const PAGES: u32 = 8;

/// When a page that was found unchanged is protected.
#[derive(Clone, Copy, PartialEq)]
enum Protects {
    InThePause,
    /// Wrong: as soon as it is known, while the VM runs.
    AtOnce,
}

#[derive(Clone, Debug)]
enum Step {
    /// The guest writes a value, perhaps the one that is there.
    Write(u32, u8),
    Cut,
    /// The copies of the last cut are compared with the backup's.
    Compare,
}

/// A VM whose writes are seen only by write protection, and the memory its backup has.
struct Host {
    memory: Vec<u8>,
    protected: Vec<bool>,
    backup: Vec<u8>,
    predictor: Predictor,
    last: Option<(CutPlan, BTreeMap<Page, u8>)>,
    protects: Protects,
}

impl Host {
    fn new(predicts: bool, protects: Protects) -> Self {
        let (memory, protected) = (vec![0; PAGES as usize], vec![true; PAGES as usize]);
        let predictor = Predictor::new(predicts);
        Self { backup: memory.clone(), memory, protected, predictor, last: None, protects }
    }

    /// Takes a step; false if the backup came out different from the VM.
    fn step(&mut self, step: &Step) -> bool {
        match *step {
            Step::Write(page, value) => {
                self.memory[page as usize] = value;
                self.protected[page as usize] = false;
                true
            }
            Step::Cut => self.cut(),
            Step::Compare => {
                self.compare();
                true
            }
        }
    }

    fn cut(&mut self) -> bool {
        self.compare();
        let writable = (0..PAGES).filter(|&page| !self.protected[page as usize]);
        let plan = self.predictor.cut(&writable.map(Page).collect());
        let copies = plan.copy.iter().map(|page| (page, self.memory[page.index()])).collect();
        plan.protect.iter().for_each(|page| self.protected[page.index()] = true);
        self.last = Some((plan, copies));
        let sent = self.sent();
        (0..PAGES).map(Page).all(|page| {
            let held = sent.get(&page).copied().unwrap_or(self.backup[page.index()]);
            held == self.memory[page.index()]
        })
    }

    /// What of the last cut goes to the backup: pages whose copy differs, and those known to be written.
    fn sent(&self) -> BTreeMap<Page, u8> {
        let Some((plan, copies)) = &self.last else { return BTreeMap::new() };
        let differs = |page: Page, value: u8| {
            plan.written.contains(page) || self.backup[page.index()] != value
        };
        copies
            .iter()
            .filter(|&(&page, &value)| differs(page, value))
            .map(|(&p, &v)| (p, v))
            .collect()
    }

    fn compare(&mut self) {
        let sent = self.sent();
        let Some((plan, copies)) = self.last.take() else { return };
        let same: PageSet =
            copies.keys().copied().filter(|page| !sent.contains_key(page)).collect();
        self.predictor.unchanged(&plan, &same);
        sent.into_iter().for_each(|(page, value)| self.backup[page.index()] = value);
        if self.protects == Protects::AtOnce {
            same.iter().for_each(|page| self.protected[page.index()] = true);
            same.iter().for_each(|page| self.predictor.writable.remove(page));
        }
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..PAGES, 0..3_u8).prop_map(|(page, value)| Step::Write(page, value)),
        2 => Just(Step::Cut),
        1 => Just(Step::Compare),
    ];
    prop::collection::vec(step, 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_written_page_is_ever_missed(steps in steps(), predicts: bool) {
        let mut host = Host::new(predicts, Protects::InThePause);
        for (at, step) in steps.iter().enumerate() {
            prop_assert!(host.step(step), "step {at} of {steps:?}");
        }
    }
}

#[test]
fn protecting_an_unchanged_page_while_the_vm_runs_would_lose_a_write() {
    let steps = [
        Step::Write(0, 1), // found by the scan of the first cut; a candidate from there
        Step::Cut,
        Step::Compare,
        Step::Cut,         // not written since: the copy is the same
        Step::Write(0, 2), // after the cut, before that is known: nothing tells
        Step::Compare,
        Step::Cut,
    ];
    let right = |protects| {
        let mut host = Host::new(true, protects);
        steps.iter().all(|step| host.step(step))
    };
    assert!(right(Protects::InThePause));
    assert!(!right(Protects::AtOnce), "the test would not notice a lost write");
}

#[test]
fn a_page_written_in_every_epoch_faults_once() {
    let mut host = Host::new(true, Protects::InThePause);
    for value in 1..=5 {
        host.step(&Step::Write(3, value));
        host.step(&Step::Cut);
        host.step(&Step::Compare);
    }
    let Counts { faulted, predicted, unchanged } = host.predictor.counts();
    assert_eq!((faulted, predicted, unchanged), (1, 4, 0));
}

#[test]
fn a_page_no_longer_written_is_protected_again() {
    let mut host = Host::new(true, Protects::InThePause);
    host.step(&Step::Write(3, 1));
    for _ in 0..3 {
        assert!(!host.protected[3]);
        host.step(&Step::Cut);
        host.step(&Step::Compare);
    }
    assert!(host.protected[3] && host.predictor.candidates().is_empty());
}

#[test]
fn without_prediction_nothing_stays_writable() {
    let mut host = Host::new(false, Protects::InThePause);
    host.step(&Step::Write(3, 1));
    host.step(&Step::Cut);
    assert!(host.protected[3] && host.predictor.candidates().is_empty());
}
