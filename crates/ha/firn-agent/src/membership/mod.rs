//! This host's part in membership: the records and leases of `firn-membership`.
//!
//! ```text
//!   firn cluster status - agent.sock ---> membership_view   POST /v1/members <-- peers: servers,
//!                                          |                   |                 and their clients
//!                                          v                   v
//!                          EmbeddedStore or EtcdStore        RaftServer, if this host is a server
//!                                          |                   |
//!                                          '--- ServerLinks ---'--- POST /v1/members ---> peers
//! ```
//!
//! The certificate of a connection identifies the peer that sends a message: no peer can request
//! the lease of another one, and a peer that is no server can't send messages of raft.

mod links;
pub(crate) mod options;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use firn_cluster::HostId;
use firn_control::HostName;
use firn_control::api::{ClusterView, MembershipView, PlacementView};
use firn_membership::embedded::{self, RaftServer};
use firn_membership::{
    ClusterName, ClusterRecord, EmbeddedStore, EtcdStore, FailoverTiming, MembershipError,
    MembershipStore, RecordView,
};
use firn_supervisor::{Failure, FailureKind};
use hyper::body::Incoming;
use hyper::{Request, StatusCode};

use self::links::ServerLinks;
pub use self::options::{BackendKind, MembershipOptions, MembershipSection};
use crate::config::AgentConfig;
use crate::http::{self, HttpResponse};
use crate::identity::HostIdentity;

/// This host's part in membership, if it has one.
pub struct MembershipService(Option<MembershipBackend>);

struct MembershipBackend {
    options: MembershipOptions,
    members: Arc<dyn MembershipStore>,
    server: Option<Arc<RaftServer>>,
}

/// Whether the store of records answers, as metrics and the page show it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MembershipHealth {
    /// The host that leads, if there is one.
    pub leader: Option<String>,
    /// Why the store does not answer, if it does not.
    pub trouble: Option<String>,
}

impl MembershipHealth {
    /// The health of a store that has not answered for this time.
    pub(crate) fn silent(wait: Duration) -> Self {
        let trouble = format!("no answer within {} s", wait.as_secs());
        Self { leader: None, trouble: Some(trouble) }
    }
}

/// Makes this host a server of a new cluster; returns the names of the servers.
///
/// # Errors
/// If it is one already, or is not configured as one.
pub fn bootstrap_server(config: &AgentConfig) -> Result<Vec<String>, Failure> {
    let Some(MembershipOptions {
        kind: BackendKind::Embedded { servers, state: Some(state) }, ..
    }) = &config.membership
    else {
        let text = "the configuration has no [membership] with servers and state-dir";
        return Err(
            Failure::new(FailureKind::Usage, text).with_hint("`firn-agent --help` shows one")
        );
    };
    let servers: Vec<String> = servers.iter().map(ToString::to_string).collect();
    embedded::bootstrap_server(state, config.name.as_str(), &servers)
        .map_err(|trouble| membership_failure(&trouble))?;
    Ok(servers)
}

impl MembershipService {
    /// Joins membership, if the configuration has it.
    ///
    /// # Errors
    /// If that is impossible. Servers that can't be reached yet are no error.
    pub async fn begin_membership(
        config: &AgentConfig,
        identity: &HostIdentity,
    ) -> Result<Self, Failure> {
        let Some(options) = config.membership.clone() else { return Ok(Self(None)) };
        let part = match &options.kind {
            BackendKind::Embedded { .. } => begin_embedded(config, identity, options).await,
            BackendKind::Etcd(etcd) => {
                EtcdStore::connect(etcd, options.timing.lease).await.map(|etcd| {
                    let members: Arc<dyn MembershipStore> = Arc::new(etcd);
                    MembershipBackend { options, members, server: None }
                })
            }
        };
        part.map(|part| Self(Some(part))).map_err(|trouble| membership_failure(&trouble))
    }

    /// Answers a peer that sends a message to this host's server.
    pub(crate) async fn answer_peer(
        &self,
        peer: &HostName,
        request: Request<Incoming>,
    ) -> HttpResponse {
        let Some(server) = self.0.as_ref().and_then(|part| part.server.as_ref()) else {
            let text = "this host is no server of a cluster";
            return http::failure_response(&Failure::new(FailureKind::Usage, text));
        };
        match http::read_body(request).await {
            Ok(message) => {
                let reply = server.answer_message(Some(peer.as_str()), &message).await;
                http::bytes_response(StatusCode::OK, "application/octet-stream", reply)
            }
            Err(failure) => http::failure_response(&failure),
        }
    }

    /// The store of records and leases, and the times of a failover, if there is membership.
    pub(crate) fn store_and_timing(&self) -> Option<(Arc<dyn MembershipStore>, FailoverTiming)> {
        self.0.as_ref().map(|part| (Arc::clone(&part.members), part.options.timing))
    }

