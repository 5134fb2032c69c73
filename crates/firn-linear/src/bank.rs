//! Model of a bank: accounts, and transfers between them.
//!
//! A state is the balance of each account, or that it is unknown. Accounts that no transfer
//! connects are independent (a part); in the view of a single account, money comes from elsewhere
//! and goes elsewhere.

use crate::history::Call;
use crate::model::{CallOf, Model};

/// A bank, by the initial balance of each account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bank(pub Vec<i64>);

/// A request of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Transfers an amount from one account to another, if the balance suffices. `None` is an
    /// account outside of the view, whose balance always suffices.
    Transfer {
        /// The account to debit.
        from: Option<usize>,
        /// The account to credit.
        to: Option<usize>,
        /// The amount.
        amount: i64,
    },
    /// The balance of an account.
    Balance(usize),
    /// The sum of all balances.
    Total,
}

/// An answer of the bank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// The transfer is done.
    Done,
    /// The balance is too low, and nothing was done.
    Refused,
    /// The balance or the sum.
    Holds(i64),
}

/// The known balances of the accounts.
type Holdings = Vec<Option<i64>>;

impl Operation {
    /// A transfer from one account to another.
    pub fn transfer(from: usize, to: usize, amount: i64) -> Self {
        Self::Transfer { from: Some(from), to: Some(to), amount }
    }
}

fn transferred(
    state: &Holdings,
    [from, to]: [Option<usize>; 2],
    amount: i64,
    answer: Option<&Answer>,
) -> Option<Holdings> {
    let held = match from {
        Some(account) => *state.get(account)?,
        None => None,
    };
    let is_enough = held.is_none_or(|held| held >= amount);
    match answer {
        Some(Answer::Refused) => {
            (from.is_some() && held.is_none_or(|held| held < amount)).then(|| state.clone())
        }
        Some(Answer::Done) | None if is_enough => {
            let mut state = state.clone();
            if let Some(account) = from {
                state[account] = held.map(|held| held - amount);
            }
            if let Some(account) = to {
                let held = state.get_mut(account)?;
                *held = held.map(|held| held + amount);
            }
            Some(state)
        }
        // A transfer without an answer that the balance does not permit was refused.
        None => Some(state.clone()),
        Some(_) => None,
    }
}

fn read(state: &Holdings, account: usize, answer: Option<&Answer>) -> Option<Holdings> {
    let held = *state.get(account)?;
    match answer {
        None => Some(state.clone()),
        Some(&Answer::Holds(told)) if held.is_none_or(|held| held == told) => {
            let mut state = state.clone();
            state[account] = Some(told);
            Some(state)
        }
        Some(_) => None,
    }
}

fn total(state: &Holdings) -> Option<i64> {
    state.iter().copied().sum()
}

impl Model for Bank {
    type Operation = Operation;
    type Answer = Answer;
    type State = Holdings;

    fn start(&self) -> Holdings {
        self.0.iter().copied().map(Some).collect()
    }

    fn unknown(&self) -> Holdings {
        vec![None; self.0.len()]
    }

    fn step(
        &self,
        state: &Holdings,
        operation: &Operation,
        answer: Option<&Answer>,
    ) -> Option<Holdings> {
        match *operation {
            Operation::Transfer { from, to, amount } => {
                transferred(state, [from, to], amount, answer)
            }
            Operation::Balance(account) => read(state, account, answer),
            Operation::Total => match (answer, total(state)) {
                (None, _) | (Some(Answer::Holds(_)), None) => Some(state.clone()),
                (Some(Answer::Holds(told)), Some(held)) if *told == held => Some(state.clone()),
                _ => None,
            },
        }
    }

    fn expected(&self, state: &Holdings, operation: &Operation) -> Option<Answer> {
        match *operation {
            Operation::Transfer { from, amount, .. } => {
                let held = (*state.get(from?)?)?;
                Some(if held >= amount { Answer::Done } else { Answer::Refused })
            }
            Operation::Balance(account) => (*state.get(account)?).map(Answer::Holds),
            Operation::Total => total(state).map(Answer::Holds),
        }
    }

    fn changes(&self, operation: &Operation) -> bool {
        matches!(operation, Operation::Transfer { .. })
    }

    /// Parts by accounts that transfers connect, if no client has requested the total.
    fn parts(&self, history: &[CallOf<Self>]) -> Vec<Vec<CallOf<Self>>> {
        if history.iter().any(|call| call.operation == Operation::Total) {
            return vec![history.to_vec()];
        }
        let mut groups: Vec<usize> = (0..self.0.len()).collect();
        for call in history {
            if let [Some(one), Some(other)] = accounts(&call.operation) {
                join(&mut groups, one, other);
            }
        }
        let group = |call: &CallOf<Self>| {
            let [one, other] = accounts(&call.operation);
            // An account that does not exist is a part by itself, and wrong.
            one.or(other).map(|account| *groups.get(account).unwrap_or(&account))
        };
        let mut kinds: Vec<Option<usize>> = history.iter().map(group).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let of = |kind| history.iter().filter(|call| group(call) == kind).cloned().collect();
        kinds.into_iter().map(of).collect()
    }

