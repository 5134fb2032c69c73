//! A VM's record of the token.

use serde::{Deserialize, Serialize};

/// A VM's record of the token, as it reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenRecord {
    /// The highest number received.
    pub last: u64,
    /// How often the VM has passed the token on.
    pub passed: u64,
    /// The number of wrong tokens: one that the VM had received before, or one after others that it
    /// has not received.
    pub wrong: u64,
    /// The number of connections that broke.
    pub broken: u64,
}

impl TokenRecord {
    /// Records a received token. Returns whether to pass it on. The first of a connection may
    /// repeat the last one.
    pub(super) fn record_token(&mut self, number: u64, vms: u64, is_first: bool) -> bool {
        if is_first && number == self.last {
            return false;
        }
        let is_new = number > self.last;
        // Before the first token there is none to compare with.
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
    fn a_token_comes_back_higher_by_the_number_of_vms() {
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
