//! What agents and commands say to each other: JSON, over HTTP/1.1.
//!
//! ```text
//!   at the agent's socket, for the owner of this host's VMs          between hosts, by TLS with certificates of both
//!     GET  /v1/status     -> Cluster                                   GET  /v1/heartbeat       -> Heartbeat
//!     POST /v1/protect    Protect -> replies, a line of JSON each      GET  /v1/vms             -> [VmView]
//!     POST /v1/failover   FailOver -> facts
//!     GET  /metrics       -> text for Prometheus                       POST /v1/standbys/NAME   Upgrade: firn-epochs
//!                                                                      POST /v1/networks/NAME   Upgrade: firn-frames
//!     GET  /v1/clusters             -> [Record]                        POST /v1/vms/NAME/member   Request -> facts
//!     POST /v1/clusters             Create -> Record                   POST /v1/vms/NAME/protect  ProtectHere -> facts
//!     POST /v1/clusters/NAME/VERB   -> Record                         POST /v1/keep/NAME         ProtectHere -> Record
//!     POST /v1/clusters/NAME/forget -> Forgotten
//!     GET  /v1/members    -> MembershipView                            POST /v1/members         bytes -> bytes (firn-membership)
//! ```
//!
//! Whatever fails is answered by a status of 400 or more and a [`Failure`] as JSON. `protect` takes long: it answers 200 at once,
//! and then as a supervisor does, by any number of [`Reply::Progress`] and one [`Reply::Done`] or [`Reply::Failed`].
//!
//! `standbys` starts a standby of that name. It answers 101 once that waits for its primary; from then on the connection is the
//! stream of epochs (`firn-epochs`, `wire`), and nothing of the standby is left if it ends before the primary has introduced itself.
//!
//! `networks` links the networks of that name of the two hosts. It answers 101, and then frames go both ways, each behind its length (u32, big
//! endian).
//!
//! [`Reply::Progress`]: firn_supervisor::Reply::Progress
//! [`Reply::Done`]: firn_supervisor::Reply::Done
//! [`Reply::Failed`]: firn_supervisor::Reply::Failed
//! [`Failure`]: firn_supervisor::Failure

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use firn_supervisor::{NetworkName, Protection, VmName};
use serde::{Deserialize, Serialize};

use crate::detect::Health;
use crate::host::HostName;

/// What a connection becomes that carries epochs.
pub const EPOCHS: &str = "firn-epochs";

/// What a connection becomes that carries frames.
pub const FRAMES: &str = "firn-frames";

/// Where the status can be had.
pub const STATUS: &str = "/v1/status";
/// Where protection is asked for.
pub const PROTECT: &str = "/v1/protect";
/// Where a failover by the record is asked for.
pub const FAILOVER: &str = "/v1/failover";
/// Where metrics can be had.
pub const METRICS: &str = "/metrics";
/// Where peers are asked whether they are there.
pub const HEARTBEAT: &str = "/v1/heartbeat";
/// Where what hosts agree on can be had, and where its servers are asked.
pub const MEMBERS: &str = "/v1/members";
/// Where a peer's VMs can be had.
pub const VMS: &str = "/v1/vms";
/// What is asked of a VM of a peer's; its name is before that, after [`VMS`].
pub const MEMBER: &str = "member";
/// That it is to be protected by who asks; likewise.
pub const PROTECTED: &str = "protect";
/// Clusters that this host keeps the copies of; a name and a verb may follow.
pub const CLUSTERS: &str = "/v1/clusters";

/// Where a peer is asked to protect a cluster that it runs no VM of; the name follows.
pub const KEEP: &str = "/v1/keep/";

/// Where standbys are started; the name follows.
pub const STANDBYS: &str = "/v1/standbys/";

/// Where networks are linked; the name follows.
pub const NETWORKS: &str = "/v1/networks/";

/// A VM is to be protected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Protect {
    /// The VM.
    pub vm: VmName,
    /// The host that it is to be protected by.
    pub backup: HostName,
    /// Milliseconds from one cut to the next.
    pub interval_ms: u64,
    /// What was written in one epoch starts the next writable.
    pub predicts: bool,
}

/// A standby's VM is to run here, by the record of the hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailOver {
    /// The VM.
    pub vm: VmName,
    /// The host that a person declares dead: it is fenced though it holds a lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dead: Option<HostName>,
}

