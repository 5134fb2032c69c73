//! The messages between clients and VMs, and between VMs: a line of JSON each.
//!
//! ```text
//!   -> {"id":7,"do":"transfer","from":3,"to":4,"amount":10}
//!   <- {"id":7,"said":"done"}
//!   -> {"id":8,"do":"balance","account":4}
//!   <- {"id":8,"said":"holds","held":1010}
//! ```

use serde::{Deserialize, Serialize};

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum BankRequest {
    /// Transfers an amount from one account to another.
    Transfer {
        /// Chosen by the client, and not used for another transfer.
        id: u64,
        /// The payer's account, of this VM.
        from: usize,
        /// The payee's account.
        to: usize,
        /// The amount.
        amount: i64,
    },
    /// From another VM: books a deposit, whose payer's account is locked.
    Deposit {
        /// The id of the transfer.
        id: u64,
        /// The payee's account, of this VM.
        to: usize,
        /// The amount.
        amount: i64,
    },
    /// Requests the balance of an account.
    Balance {
        /// An id that the reply repeats.
        id: u64,
        /// The account, of this VM.
        account: usize,
    },
    /// Requests the transfers that this VM has done its part of.
    Known {
        /// An id that the reply repeats.
        id: u64,
    },
}

impl BankRequest {
    /// The id that the reply repeats.
    pub fn id(&self) -> u64 {
        match *self {
            Self::Transfer { id, .. }
            | Self::Deposit { id, .. }
            | Self::Balance { id, .. }
            | Self::Known { id } => id,
        }
    }
}

/// A reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BankReply {
    /// The id of the request.
    pub id: u64,
    /// The answer.
    #[serde(flatten)]
    pub body: AnswerBody,
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "said", rename_all = "snake_case")]
pub enum AnswerBody {
    /// The request is done.
    Done,
    /// The account holds too little money.
    Refused,
    /// The balance of the account, or the sum of all.
    #[serde(rename = "holds")]
    Amount {
        /// The amount.
        held: i64,
    },
    /// This VM does not have the account.
    Elsewhere,
    /// The transfers that this VM has done its part of.
    Known(TransferLog),
}

/// The transfers that a VM has done its part of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransferLog {
    /// The ids of transfers for which it withdrew money, one entry per withdrawal.
    pub taken: Vec<u64>,
    /// The ids of transfers for which it booked deposits, one entry per deposit.
    pub paid: Vec<u64>,
    /// The number of connections to other VMs that broke.
    pub broken: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_its_documentation_shows() {
        let text = r#"{"id":7,"do":"transfer","from":3,"to":4,"amount":10}"#;
        let transfer = BankRequest::Transfer { id: 7, from: 3, to: 4, amount: 10 };
        assert_eq!(serde_json::from_str::<BankRequest>(text).unwrap(), transfer);
        let text = r#"{"id":8,"said":"holds","held":1010}"#;
        let holds = BankReply { id: 8, body: AnswerBody::Amount { held: 1010 } };
        assert_eq!(serde_json::from_str::<BankReply>(text).unwrap(), holds);
        let known = AnswerBody::Known(TransferLog { taken: vec![7], paid: vec![], broken: 1 });
        let known = BankReply { id: 9, body: known };
        let line = serde_json::to_string(&known).unwrap();
        assert_eq!(serde_json::from_str::<BankReply>(&line).unwrap(), known);
    }
}
