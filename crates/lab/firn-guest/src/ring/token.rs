//! Token record: the counters of one VM in the token ring, by which a test detects lost, repeated
//! and undone messages.
//!
//! ```text
//!   three VMs, a correct run:   VM 0 receives 3, 6, 9 ...   VM 1 receives 1, 4, 7 ...   VM 2 receives 2, 5, 8 ...
//!   a VM receives 6, then 6:    repeated: wrong, unless the second is the first of a new connection
//!   a VM receives 6, then 3:    another VM was set back to an older state: wrong
//!   a VM receives 6, then 12:   this VM was set back, or 9 was lost: wrong
//! ```
//!
//! The counters are in the memory of the VM alone, so a restore or a failover sets them back, too.

use serde::{Deserialize, Serialize};

/// The counters of one VM, as it reports them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenRecord {
    /// The highest number that the VM has received.
    pub last: u64,
    /// How often the VM has accepted a token and passed it on.
    pub passed: u64,
    /// The number of wrong tokens: not higher than the last one, or higher by another number than
    /// that of the VMs.
    pub wrong: u64,
    /// The number of connections to the next VM that broke.
    pub broken: u64,
}

impl TokenRecord {
    /// Records a received token, and returns whether to pass it on. `vms` is the number of VMs in
    /// the ring. `is_first`: the token is the first one of its connection. Such a token may repeat
    /// the last one: the previous VM sends it again if it got no reply.
    pub(super) fn record_token(&mut self, number: u64, vms: u64, is_first: bool) -> bool {
        if is_first && number == self.last {
            return false;
        }
        let is_new = number > self.last;
        // The first token has no predecessor to compare it with.
        let is_next = self.last == 0 || number == self.last + vms;
        self.wrong += u64::from(!is_new || !is_next);
        if is_new {
            self.last = number;
            self.passed += 1;
        }
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_returns_increased_by_the_number_of_vms() {
        let mut passed = TokenRecord::default();
        assert!(
            passed.record_token(2, 3, true)
                && passed.record_token(5, 3, false)
                && passed.record_token(8, 3, true)
        );
        // Sent again.
        assert!(!passed.record_token(8, 3, true));
        assert_eq!(passed, TokenRecord { last: 8, passed: 3, wrong: 0, broken: 0 });
        // Twice; lower than before; and one that another VM must have passed on twice.
        assert!(
            !passed.record_token(8, 3, false)
                && !passed.record_token(5, 3, true)
                && passed.record_token(14, 3, false)
        );
        assert_eq!(passed, TokenRecord { last: 14, passed: 4, wrong: 3, broken: 0 });
    }
}
