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
mod options;

use std::collections::BTreeMap;
use std::sync::Arc;

use firn_cluster::Host;
use firn_cluster::failover::Terms;
use firn_membership::embedded::{self, Server};
use firn_membership::{Cluster, Embedded, Etcd, Members, Record, Trouble, View};
use firn_supervisor::{Failure, FailureKind};
use hyper::body::Incoming;
use hyper::{Request, StatusCode};

use self::links::Links;
pub use self::options::{Kind, Options, Section};
use crate::api::{ClusterView, MembershipView, PlaceView};
use crate::config::Config;
use crate::host::HostName;
use crate::http::{self, Answer};
use crate::identity::Identity;

/// This host's part in membership, if it has one.
pub struct Membership(Option<Part>);

struct Part {
    options: Options,
    members: Arc<dyn Members>,
    server: Option<Arc<Server>>,
}

/// Makes this host a server of a new cluster; returns the names of the servers.
///
/// # Errors
/// If it is one already, or is not configured as one.
pub fn found(config: &Config) -> Result<Vec<String>, Failure> {
    let Some(Options { kind: Kind::Embedded { servers, state: Some(state) }, .. }) =
        &config.membership
    else {
        let text = "the configuration has no [membership] with servers and state-dir";
        return Err(Failure::new(FailureKind::Usage, text).hint("`firn-agent --help` shows one"));
    };
    let servers: Vec<String> = servers.iter().map(ToString::to_string).collect();
    embedded::found(state, config.name.as_str(), &servers).map_err(|trouble| failure(&trouble))?;
    Ok(servers)
}

impl Membership {
    /// Joins membership, if the configuration has it.
    ///
    /// # Errors
    /// If that is impossible. Servers that can't be reached yet are no error.
    pub async fn begin(config: &Config, identity: &Identity) -> Result<Self, Failure> {
        let Some(options) = config.membership.clone() else { return Ok(Self(None)) };
        let part = match &options.kind {
            Kind::Embedded { .. } => embedded(config, identity, options).await,
            Kind::Etcd(etcd) => Etcd::connect(etcd, options.terms).await.map(|etcd| {
                let members: Arc<dyn Members> = Arc::new(etcd);
                Part { options, members, server: None }
            }),
        };
        part.map(|part| Self(Some(part))).map_err(|trouble| failure(&trouble))
    }

    /// Answers a peer that sends a message to this host's server.
    pub(crate) async fn answer(&self, peer: &HostName, request: Request<Incoming>) -> Answer {
        let Some(server) = self.0.as_ref().and_then(|part| part.server.as_ref()) else {
            let text = "this host is no server of a cluster";
            return http::refusal(&Failure::new(FailureKind::Usage, text));
        };
        match http::read_bytes(request).await {
            Ok(message) => {
                let told = server.answer(Some(peer.as_str()), &message).await;
                http::answer(StatusCode::OK, "application/octet-stream", told)
            }
            Err(failure) => http::refusal(&failure),
        }
    }

    /// The store of records and leases, and the terms of leases, if there is membership.
    pub(crate) fn members(&self) -> Option<(Arc<dyn Members>, Terms)> {
        self.0.as_ref().map(|part| (Arc::clone(&part.members), part.options.terms))
    }

    /// The state of membership as the agent reports it.
    pub(crate) async fn view(&self, host: &HostName) -> Result<MembershipView, Failure> {
        let Some(part) = &self.0 else {
            let text = format!("host {host} has no membership");
            return Err(Failure::new(FailureKind::Usage, text).hint(
                "give its agent's configuration a [membership]: `firn-agent --help` shows one",
            ));
        };
        Ok(part.view(host).await)
    }
}

async fn embedded(config: &Config, identity: &Identity, options: Options) -> Result<Part, Trouble> {
    let Kind::Embedded { servers, state } = &options.kind else {
        return Err(Trouble::Refused("there are no servers".to_owned()));
    };
    let links = Arc::new(Links::new(config, identity));
    let server = match state {
        Some(state) if servers.contains(&config.name) => {
            let begun = Server::begin(state, config.name.as_str(), options.terms, links.clone());
            let server = begun.await?;
            links.set_own(Arc::downgrade(&server));
            Some(server)
        }
        _ => None,
    };
    let names = servers.iter().map(ToString::to_string).collect();
    Ok(Part { members: Arc::new(Embedded::new(names, links)), options, server })
}

impl Part {
    async fn view(&self, host: &HostName) -> MembershipView {
        let (kind, servers) = match &self.options.kind {
            Kind::Embedded { servers, .. } => {
                ("embedded", servers.iter().map(ToString::to_string).collect())
            }
            Kind::Etcd(etcd) => ("etcd", etcd.endpoints.clone()),
        };
        let told = self.told().await;
        let trouble = told.as_ref().err().map(ToString::to_string);
        let (leader, clusters) = told.unwrap_or_default();
        let (host, kind) = (host.clone(), kind.to_owned());
        let lease_ms = self.options.terms.ttl.as_millis() as u64;
        MembershipView { host, kind, servers, leader, lease_ms, clusters, trouble }
    }

    async fn told(&self) -> Result<(Option<String>, Vec<ClusterView>), Trouble> {
        let leader = self.members.leader().await?;
        let mut clusters = Vec::new();
        for cluster in self.members.clusters().await? {
            let View { known, leases, names } = self.members.view(&cluster).await?;
            // The record may have ended since.
            if let Some(record) = known.record.filter(|record| !record.register.is_ended()) {
                clusters.push(cluster_view(&cluster, &record, leases, &names));
            }
        }
        Ok((leader, clusters))
    }
}

fn cluster_view(
    cluster: &Cluster,
    record: &Record,
    leases: impl IntoIterator<Item = Host>,
    names: &BTreeMap<Host, String>,
) -> ClusterView {
    let called = |host: Host| match names.get(&host) {
        Some(name) => format!("{name} ({})", host.0),
        None => format!("? ({})", host.0),
    };
    let register = &record.register;
    let places = register.places.iter().map(|(vm, place)| PlaceView {
        vm: record.vms.get(vm).cloned().unwrap_or_else(|| vm.to_string()),
        primary: called(place.primary),
        backup: place.backup.map(called),
    });
    ClusterView {
        name: cluster.to_string(),
        generation: register.generation.0,
        checkpoint: register.checkpoint.number,
        vms: places.collect(),
        leases: leases.into_iter().map(called).collect(),
        fence: register.fence.iter().copied().map(called).collect(),
    }
}

fn failure(trouble: &Trouble) -> Failure {
    let kind = match trouble {
        Trouble::Refused(_) => FailureKind::Usage,
        Trouble::Unreachable(_) | Trouble::Unknown(_) => FailureKind::Host,
    };
    Failure::new(kind, trouble.to_string()).while_doing("taking part in a cluster")
}