    /// One view for each account.
    fn views(&self, history: &[CallOf<Self>]) -> Vec<Vec<CallOf<Self>>> {
        let of = |account| history.iter().filter_map(|call| seen_by(account, call)).collect();
        (0..self.0.len()).map(of).collect()
    }
}

/// The accounts that an operation accesses.
fn accounts(operation: &Operation) -> [Option<usize>; 2] {
    match *operation {
        Operation::Transfer { from, to, .. } => [from, to],
        Operation::Balance(account) => [Some(account), None],
        Operation::Total => [None, None],
    }
}

/// Gives both groups the lower of their numbers.
fn join(groups: &mut [usize], one: usize, other: usize) {
    let (Some(&one), Some(&other)) = (groups.get(one), groups.get(other)) else { return };
    let (low, high) = (one.min(other), one.max(other));
    groups.iter_mut().filter(|group| **group == high).for_each(|group| *group = low);
}

/// The operation as seen by one account, if it affects the account.
fn seen_by(account: usize, call: &CallOf<Bank>) -> Option<CallOf<Bank>> {
    let its = |side: Option<usize>| side.filter(|&it| it == account);
    let operation = match call.operation {
        Operation::Transfer { from, to, amount } => {
            // A transfer that another account refused is nothing to this account.
            let is_refused = matches!(call.answer, Some((_, Answer::Refused)));
            let (from, to) = (its(from), its(to).filter(|_| !is_refused));
            (from.is_some() || to.is_some()).then_some(Operation::Transfer { from, to, amount })?
        }
        Operation::Balance(of) => Operation::Balance(its(Some(of))?),
        Operation::Total => return None,
    };
    Some(Call { operation, ..call.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(operation: Operation, answer: Answer) -> CallOf<Bank> {
        Call { client: 0, called: 0, operation, answer: Some((1, answer)) }
    }

    #[test]
    fn money_goes_where_it_is_sent() {
        let bank = Bank(vec![10, 0]);
        let transfer = Operation::transfer(0, 1, 7);
        let state = bank.step(&bank.start(), &transfer, Some(&Answer::Done)).unwrap();
        assert_eq!(state, [Some(3), Some(7)]);
        assert!(bank.step(&state, &transfer, Some(&Answer::Done)).is_none());
        assert_eq!(bank.step(&state, &transfer, Some(&Answer::Refused)), Some(state.clone()));
        assert_eq!(bank.step(&state, &transfer, None), Some(state.clone()));
        assert_eq!(bank.expected(&state, &Operation::Total), Some(Answer::Holds(10)));
        let own = Operation::transfer(1, 1, 7);
        assert_eq!(bank.step(&state, &own, Some(&Answer::Done)), Some(state.clone()));
        assert!(bank.step(&state, &Operation::Balance(1), Some(&Answer::Holds(8))).is_none());
    }

    #[test]
    fn of_an_unknown_account_the_first_look_tells() {
        let bank = Bank(vec![10, 0]);
        let look = |state: &Holdings, told| {
            bank.step(state, &Operation::Balance(1), Some(&Answer::Holds(told)))
        };
        let state = look(&bank.unknown(), 5).unwrap();
        assert_eq!(state, [None, Some(5)]);
        let transfer = Operation::transfer(0, 1, 7);
        let state = bank.step(&state, &transfer, Some(&Answer::Done)).unwrap();
        assert!(look(&state, 5).is_none() && look(&state, 12).is_some());
        assert_eq!(bank.expected(&state, &Operation::Total), None);
    }

    #[test]
    fn what_no_transfer_connects_is_apart() {
        let bank = Bank(vec![9; 5]);
        let history = [
            call(Operation::transfer(0, 1, 1), Answer::Done),
            call(Operation::transfer(3, 2, 1), Answer::Done),
            call(Operation::transfer(1, 2, 1), Answer::Done),
            call(Operation::Balance(4), Answer::Holds(9)),
        ];
        let parts = bank.parts(&history);
        assert_eq!(parts.iter().map(Vec::len).collect::<Vec<_>>(), [3, 1]);
        let total = [&history[..], &[call(Operation::Total, Answer::Holds(45))]].concat();
        assert_eq!(bank.parts(&total).len(), 1);
    }

    #[test]
    fn one_account_sees_its_own() {
        let bank = Bank(vec![9; 3]);
        let history = [
            call(Operation::transfer(0, 1, 1), Answer::Done),
            call(Operation::transfer(2, 1, 99), Answer::Refused),
            call(Operation::Balance(1), Answer::Holds(10)),
        ];
        let views = bank.views(&history);
        assert_eq!(views.iter().map(Vec::len).collect::<Vec<_>>(), [1, 2, 1]);
        let into = Operation::Transfer { from: None, to: Some(1), amount: 1 };
        assert_eq!(views[1][0].operation, into);
    }
}