    /// Has this host's server, if it is one, replace a leader whose agent has ended.
    pub(crate) async fn replace_leader(&self, host: &HostName) {
        if let Some(server) = self.0.as_ref().and_then(|part| part.server.as_ref()) {
            server.replace_leader(host.as_str()).await;
        }
    }

    /// Asks the store for the leader; `None` if this host takes part in no membership.
    pub(crate) async fn check_health(&self) -> Option<MembershipHealth> {
        let part = self.0.as_ref()?;
        Some(match part.members.current_leader().await {
            Ok(leader) => MembershipHealth { leader, trouble: None },
            Err(trouble) => MembershipHealth { leader: None, trouble: Some(trouble.to_string()) },
        })
    }

    /// The state of membership as the agent reports it.
    pub(crate) async fn membership_view(&self, host: &HostName) -> Result<MembershipView, Failure> {
        let Some(part) = &self.0 else {
            let text = format!("host {host} has no membership");
            return Err(Failure::new(FailureKind::Usage, text).with_hint(
                "give its agent's configuration a [membership]: `firn-agent --help` shows one",
            ));
        };
        Ok(part.view_backend(host).await)
    }
}

async fn begin_embedded(
    config: &AgentConfig,
    identity: &HostIdentity,
    options: MembershipOptions,
) -> Result<MembershipBackend, MembershipError> {
    let BackendKind::Embedded { servers, state } = &options.kind else {
        return Err(MembershipError::Refused("there are no servers".to_owned()));
    };
    let links = Arc::new(ServerLinks::new(config, identity));
    let server = match state {
        Some(state) if servers.contains(&config.name) => {
            let begun = RaftServer::start_server(
                state,
                config.name.as_str(),
                options.timing.lease,
                links.clone(),
            );
            let server = begun.await?;
            links.set_own(Arc::downgrade(&server));
            Some(server)
        }
        _ => None,
    };
    let names = servers.iter().map(ToString::to_string).collect();
    Ok(MembershipBackend {
        members: Arc::new(EmbeddedStore::new(names, links, options.timing.lease.ttl)),
        options,
        server,
    })
}

impl MembershipBackend {
    async fn view_backend(&self, host: &HostName) -> MembershipView {
        let (kind, servers) = match &self.options.kind {
            BackendKind::Embedded { servers, .. } => {
                ("embedded", servers.iter().map(ToString::to_string).collect())
            }
            BackendKind::Etcd(etcd) => ("etcd", etcd.endpoints.clone()),
        };
        let outcome = self.read_clusters().await;
        let trouble = outcome.as_ref().err().map(ToString::to_string);
        let (leader, clusters) = outcome.unwrap_or_default();
        let (host, kind) = (host.clone(), kind.to_owned());
        let lease_ms = self.options.timing.lease.ttl.as_millis() as u64;
        MembershipView { host, kind, servers, leader, lease_ms, clusters, trouble }
    }

    async fn read_clusters(&self) -> Result<(Option<String>, Vec<ClusterView>), MembershipError> {
        let leader = self.members.current_leader().await?;
        let mut clusters = Vec::new();
        for cluster in self.members.list_clusters().await? {
            let RecordView { known, leases, names, .. } = self.members.read_view(&cluster).await?;
            // The record may have ended since.
            if let Some(record) = known.record.filter(|record| !record.register.is_ended()) {
                clusters.push(cluster_view(&cluster, &record, leases, &names));
            }
        }
        Ok((leader, clusters))
    }
}

fn cluster_view(
    cluster: &ClusterName,
    record: &ClusterRecord,
    leases: impl IntoIterator<Item = HostId>,
    names: &BTreeMap<HostId, String>,
) -> ClusterView {
    let called = |host: HostId| match names.get(&host) {
        Some(name) => format!("{name} ({})", host.0),
        None => format!("? ({})", host.0),
    };
    let register = &record.register;
    let placements = register.placements.iter().map(|(vm, placement)| PlacementView {
        vm: record.vms.get(vm).cloned().unwrap_or_else(|| vm.to_string()),
        primary: called(placement.primary),
        backup: placement.backup.map(called),
    });
    ClusterView {
        name: cluster.to_string(),
        generation: register.generation.0,
        checkpoint: register.checkpoint.number,
        vms: placements.collect(),
        leases: leases.into_iter().map(called).collect(),
        fence: register.fence.iter().copied().map(called).collect(),
    }
}

fn membership_failure(trouble: &MembershipError) -> Failure {
    let kind = match trouble {
        MembershipError::Refused(_) => FailureKind::Usage,
        MembershipError::Unreachable(_) | MembershipError::Unknown(_) => FailureKind::Host,
    };
    Failure::new(kind, trouble.to_string()).while_doing("taking part in a cluster")
}