/// A VM is to be protected by who asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProtectHere {
    /// Milliseconds from one cut to the next.
    pub interval_ms: u64,
    /// What was written in one epoch starts the next writable.
    pub predicts: bool,
    /// The cluster that it is a part of, if hosts have agreed on that: what it sends obeys the lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<VmName>,
}

/// VMs are to fail over together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Create {
    /// What they are called together.
    pub name: VmName,
    /// They, and where they run, if that is said.
    pub vms: Vec<(VmName, Option<HostName>)>,
}

/// A record that was ended because all its hosts are gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forgotten {
    /// Its name, which is free.
    pub name: VmName,
    /// The VMs that it named.
    pub vms: Vec<String>,
    /// The hosts that it named, as `b (2)`, and why nothing of it runs there.
    pub hosts: BTreeMap<String, String>,
}

/// The answer of a host that is there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Its name.
    pub host: HostName,
}

/// A host's view of all.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cluster {
    /// The host that tells it.
    pub host: HostName,
    /// Where it listens.
    pub listen: SocketAddr,
    /// The others.
    pub peers: Vec<PeerView>,
    /// The VMs of all hosts that answer.
    pub vms: Vec<VmView>,
    /// The networks of the host that tells it.
    #[serde(default)]
    pub networks: Vec<NetworkView>,
    /// Connections that were refused since the agent began, by why.
    pub refused: BTreeMap<String, u64>,
}

/// Another host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerView {
    /// Its name.
    pub name: HostName,
    /// Where it is connected to.
    pub address: String,
    /// What is believed of it.
    pub health: Health,
    /// Since how many seconds.
    pub since_s: f64,
    /// How many seconds ago it answered last, if it ever did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heard_s: Option<f64>,
    /// Milliseconds from its newest question to the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round_trip_ms: Option<f64>,
    /// Why the newest question was not answered, if it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// A VM, or what stands by for one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmView {
    /// Where it is.
    pub host: HostName,
    /// Its name.
    pub name: VmName,
    /// As in `firn ls`.
    pub state: String,
    /// The host that it is protected by, if that was asked of the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<HostName>,
    /// How it is protected, if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protection: Option<Protection>,
    /// The timeline whose lease its frames obey, if they obey one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<u32>,
    /// Of a standby: the host that its primary runs on, if the agent has started it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub primary: Option<HostName>,
    /// Of a standby: the newest epoch that a failover would run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub committed: Option<u64>,
    /// What its owner should know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

/// A network, as its switch at this host has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkView {
    /// Its name, the same on all hosts.
    pub name: NetworkName,
    /// Where VMs connect.
    pub socket: PathBuf,
    /// The way out, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uplink: Option<String>,
    /// Ethernet addresses that are known.
    pub addresses: usize,
    /// Where frames come from and go to: VMs of this host, each other host, the uplink.
    pub lanes: Vec<LaneView>,
}

/// One of those; counted since the agent began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaneView {
    /// `VMs`, `host NAME` or `uplink`.
    pub to: String,
    /// How many are connected now.
    pub connected: u64,
    /// Frames that have come from there.
    pub frames_in: u64,
    /// Frames that have gone there.
    pub frames_out: u64,
    /// Frames that were to go there and had no room, or were still waiting when the connection ended.
    pub dropped: u64,
    /// Why nobody is connected, where somebody should be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// What hosts agree on, and how.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MembershipView {
    /// The host that tells it.
    pub host: HostName,
    /// `embedded` or `etcd`.
    pub kind: String,
    /// The hosts that are servers, or where etcd is asked.
    pub servers: Vec<String>,
    /// The host that leads, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader: Option<String>,
    /// Milliseconds that a lease lasts.
    pub lease_ms: u64,
    /// What was agreed on.
    pub clusters: Vec<ClusterView>,
    /// Why that is not known, if it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// VMs that fail over together. Hosts are told by their name and number, as `b (2)`: each start of an agent has another number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterView {
    /// Its name.
    pub name: String,
    /// Counts the timelines: each failover begins another one.
    pub generation: u32,
    /// The number of the newest checkpoint that all its VMs can go back to.
    pub checkpoint: u64,
    /// Where its VMs are.
    pub vms: Vec<PlaceView>,
    /// Hosts that hold a lease, or may believe so.
    pub leases: Vec<String>,
    /// Hosts that may still send in an older timeline. While there are any, no VM runs.
    pub fence: Vec<String>,
}

/// Where a VM is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlaceView {
    /// The VM.
    pub vm: String,
    /// Where it runs.
    pub primary: String,
    /// Where its copies go, if there is a host for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<String>,
}
