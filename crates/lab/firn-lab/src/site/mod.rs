//! Sites: hosts on this machine as network namespaces, each with a cable and an agent, and their
//! consensus.
//!
//! ```text
//!   namespace firn-PID-N-outside        lan: 10.77.0.254 (hosts), 10.77.1.254 (VMs); clients are here
//!     |            |           |
//!   cable        cable       cable      as if to a switch; can be disconnected
//!     |            |           |
//!   ... -a       ... -b      ... -c     each: a bridge with 10.77.0.1, .2, .3 and the tap device of the agent's network `lan`
//!     firn-agent   firn-agent  firn-agent
//!     VMs          VMs         VMs      `-netdev firn,id=ID,network=lan`
//! ```
//!
//! All processes of a host run in its namespace. So a host can be lost as a whole
//! ([`SiteHost::kill_all`]), and nothing of it remains when the site is dropped. The machine's own
//! network is not involved. Creating namespaces takes root.

mod agent;
mod certificates;
mod config;
mod etcd;
mod network;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::firn::{CommandOutput, Firn};
use crate::guest::{accel, lean_virtio_options};
use crate::lab::{Lab, wait_for};
use agent::AgentProcess;
use etcd::EtcdProcess;
use network::SiteNetwork;
pub use network::{HostProcess, NetworkNamespace};

/// How long an agent may take to listen, and hosts to connect to each other.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);

/// The consensus by which hosts decide which host may run a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConsensusKind {
    /// Raft between the agents.
    Embedded,
    /// An etcd of three servers, one at each of the first three hosts.
    Etcd,
}

impl ConsensusKind {
    /// The default duration of a lease, of `lease-ms` in an agent's configuration; of etcd one that
    /// is a little shorter.
    pub fn default_lease(self) -> Duration {
        match self {
            Self::Embedded => Duration::from_millis(800),
            Self::Etcd => Duration::from_secs(4),
        }
    }
}

/// Description of a site.
#[derive(Clone, Copy, Debug)]
pub struct SitePlan<'a> {
    /// Names of the hosts: a letter each, in the order of their addresses.
    pub hosts: &'a [&'a str],
    /// Their consensus, if any.
    pub agreement: Option<ConsensusKind>,
    /// Duration of a lease.
    pub lease: Duration,
}

/// Hosts whose agents know each other. All are removed when it is dropped, or when the program is
/// interrupted.
#[derive(Debug)]
pub struct HostSite {
    hosts: Vec<SiteHost>,
    network: SiteNetwork,
}

/// A host of a site.
#[derive(Debug)]
pub struct SiteHost {
    name: String,
    dir: PathBuf,
    namespace: String,
    firn: Firn,
    etcd: Option<EtcdProcess>,
    agent: Option<AgentProcess>,
}

impl HostSite {
    /// Creates the hosts and starts the processes of each. Returns when every host sees all others.
    ///
    /// # Errors
    /// If the machine does not allow network namespaces, or an agent doesn't start.
    pub fn build_site(lab: &Lab, plan: &SitePlan<'_>) -> Result<Self> {
        let network = SiteNetwork::create_network(lab, plan.hosts)?;
        let base = lab.file(network.name());
        let authority = certificates::SiteAuthority::new()?;
        let mut hosts = Vec::new();
        for (number, name) in plan.hosts.iter().enumerate() {
            let dir = base.join(name);
            config::write_config(&dir, plan, number, &authority)
                .with_context(|| format!("configuring host {name}"))?;
            hosts.push(SiteHost::new(name, dir, network.namespace(number)));
        }
        let mut site = Self { hosts, network };
        site.start_hosts(plan)?;
        Ok(site)
    }

    fn start_hosts(&mut self, plan: &SitePlan<'_>) -> Result<()> {
        if plan.agreement == Some(ConsensusKind::Etcd) {
            for (number, host) in self.hosts.iter_mut().enumerate().take(etcd::SERVER_COUNT) {
                host.etcd = Some(EtcdProcess::start(&host.dir, &host.namespace, number, plan)?);
            }
        }
        self.hosts.iter_mut().try_for_each(SiteHost::start_agent)?;
        self.hosts.iter().try_for_each(SiteHost::wait_for_peers)
    }

    /// Restarts hosts that were killed. Returns when every host sees all others.
    ///
    /// # Errors
    /// If an agent doesn't start.
    pub fn restart_hosts(&mut self, numbers: Range<usize>) -> Result<()> {
        self.hosts[numbers].iter_mut().try_for_each(SiteHost::start_agent)?;
        self.hosts.iter().try_for_each(SiteHost::wait_for_peers)
    }

