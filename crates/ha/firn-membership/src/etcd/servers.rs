//! Requests to etcd: to one server until it does not answer in time, then to the next one.
//!
//! A client that balances requests over all servers would wait on every third one if one server
//! hangs, for a server that hangs still accepts every connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use etcd_client::{Client, Error, GetOptions, KeyValue, PutOptions, Txn, TxnResponse};
use tokio::time::timeout;

use super::EtcdOptions;
use crate::MembershipError;

/// How long a server may take for a change: an election takes a second or two. And for a request
/// that may be sent to another server as well.
const SINGLE_SERVER_WAIT: Duration = Duration::from_secs(4);
const ASK_WAIT: Duration = Duration::from_millis(1500);

/// The servers.
#[derive(Clone)]
pub struct EtcdServers {
    clients: Vec<Client>,
    /// Counts the switches from one server to the next.
    switches: Arc<AtomicUsize>,
}

impl EtcdServers {
    /// Prepares connections to the servers, which need not run yet.
    ///
    /// # Errors
    /// If the options can't be used.
    pub async fn connect(options: &EtcdOptions) -> Result<Self, MembershipError> {
        let mut clients = Vec::new();
        for endpoint in &options.endpoints {
            let connecting = Client::connect([endpoint], Some(options.connect_options()?));
            clients.push(limit_time(ASK_WAIT, connecting).await.map_err(as_unreachable)?);
        }
        Ok(Self { clients, switches: Arc::default() })
    }

    /// Sends a transaction that is made once, or not at all.
    pub async fn transact_once(&self, txn: Txn) -> Result<TxnResponse, MembershipError> {
        self.ask_current(SINGLE_SERVER_WAIT, |client| send_transaction(client, txn.clone())).await
    }

    /// Sends a transaction that does no harm if it was made without an answer.
    pub async fn transact_repeatable(&self, txn: Txn) -> Result<TxnResponse, MembershipError> {
        self.ask_any(|client| send_transaction(client, txn.clone())).await
    }

    /// Reads the pair of a key, or of all keys with a prefix.
    pub async fn get_pairs(
        &self,
        key: String,
        options: Option<GetOptions>,
    ) -> Result<Vec<KeyValue>, MembershipError> {
        let asked = self.ask_any(|client| {
            let (key, options) = (key.clone(), options.clone());
            async move { client.kv_client().get(key, options).await }
        });
        Ok(asked.await?.take_kvs())
    }

    /// Grants an etcd lease that no key is attached to yet.
    pub async fn grant_lease(&self, seconds: i64) -> Result<PutOptions, MembershipError> {
        let grant =
            |client: Client| async move { client.lease_client().grant(seconds, None).await };
        Ok(PutOptions::new().with_lease(self.ask_any(grant).await?.id()))
    }

    async fn ask_any<T, F>(&self, ask: impl Fn(Client) -> F) -> Result<T, MembershipError>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let mut last = MembershipError::Refused("there is no etcd to ask".to_owned());
        for _ in &self.clients {
            match self.ask_current(ASK_WAIT, &ask).await {
                Ok(answer) => return Ok(answer),
                Err(trouble) => last = as_unreachable(trouble),
            }
        }
        Err(last)
    }

    async fn ask_current<T, F>(
        &self,
        wait: Duration,
        ask: impl Fn(Client) -> F,
    ) -> Result<T, MembershipError>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let turn = self.switches.load(Ordering::Relaxed);
        let client = self.clients[turn % self.clients.len()].clone();
        let answer = limit_time(wait, ask(client)).await;
        if answer.is_err() {
            // Another request may have switched to the next server already.
            let next = turn.wrapping_add(1);
            let _ =
                self.switches.compare_exchange(turn, next, Ordering::Relaxed, Ordering::Relaxed);
        }
        answer
    }
}

async fn send_transaction(client: Client, txn: Txn) -> Result<TxnResponse, Error> {
    client.kv_client().txn(txn).await
}

async fn limit_time<T>(
    wait: Duration,
    asked: impl Future<Output = Result<T, Error>>,
) -> Result<T, MembershipError> {
    match timeout(wait, asked).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(convert_error(&error)),
        Err(_) => {
            let text = format!("etcd does not answer within {} ms", wait.as_millis());
            Err(MembershipError::Unknown(text))
        }
    }
}

/// Converts an error. Only some errors show whether anything was changed.
fn convert_error(error: &Error) -> MembershipError {
    let text = format!("etcd: {error}");
    match error {
        Error::InvalidArgs(_) | Error::InvalidUri(_) => MembershipError::Refused(text),
        _ => MembershipError::Unknown(text),
    }
}

/// Converts the error of a request that does no harm if it was carried out.
fn as_unreachable(trouble: MembershipError) -> MembershipError {
    match trouble {
        MembershipError::Unknown(text) => MembershipError::Unreachable(text),
        other => other,
    }
}
