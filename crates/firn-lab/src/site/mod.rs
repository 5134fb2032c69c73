//! Hosts on this machine: network namespaces with a cable each, an agent in each, and whatever they agree by.
//!
//! ```text
//!   namespace firn-PID-N-outside        lan: 10.77.0.254 (hosts), 10.77.1.254 (VMs); clients are here
//!     |            |           |
//!   cable        cable       cable      as if to a switch; can be cut
//!     |            |           |
//!   ... -a       ... -b      ... -c     each: a bridge with 10.77.0.1, .2, .3 and the tap device of the agent's network `lan`
//!     firn-agent   firn-agent  firn-agent
//!     VMs          VMs         VMs      `-netdev firn,id=ID,network=lan`
//! ```
//!
//! All of a host is in its namespace, so that a host can be lost as a whole ([`Host::kill`]), and nothing of it stays when the site goes. The
//! machine's own network has no part in it. Making namespaces takes root.

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

use crate::firn::{Firn, Said};
use crate::guest::{accel, lean};
use crate::lab::{Lab, wait_for};
use agent::Agent;
use etcd::Etcd;
use network::Network;
pub use network::{Inside, Process};

/// How long an agent may take to listen, and hosts to meet.
const PATIENCE: Duration = Duration::from_secs(60);

/// How hosts agree who may run what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agreement {
    /// The agents do, by raft.
    Embedded,
    /// By an etcd of three servers, one at each of the first three hosts.
    Etcd,
}

/// What a site is like.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    /// What hosts are called: by a letter each, in the order of their addresses.
    pub hosts: &'a [&'a str],
    /// How they agree, if they do.
    pub agreement: Option<Agreement>,
    /// How long a lease is.
    pub lease: Duration,
}

/// Hosts with agents that know each other. All goes when it is dropped, or the program is interrupted.
#[derive(Debug)]
pub struct Site {
    hosts: Vec<Host>,
    network: Network,
}

/// One of them.
#[derive(Debug)]
pub struct Host {
    name: String,
    dir: PathBuf,
    namespace: String,
    firn: Firn,
    etcd: Option<Etcd>,
    agent: Option<Agent>,
}

impl Site {
    /// Makes hosts and starts what runs on each. Returns when every one of them sees all others.
    ///
    /// # Errors
    /// Where the machine has no network namespaces for us, or an agent doesn't start.
    pub fn build(lab: &Lab, plan: &Plan<'_>) -> Result<Self> {
        let network = Network::lay(lab, plan.hosts)?;
        let base = lab.file(network.name());
        let authority = certificates::Authority::new()?;
        let mut hosts = Vec::new();
        for (number, name) in plan.hosts.iter().enumerate() {
            let dir = base.join(name);
            config::write(&dir, plan, number, &authority)
                .with_context(|| format!("configuring host {name}"))?;
            hosts.push(Host::new(name, dir, network.namespace(number)));
        }
        let mut site = Self { hosts, network };
        site.start(plan)?;
        Ok(site)
    }

    fn start(&mut self, plan: &Plan<'_>) -> Result<()> {
        if plan.agreement == Some(Agreement::Etcd) {
            for (number, host) in self.hosts.iter_mut().enumerate().take(etcd::SERVERS) {
                host.etcd = Some(Etcd::start(&host.dir, &host.namespace, number, plan)?);
            }
        }
        self.hosts.iter_mut().try_for_each(Host::start)?;
        self.hosts.iter().try_for_each(Host::sees_all)
    }

    /// Starts hosts again that were killed. Returns when every host sees all others.
    ///
    /// # Errors
    /// If an agent doesn't start.
    pub fn revive(&mut self, numbers: Range<usize>) -> Result<()> {
        self.hosts[numbers].iter_mut().try_for_each(Host::start)?;
        self.hosts.iter().try_for_each(Host::sees_all)
    }

    /// The hosts.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// One of them, by its place in the plan.
    pub fn host(&self, number: usize) -> &Host {
        &self.hosts[number]
    }

    /// For a thread that is to be outside, where clients are.
    pub fn outside(&self) -> Result<Inside> {
        Inside::of(self.network.outside())
    }

    /// The address of a VM of the network `lan`; see [`vm_network`].
    pub fn vm_address(number: u8) -> std::net::Ipv4Addr {
        network::vm_address(number)
    }

    /// Cuts a host off from all others, or connects it again.
    ///
    /// # Errors
    /// What `ip` says.
    pub fn connect(&self, number: usize, is_on: bool) -> Result<()> {
        self.network.connect(number, is_on)
    }
}

/// The card of a VM in the network `lan`, for QEMU's command line, and the word for its kernel's that gives it its address.
pub fn vm_network(number: u8) -> ([String; 4], String) {
    let lean = lean(accel::decide().accel);
    let device =
        format!("virtio-net-pci,netdev=net,romfile=,{lean},mac=52:54:00:12:34:{number:02x}");
    let card = ["-netdev", "firn,id=net,network=lan", "-device", &device].map(str::to_owned);
    (card, format!("firn.ip={}", network::vm_address(number)))
}

impl Host {
    fn new(name: &str, dir: PathBuf, namespace: String) -> Self {
        let firn = Firn::within(&dir.join("run"), &namespace);
        Self { name: name.to_owned(), dir, namespace, firn, etcd: None, agent: None }
    }

    fn start(&mut self) -> Result<()> {
        let starting = || format!("the agent of host {}", self.name);
        self.agent = Some(Agent::start(&self.dir, &self.namespace).with_context(starting)?);
        Ok(())
    }

    fn sees_all(&self) -> Result<()> {
        let alive = |peers: &Value| {
            peers.as_array().is_some_and(|all| all.iter().all(|it| it["health"] == "alive"))
        };
        wait_for(&format!("host {} sees all others", self.name), PATIENCE, || {
            let status = self.firn.call("agent", &["status"])?.facts;
            Ok(alive(&status["peers"]).then_some(()))
        })
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its own files.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// What its agent has logged.
    pub fn log(&self) -> PathBuf {
        agent::log(&self.dir)
    }

    /// `firn` at this host.
    pub fn firn(&self) -> &Firn {
        &self.firn
    }

    /// What hosts have agreed on of one cluster, as seen from here; nothing if there is none of that name, or this host knows nothing now.
    pub fn cluster(&self, name: &str) -> Option<Value> {
        let Said { facts, .. } = self.firn.call("cluster", &["status"]).ok()?;
        let mut clusters = facts["clusters"].as_array()?.iter();
        clusters.find(|it| it["name"] == name).cloned()
    }

    /// Everything that runs here.
    ///
    /// # Errors
    /// What `ip` says.
    pub fn processes(&self) -> Result<Vec<Process>> {
        network::processes(&self.namespace)
    }

    /// Ends everything that runs here at once (SIGKILL), as if the machine had lost its power.
    ///
    /// # Errors
    /// If something doesn't end.
    pub fn kill(&self) -> Result<()> {
        network::kill_all(&self.namespace)
    }

    /// Where its files are.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}
