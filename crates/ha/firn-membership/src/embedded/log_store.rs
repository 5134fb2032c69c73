//! The durable state of a server: the log, and its vote, in one file of redb.
//!
//! ```text
//!   members.redb
//!     log    index -> entry              raft's, consecutive; removed once it is in a snapshot
//!     meta   "founded"  -> the servers, as of the bootstrap, and a random number
//!            "met"      -> such numbers of the other servers
//!            "vote"     -> the newest term, and for whom
//!            "purged"   -> the last entry that was removed
//!            "snapshot" -> the state, and the last entry that is in it
//! ```
//!
//! Each write is a transaction, on disk when it is answered. The result of applying the log is in
//! memory, and made anew from the snapshot and the log.
//!
//! A server that has forgotten its state is worse than one that is gone: it could vote twice, or
//! elect a server that doesn't have the entries that it acknowledged. So the file is created once
//! ([`LogStore::create_new`]), and where it is missing, the server doesn't start.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::fs;
use std::io;
use std::ops::RangeBounds;
use std::path::Path;
use std::sync::Arc;

use openraft::storage::{LogFlushed, LogState, RaftLogStorage};
use openraft::{Entry, LogId, OptionalSend, RaftLogReader, StorageError, StorageIOError, Vote};
use redb::{Builder, Database, ReadableTable, TableDefinition, WriteTransaction};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::task::spawn_blocking;

use super::bootstrap_ids::BootstrapId;
use super::types::Types;
use crate::MembershipError;

const LOG: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("log");
const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");

/// The file's name.
const FILE: &str = "members.redb";

/// Pages of the file that are cached in memory, in bytes.
const CACHE_BYTES: usize = 4 << 20;

pub(super) const SNAPSHOT: &str = "snapshot";
pub(super) const KNOWN_SERVERS: &str = "met";
const BOOTSTRAP_RECORD_KEY: &str = "founded";
const VOTE: &str = "vote";
const PURGED: &str = "purged";

pub(super) type StorageResult<T> = Result<T, StorageError<u64>>;

/// The result of the bootstrap of a server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BootstrapRecord {
    /// The identity of that bootstrap.
    pub founding: BootstrapId,
    /// The servers.
    pub servers: BTreeMap<u64, String>,
}

/// The file of one server.
#[derive(Clone, Debug)]
pub struct LogStore {
    database: Arc<Database>,
    me: u64,
}

impl LogStore {
    /// Creates the file for a server of a new cluster.
    ///
    /// # Errors
    /// If it exists, or the system refuses; then it does not exist afterwards.
    pub fn create_new(
        directory: &Path,
        servers: &BTreeMap<u64, String>,
    ) -> Result<(), MembershipError> {
        let (path, new) = (directory.join(FILE), directory.join("members.new"));
        if path.exists() {
            return Err(MembershipError::Refused(format!(
                "{} is there already: it is founded once",
                path.display()
            )));
        }
        let failed = |error: &dyn std::fmt::Display| {
            MembershipError::Refused(format!("can't make {}: {error}", path.display()))
        };
        fs::create_dir_all(directory).map_err(|error| failed(&error))?;
        remove_if_present(&new).map_err(|error| failed(&error))?;
        let database = Builder::new()
            .set_cache_size(CACHE_BYTES)
            .create(&new)
            .map_err(|error| failed(&error))?;
        let write = || {
            let write = database.begin_write()?;
            write.open_table(LOG)?;
            let founded =
                BootstrapRecord { founding: BootstrapId::new(), servers: servers.clone() };
            put_meta(&write, BOOTSTRAP_RECORD_KEY, &founded)?;
            Ok::<_, redb::Error>(write.commit()?)
        };
        write().map_err(|error| failed(&error))?;
        drop(database);
        fs::rename(&new, &path)
            .and_then(|()| fs::File::open(directory)?.sync_all())
            .map_err(|error| failed(&error))
    }

    /// Opens a server's file.
    ///
    /// # Errors
    /// If it doesn't exist, or is damaged, or another process has opened it.
    pub fn open(directory: &Path, me: u64) -> Result<(Self, BootstrapRecord), MembershipError> {
        let path = directory.join(FILE);
        if !path.exists() {
            return Err(MembershipError::Refused(format!(
                "{} is not there. Where the cluster is new, found it; where the file was lost, this host may not vote any more: \
                 give it another name",
                path.display()
            )));
        }
        let opened = Builder::new().set_cache_size(CACHE_BYTES).open(&path);
        let failed = |error: &dyn std::fmt::Display| {
            MembershipError::Unreachable(format!("can't use {}: {error}", path.display()))
        };
        let database = Arc::new(opened.map_err(|error| failed(&error))?);
        let store = Self { database, me };
        let founded = store.read_meta(BOOTSTRAP_RECORD_KEY).map_err(|error| failed(&error))?;
        let founded = founded.ok_or_else(|| failed(&"it does not say who the servers are"))?;
        Ok((store, founded))
    }