    /// Kills all hosts, and starts them anew, connected, and without any state of before.
    ///
    /// # Errors
    /// If a process doesn't end, or an agent doesn't start.
    pub fn reboot_hosts(&mut self) -> Result<()> {
        for host in self.hosts() {
            host.kill_all()?;
            remove_dir(&host.host_file("run"))?;
            remove_dir(&host.host_file("state"))?;
        }
        let all = 0..self.hosts.len();
        all.clone().try_for_each(|host| self.set_connected(host, true))?;
        self.restart_hosts(all)
    }

    /// The hosts.
    pub fn hosts(&self) -> &[SiteHost] {
        &self.hosts
    }

    /// The host with this index in the plan.
    pub fn host(&self, number: usize) -> &SiteHost {
        &self.hosts[number]
    }

    /// The network namespace outside the hosts, for threads of clients.
    pub fn outside_namespace(&self) -> Result<NetworkNamespace> {
        NetworkNamespace::open_namespace(self.network.outside())
    }

    /// The address of a VM in the network `lan`; see [`vm_network`].
    pub fn vm_address(number: u8) -> std::net::Ipv4Addr {
        network::vm_address(number)
    }

    /// Disconnects a host from all others, or connects it again.
    ///
    /// # Errors
    /// The errors of `ip`.
    pub fn set_connected(&self, number: usize, is_on: bool) -> Result<()> {
        self.network.set_connected(number, is_on)
    }
}

fn remove_dir(dir: &Path) -> Result<()> {
    match std::fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| dir.display().to_string())
        }
        _ => Ok(()),
    }
}

/// The card of a VM in the network `lan`, for QEMU's command line, and the kernel argument that
/// sets its address.
pub fn vm_network(number: u8) -> ([String; 4], String) {
    let lean = lean_virtio_options(accel::choose_accel().accel);
    let device =
        format!("virtio-net-pci,netdev=net,romfile=,{lean},mac=52:54:00:12:34:{number:02x}");
    let card = ["-netdev", "firn,id=net,network=lan", "-device", &device].map(str::to_owned);
    (card, format!("firn.ip={}", network::vm_address(number)))
}

impl SiteHost {
    fn new(name: &str, dir: PathBuf, namespace: String) -> Self {
        let firn = Firn::in_namespace(&dir.join("run"), &namespace);
        Self { name: name.to_owned(), dir, namespace, firn, etcd: None, agent: None }
    }

    fn start_agent(&mut self) -> Result<()> {
        let starting = || format!("the agent of host {}", self.name);
        self.agent = Some(AgentProcess::start(&self.dir, &self.namespace).with_context(starting)?);
        Ok(())
    }

    fn wait_for_peers(&self) -> Result<()> {
        let alive = |peers: &Value| {
            peers.as_array().is_some_and(|all| all.iter().all(|it| it["health"] == "alive"))
        };
        wait_for(&format!("host {} sees all others", self.name), CONNECT_TIMEOUT, || {
            let status = self.firn.run_verb("agent", &["status"])?.facts;
            Ok(alive(&status["peers"]).then_some(()))
        })
    }

    /// The host's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A file of this host.
    pub fn host_file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The log of its agent.
    pub fn agent_log(&self) -> PathBuf {
        agent::log_path(&self.dir)
    }

    /// The `firn` of this host.
    pub fn firn(&self) -> &Firn {
        &self.firn
    }

    /// The record of a cluster, as this host sees it. `None` if there is no cluster of this name,
    /// or this host cannot read the record now.
    pub fn cluster_record(&self, name: &str) -> Option<Value> {
        let CommandOutput { facts, .. } = self.firn.run_verb("cluster", &["status"]).ok()?;
        let mut clusters = facts["clusters"].as_array()?.iter();
        clusters.find(|it| it["name"] == name).cloned()
    }

    /// All processes that run on this host.
    ///
    /// # Errors
    /// The errors of `ip`.
    pub fn list_processes(&self) -> Result<Vec<HostProcess>> {
        network::list_processes(&self.namespace)
    }

    /// Ends all processes of this host at once (SIGKILL), as if the machine had lost its power.
    ///
    /// # Errors
    /// If a process doesn't end.
    pub fn kill_all(&self) -> Result<()> {
        network::kill_all(&self.namespace)
    }

    /// The directory of its files.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}
