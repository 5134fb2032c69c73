//! The health of a host. The agent's failure detector decides it; the states are:
//!
//! ```text
//!   alive ---> suspected ---> lost      by silence
//!     ^------------'-----------'        by an answer
//! ```

use serde::{Deserialize, Serialize};

/// The health of a host, as this agent judges it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostHealth {
    /// It answers.
    Alive,
    /// It has not answered for a while.
    Suspected,
    /// It has not answered for so long that the agent acts as if it were gone. It may answer again.
    Lost,
}

impl HostHealth {
    /// The state as one word.
    pub fn as_word(self) -> &'static str {
        match self {
            Self::Alive => "alive",
            Self::Suspected => "suspected",
            Self::Lost => "lost",
        }
    }
}
