//! Transport of messages between membership servers: the agents' connections, with certificates of
//! both hosts.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use firn_control::HostName;
use firn_control::api::MEMBERS;
use firn_membership::embedded::{MessageTransport, RaftServer};
use firn_membership::{MembershipError, MembershipFuture};

use crate::config::AgentConfig;
use crate::identity::HostIdentity;
use crate::peer_connection::PeerConnection;

/// Maximum number of connections to a peer that wait to be used again.
const IDLE_MAX: usize = 4;

/// The connections to the servers.
pub struct ServerLinks {
    me: HostName,
    identity: HostIdentity,
    peers: BTreeMap<HostName, String>,
    /// The server in this process, if there is one.
    own: OnceLock<Weak<RaftServer>>,
    idle: Mutex<BTreeMap<HostName, Vec<PeerConnection>>>,
}

impl ServerLinks {
    pub fn new(config: &AgentConfig, identity: &HostIdentity) -> Self {
        let (me, peers) = (config.name.clone(), config.peers.clone());
        Self { me, identity: identity.clone(), peers, own: OnceLock::new(), idle: Mutex::default() }
    }

    /// Sets the server in this process.
    pub fn set_own(&self, server: Weak<RaftServer>) {
        // It is set once.
        let _ = self.own.set(server);
    }

    async fn call_own(&self, message: &[u8]) -> Result<Vec<u8>, MembershipError> {
        match self.own.get().and_then(Weak::upgrade) {
            Some(server) => Ok(server.answer_message(None, message).await),
            None => Err(MembershipError::Unreachable("this host's server does not run".to_owned())),
        }
    }

    async fn call_peer(&self, to: &str, message: Vec<u8>) -> Result<Vec<u8>, MembershipError> {
        let unreachable = |why: String| MembershipError::Unreachable(why);
        let name = HostName::new(to).map_err(|error| unreachable(error.to_string()))?;
        let address =
            self.peers.get(&name).ok_or_else(|| unreachable(format!("{to} is no peer")))?;
        let mut link = match self.take_idle(&name) {
            Some(link) => link,
            None => PeerConnection::open(&self.identity, &name, address)
                .await
                .map_err(|failure| unreachable(failure.to_string()))?,
        };
        let answer = link.post_bytes(MEMBERS, message).await;
        let answer = answer.map_err(|failure| MembershipError::Unknown(failure.to_string()))?;
        self.keep_idle(name, link);
        Ok(answer.to_vec())
    }

    fn take_idle(&self, name: &HostName) -> Option<PeerConnection> {
        let mut idle = self.lock_idle();
        let links = idle.get_mut(name)?;
        links.retain(|link| !link.is_closed());
        links.pop()
    }

    fn keep_idle(&self, name: HostName, link: PeerConnection) {
        let mut idle = self.lock_idle();
        let links = idle.entry(name).or_default();
        if links.len() < IDLE_MAX {
            links.push(link);
        }
    }

    fn lock_idle(&self) -> MutexGuard<'_, BTreeMap<HostName, Vec<PeerConnection>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MessageTransport for ServerLinks {
    fn call_server<'a>(&'a self, to: &'a str, message: Vec<u8>) -> MembershipFuture<'a, Vec<u8>> {
        Box::pin(async move {
            match to == self.me.as_str() {
                true => self.call_own(&message).await,
                false => self.call_peer(to, message).await,
            }
        })
    }
}