    /// Reads a value of `meta`.
    pub(super) fn read_meta<T: DeserializeOwned>(
        &self,
        key: &str,
    ) -> Result<Option<T>, redb::Error> {
        let table = self.database.begin_read()?.open_table(META)?;
        table.get(key)?.map(|value| from_bytes(value.value())).transpose()
    }

    /// Writes a value of `meta`.
    pub(super) async fn set_meta(
        &self,
        key: &'static str,
        value: impl Serialize + Send + 'static,
    ) -> Result<(), redb::Error> {
        self.write_transaction(move |write| put_meta(write, key, &value)).await
    }

    /// Writes a transaction, which is on disk when this returns.
    async fn write_transaction(
        &self,
        change: impl FnOnce(&WriteTransaction) -> Result<(), redb::Error> + Send + 'static,
    ) -> Result<(), redb::Error> {
        let database = Arc::clone(&self.database);
        let done = spawn_blocking(move || {
            let write = database.begin_write()?;
            change(&write)?;
            Ok(write.commit()?)
        });
        done.await.map_err(|error| redb::Error::Io(io::Error::other(error)))?
    }
}

impl RaftLogReader<Types> for LogStore {
    async fn try_get_log_entries<R: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: R,
    ) -> StorageResult<Vec<Entry<Types>>> {
        let read = || {
            let table = self.database.begin_read()?.open_table(LOG)?;
            let entries = table.range(range)?.map(|pair| from_bytes(pair?.1.value()));
            entries.collect::<Result<Vec<_>, redb::Error>>()
        };
        read().map_err(|error| StorageIOError::read_logs(&error).into())
    }
}

impl RaftLogStorage<Types> for LogStore {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> StorageResult<LogState<Types>> {
        let read = || {
            let purged: Option<LogId<u64>> = self.read_meta(PURGED)?;
            let table = self.database.begin_read()?.open_table(LOG)?;
            let last = table
                .last()?
                .map(|(_, entry)| from_bytes::<Entry<Types>>(entry.value()))
                .transpose()?;
            let last_log_id = last.map(|entry| entry.log_id).or(purged);
            Ok::<_, redb::Error>(LogState { last_purged_log_id: purged, last_log_id })
        };
        read().map_err(|error| StorageIOError::read_logs(&error).into())
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote<u64>) -> StorageResult<()> {
        let saved = self.set_meta(VOTE, *vote).await;
        saved.map_err(|error| StorageIOError::write_vote(&error).into())
    }

    /// The vote of a server that led, and starts again, counts as a vote for itself, and no more.
    /// Otherwise raft would let it lead at once, in the same term, in which the first entry is all
    /// that it knows to be committed. It would read from a state that lacks the rest.
    async fn read_vote(&mut self) -> StorageResult<Option<Vote<u64>>> {
        let vote: Option<Vote<u64>> =
            self.read_meta(VOTE).map_err(|error| StorageIOError::read_vote(&error))?;
        let is_own = |vote: &Vote<u64>| vote.leader_id.node_id == self.me;
        Ok(vote
            .map(|vote| if is_own(&vote) { Vote::new(vote.leader_id.term, self.me) } else { vote }))
    }

    async fn append<I>(&mut self, entries: I, callback: LogFlushed<Types>) -> StorageResult<()>
    where
        I: IntoIterator<Item = Entry<Types>> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let entries: Vec<Entry<Types>> = entries.into_iter().collect();
        let written = self.write_transaction(move |write| {
            let mut log = write.open_table(LOG)?;
            for entry in &entries {
                log.insert(entry.log_id.index, to_bytes(entry)?.as_slice())?;
            }
            Ok(())
        });
        let written = written.await;
        callback.log_io_completed(
            written.as_ref().copied().map_err(|error| io::Error::other(error.to_string())),
        );
        written.map_err(|error| StorageIOError::write_logs(&error).into())
    }

    async fn truncate(&mut self, from: LogId<u64>) -> StorageResult<()> {
        let written = self.write_transaction(move |write| {
            write.open_table(LOG)?.retain_in(from.index.., |_, _| false)?;
            Ok(())
        });
        written.await.map_err(|error| StorageIOError::write_logs(&error).into())
    }

    async fn purge(&mut self, upto: LogId<u64>) -> StorageResult<()> {
        let written = self.write_transaction(move |write| {
            write.open_table(LOG)?.retain_in(..=upto.index, |_, _| false)?;
            put_meta(write, PURGED, &upto)
        });
        written.await.map_err(|error| StorageIOError::write_logs(&error).into())
    }
}

fn put_meta(
    write: &WriteTransaction,
    key: &str,
    value: &impl Serialize,
) -> Result<(), redb::Error> {
    write.open_table(META)?.insert(key, to_bytes(value)?.as_slice())?;
    Ok(())
}

fn to_bytes(value: &impl Serialize) -> Result<Vec<u8>, redb::Error> {
    postcard::to_stdvec(value).map_err(|error| redb::Error::Io(io::Error::other(error)))
}

fn from_bytes<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, redb::Error> {
    postcard::from_bytes(bytes).map_err(|error| redb::Error::Io(io::Error::other(error)))
}

fn remove_if_present(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
