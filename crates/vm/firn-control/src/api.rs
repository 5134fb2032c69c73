//! The protocol of agents and commands: JSON over HTTP/1.1.
//!
//! ```text
//!   at the agent's socket, for the owner of this host's VMs
//!     GET  /v1/status               -> AgentStatus
//!     POST /v1/protect              ProtectVmRequest -> replies, a line of JSON each
//!     POST /v1/failover             FailoverVmRequest -> facts
//!     POST /v1/move                 MoveVmRequest -> replies, a line of JSON each
//!     POST /v1/drain                DrainRequest -> replies, a line of JSON each
//!     GET  /metrics                 -> text for Prometheus
//!     GET  /, and /page/...         -> the page, for browsers (firn-agent, page)
//!     GET  /v1/clusters             -> [StoredCluster]
//!     POST /v1/clusters             CreateCluster -> StoredCluster
//!     POST /v1/clusters/NAME/VERB   -> StoredCluster
//!     POST /v1/clusters/NAME/forget -> ForgottenRecord
//!     GET  /v1/members              -> MembershipView
//!
//!   between hosts, by TLS with certificates of both
//!     GET  /v1/heartbeat            -> HeartbeatAnswer
//!     GET  /v1/vms                  -> [VmView]
//!     POST /v1/standbys/NAME        Upgrade: firn-epochs
//!     POST /v1/networks/NAME        Upgrade: firn-frames
//!     POST /v1/vms/NAME/member      Request -> facts
//!     POST /v1/vms/NAME/protect     ProtectionOptions -> facts
//!     POST /v1/vms/NAME/move        MoveVmRequest -> MoveReport
//!     POST /v1/vms/NAME/run         RunMovedRequest -> facts
//!     POST /v1/vms/NAME/moved       RunMovedRequest -> facts
//!     POST /v1/drained              DrainMark -> DrainMark
//!     POST /v1/keep/NAME            ProtectionOptions -> StoredCluster
//!     POST /v1/members              bytes -> bytes (firn-membership)
//!     GET  /, and /page/...         -> the page; also for clients that may do nothing else
//! ```
//!
//! A failure is answered by a status of 400 or more and a [`Failure`] as JSON. `protect`, `move` and
//! `drain` take long: they answer 200 at once, and then as a supervisor does, by any number of
//! [`SupervisorReply::Progress`] and one [`SupervisorReply::Done`] or [`SupervisorReply::Failed`].
//!
//! `standbys` starts a standby of that name. The agent answers 101 once the standby waits for its
//! primary; from then on the connection is the stream of epochs (`firn-epochs`, `wire`). Nothing of
//! the standby is left if the stream ends before the primary has introduced itself.
//!
//! `networks` links the networks of that name of the two hosts. The agent answers 101, and then
//! frames go in both directions, each after its length (u32, big endian).
//!
//! [`SupervisorReply::Progress`]: firn_supervisor::SupervisorReply::Progress
//! [`SupervisorReply::Done`]: firn_supervisor::SupervisorReply::Done
//! [`SupervisorReply::Failed`]: firn_supervisor::SupervisorReply::Failed
//! [`Failure`]: firn_supervisor::Failure

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use firn_supervisor::{CardStatus, CheckpointTally, NetworkName, ProtectionStatus, VmName};
use serde::{Deserialize, Serialize};

use crate::health::HostHealth;
use crate::host::HostName;

/// The protocol of a connection that carries epochs.
pub const EPOCHS: &str = "firn-epochs";

/// The protocol of a connection that carries frames.
pub const FRAMES: &str = "firn-frames";

/// Path of the status.
pub const STATUS: &str = "/v1/status";
/// Path of requests to protect a VM.
pub const PROTECT: &str = "/v1/protect";
/// Path of requests for a failover by the record.
pub const FAILOVER: &str = "/v1/failover";
/// Path of requests to move a VM to its backup.
pub const MOVE: &str = "/v1/move";
/// Path of requests to drain a host, or to end that.
pub const DRAIN: &str = "/v1/drain";
/// Path of the mark of a drained host, for peers.
pub const DRAINED: &str = "/v1/drained";
/// Path of a peer's request to move a VM; after [`VMS`] and the VM's name.
pub const MOVE_VM: &str = "move";
/// Path of a primary's request to run the standby of a VM that it moves here; likewise.
pub const RUN_MOVED: &str = "run";
/// Path of a primary's report that the record names this host now; likewise.
pub const MOVED: &str = "moved";
/// Path of the metrics.
pub const METRICS: &str = "/metrics";
/// Path of heartbeats of peers.
pub const HEARTBEAT: &str = "/v1/heartbeat";
/// Path of the membership's state for commands, and of messages to its servers for peers.
pub const MEMBERS: &str = "/v1/members";
/// Path of a peer's VMs.
pub const VMS: &str = "/v1/vms";
/// Path of requests to a VM of a peer's; after [`VMS`] and the VM's name.
pub const MEMBER: &str = "member";
/// Path of requests that a VM of a peer's be protected by the caller; likewise.
pub const PROTECTED: &str = "protect";
/// Path of the clusters that this host is the backup of; a name and a verb may follow.
pub const CLUSTERS: &str = "/v1/clusters";

