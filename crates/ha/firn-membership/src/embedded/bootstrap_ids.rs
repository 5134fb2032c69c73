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

use super::log_store::{KNOWN_SERVERS, LogStore};
use crate::MembershipError;

/// The identity of one bootstrap of one server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BootstrapId(u64);

impl BootstrapId {
    /// A new random identity.
    pub fn new() -> Self {
        Self(RandomState::new().hash_one("founding"))
    }
}

/// The identities that a server knows. Clones share them.
#[derive(Clone, Debug)]
pub struct BootstrapIds {
    own: BootstrapId,
    store: LogStore,
    known: Arc<Mutex<BTreeMap<u64, BootstrapId>>>,
    reported: Arc<Mutex<BTreeSet<u64>>>,
}

impl BootstrapIds {
    /// Reads the identities in the store.
    ///
    /// # Errors
    /// If it can't be read.
    pub fn open(store: LogStore, own: BootstrapId) -> Result<Self, redb::Error> {
        let met = Arc::new(Mutex::new(store.read_meta(KNOWN_SERVERS)?.unwrap_or_default()));
        Ok(Self { own, store, known: met, reported: Arc::default() })
    }

    /// The identity of this server.
    pub fn own_id(&self) -> BootstrapId {
        self.own
    }

    /// The identity of another server, if it is known.
    pub fn id_of(&self, server: u64) -> Option<BootstrapId> {
        self.lock_known().get(&server).copied()
    }

    /// Checks the identities in a message from a server; `to` is the identity that it expects of
    /// this one.
    ///
    /// # Errors
    /// If one of the two differs. Nothing of the message may be used.
    pub async fn check_identities(
        &self,
        (server, name): (u64, &str),
        from: BootstrapId,
        to: Option<BootstrapId>,
    ) -> Result<(), MembershipError> {
        let known = self.id_of(server);
        if to.is_some_and(|to| to != self.own) || known.is_some_and(|known| known != from) {
            let text = format!(
                "the server {name} was founded another time than this one. Where the cluster was founded anew, remove the older state, and \
                 found that server again; where {name} has lost its state, it may not vote any more: give it another name"
            );
            if self.is_first_report(server) {
                tracing::error!("{text}");
            }
            return Err(MembershipError::Refused(text));
        }
        match known {
            Some(_) => Ok(()),
            None => self.store_identity(server, from).await,
        }
    }

    async fn store_identity(&self, server: u64, from: BootstrapId) -> Result<(), MembershipError> {
        let mut all = self.lock_known().clone();
        all.insert(server, from);
        let kept = self.store.set_meta(KNOWN_SERVERS, all).await;
        kept.map_err(|error| MembershipError::Unreachable(format!("keeping who is met: {error}")))?;
        // If another message has stored one meanwhile, the next message is checked against that.
        self.lock_known().entry(server).or_insert(from);
        Ok(())
    }

    fn is_first_report(&self, server: u64) -> bool {
        self.reported.lock().unwrap_or_else(PoisonError::into_inner).insert(server)
    }

    fn lock_known(&self) -> MutexGuard<'_, BTreeMap<u64, BootstrapId>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(dir: &std::path::Path) -> BootstrapIds {
        let (store, founded) = LogStore::open(dir, 1).unwrap();
        BootstrapIds::open(store, founded.founding).unwrap()
    }

    #[tokio::test]
    async fn who_was_met_stays_the_one_that_was_met() {
        let dir = tempfile::tempdir().unwrap();
        LogStore::create_new(dir.path(), &BTreeMap::new()).unwrap();
        let (other, again) = (BootstrapId::new(), BootstrapId::new());
        let own = {
            let mine = opened(dir.path());
            mine.check_identities((2, "b"), other, None).await.unwrap();
            mine.check_identities((2, "b"), other, Some(mine.own_id())).await.unwrap();
            assert!(
                mine.check_identities((3, "c"), other, Some(again)).await.is_err(),
                "it takes us for another"
            );
            mine.own_id()
        };
        let mine = opened(dir.path());
        assert_eq!((mine.own_id(), mine.id_of(2), mine.id_of(3)), (own, Some(other), None));
        let why = mine.check_identities((2, "b"), again, None).await.unwrap_err().to_string();
        assert!(why.contains("server b") && why.contains("another time"), "{why}");
    }
}
