//! Three servers of one kind, as processes.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_cluster::failover::{FailoverRecord, LeaseTerms, VmPlacement};
use firn_cluster::{HostId, VmId};
use firn_membership::etcd::EtcdOptions;
use firn_membership::{
    ChangeResult, ClusterName, ClusterRecord, EmbeddedStore, EtcdStore, MembershipStore, Revision,
    embedded,
};

use crate::process::{self, CLIENTS, RAFT};
use crate::site::{HOSTS, Site};
use crate::wire::Tcp;

pub const TERMS: LeaseTerms = LeaseTerms { ttl: Duration::from_secs(3), drift_ppm_max: 1000 };

/// How long anything may take on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(90);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Embedded,
    Etcd,
}

/// Three servers.
pub struct Servers {
    pub kind: Kind,
    pub site: Site,
    children: Vec<Option<Child>>,
}

impl Servers {
    pub fn start(kind: Kind) -> Self {
        Self::start_at(kind, Site::new())
    }

    pub fn start_at(kind: Kind, site: Site) -> Self {
        let mut servers = Self { kind, site, children: HOSTS.iter().map(|_| None).collect() };
        if kind == Kind::Embedded {
            let names = HOSTS.map(str::to_owned);
            for (host, name) in HOSTS.iter().enumerate() {
                let state = servers.site.disk(host).join("state");
                embedded::bootstrap_server(&state, name, &names).unwrap();
            }
        }
        (0..HOSTS.len()).for_each(|host| servers.begin(host));
        servers
    }

    pub fn begin(&mut self, host: usize) {
        let log = self.site.dir.path().join(format!("{}.log", HOSTS[host]));
        let log = File::options().create(true).append(true).open(log).unwrap();
        let mut command = match self.kind {
            Kind::Embedded => process::node(&self.site, host),
            Kind::Etcd => self.etcd(host),
        };
        command.stdout(Stdio::null()).stderr(log);
        self.children[host] = Some(command.spawn().unwrap());
    }

    fn etcd(&self, host: usize) -> std::process::Command {
        let peer = |host| format!("http://{}:{RAFT}", self.site.address(host));
        let client = format!("http://{}:{CLIENTS}", self.site.address(host));
        let all: Vec<String> =
            (0..HOSTS.len()).map(|host| format!("{}={}", HOSTS[host], peer(host))).collect();
        let mut command = self.site.command(host, Path::new("etcd"));
        command.args(["--name", HOSTS[host], "--initial-cluster-state", "new"]);
        command.args(["--initial-cluster", &all.join(",")]);
        command.args([
            "--listen-peer-urls",
            &peer(host),
            "--initial-advertise-peer-urls",
            &peer(host),
        ]);
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.arg("--data-dir").arg(self.site.disk(host).join("state"));
        command
    }

