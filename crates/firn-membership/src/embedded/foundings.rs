//! Detects servers of another bootstrap. Such a server has missed that its cluster was bootstrapped
//! anew, or was bootstrapped again alone after it had lost its file. It would vote without entries
//! that the others have.
//!
//! ```text
//!   bootstrap: a random number, in the file         a (17)                    b (42)
//!   each message names its sender and its receiver    |--- 17, to any server -->|  stores: a is 17
//!   each server stores the first number it receives   |<-- 42 ------------------|
//!   b is bootstrapped again, alone                    |--- 17, to 42 ---------->|  b (7): not 42!
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::store::{MET, Store};
use crate::Trouble;

/// The identity of one bootstrap of one server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Founding(u64);

impl Founding {
    /// A new random identity.
    pub fn new() -> Self {
        Self(RandomState::new().hash_one("founding"))
    }
}

/// The identities that a server knows. Clones share them.
#[derive(Clone, Debug)]
pub struct Foundings {
    own: Founding,
    store: Store,
    met: Arc<Mutex<BTreeMap<u64, Founding>>>,
    told: Arc<Mutex<BTreeSet<u64>>>,
}

impl Foundings {
    /// Reads the identities in the store.
    ///
    /// # Errors
    /// If it can't be read.
    pub fn open(store: Store, own: Founding) -> Result<Self, redb::Error> {
        let met = Arc::new(Mutex::new(store.meta(MET)?.unwrap_or_default()));
        Ok(Self { own, store, met, told: Arc::default() })
    }

    /// The identity of this server.
    pub fn own(&self) -> Founding {
        self.own
    }

    /// The identity of another server, if it is known.
    pub fn of(&self, server: u64) -> Option<Founding> {
        self.met().get(&server).copied()
    }

    /// Checks the identities in a message from a server; `to` is the identity that it expects of
    /// this one.
    ///
    /// # Errors
    /// If one of the two differs. Nothing of the message may be used.
    pub async fn meet(
        &self,
        (server, name): (u64, &str),
        from: Founding,
        to: Option<Founding>,
    ) -> Result<(), Trouble> {
        let known = self.of(server);
        if to.is_some_and(|to| to != self.own) || known.is_some_and(|known| known != from) {
            let text = format!(
                "the server {name} was founded another time than this one. Where the cluster was founded anew, remove the older state, and \
                 found that server again; where {name} has lost its state, it may not vote any more: give it another name"
            );
            if self.is_news(server) {
                tracing::error!("{text}");
            }
            return Err(Trouble::Refused(text));
        }
        match known {
            Some(_) => Ok(()),
            None => self.keep(server, from).await,
        }
    }

    async fn keep(&self, server: u64, from: Founding) -> Result<(), Trouble> {
        let mut all = self.met().clone();
        all.insert(server, from);
        let kept = self.store.set_meta(MET, all).await;
        kept.map_err(|error| Trouble::Unreachable(format!("keeping who is met: {error}")))?;
        // If another message has stored one meanwhile, the next message is checked against that.
        self.met().entry(server).or_insert(from);
        Ok(())
    }

    fn is_news(&self, server: u64) -> bool {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).insert(server)
    }

    fn met(&self) -> MutexGuard<'_, BTreeMap<u64, Founding>> {
        self.met.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(dir: &std::path::Path) -> Foundings {
        let (store, founded) = Store::open(dir, 1).unwrap();
        Foundings::open(store, founded.founding).unwrap()
    }

    #[tokio::test]
    async fn who_was_met_stays_the_one_that_was_met() {
        let dir = tempfile::tempdir().unwrap();
        Store::found(dir.path(), &BTreeMap::new()).unwrap();
        let (other, again) = (Founding::new(), Founding::new());
        let own = {
            let mine = opened(dir.path());
            mine.meet((2, "b"), other, None).await.unwrap();
            mine.meet((2, "b"), other, Some(mine.own())).await.unwrap();
            assert!(
                mine.meet((3, "c"), other, Some(again)).await.is_err(),
                "it takes us for another"
            );
            mine.own()
        };
        let mine = opened(dir.path());
        assert_eq!((mine.own(), mine.of(2), mine.of(3)), (own, Some(other), None));
        let why = mine.meet((2, "b"), again, None).await.unwrap_err().to_string();
        assert!(why.contains("server b") && why.contains("another time"), "{why}");
    }
}
