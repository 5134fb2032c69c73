//! Model of a bank: accounts, and transfers between them.
//!
//! A state is the balance of each account, or that it is unknown. Accounts that no transfer
//! connects are independent (a part); in the view of a single account, money comes from elsewhere
//! and goes elsewhere.

use crate::history::ClientCall;
use crate::model::{ModelCall, SequentialModel};

/// A bank, by the initial balance of each account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BankModel(pub Vec<i64>);

/// A request of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BankOperation {
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
pub enum BankAnswer {
    /// The transfer is done.
    Done,
    /// The balance is too low, and nothing was done.
    Refused,
    /// The balance or the sum.
    Amount(i64),
}

/// The known balances of the accounts.
type KnownBalances = Vec<Option<i64>>;

impl BankOperation {
    /// A transfer from one account to another.
    pub fn transfer(from: usize, to: usize, amount: i64) -> Self {
        Self::Transfer { from: Some(from), to: Some(to), amount }
    }
}

fn apply_transfer(
    state: &KnownBalances,
    [from, to]: [Option<usize>; 2],
    amount: i64,
    answer: Option<&BankAnswer>,
) -> Option<KnownBalances> {
    let held = match from {
        Some(account) => *state.get(account)?,
        None => None,
    };
    let is_enough = held.is_none_or(|held| held >= amount);
    match answer {
        Some(BankAnswer::Refused) => {
            (from.is_some() && held.is_none_or(|held| held < amount)).then(|| state.clone())
        }
        Some(BankAnswer::Done) | None if is_enough => {
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

fn apply_read(
    state: &KnownBalances,
    account: usize,
    answer: Option<&BankAnswer>,
) -> Option<KnownBalances> {
    let held = *state.get(account)?;
    match answer {
        None => Some(state.clone()),
        Some(&BankAnswer::Amount(amount)) if held.is_none_or(|held| held == amount) => {
            let mut state = state.clone();
            state[account] = Some(amount);
            Some(state)
        }
        Some(_) => None,
    }
}

fn sum_balances(state: &KnownBalances) -> Option<i64> {
    state.iter().copied().sum()
}

impl SequentialModel for BankModel {
    type Operation = BankOperation;
    type Answer = BankAnswer;
    type State = KnownBalances;

    fn initial_state(&self) -> KnownBalances {
        self.0.iter().copied().map(Some).collect()
    }

    fn unknown_state(&self) -> KnownBalances {
        vec![None; self.0.len()]
    }

    fn apply_operation(
        &self,
        state: &KnownBalances,
        operation: &BankOperation,
        answer: Option<&BankAnswer>,
    ) -> Option<KnownBalances> {
        match *operation {
            BankOperation::Transfer { from, to, amount } => {
                apply_transfer(state, [from, to], amount, answer)
            }
            BankOperation::Balance(account) => apply_read(state, account, answer),
            BankOperation::Total => match (answer, sum_balances(state)) {
                (None, _) | (Some(BankAnswer::Amount(_)), None) => Some(state.clone()),
                (Some(BankAnswer::Amount(amount)), Some(held)) if *amount == held => {
                    Some(state.clone())
                }
                _ => None,
            },
        }
    }

    fn expected_answer(
        &self,
        state: &KnownBalances,
        operation: &BankOperation,
    ) -> Option<BankAnswer> {
        match *operation {
            BankOperation::Transfer { from, amount, .. } => {
                let held = (*state.get(from?)?)?;
                Some(if held >= amount { BankAnswer::Done } else { BankAnswer::Refused })
            }
            BankOperation::Balance(account) => (*state.get(account)?).map(BankAnswer::Amount),
            BankOperation::Total => sum_balances(state).map(BankAnswer::Amount),
        }
    }

    fn can_change_state(&self, operation: &BankOperation) -> bool {
        matches!(operation, BankOperation::Transfer { .. })
    }

    /// Parts by accounts that transfers connect, if no client has requested the total.
    fn independent_parts(&self, history: &[ModelCall<Self>]) -> Vec<Vec<ModelCall<Self>>> {
        if history.iter().any(|call| call.operation == BankOperation::Total) {
            return vec![history.to_vec()];
        }
        let mut groups: Vec<usize> = (0..self.0.len()).collect();
        for call in history {
            if let [Some(one), Some(other)] = accounts(&call.operation) {
                join_groups(&mut groups, one, other);
            }
        }
        let group = |call: &ModelCall<Self>| {
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
    fn simpler_views(&self, history: &[ModelCall<Self>]) -> Vec<Vec<ModelCall<Self>>> {
        let of =
            |account| history.iter().filter_map(|call| view_of_account(account, call)).collect();
        (0..self.0.len()).map(of).collect()
    }
}

/// The accounts that an operation accesses.
fn accounts(operation: &BankOperation) -> [Option<usize>; 2] {
    match *operation {
        BankOperation::Transfer { from, to, .. } => [from, to],
        BankOperation::Balance(account) => [Some(account), None],
        BankOperation::Total => [None, None],
    }
}

/// Gives both groups the lower of their numbers.
fn join_groups(groups: &mut [usize], one: usize, other: usize) {
    let (Some(&one), Some(&other)) = (groups.get(one), groups.get(other)) else { return };
    let (low, high) = (one.min(other), one.max(other));
    groups.iter_mut().filter(|group| **group == high).for_each(|group| *group = low);
}

/// The operation as seen by one account, if it affects the account.
fn view_of_account(account: usize, call: &ModelCall<BankModel>) -> Option<ModelCall<BankModel>> {
    let its = |side: Option<usize>| side.filter(|&it| it == account);
    let operation = match call.operation {
        BankOperation::Transfer { from, to, amount } => {
            // A transfer that another account refused is nothing to this account.
            let is_refused = matches!(call.answer, Some((_, BankAnswer::Refused)));
            let (from, to) = (its(from), its(to).filter(|_| !is_refused));
            (from.is_some() || to.is_some()).then_some(BankOperation::Transfer {
                from,
                to,
                amount,
            })?
        }
        BankOperation::Balance(of) => BankOperation::Balance(its(Some(of))?),
        BankOperation::Total => return None,
    };
    Some(ClientCall { operation, ..call.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(operation: BankOperation, answer: BankAnswer) -> ModelCall<BankModel> {
        ClientCall { client: 0, called: 0, operation, answer: Some((1, answer)) }
    }

    #[test]
    fn a_transfer_debits_one_account_and_credits_the_other() {
        let bank = BankModel(vec![10, 0]);
        let transfer = BankOperation::transfer(0, 1, 7);
        let state = bank
            .apply_operation(&bank.initial_state(), &transfer, Some(&BankAnswer::Done))
            .unwrap();
        assert_eq!(state, [Some(3), Some(7)]);
        assert!(bank.apply_operation(&state, &transfer, Some(&BankAnswer::Done)).is_none());
        assert_eq!(
            bank.apply_operation(&state, &transfer, Some(&BankAnswer::Refused)),
            Some(state.clone())
        );
        assert_eq!(bank.apply_operation(&state, &transfer, None), Some(state.clone()));
        assert_eq!(
            bank.expected_answer(&state, &BankOperation::Total),
            Some(BankAnswer::Amount(10))
        );
        let own = BankOperation::transfer(1, 1, 7);
        assert_eq!(
            bank.apply_operation(&state, &own, Some(&BankAnswer::Done)),
            Some(state.clone())
        );
        assert!(
            bank.apply_operation(&state, &BankOperation::Balance(1), Some(&BankAnswer::Amount(8)))
                .is_none()
        );
    }

    #[test]
    fn the_first_read_gives_an_unknown_balance() {
        let bank = BankModel(vec![10, 0]);
        let look = |state: &KnownBalances, amount| {
            bank.apply_operation(
                state,
                &BankOperation::Balance(1),
                Some(&BankAnswer::Amount(amount)),
            )
        };
        let state = look(&bank.unknown_state(), 5).unwrap();
        assert_eq!(state, [None, Some(5)]);
        let transfer = BankOperation::transfer(0, 1, 7);
        let state = bank.apply_operation(&state, &transfer, Some(&BankAnswer::Done)).unwrap();
        assert!(look(&state, 5).is_none() && look(&state, 12).is_some());
        assert_eq!(bank.expected_answer(&state, &BankOperation::Total), None);
    }

    #[test]
    fn unconnected_accounts_are_independent_parts() {
        let bank = BankModel(vec![9; 5]);
        let history = [
            call(BankOperation::transfer(0, 1, 1), BankAnswer::Done),
            call(BankOperation::transfer(3, 2, 1), BankAnswer::Done),
            call(BankOperation::transfer(1, 2, 1), BankAnswer::Done),
            call(BankOperation::Balance(4), BankAnswer::Amount(9)),
        ];
        let parts = bank.independent_parts(&history);
        assert_eq!(parts.iter().map(Vec::len).collect::<Vec<_>>(), [3, 1]);
        let total = [&history[..], &[call(BankOperation::Total, BankAnswer::Amount(45))]].concat();
        assert_eq!(bank.independent_parts(&total).len(), 1);
    }

    #[test]
    fn the_view_of_an_account_has_its_own_operations() {
        let bank = BankModel(vec![9; 3]);
        let history = [
            call(BankOperation::transfer(0, 1, 1), BankAnswer::Done),
            call(BankOperation::transfer(2, 1, 99), BankAnswer::Refused),
            call(BankOperation::Balance(1), BankAnswer::Amount(10)),
        ];
        let views = bank.simpler_views(&history);
        assert_eq!(views.iter().map(Vec::len).collect::<Vec<_>>(), [1, 2, 1]);
        let into = BankOperation::Transfer { from: None, to: Some(1), amount: 1 };
        assert_eq!(views[1][0].operation, into);
    }
}