    pub fn kill(&mut self, host: usize) {
        let mut child = self.children[host].take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    pub fn signal(&self, host: usize, signal: rustix::process::Signal) {
        let id = self.children[host].as_ref().unwrap().id();
        process::signal(id, signal);
    }

    /// Restarts those that have ended by themselves.
    pub fn revive(&mut self) {
        for host in 0..HOSTS.len() {
            let has_ended =
                self.children[host].as_mut().is_none_or(|it| it.try_wait().unwrap().is_some());
            if has_ended {
                self.begin(host);
            }
        }
    }

    /// The leading server, if that is visible from outside: of etcd only its own tools show it.
    pub async fn leader(&self) -> usize {
        match self.kind {
            Kind::Embedded => {
                let members = self.members().await;
                let name = eventually("somebody leads", async || {
                    members.request_leadership("").await.ok()
                })
                .await;
                HOSTS.iter().position(|host| *host == name).unwrap()
            }
            Kind::Etcd => {
                eventually("an etcd leads", async || {
                    (0..HOSTS.len()).find(|host| self.etcd_leads(*host))
                })
                .await
            }
        }
    }

    fn etcd_leads(&self, host: usize) -> bool {
        let endpoint = format!("--endpoints=http://{}:{CLIENTS}", self.site.address(host));
        let mut command = std::process::Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").args([
            &endpoint,
            "--command-timeout=1s",
            "endpoint",
            "status",
            "-w",
            "json",
        ]);
        let Ok(told) = command.stderr(Stdio::null()).output() else { return false };
        let Ok(status) = serde_json::from_slice::<serde_json::Value>(&told.stdout) else {
            return false;
        };
        let status = &status[0]["Status"];
        !status["leader"].is_null() && status["leader"] == status["header"]["member_id"]
    }

    /// A client.
    pub async fn members(&self) -> Arc<dyn MembershipStore> {
        let addresses = (0..HOSTS.len()).map(|host| self.site.address(host)).collect();
        members(self.kind, addresses).await
    }

    /// A cluster of one VM, of host 1 and backed up by host 2; and its revision.
    pub async fn cluster(&self, name: &str) -> (ClusterName, Revision) {
        let (members, cluster) = (self.members().await, ClusterName::new(name).unwrap());
        let place = VmPlacement { primary: HostId(1), backup: Some(HostId(2)) };
        let register = FailoverRecord::new(BTreeMap::from([(VmId(0), place)]));
        let record = ClusterRecord { register, vms: BTreeMap::from([(VmId(0), "0".to_owned())]) };
        let joined = async || members.join_host("h").await.ok().filter(|host| *host >= HostId(2));
        eventually("there are hosts", joined).await;
        let made = async || {
            let _ = members.change_record(&cluster, Revision(0), &record).await;
            members.read_record(&cluster).await.ok().filter(|known| known.record.is_some())
        };
        let revision = eventually("there is a cluster", made).await.revision;
        (cluster, revision)
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        for child in self.children.iter_mut().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            for host in HOSTS {
                let log = std::fs::read_to_string(self.site.dir.path().join(format!("{host}.log")));
                let log = log.unwrap_or_default();
                let last: Vec<&str> = log.lines().rev().take(12).collect();
                eprintln!("the log of {host} ends, newest first:\n{}", last.join("\n"));
            }
        }
    }
}

/// A client of the servers at these addresses.
pub async fn members(kind: Kind, addresses: Vec<String>) -> Arc<dyn MembershipStore> {
    match kind {
        Kind::Embedded => {
            let at =
                |(host, address): (&&str, &String)| (host.to_string(), format!("{address}:{RAFT}"));
            let addresses = HOSTS.iter().zip(&addresses).map(at).collect();
            let wire = Tcp { me: String::new(), addresses };
            Arc::new(EmbeddedStore::new(
                HOSTS.map(str::to_owned).to_vec(),
                Arc::new(wire),
                TERMS.ttl,
            ))
        }
        Kind::Etcd => {
            let at = |address: &String| format!("http://{address}:{CLIENTS}");
            let endpoints = addresses.iter().map(at).collect();
            let options = EtcdOptions { endpoints, prefix: "firn".to_owned(), tls: None };
            Arc::new(EtcdStore::connect(&options, TERMS).await.unwrap())
        }
    }
}

pub async fn eventually<T>(what: &str, mut holds: impl AsyncFnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = holds().await {
            return value;
        }
        assert!(start.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A change that no other client conflicts with.
pub async fn change(
    members: &dyn MembershipStore,
    cluster: &ClusterName,
    make: impl Fn(&mut ClusterRecord),
) -> Revision {
    eventually("a change is made", async || {
        let known = members.read_record(cluster).await.ok()?;
        let mut record = known.record.unwrap();
        make(&mut record);
        match members.change_record(cluster, known.revision, &record).await {
            Ok(ChangeResult::Done(revision)) => Some(revision),
            _ => None,
        }
    })
    .await
}
