//! Page claims: the pages of this process that a session follows. Two sessions may not follow the
//! same page.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::span::PageSpan;

static CLAIMED_SPANS: Mutex<Vec<PageSpan>> = Mutex::new(Vec::new());

pub(crate) fn lock_claims() -> MutexGuard<'static, Vec<PageSpan>> {
    CLAIMED_SPANS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The pages that one session has claimed. Dropping this value releases them.
#[derive(Debug, Default)]
pub(crate) struct PageClaims(Vec<PageSpan>);

impl PageClaims {
    /// Claims the pages of a span that this session has not claimed yet, and returns them. `None`
    /// if another session has claimed any of them.
    pub(crate) fn claim_span(&mut self, span: PageSpan) -> Option<Vec<PageSpan>> {
        let new = span.without_spans(&self.0);
        let mut claimed = lock_claims();
        if new.iter().any(|new| claimed.iter().any(|taken| taken.overlaps(*new))) {
            return None;
        }
        claimed.extend(&new);
        self.0.extend(&new);
        Some(new)
    }

    /// Releases some of the claimed spans.
    pub(crate) fn release_spans(&mut self, spans: &[PageSpan]) {
        let mut claimed = lock_claims();
        claimed.retain(|span| !spans.contains(span));
        self.0.retain(|span| !spans.contains(span));
    }
}

impl PageClaims {
    /// Releases the pages of a span, which may be a part of claimed spans.
    pub(crate) fn release_pages(&mut self, span: PageSpan) {
        let mut claimed = lock_claims();
        span.remove_from(&mut claimed);
        span.remove_from(&mut self.0);
    }
}

impl Drop for PageClaims {
    fn drop(&mut self) {
        let all = std::mem::take(&mut self.0);
        self.release_spans(&all);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::span::PAGE;

    #[test]
    fn pages_belong_to_one_session_at_a_time() {
        // No memory is touched: these are only numbers.
        let pages = |first: usize, last: usize| PageSpan::covering_range(first * PAGE..last * PAGE);
        let (mut one, mut two) = (PageClaims::default(), PageClaims::default());
        assert_eq!(one.claim_span(pages(10, 20)), Some(vec![pages(10, 20)]));
        assert_eq!(one.claim_span(pages(15, 22)), Some(vec![pages(20, 22)]));
        assert_eq!(two.claim_span(pages(21, 23)), None);
        drop(one);
        assert_eq!(two.claim_span(pages(21, 23)), Some(vec![pages(21, 23)]));
    }
}
