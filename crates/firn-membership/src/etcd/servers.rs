//! Requests to etcd: to one server until it does not answer in time, then to the next one.
//!
//! A client that balances requests over all servers would wait on every third one if one server
//! hangs, for a server that hangs still accepts every connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use etcd_client::{Client, Error, GetOptions, KeyValue, PutOptions, Txn, TxnResponse};
use tokio::time::timeout;

use super::Options;
use crate::Trouble;

/// How long a server may take for a change: an election takes a second or two. And for a request
/// that may be sent to another server as well.
const SURE_WAIT: Duration = Duration::from_secs(4);
const ASK_WAIT: Duration = Duration::from_millis(1500);

/// The servers.
#[derive(Clone)]
pub struct Servers {
    clients: Vec<Client>,
    /// Counts the switches from one server to the next.
    turn: Arc<AtomicUsize>,
}

impl Servers {
    /// Prepares connections to the servers, which need not run yet.
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

    /// Sends a transaction that is made once, or not at all.
    pub async fn change(&self, txn: Txn) -> Result<TxnResponse, Trouble> {
        self.once(SURE_WAIT, |client| transact(client, txn.clone())).await
    }

    /// Sends a transaction that does no harm if it was made without an answer.
    pub async fn txn(&self, txn: Txn) -> Result<TxnResponse, Trouble> {
        self.freely(|client| transact(client, txn.clone())).await
    }

    /// Reads the pair of a key, or of all keys with a prefix.
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

    /// Grants an etcd lease that no key is attached to yet.
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
            // Another request may have switched to the next server already.
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

/// Converts an error. Only some errors show whether anything was changed.
fn trouble(error: &Error) -> Trouble {
    let text = format!("etcd: {error}");
    match error {
        Error::InvalidArgs(_) | Error::InvalidUri(_) => Trouble::Refused(text),
        _ => Trouble::Unknown(text),
    }
}

/// Converts the error of a request that does no harm if it was carried out.
fn unchanged(trouble: Trouble) -> Trouble {
    match trouble {
        Trouble::Unknown(text) => Trouble::Unreachable(text),
        other => other,
    }
}
