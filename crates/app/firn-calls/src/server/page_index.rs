//! An index from physical pages to their users.

use std::collections::BTreeSet;

use firn_types::Page;

/// The users of physical pages, by number. A page may have several, and a user one page or none.
#[derive(Debug, Default)]
pub(super) struct PageIndex(BTreeSet<(Page, u64)>);

impl PageIndex {
    /// Records that a user has another page than before.
    pub(super) fn replace_page(&mut self, user: u64, before: Option<Page>, now: Option<Page>) {
        if let Some(before) = before {
            self.0.remove(&(before, user));
        }
        if let Some(now) = now {
            self.0.insert((now, user));
        }
    }

    /// The users of a page, in ascending order.
    pub(super) fn users_of(&self, page: Page) -> impl Iterator<Item = u64> + '_ {
        self.0.range((page, 0)..=(page, u64::MAX)).map(|(_, user)| *user)
    }

    /// The pages, in ascending order. A page with several users occurs several times.
    pub(super) fn pages(&self) -> impl Iterator<Item = Page> + '_ {
        self.0.iter().map(|(page, _)| *page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_several_users() {
        let mut index = PageIndex::default();
        index.replace_page(7, None, Some(Page(3)));
        index.replace_page(5, None, Some(Page(3)));
        index.replace_page(6, None, Some(Page(4)));
        assert_eq!(index.users_of(Page(3)).collect::<Vec<_>>(), [5, 7]);
        index.replace_page(5, Some(Page(3)), Some(Page(9)));
        assert_eq!(index.users_of(Page(3)).collect::<Vec<_>>(), [7]);
        assert_eq!(index.pages().collect::<Vec<_>>(), [3, 4, 9].map(Page));
        index.replace_page(7, Some(Page(3)), None);
        assert_eq!(index.users_of(Page(3)).count(), 0);
    }
}
