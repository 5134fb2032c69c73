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

use super::bootstrap_ids::BootstrapIds;
use super::message::{self, RaftEnvelope, RaftReply, RaftRequest, ServerMessage};
use super::transport::MessageTransport;
use super::types::Types;
use crate::MembershipError;

/// Makes connections to other servers.
pub struct RaftTransport {
    pub wire: Arc<dyn MessageTransport>,
    pub foundings: BootstrapIds,
}

/// The connection to one server.
pub struct RaftPeer {
    wire: Arc<dyn MessageTransport>,
    foundings: BootstrapIds,
    id: u64,
    name: String,
}

type RaftCallError<E> = RPCError<u64, BasicNode, E>;

impl RaftNetworkFactory<Types> for RaftTransport {
    type Network = RaftPeer;

    async fn new_client(&mut self, id: u64, node: &BasicNode) -> RaftPeer {
        let (wire, foundings) = (Arc::clone(&self.wire), self.foundings.clone());
        RaftPeer { wire, foundings, id, name: node.addr.clone() }
    }
}

impl RaftPeer {
    async fn call_peer<T, E>(
        &self,
        rpc: RaftRequest,
        option: RPCOption,
    ) -> Result<T, RaftCallError<E>>
    where
        Result<T, E>: DeserializeOwned,
        E: std::error::Error,
    {
        let letter =
            RaftEnvelope { from: self.foundings.own_id(), to: self.foundings.id_of(self.id), rpc };
        let bytes = message::encode_message(&ServerMessage::Raft(letter))
            .map_err(|error| NetworkError::new(&error))?;
        let called = timeout(option.hard_ttl(), self.wire.call_server(&self.name, bytes)).await;
        let answer = match called {
            Ok(Ok(answer)) => answer,
            Ok(Err(MembershipError::Unreachable(why))) => {
                return Err(Unreachable::new(&MembershipError::Unreachable(why)).into());
            }
            Ok(Err(error)) => return Err(NetworkError::new(&error).into()),
            Err(late) => return Err(NetworkError::new(&late).into()),
        };
        let RaftReply { from, answer } =
            message::decode_message(&answer).map_err(|error| NetworkError::new(&error))?;
        let met = self.foundings.check_identities((self.id, &self.name), from, None).await;
        met.map_err(|error| NetworkError::new(&error))?;
        let outcome: Result<T, E> =
            message::decode_message(&answer).map_err(|error| NetworkError::new(&error))?;
        outcome.map_err(|error| RemoteError::new(self.id, error).into())
    }
}

impl RaftNetwork<Types> for RaftPeer {
    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<Types>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<u64>, RaftCallError<RaftError<u64>>> {
        self.call_peer(RaftRequest::Append(rpc), option).await
    }

    async fn install_snapshot(
        &mut self,
        rpc: InstallSnapshotRequest<Types>,
        option: RPCOption,
    ) -> Result<InstallSnapshotResponse<u64>, RaftCallError<RaftError<u64, InstallSnapshotError>>>
    {
        self.call_peer(RaftRequest::Snapshot(rpc), option).await
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<u64>,
        option: RPCOption,
    ) -> Result<VoteResponse<u64>, RaftCallError<RaftError<u64>>> {
        self.call_peer(RaftRequest::Vote(rpc), option).await
    }
}
