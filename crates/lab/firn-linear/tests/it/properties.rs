//! What is right is found right, what is wrong is found wrong, and of small histories all are.

use firn_linear::{
    BankAnswer, BankModel, BankOperation, ClientCall, Explanation, LinearizabilityVerdict,
    ModelCall, check_history,
};
use proptest::prelude::*;

use crate::histories::{HELD, Harm, History, Step, brute, done, steps};

const TRIES: u64 = 2_000_000;

fn bank(accounts: usize) -> BankModel {
    BankModel(vec![HELD; accounts])
}

fn is_right(bank: &BankModel, history: &[ModelCall<BankModel>]) -> bool {
    match check_history(bank, history, TRIES) {
        LinearizabilityVerdict::Linearizable => true,
        LinearizabilityVerdict::Wrong(_) => false,
        LinearizabilityVerdict::Undecided => panic!("{history:?}"),
    }
}

fn explained(
    bank: &BankModel,
    history: &[ModelCall<BankModel>],
) -> Explanation<BankOperation, BankAnswer> {
    match check_history(bank, history, TRIES) {
        LinearizabilityVerdict::Wrong(explanation) => *explanation,
        other => panic!("{other:?}: {history:?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn sequential_histories_are_linearizable(steps in steps(5, 8, 200)) {
        let bank = bank(5);
        prop_assert!(is_right(&bank, &done(&bank, &steps, Harm::None)));
    }

    /// Every one, right or wrong, is what all orders say it is.
    #[test]
    fn the_checker_agrees_with_trying_all_orders(
        steps in steps(2, 3, 6),
        harm in (0..3_usize, 0..6_usize),
        told in proptest::option::of((0..8_usize, 0..50_i64)),
    ) {
        let bank = bank(2);
        let harm = [Harm::None, Harm::Lost(harm.1), Harm::Doubled(harm.1)][harm.0];
        let mut history = done(&bank, &steps, harm);
        if let Some((number, wrong)) = told {
            if let Some((_, BankAnswer::Amount(held))) = history.get_mut(number).and_then(|call| call.answer.as_mut()) {
                *held = wrong;
            }
        }
        prop_assert_eq!(is_right(&bank, &history), brute(&bank, &history));
    }

    #[test]
    fn a_transfer_that_was_lost_or_doubled_is_found(steps in steps(5, 8, 80), which in any::<prop::sample::Index>(), is_lost in any::<bool>()) {
        let bank = bank(5);
        let all: Vec<_> = steps.into_iter().map(Step::with_answer).collect();
        let number = which.index(all.len());
        let harm = if is_lost { Harm::Lost(number) } else { Harm::Doubled(number) };
        let wrong = done(&bank, &all, harm);
        if balances(&wrong) == told(&bank, &wrong) {
            // Of a look, or of what was refused, nothing can be lost.
            return Ok(());
        }
        let explanation = explained(&bank, &wrong);
        prop_assert!(is_contradiction(&bank, &explanation), "{}", explanation);
    }

    /// A look that sees what was before an acknowledged change.
    #[test]
    fn a_stale_read_is_found(steps in steps(5, 8, 80), account in 0..5_usize) {
        let bank = bank(5);
        let mut history = done(&bank, &steps.into_iter().map(Step::with_answer).collect::<Vec<_>>(), Harm::None);
        let end = history.last().unwrap().answer.unwrap().0;
        let held = balances(&history)[account];
        let stale = held + 1;
        let operation = BankOperation::Balance(account);
        history.push(ClientCall { client: 98, called: end + 1, operation, answer: Some((end + 2, BankAnswer::Amount(stale))) });
        let explanation = explained(&bank, &history);
        prop_assert_eq!(explanation.answer.client, 98);
        prop_assert_eq!(&explanation.possible, &[BankAnswer::Amount(held)]);
        // One look says what it was, and nothing happened since.
        prop_assert_eq!(explanation.contradicted.len(), 1, "{}", explanation);
        prop_assert!(explanation.from_any_state && explanation.irrelevant.is_empty());
    }
}

/// What the last looks say.
fn balances(history: &History) -> Vec<i64> {
    let looks = history.iter().filter(|call| call.client == 99);
    looks
        .map(|call| match call.answer {
            Some((_, BankAnswer::Amount(held))) => held,
            _ => unreachable!(),
        })
        .collect()
}

/// What acknowledged transfers say.
fn told(bank: &BankModel, history: &History) -> Vec<i64> {
    let mut held = bank.0.clone();
    for call in history {
        if let (
            BankOperation::Transfer { from: Some(from), to: Some(to), amount },
            Some((_, BankAnswer::Done)),
        ) = (call.operation, call.answer)
        {
            held[from] -= amount;
            held[to] += amount;
        }
    }
    held
}

/// What an explanation says has no order, whichever of the others were done; from the beginning, or
/// whatever accounts held.
fn is_contradiction(bank: &BankModel, told: &Explanation<BankOperation, BankAnswer>) -> bool {
    let starts: Vec<BankModel> = match told.from_any_state {
        false => vec![bank.clone()],
        true => (-40..=160).map(|held| BankModel(vec![held; bank.0.len()])).collect(),
    };
    // Of many not all combinations are tried.
    let others = told.irrelevant.len().min(6);
    (0..1 << others).all(|done: u32| {
        let others = told.irrelevant.iter().enumerate();
        let others = others.filter(|(number, _)| *number >= 6 || done & 1 << number != 0);
        let history: History = others
            .map(|(_, call)| call)
            .chain(&told.contradicted)
            .chain(std::iter::once(&told.answer))
            .cloned()
            .collect();
        starts.iter().all(|bank| !is_right(bank, &history))
    })
}

fn call(
    client: u32,
    times: [u64; 2],
    operation: BankOperation,
    answer: BankAnswer,
) -> ModelCall<BankModel> {
    ClientCall { client, called: times[0], operation, answer: Some((times[1], answer)) }
}

#[test]
fn an_unanswered_operation_may_take_effect_late_or_never() {
    let bank = bank(2);
    let open = ClientCall {
        client: 0,
        called: 0,
        operation: BankOperation::transfer(0, 1, 5),
        answer: None,
    };
    let look = |client, times, held| {
        call(client, times, BankOperation::Balance(1), BankAnswer::Amount(held))
    };
    let history = |looks: &[i64]| {
        let looks = looks.iter().zip(1..).map(|(&held, at)| look(1, [10 * at, 10 * at + 5], held));
        std::iter::once(open.clone()).chain(looks).collect::<Vec<_>>()
    };
    for right in [&[20, 20][..], &[20, 25, 25], &[25], &[]] {
        assert!(is_right(&bank, &history(right)), "{right:?}");
    }
    for wrong in [&[25, 20][..], &[20, 30], &[25, 30]] {
        assert!(!is_right(&bank, &history(wrong)), "{wrong:?}");
    }
}

#[test]
fn an_explanation_is_short_and_names_the_conflict() {
    let bank = bank(3);
    let done =
        |from, to, times| call(0, times, BankOperation::transfer(from, to, 1), BankAnswer::Done);
    let look = |account, times, held| {
        call(1, times, BankOperation::Balance(account), BankAnswer::Amount(held))
    };
    let mut history: History = Vec::new();
    for round in 0..198 {
        let at = 100 * round;
        history.push(done(round as usize % 3, (round as usize + 1) % 3, [at, at + 50]));
        history.push(look(2, [at + 10, at + 20], if round % 3 == 2 { 21 } else { 20 }));
    }
    history.push(look(2, [20_000, 20_001], 20));
    history.push(done(0, 2, [20_010, 20_020]));
    history.push(look(2, [20_030, 20_040], 20));
    let explanation = explained(&bank, &history);
    let into = BankOperation::Transfer { from: None, to: Some(2), amount: 1 };
    assert_eq!(explanation.answer.called, 20_030);
    assert_eq!(explanation.possible, [BankAnswer::Amount(21)]);
    assert_eq!(
        explanation.contradicted.iter().map(|it| it.operation).collect::<Vec<_>>(),
        [BankOperation::Balance(2), into]
    );
    let text = explanation.to_string();
    assert!(
        text.starts_with(
            "client 1, 20030: Balance(2) -> 20040: Amount(20), but it could have been [Amount(21)]"
        ),
        "{text}"
    );
}

/// Eight clients that wait for nothing, and a few thousand operations: the search has to be quick,
/// or it doesn't end here.
#[test]
fn thousands_of_operations_of_eight_clients() {
    let bank = BankModel(vec![1000; 16]);
    let (mut held, mut history) = (bank.0.clone(), History::new());
    let mut state = 1_u64;
    let mut any = |below: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for number in 0..8000_u64 {
        let moment = 100 + 10 * number;
        let (from, to, amount) = (any(16) as usize, any(16) as usize, any(1500) as i64);
        let (operation, answer) = match any(3) {
            0 => (BankOperation::Balance(from), BankAnswer::Amount(held[from])),
            _ if held[from] < amount => {
                (BankOperation::transfer(from, to, amount), BankAnswer::Refused)
            }
            _ => {
                held[from] -= amount;
                held[to] += amount;
                (BankOperation::transfer(from, to, amount), BankAnswer::Done)
            }
        };
        // Client n has the operations n, n + 8, ...: each takes nearly until its next one.
        let (before, after) = (any(39), any(39));
        let answer = (number % 1000 != 7).then_some((moment + after, answer));
        let client = if answer.is_some() { number % 8 } else { 1000 + number } as u32;
        history.push(ClientCall { client, called: moment - before, operation, answer });
    }
    let all = |history: &History| check_history(&bank, history, 1_000_000);
    assert_eq!(all(&history), LinearizabilityVerdict::Linearizable);
    let end = 100 + 10 * 8000 + 100;
    history.push(call(99, [end, end + 1], BankOperation::Balance(3), BankAnswer::Amount(held[3])));
    assert_eq!(all(&history), LinearizabilityVerdict::Linearizable);
    // If no transfer is open, none can have changed it.
    history.retain(|call| call.answer.is_some());
    history.push(call(
        99,
        [end + 2, end + 3],
        BankOperation::Balance(3),
        BankAnswer::Amount(held[3] + 1),
    ));
    assert!(matches!(all(&history), LinearizabilityVerdict::Wrong(_)));
}
