//! What is said between clients and VMs, and between VMs: a line of JSON each.
//!
//! ```text
//!   -> {"id":7,"do":"transfer","from":3,"to":4,"amount":10}
//!   <- {"id":7,"said":"done"}
//!   -> {"id":8,"do":"balance","account":4}
//!   <- {"id":8,"said":"holds","held":1010}
//! ```

use serde::{Deserialize, Serialize};

/// A question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Question {
    /// So much from one account to another.
    Transfer {
        /// Chosen by the client, never for another one.
        id: u64,
        /// From which account, of this VM.
        from: usize,
        /// To which.
        to: usize,
        /// How much.
        amount: i64,
    },
    /// Of the other VM: its account pays already.
    Deposit {
        /// The transfer's.
        id: u64,
        /// To which account, of this VM.
        to: usize,
        /// How much.
        amount: i64,
    },
    /// What an account holds.
    Balance {
        /// Comes back with the answer.
        id: u64,
        /// Which account, of this VM.
        account: usize,
    },
    /// Which transfers are done as far as this VM goes.
    Known {
        /// Comes back with the answer.
        id: u64,
    },
}

impl Question {
    /// What the answer carries.
    pub fn id(&self) -> u64 {
        match *self {
            Self::Transfer { id, .. }
            | Self::Deposit { id, .. }
            | Self::Balance { id, .. }
            | Self::Known { id } => id,
        }
    }
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// The question's.
    pub id: u64,
    /// What is said.
    #[serde(flatten)]
    pub said: Said,
}

/// What is said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "said", rename_all = "snake_case")]
pub enum Said {
    /// It is done.
    Done,
    /// The account holds too little.
    Refused,
    /// So much.
    Holds {
        /// How much.
        held: i64,
    },
    /// Not here.
    Elsewhere,
    /// These.
    Known(Known),
}

/// What a VM has done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known {
    /// The transfers that it took from accounts for, each time it did.
    pub taken: Vec<u64>,
    /// The transfers that it paid into accounts for, each time it did.
    pub paid: Vec<u64>,
    /// How many connections to other VMs broke.
    pub broken: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_its_documentation_shows() {
        let text = r#"{"id":7,"do":"transfer","from":3,"to":4,"amount":10}"#;
        let transfer = Question::Transfer { id: 7, from: 3, to: 4, amount: 10 };
        assert_eq!(serde_json::from_str::<Question>(text).unwrap(), transfer);
        let text = r#"{"id":8,"said":"holds","held":1010}"#;
        let holds = Reply { id: 8, said: Said::Holds { held: 1010 } };
        assert_eq!(serde_json::from_str::<Reply>(text).unwrap(), holds);
        let known = Said::Known(Known { taken: vec![7], paid: vec![], broken: 1 });
        let known = Reply { id: 9, said: known };
        let line = serde_json::to_string(&known).unwrap();
        assert_eq!(serde_json::from_str::<Reply>(&line).unwrap(), known);
    }
}