/// Path of requests that the peer protect a cluster that it runs no VM of; the name follows.
pub const KEEP_PROTECTED_PATH: &str = "/v1/keep/";

/// Path of requests to start a standby; the name follows.
pub const STANDBYS: &str = "/v1/standbys/";

/// Path of requests to link networks; the name follows.
pub const NETWORKS: &str = "/v1/networks/";

/// The request to protect a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProtectVmRequest {
    /// The VM.
    pub vm: VmName,
    /// The host that is to be its backup.
    pub backup: HostName,
    /// Milliseconds from one cut to the next.
    pub interval_ms: u64,
    /// Whether pages written in one epoch stay writable at the start of the next.
    pub predicts: bool,
}

/// The request to run a standby's VM on this host, by its record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailoverVmRequest {
    /// The VM.
    pub vm: VmName,
    /// The host that the user declares dead: it is fenced although it may hold a lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dead: Option<HostName>,
}

/// The request to move a VM to its backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveVmRequest {
    /// The VM.
    pub vm: VmName,
    /// The host that is to run it.
    pub to: HostName,
}

/// A planned move that was made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MoveReport {
    /// The VM.
    pub vm: VmName,
    /// The host that ran it.
    pub from: HostName,
    /// The host that runs it.
    pub to: HostName,
    /// The generation that began.
    pub generation: u32,
    /// The epoch from whose end it continues.
    pub epoch: u64,
    /// Milliseconds from when the VM was paused until its new host may send what it sends.
    pub pause_ms: f64,
    /// Of these: until the backup had the final epoch.
    pub commit_ms: f64,
    /// Of these: until the VM ran at its backup.
    pub run_ms: f64,
    /// Of these: until the record named the new host.
    pub record_ms: f64,
    /// The host that protects it again, if one does already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<HostName>,
}

/// The request of a primary to the backup of a VM that moves there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunMovedRequest {
    /// The generation that the move begins.
    pub generation: u32,
    /// Milliseconds from one cut to the next, for the protection that follows.
    pub interval_ms: u64,
    /// Whether pages written in one epoch stay writable at the start of the next; likewise.
    pub predicts: bool,
}

/// The request to move all VMs of a host to their backups, or to end that state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DrainRequest {
    /// The host.
    pub host: HostName,
    /// How many VMs are moved at a time.
    pub at_once: u32,
    /// The host accepts standbys again. No VM is moved.
    #[serde(default)]
    pub undo: bool,
}

/// The mark of a host that is drained: it accepts no standbys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainMark {
    /// Whether it is drained.
    pub drained: bool,
}

/// The result of draining a host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DrainReport {
    /// The host.
    pub host: HostName,
    /// Whether it accepts no standbys now.
    pub drained: bool,
    /// The VMs that were moved.
    pub moved: Vec<MoveReport>,
    /// The VMs that were not, and why.
    pub failed: BTreeMap<VmName, String>,
    /// VMs of other hosts that have their standby there.
    pub standbys: Vec<VmName>,
}

/// The options of a protection: of a VM by the caller, or of a cluster by the peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProtectionOptions {
    /// Milliseconds from one cut to the next.
    pub interval_ms: u64,
    /// Whether pages written in one epoch stay writable at the start of the next.
    pub predicts: bool,
    /// The cluster that the VM is a member of, if the cluster has a record: the VM's output obeys
    /// its lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<VmName>,
}

/// The request to create a cluster: VMs that are to fail over as one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateCluster {
    /// The name of the cluster.
    pub name: VmName,
    /// Its VMs, and the hosts that run them, as far as these are given.
    pub vms: Vec<(VmName, Option<HostName>)>,
}

/// A record that was ended because all its hosts are gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForgottenRecord {
    /// Its name, which is free now.
    pub name: VmName,
    /// The VMs that it named.
    pub vms: Vec<String>,
    /// The hosts that it named, as `b (2)`, and why nothing of it runs there.
    pub hosts: BTreeMap<String, String>,
}

