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

use super::words::{Known, Said};

/// The next step for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Say(Said),
    /// Wait until an account changes.
    Wait,
    /// Send the deposit to the payee's VM, then call [`AccountBooks::complete_transfer`].
    Deposit,
}

#[derive(Debug)]
struct Account {
    held: i64,
    is_locked: bool,
}

#[derive(Debug, Default)]
pub(super) struct Books {
    accounts: BTreeMap<usize, Account>,
    answers: HashMap<u64, Said>,
    under_way: HashSet<u64>,
    deposits: HashSet<u64>,
    pub(super) known: Known,
}

impl Books {
    pub(super) fn new(accounts: impl Iterator<Item = usize>, held: i64) -> Self {
        let account = |number| (number, Account { held, is_locked: false });
        Self { accounts: accounts.map(account).collect(), ..Self::default() }
    }

    pub(super) fn transfer(&mut self, id: u64, from: usize, to: usize, amount: i64) -> Next {
        if let Some(said) = self.answers.get(&id) {
            return Next::Say(said.clone());
        }
        let is_under_way = self.under_way.contains(&id);
        let is_here = self.accounts.contains_key(&to);
        let Some(payer) = self.accounts.get_mut(&from) else { return Next::Say(Said::Elsewhere) };
        if is_under_way || payer.is_locked {
            return Next::Wait;
        }
        if payer.held < amount {
            return Next::Say(self.answer(id, Said::Refused));
        }
        if !is_here {
            payer.is_locked = true;
            self.under_way.insert(id);
            return Next::Deposit;
        }
        self.deposit(id, to, amount);
        Next::Say(self.take(id, from, amount))
    }

    /// Completes a transfer after the other VM has booked the deposit.
    pub(super) fn is_deposited(&mut self, id: u64, from: usize, amount: i64) -> Said {
        if let Some(payer) = self.accounts.get_mut(&from) {
            payer.is_locked = false;
        }
        self.under_way.remove(&id);
        self.take(id, from, amount)
    }

    fn take(&mut self, id: u64, from: usize, amount: i64) -> Said {
        if let Some(payer) = self.accounts.get_mut(&from) {
            payer.held -= amount;
        }
        self.known.taken.push(id);
        self.answer(id, Said::Done)
    }

    fn answer(&mut self, id: u64, said: Said) -> Said {
        self.answers.insert(id, said.clone());
        said
    }

    pub(super) fn deposit(&mut self, id: u64, to: usize, amount: i64) -> Said {
        let Some(payee) = self.accounts.get_mut(&to) else { return Said::Elsewhere };
        if self.deposits.insert(id) {
            payee.held += amount;
            self.known.paid.push(id);
        }
        Said::Done
    }

    pub(super) fn balance(&self, account: usize) -> Next {
        match self.accounts.get(&account) {
            None => Next::Say(Said::Elsewhere),
            Some(account) if account.is_locked => Next::Wait,
            Some(account) => Next::Say(Said::Holds { held: account.held }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holds(held: i64) -> Next {
        Next::Say(Said::Holds { held })
    }

    fn books() -> [Books; 2] {
        [0, 1].map(|vm| Books::new((0..4).filter(move |account| account % 2 == vm), 100))
    }

    #[test]
    fn money_within_a_vm_goes_at_once_and_once() {
        let [mut a, _] = books();
        for _ in 0..2 {
            assert_eq!(a.transfer(1, 0, 2, 30), Next::Say(Said::Done));
            assert_eq!((a.balance(0), a.balance(2)), (holds(70), holds(130)));
        }
        assert_eq!(a.transfer(2, 0, 2, 71), Next::Say(Said::Refused));
        a.transfer(3, 2, 0, 100);
        // The transfer was refused, whatever the account's balance is now.
        assert_eq!(a.transfer(2, 0, 2, 71), Next::Say(Said::Refused));
        assert_eq!(a.transfer(4, 1, 0, 1), Next::Say(Said::Elsewhere));
        assert_eq!(a.transfer(5, 2, 2, 30), Next::Say(Said::Done));
        assert_eq!(a.balance(2), holds(30));
    }

    #[test]
    fn who_pays_to_another_vm_is_locked_meanwhile() {
        let [mut a, mut b] = books();
        assert_eq!(a.transfer(1, 0, 1, 30), Next::Deposit);
        assert_eq!(a.transfer(1, 0, 1, 30), Next::Wait);
        assert_eq!((a.transfer(2, 0, 2, 80), a.balance(0)), (Next::Wait, Next::Wait));
        // A deposit to the locked account is booked all the same, also from the account that it
        // pays.
        assert_eq!(b.transfer(3, 1, 0, 5), Next::Deposit);
        assert_eq!(a.deposit(3, 0, 5), Said::Done);
        for _ in 0..2 {
            assert_eq!(b.deposit(1, 1, 30), Said::Done);
        }
        assert_eq!(a.is_deposited(1, 0, 30), Said::Done);
        assert_eq!(b.is_deposited(3, 1, 5), Said::Done);
        assert_eq!((a.balance(0), b.balance(1)), (holds(75), holds(125)));
        assert_eq!(a.transfer(2, 0, 2, 80), Next::Say(Said::Refused));
        let known = Known { taken: vec![1], paid: vec![3], broken: 0 };
        assert_eq!(a.known, known);
    }
}
