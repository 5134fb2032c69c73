//! The accounts of a VM: a pure core, called by the thread that holds its lock.
//!
//! ```text
//!   transfer   known already                      -> its answer
//!              its account is locked, or it is in progress -> wait
//!              too little money                   -> refused
//!              both accounts are in this VM       -> done
//!              else: locked, in progress          -> deposit at the other VM; after that: done
//! ```

use std::collections::{BTreeMap, HashMap, HashSet};

use super::messages::{AnswerBody, TransferLog};

/// The next step for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RequestStep {
    Answer(AnswerBody),
    /// Wait until an account changes.
    Wait,
    /// Send the deposit to the payee's VM, then call [`AccountBooks::complete_transfer`].
    Deposit,
}

#[derive(Debug)]
struct BankAccount {
    held: i64,
    is_locked: bool,
}

#[derive(Debug, Default)]
pub(super) struct AccountBooks {
    accounts: BTreeMap<usize, BankAccount>,
    answers: HashMap<u64, AnswerBody>,
    under_way: HashSet<u64>,
    deposits: HashSet<u64>,
    pub(super) transfer_log: TransferLog,
}

impl AccountBooks {
    pub(super) fn new(accounts: impl Iterator<Item = usize>, held: i64) -> Self {
        let account = |number| (number, BankAccount { held, is_locked: false });
        Self { accounts: accounts.map(account).collect(), ..Self::default() }
    }

    pub(super) fn begin_transfer(
        &mut self,
        id: u64,
        from: usize,
        to: usize,
        amount: i64,
    ) -> RequestStep {
        if let Some(answer) = self.answers.get(&id) {
            return RequestStep::Answer(answer.clone());
        }
        let is_under_way = self.under_way.contains(&id);
        let is_here = self.accounts.contains_key(&to);
        let Some(payer) = self.accounts.get_mut(&from) else {
            return RequestStep::Answer(AnswerBody::Elsewhere);
        };
        if is_under_way || payer.is_locked {
            return RequestStep::Wait;
        }
        if payer.held < amount {
            return RequestStep::Answer(self.record_answer(id, AnswerBody::Refused));
        }
        if !is_here {
            payer.is_locked = true;
            self.under_way.insert(id);
            return RequestStep::Deposit;
        }
        self.book_deposit(id, to, amount);
        RequestStep::Answer(self.withdraw_money(id, from, amount))
    }

    /// Completes a transfer after the other VM has booked the deposit.
    pub(super) fn complete_transfer(&mut self, id: u64, from: usize, amount: i64) -> AnswerBody {
        if let Some(payer) = self.accounts.get_mut(&from) {
            payer.is_locked = false;
        }
        self.under_way.remove(&id);
        self.withdraw_money(id, from, amount)
    }

    fn withdraw_money(&mut self, id: u64, from: usize, amount: i64) -> AnswerBody {
        if let Some(payer) = self.accounts.get_mut(&from) {
            payer.held -= amount;
        }
        self.transfer_log.taken.push(id);
        self.record_answer(id, AnswerBody::Done)
    }

    fn record_answer(&mut self, id: u64, answer: AnswerBody) -> AnswerBody {
        self.answers.insert(id, answer.clone());
        answer
    }

    pub(super) fn book_deposit(&mut self, id: u64, to: usize, amount: i64) -> AnswerBody {
        let Some(payee) = self.accounts.get_mut(&to) else { return AnswerBody::Elsewhere };
        if self.deposits.insert(id) {
            payee.held += amount;
            self.transfer_log.paid.push(id);
        }
        AnswerBody::Done
    }

    pub(super) fn check_balance(&self, account: usize) -> RequestStep {
        match self.accounts.get(&account) {
            None => RequestStep::Answer(AnswerBody::Elsewhere),
            Some(account) if account.is_locked => RequestStep::Wait,
            Some(account) => RequestStep::Answer(AnswerBody::Amount { held: account.held }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holds(held: i64) -> RequestStep {
        RequestStep::Answer(AnswerBody::Amount { held })
    }

    fn books() -> [AccountBooks; 2] {
        [0, 1].map(|vm| AccountBooks::new((0..4).filter(move |account| account % 2 == vm), 100))
    }

    #[test]
    fn money_within_a_vm_goes_at_once_and_once() {
        let [mut a, _] = books();
        for _ in 0..2 {
            assert_eq!(a.begin_transfer(1, 0, 2, 30), RequestStep::Answer(AnswerBody::Done));
            assert_eq!((a.check_balance(0), a.check_balance(2)), (holds(70), holds(130)));
        }
        assert_eq!(a.begin_transfer(2, 0, 2, 71), RequestStep::Answer(AnswerBody::Refused));
        a.begin_transfer(3, 2, 0, 100);
        // The transfer was refused, whatever the account's balance is now.
        assert_eq!(a.begin_transfer(2, 0, 2, 71), RequestStep::Answer(AnswerBody::Refused));
        assert_eq!(a.begin_transfer(4, 1, 0, 1), RequestStep::Answer(AnswerBody::Elsewhere));
        assert_eq!(a.begin_transfer(5, 2, 2, 30), RequestStep::Answer(AnswerBody::Done));
        assert_eq!(a.check_balance(2), holds(30));
    }

    #[test]
    fn an_account_is_locked_during_a_transfer_to_another_vm() {
        let [mut a, mut b] = books();
        assert_eq!(a.begin_transfer(1, 0, 1, 30), RequestStep::Deposit);
        assert_eq!(a.begin_transfer(1, 0, 1, 30), RequestStep::Wait);
        assert_eq!(
            (a.begin_transfer(2, 0, 2, 80), a.check_balance(0)),
            (RequestStep::Wait, RequestStep::Wait)
        );
        // A deposit to the locked account is booked all the same, also from the account that it
        // pays.
        assert_eq!(b.begin_transfer(3, 1, 0, 5), RequestStep::Deposit);
        assert_eq!(a.book_deposit(3, 0, 5), AnswerBody::Done);
        for _ in 0..2 {
            assert_eq!(b.book_deposit(1, 1, 30), AnswerBody::Done);
        }
        assert_eq!(a.complete_transfer(1, 0, 30), AnswerBody::Done);
        assert_eq!(b.complete_transfer(3, 1, 5), AnswerBody::Done);
        assert_eq!((a.check_balance(0), b.check_balance(1)), (holds(75), holds(125)));
        assert_eq!(a.begin_transfer(2, 0, 2, 80), RequestStep::Answer(AnswerBody::Refused));
        let known = TransferLog { taken: vec![1], paid: vec![3], broken: 0 };
        assert_eq!(a.transfer_log, known);
    }
}
