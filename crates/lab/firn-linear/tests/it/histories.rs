//! Histories that are known to be right, and what is done to them that makes them wrong.

use firn_linear::{BankModel, BankOperation, ClientCall, ModelCall, SequentialModel as _};
use proptest::prelude::*;

pub type History = Vec<ModelCall<BankModel>>;

/// What each account holds in the beginning.
pub const HELD: i64 = 20;

/// An operation to be done, and how long before and after that moment its client asks and hears.
#[derive(Clone, Debug)]
pub struct Step {
    client: u32,
    operation: BankOperation,
    before: u64,
    after: u64,
    is_answered: bool,
}

impl Step {
    pub fn with_answer(self) -> Self {
        Self { is_answered: true, ..self }
    }
}

/// So many steps of a bank of so many accounts.
pub fn steps(accounts: usize, clients: u32, count: usize) -> impl Strategy<Value = Vec<Step>> {
    let transfer = (0..accounts, 0..accounts, 1..30_i64)
        .prop_map(|(from, to, amount)| BankOperation::transfer(from, to, amount));
    let operation = prop_oneof![
        6 => transfer,
        3 => (0..accounts).prop_map(BankOperation::Balance),
        1 => Just(BankOperation::Total),
    ];
    let step = (0..clients, operation, 0..60_u64, 0..60_u64, 0..12_u8).prop_map(
        |(client, operation, before, after, answered)| {
            let is_answered = answered > 0;
            Step { client, operation, before, after, is_answered }
        },
    );
    proptest::collection::vec(step, 1..=count)
}

/// What is done with one of the steps that it should not be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Harm {
    None,
    /// The transfer of this step is answered, and not done.
    Lost(usize),
    /// It is done twice.
    Doubled(usize),
}

/// Does one step after another, each ten later than the one before: so its client hears of it after
/// that, and asked before.
pub fn done(bank: &BankModel, steps: &[Step], harm: Harm) -> History {
    let (mut state, mut history) = (bank.initial_state(), History::new());
    // A client that got no answer asks by another name from then on, for it doesn't know whether
    // the operation is over.
    let mut free = std::collections::BTreeMap::new();
    for (number, step) in steps.iter().enumerate() {
        let moment = 100 + 10 * number as u64;
        let (name, since) = free.get(&step.client).copied().unwrap_or((step.client, 0));
        let called = (moment - step.before).max(since);
        if called > moment {
            continue;
        }
        let answer = bank.expected_answer(&state, &step.operation).unwrap();
        let times = match harm {
            Harm::Lost(it) if it == number => 0,
            Harm::Doubled(it) if it == number => 2,
            _ => 1,
        };
        for _ in 0..times {
            state = bank.apply_operation(&state, &step.operation, None).unwrap();
        }
        let answered = moment + step.after;
        let is_harmed = !matches!(harm, Harm::None) && times != 1;
        let answer = (step.is_answered || is_harmed).then_some((answered, answer));
        let next = match answer {
            Some(_) => (name, answered + 1),
            None => (name + 100, answered + 1),
        };
        free.insert(step.client, next);
        history.push(ClientCall { client: name, called, operation: step.operation, answer });
    }
    // At the end, after everything else, a client reads all accounts, one after another.
    let mut now = 100 + 10 * steps.len() as u64 + 100;
    for account in 0..bank.0.len() {
        let operation = BankOperation::Balance(account);
        let answer = bank.expected_answer(&state, &operation).map(|answer| (now + 1, answer));
        history.push(ClientCall { client: 99, called: now, operation, answer });
        now += 2;
    }
    history
}

/// Tries all orders.
pub fn brute(bank: &BankModel, history: &[ModelCall<BankModel>]) -> bool {
    fn left(
        bank: &BankModel,
        history: &[ModelCall<BankModel>],
        state: Vec<Option<i64>>,
        used: u32,
    ) -> bool {
        let is_left = |number: &usize| used & (1 << number) == 0;
        let open: Vec<usize> = (0..history.len()).filter(is_left).collect();
        // The first answer among those left: who was asked later comes later.
        let first = open.iter().filter_map(|&it| history[it].answer.map(|(at, _)| at)).min();
        let Some(first) = first else { return true };
        let may = |&&it: &&usize| history[it].called <= first;
        open.iter().filter(may).any(|&it| {
            let answer = history[it].answer.map(|(_, answer)| answer);
            let next = bank.apply_operation(&state, &history[it].operation, answer.as_ref());
            next.is_some_and(|next| left(bank, history, next, used | 1 << it))
        })
    }
    left(bank, history, bank.initial_state(), 0)
}