/// The answer to a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeartbeatAnswer {
    /// Its name.
    pub host: HostName,
}

/// All hosts and VMs, as one agent sees them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgentStatus {
    /// The host of that agent.
    pub host: HostName,
    /// The address at which it listens for its peers, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
    /// The other hosts.
    pub peers: Vec<PeerView>,
    /// The VMs of all hosts that answer.
    pub vms: Vec<VmView>,
    /// The networks of that host.
    #[serde(default)]
    pub networks: Vec<NetworkView>,
    /// Connections that were refused since the agent began, by reason.
    pub refused: BTreeMap<String, u64>,
    /// Whether that host is drained, and accepts no standbys.
    #[serde(default)]
    pub drained: bool,
}

/// Another host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerView {
    /// Its name.
    pub name: HostName,
    /// Its address.
    pub address: String,
    /// Its health, as this host judges it.
    pub health: HostHealth,
    /// For how many seconds it has had that health.
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

/// A VM, or a standby.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmView {
    /// The host that it is on.
    pub host: HostName,
    /// Its name.
    pub name: VmName,
    /// Its state, as in `firn ls`.
    pub state: String,
    /// The host that is its backup, if the agent protects it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<HostName>,
    /// The state of its protection, if it is protected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protection: Option<ProtectionStatus>,
    /// The cluster that it belongs to, if that has a record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<VmName>,
    /// The generation whose lease its frames obey, if they obey one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<u32>,
    /// Whether its host holds that lease now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_held: Option<bool>,
    /// Of a standby: the host that its primary runs on, if the agent has started it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub primary: Option<HostName>,
    /// Of a standby: the newest epoch that a failover would run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub committed: Option<u64>,
    /// Advice to its owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    /// Its network cards whose frames pass through Firn.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub network: Vec<CardStatus>,
    /// Its checkpoints, if there are any.
    #[serde(default, skip_serializing_if = "CheckpointTally::is_empty")]
    pub checkpoints: CheckpointTally,
    /// How often a successor has taken over from a dead supervisor.
    #[serde(default)]
    pub recoveries: u32,
    /// Whether its supervisor answers.
    #[serde(default)]
    pub supervised: bool,
}

/// A network, as its switch at this host has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkView {
    /// Its name, the same on all hosts.
    pub name: NetworkName,
    /// The socket that VMs connect to.
    pub socket: PathBuf,
    /// Its uplink, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uplink: Option<String>,
    /// Ethernet addresses that are known.
    pub addresses: usize,
    /// Counters of frames: for all VMs of this host, each other host, and the uplink.
    pub lanes: Vec<TrafficView>,
}

/// Counters of one target of a network, since the agent began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrafficView {
    /// `VMs`, `host NAME` or `uplink`.
    pub to: String,
    /// How many ports are connected now.
    pub connected: u64,
    /// Frames that were received from there.
    pub frames_in: u64,
    /// Frames that were sent there.
    pub frames_out: u64,
    /// Frames that found no room, or still waited when the connection ended.
    pub dropped: u64,
    /// Why no port is connected, if one should be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// The records that hosts agree on, and how they agree.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MembershipView {
    /// The host that reports this.
    pub host: HostName,
    /// `embedded` or `etcd`.
    pub kind: String,
    /// The hosts that are servers, or the addresses of etcd.
    pub servers: Vec<String>,
    /// The host that leads, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader: Option<String>,
    /// Milliseconds that a lease lasts.
    pub lease_ms: u64,
    /// The clusters with records.
    pub clusters: Vec<ClusterView>,
    /// Why those are not known, if they are not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// The record of a cluster. A host is given by its name and number, as `b (2)`: each start of an
/// agent has another number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterView {
    /// Its name.
    pub name: String,
    /// The generation: each failover begins another one.
    pub generation: u32,
    /// The number of the newest checkpoint that all its VMs can be run from.
    pub checkpoint: u64,
    /// Its VMs, and their hosts.
    pub vms: Vec<PlacementView>,
    /// Hosts that hold a lease, or may believe so.
    pub leases: Vec<String>,
    /// Hosts that may still send in an older generation. While there are any, no VM runs.
    pub fence: Vec<String>,
}

/// A VM, with its hosts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlacementView {
    /// The VM.
    pub vm: String,
    /// The host that runs it.
    pub primary: String,
    /// The host that is its backup, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<String>,
}
