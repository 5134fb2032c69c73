//! The network of raft: its messages to the other servers.

use std::sync::Arc;

use openraft::BasicNode;
use openraft::error::{
    InstallSnapshotError, NetworkError, RPCError, RaftError, RemoteError, Unreachable,
};
use openraft::network::{RPCOption, RaftNetwork, RaftNetworkFactory};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, InstallSnapshotRequest, InstallSnapshotResponse,
    VoteRequest, VoteResponse,
};
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use super::foundings::Foundings;
use super::message::{self, Letter, Message, Reply, Rpc};
use super::{Types, Wire};
use crate::Trouble;

/// Makes connections to other servers.
pub struct Network {
    pub wire: Arc<dyn Wire>,
    pub foundings: Foundings,
}

/// The connection to one server.
pub struct Peer {
    wire: Arc<dyn Wire>,
    foundings: Foundings,
    id: u64,
    name: String,
}

type Failed<E> = RPCError<u64, BasicNode, E>;

impl RaftNetworkFactory<Types> for Network {
    type Network = Peer;

    async fn new_client(&mut self, id: u64, node: &BasicNode) -> Peer {
        let (wire, foundings) = (Arc::clone(&self.wire), self.foundings.clone());
        Peer { wire, foundings, id, name: node.addr.clone() }
    }
}

impl Peer {
    async fn call<T, E>(&self, rpc: Rpc, option: RPCOption) -> Result<T, Failed<E>>
    where
        Result<T, E>: DeserializeOwned,
        E: std::error::Error,
    {
        let letter = Letter { from: self.foundings.own(), to: self.foundings.of(self.id), rpc };
        let bytes =
            message::encode(&Message::Raft(letter)).map_err(|error| NetworkError::new(&error))?;
        let called = timeout(option.hard_ttl(), self.wire.call(&self.name, bytes)).await;
        let answer = match called {
            Ok(Ok(answer)) => answer,
            Ok(Err(Trouble::Unreachable(why))) => {
                return Err(Unreachable::new(&Trouble::Unreachable(why)).into());
            }
            Ok(Err(error)) => return Err(NetworkError::new(&error).into()),
            Err(late) => return Err(NetworkError::new(&late).into()),
        };
        let Reply { from, answer } =
            message::decode(&answer).map_err(|error| NetworkError::new(&error))?;
        let met = self.foundings.meet((self.id, &self.name), from, None).await;
        met.map_err(|error| NetworkError::new(&error))?;
        let told: Result<T, E> =
            message::decode(&answer).map_err(|error| NetworkError::new(&error))?;
        told.map_err(|error| RemoteError::new(self.id, error).into())
    }
}

impl RaftNetwork<Types> for Peer {
    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<Types>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<u64>, Failed<RaftError<u64>>> {
        self.call(Rpc::Append(rpc), option).await
    }

    async fn install_snapshot(
        &mut self,
        rpc: InstallSnapshotRequest<Types>,
        option: RPCOption,
    ) -> Result<InstallSnapshotResponse<u64>, Failed<RaftError<u64, InstallSnapshotError>>> {
        self.call(Rpc::Snapshot(rpc), option).await
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<u64>,
        option: RPCOption,
    ) -> Result<VoteResponse<u64>, Failed<RaftError<u64>>> {
        self.call(Rpc::Vote(rpc), option).await
    }
}
