//! Page claims: the pages of this process that a session follows. Two sessions may not follow the
//! same page.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::span::Span;

static CLAIMED: Mutex<Vec<Span>> = Mutex::new(Vec::new());

pub(crate) fn lock() -> MutexGuard<'static, Vec<Span>> {
    CLAIMED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The pages that one session has claimed. Dropping this value releases them.
#[derive(Debug, Default)]
pub(crate) struct Claims(Vec<Span>);

impl Claims {
    /// Claims the pages of a span that this session has not claimed yet, and returns them. `None`
    /// if another session has claimed any of them.
    pub(crate) fn claim(&mut self, span: Span) -> Option<Vec<Span>> {
        let new = span.without(&self.0);
        let mut claimed = lock();
        if new.iter().any(|new| claimed.iter().any(|taken| taken.overlaps(*new))) {
            return None;
        }
        claimed.extend(&new);
        self.0.extend(&new);
        Some(new)
    }

    /// Releases some of the claimed spans.
    pub(crate) fn release(&mut self, spans: &[Span]) {
        let mut claimed = lock();
        claimed.retain(|span| !spans.contains(span));
        self.0.retain(|span| !spans.contains(span));
    }
}

impl Drop for Claims {
    fn drop(&mut self) {
        let all = std::mem::take(&mut self.0);
        self.release(&all);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::span::PAGE;

    #[test]
    fn pages_belong_to_one_session_at_a_time() {
        // No memory is touched: these are only numbers.
        let pages = |first: usize, last: usize| Span::covering(first * PAGE..last * PAGE);
        let (mut one, mut two) = (Claims::default(), Claims::default());
        assert_eq!(one.claim(pages(10, 20)), Some(vec![pages(10, 20)]));
        assert_eq!(one.claim(pages(15, 22)), Some(vec![pages(20, 22)]));
        assert_eq!(two.claim(pages(21, 23)), None);
        drop(one);
        assert_eq!(two.claim(pages(21, 23)), Some(vec![pages(21, 23)]));
    }
}
