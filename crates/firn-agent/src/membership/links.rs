//! Transport of messages between membership servers: the agents' connections, with certificates of
//! both hosts.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use firn_membership::embedded::{Server, Wire};
use firn_membership::{Later, Trouble};

use crate::api::MEMBERS;
use crate::config::Config;
use crate::host::HostName;
use crate::identity::Identity;
use crate::link::Link;

/// Maximum number of connections to a peer that wait to be used again.
const IDLE_MAX: usize = 4;

/// The connections to the servers.
pub struct Links {
    me: HostName,
    identity: Identity,
    peers: BTreeMap<HostName, String>,
    /// The server in this process, if there is one.
    own: OnceLock<Weak<Server>>,
    idle: Mutex<BTreeMap<HostName, Vec<Link>>>,
}

impl Links {
    pub fn new(config: &Config, identity: &Identity) -> Self {
        let (me, peers) = (config.name.clone(), config.peers.clone());
        Self { me, identity: identity.clone(), peers, own: OnceLock::new(), idle: Mutex::default() }
    }

    /// Sets the server in this process.
    pub fn set_own(&self, server: Weak<Server>) {
        // It is set once.
        let _ = self.own.set(server);
    }

    async fn to_own(&self, message: &[u8]) -> Result<Vec<u8>, Trouble> {
        match self.own.get().and_then(Weak::upgrade) {
            Some(server) => Ok(server.answer(None, message).await),
            None => Err(Trouble::Unreachable("this host's server does not run".to_owned())),
        }
    }

    async fn to_peer(&self, to: &str, message: Vec<u8>) -> Result<Vec<u8>, Trouble> {
        let unreachable = |why: String| Trouble::Unreachable(why);
        let name = HostName::new(to).map_err(|error| unreachable(error.to_string()))?;
        let address =
            self.peers.get(&name).ok_or_else(|| unreachable(format!("{to} is no peer")))?;
        let mut link = match self.take(&name) {
            Some(link) => link,
            None => Link::open(&self.identity, &name, address)
                .await
                .map_err(|failure| unreachable(failure.to_string()))?,
        };
        let answer = link.post(MEMBERS, message).await;
        let answer = answer.map_err(|failure| Trouble::Unknown(failure.to_string()))?;
        self.keep(name, link);
        Ok(answer.to_vec())
    }

    fn take(&self, name: &HostName) -> Option<Link> {
        let mut idle = self.idle();
        let links = idle.get_mut(name)?;
        links.retain(|link| !link.is_closed());
        links.pop()
    }

    fn keep(&self, name: HostName, link: Link) {
        let mut idle = self.idle();
        let links = idle.entry(name).or_default();
        if links.len() < IDLE_MAX {
            links.push(link);
        }
    }

    fn idle(&self) -> MutexGuard<'_, BTreeMap<HostName, Vec<Link>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wire for Links {
    fn call<'a>(&'a self, to: &'a str, message: Vec<u8>) -> Later<'a, Vec<u8>> {
        Box::pin(async move {
            match to == self.me.as_str() {
                true => self.to_own(&message).await,
                false => self.to_peer(to, message).await,
            }
        })
    }
}
