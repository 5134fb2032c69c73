//! Asking etcd: one server until it keeps somebody waiting, then the next one.
//!
//! A client that spreads what it asks over all servers would be kept waiting every third time by one that hangs, and takes every
//! connection all the same.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use etcd_client::{Client, Error, GetOptions, KeyValue, PutOptions, Txn, TxnResponse};
use tokio::time::timeout;

use super::Options;
use crate::Trouble;

/// How long a server may take for a change: an election takes it a second or two. And for what may be asked of another one as well.
const SURE_WAIT: Duration = Duration::from_secs(4);
const ASK_WAIT: Duration = Duration::from_millis(1500);

/// All servers.
#[derive(Clone)]
pub struct Servers {
    clients: Vec<Client>,
    /// Counts the turns from one to the next.
    turn: Arc<AtomicUsize>,
}

impl Servers {
    /// They need not be there yet.
    ///
    /// # Errors
    /// If the options can't be used.
    pub async fn connect(options: &Options) -> Result<Self, Trouble> {
        let mut clients = Vec::new();
        for endpoint in &options.endpoints {
            let connecting = Client::connect([endpoint], Some(options.connect()?));
            clients.push(within(ASK_WAIT, connecting).await.map_err(unchanged)?);
        }
        Ok(Self { clients, turn: Arc::default() })
    }

    /// A transaction that is made once, or not at all.
    pub async fn change(&self, txn: Txn) -> Result<TxnResponse, Trouble> {
        self.once(SURE_WAIT, |client| transact(client, txn.clone())).await
    }

    /// A transaction that does no harm if it was made without an answer.
    pub async fn txn(&self, txn: Txn) -> Result<TxnResponse, Trouble> {
        self.freely(|client| transact(client, txn.clone())).await
    }

    /// What is at a key, or below it.
    pub async fn get(
        &self,
        key: String,
        options: Option<GetOptions>,
    ) -> Result<Vec<KeyValue>, Trouble> {
        let asked = self.freely(|client| {
            let (key, options) = (key.clone(), options.clone());
            async move { client.kv_client().get(key, options).await }
        });
        Ok(asked.await?.take_kvs())
    }

    /// An etcd lease that is attached to nothing yet.
    pub async fn grant(&self, seconds: i64) -> Result<PutOptions, Trouble> {
        let grant =
            |client: Client| async move { client.lease_client().grant(seconds, None).await };
        Ok(PutOptions::new().with_lease(self.freely(grant).await?.id()))
    }

    async fn freely<T, F>(&self, ask: impl Fn(Client) -> F) -> Result<T, Trouble>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let mut last = Trouble::Refused("there is no etcd to ask".to_owned());
        for _ in &self.clients {
            match self.once(ASK_WAIT, &ask).await {
                Ok(answer) => return Ok(answer),
                Err(trouble) => last = unchanged(trouble),
            }
        }
        Err(last)
    }

    async fn once<T, F>(&self, wait: Duration, ask: impl Fn(Client) -> F) -> Result<T, Trouble>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let turn = self.turn.load(Ordering::Relaxed);
        let client = self.clients[turn % self.clients.len()].clone();
        let answer = within(wait, ask(client)).await;
        if answer.is_err() {
            // Somebody else may have turned to the next one already.
            let next = turn.wrapping_add(1);
            let _ = self.turn.compare_exchange(turn, next, Ordering::Relaxed, Ordering::Relaxed);
        }
        answer
    }
}

async fn transact(client: Client, txn: Txn) -> Result<TxnResponse, Error> {
    client.kv_client().txn(txn).await
}

async fn within<T>(
    wait: Duration,
    asked: impl Future<Output = Result<T, Error>>,
) -> Result<T, Trouble> {
    match timeout(wait, asked).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(trouble(&error)),
        Err(_) => {
            let text = format!("etcd does not answer within {} ms", wait.as_millis());
            Err(Trouble::Unknown(text))
        }
    }
}

/// Whether anything was done, only its own answers say.
fn trouble(error: &Error) -> Trouble {
    let text = format!("etcd: {error}");
    match error {
        Error::InvalidArgs(_) | Error::InvalidUri(_) => Trouble::Refused(text),
        _ => Trouble::Unknown(text),
    }
}

/// Of what does no harm if it was done.
fn unchanged(trouble: Trouble) -> Trouble {
    match trouble {
        Trouble::Unknown(text) => Trouble::Unreachable(text),
        other => other,
    }
}
