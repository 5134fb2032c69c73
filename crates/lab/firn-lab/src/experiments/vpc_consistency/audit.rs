//! The audit after a trial: the clients' observations are compared with the books of the VMs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread;

use anyhow::{Context as _, Result, anyhow, bail};
use firn_guest::bank::{AnswerBody, BankRequest, TransferLog};
use firn_linear::{BankAnswer, BankModel, BankOperation, LinearizabilityVerdict, check_history};
use serde_json::{Value, json};

use super::clients::{BankClient, COUNT, ClientObservations, ClientsState};
use crate::site::NetworkNamespace;

/// Steps of the checker, for each operation.
const STEPS_PER_OPERATION_MAX: u64 = 2_000;

/// The number of the auditor: the one after those of all clients.
const AUDITOR: u64 = COUNT;

/// The books of the VMs, and the balances of the accounts.
pub(super) struct BankBooks {
    known: Vec<TransferLog>,
    held: Vec<i64>,
}

impl BankBooks {
    /// Reads all of it. The balances are observed as clients observe them.
    pub(super) fn read_books(
        shared: &Arc<ClientsState>,
        outside: &NetworkNamespace,
    ) -> Result<(Self, ClientObservations)> {
        let (client, outside) = (BankClient::new(Arc::clone(shared), AUDITOR, 0), outside.clone());
        let reader = thread::spawn(move || outside.enter().and_then(|()| Self::ask_vms(client)));
        reader.join().map_err(|_| anyhow!("the auditor panicked"))?.context("reading the books")
    }

    fn ask_vms(mut client: BankClient) -> Result<(Self, ClientObservations)> {
        let (mut held, mut known) = (Vec::new(), Vec::new());
        for account in 0..client.shared.accounts {
            match client.perform_operation(BankOperation::Balance(account)) {
                Some(BankAnswer::Amount(holds)) => held.push(holds),
                other => bail!("account {account} holds {other:?}"),
            }
        }
        for vm in 0..client.shared.vms.len() {
            match client.ask_vm(vm, &BankRequest::Known { id: 0 }) {
                Some(AnswerBody::Known(knows)) => known.push(knows),
                other => bail!("VM {vm} knows {other:?}"),
            }
        }
        Ok((Self { known, held }, client.into_observations()))
    }
}

/// How often each number occurs.
fn count_ids<'a>(ids: impl Iterator<Item = &'a u64>) -> BTreeMap<u64, u64> {
    let mut counts = BTreeMap::new();
    ids.for_each(|&id| *counts.entry(id).or_default() += 1);
    counts
}

/// Counts all errors in the observations, with the reasons.
pub(super) fn compare_books(
    bank: &BankModel,
    seen: &ClientObservations,
    books: &BankBooks,
) -> Value {
    let taken = count_ids(books.known.iter().flat_map(|known| &known.taken));
    let paid = count_ids(books.known.iter().flat_map(|known| &known.paid));
    let is_lost = |id: &&u64| !taken.contains_key(id) || !paid.contains_key(id);
    let lost: Vec<_> = seen.acknowledged.iter().filter(is_lost).collect();
    let doubled: BTreeSet<_> =
        taken.iter().chain(&paid).filter(|(_, times)| **times > 1).map(|(id, _)| id).collect();
    let (sum, right) = (books.held.iter().sum::<i64>(), bank.0.iter().sum::<i64>());
    let mut why = Vec::new();
    why.extend(lost.first().map(|id| format!("transfer {id:#x} is acknowledged, and in no books")));
    why.extend(doubled.first().map(|id| format!("transfer {id:#x} was done twice")));
    if sum != right {
        why.push(format!("all accounts hold {sum} instead of {right}"));
    }
    let verdict =
        check_history(bank, &seen.history, STEPS_PER_OPERATION_MAX * seen.history.len() as u64);
    let (mut not_linearizable, mut undecided) = (0, 0);
    match &verdict {
        LinearizabilityVerdict::Linearizable => (),
        LinearizabilityVerdict::Wrong(explanation) => {
            not_linearizable = 1;
            why.push(explanation.to_string());
        }
        LinearizabilityVerdict::Undecided => undecided = 1,
    }
    let broken: u64 = books.known.iter().map(|known| known.broken).sum();
    json!({
        "operations": seen.history.len(), "transfers": seen.acknowledged.len(),
        "lost_transfers": lost.len(), "doubled_transfers": doubled.len(),
        "sum_wrong": u64::from(sum != right), "not_linearizable": not_linearizable,
        "undecided": undecided, "broken_connections": broken + seen.broken, "why": why,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_linear::ClientCall;

    fn seen(acknowledged: &[u64]) -> ClientObservations {
        let call = |(at, _): (u64, &u64)| ClientCall {
            client: 0,
            called: 10 * at,
            operation: BankOperation::transfer(0, 1, 5),
            answer: Some((10 * at + 5, BankAnswer::Done)),
        };
        let history = (1..).zip(acknowledged).map(call).collect();
        ClientObservations { history, acknowledged: acknowledged.to_vec(), broken: 0 }
    }

    fn look(seen: &mut ClientObservations, held: &[i64]) {
        for (account, &held) in held.iter().enumerate() {
            let called = 1000 + 10 * account as u64;
            let answer = Some((called + 1, BankAnswer::Amount(held)));
            let operation = BankOperation::Balance(account);
            seen.history.push(ClientCall { client: 9, called, operation, answer });
        }
    }

    #[test]
    fn lost_and_doubled_transfers_are_found() {
        let bank = BankModel(vec![100, 100]);
        let known = |taken: &[u64], paid: &[u64]| TransferLog {
            taken: taken.to_vec(),
            paid: paid.to_vec(),
            broken: 0,
        };
        let numbers = |books: BankBooks| {
            let mut seen = seen(&[1, 2]);
            look(&mut seen, &books.held);
            let facts = compare_books(&bank, &seen, &books);
            ["lost_transfers", "doubled_transfers", "sum_wrong", "not_linearizable"]
                .map(|key| facts[key].as_u64().unwrap())
        };
        let books = |known: [TransferLog; 2], held: [i64; 2]| BankBooks {
            known: known.into(),
            held: held.into(),
        };
        let right = [known(&[1, 2], &[]), known(&[], &[1, 2])];
        assert_eq!(numbers(books(right, [90, 110])), [0, 0, 0, 0]);
        let lost = [known(&[1], &[]), known(&[], &[1])];
        assert_eq!(numbers(books(lost, [95, 105])), [1, 0, 0, 1]);
        let torn = [known(&[1, 2], &[]), known(&[], &[1])];
        assert_eq!(numbers(books(torn, [90, 105])), [1, 0, 1, 1]);
        let doubled = [known(&[1, 2], &[]), known(&[], &[1, 2, 2])];
        assert_eq!(numbers(books(doubled, [90, 115])), [0, 1, 1, 1]);
    }
}
