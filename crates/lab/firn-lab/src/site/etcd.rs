//! etcd servers, one on each of three hosts: when a host is lost, its server is lost too.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result};

use super::SitePlan;
use super::network::host_address;

/// Number of servers.
pub(super) const SERVER_COUNT: usize = 3;

/// The ports they listen at: for clients, and for each other.
const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;

/// An etcd server process; it ends with this value.
#[derive(Debug)]
pub(super) struct EtcdProcess(Child);

/// The servers' addresses for clients.
pub(super) fn client_endpoints() -> Vec<String> {
    (0..SERVER_COUNT).map(|host| endpoint_url(host, CLIENT_PORT)).collect()
}

fn endpoint_url(host: usize, port: u16) -> String {
    format!("http://{}:{port}", host_address(host))
}

impl EtcdProcess {
    /// Starts a server. It answers requests only when a majority of the servers run.
    pub(super) fn start(
        dir: &Path,
        namespace: &str,
        host: usize,
        plan: &SitePlan<'_>,
    ) -> Result<Self> {
        let [clients, peers] = [CLIENT_PORT, PEER_PORT].map(|port| endpoint_url(host, port));
        let servers = plan.hosts.iter().enumerate().take(SERVER_COUNT);
        let all: Vec<String> = servers
            .map(|(host, name)| format!("{name}={}", endpoint_url(host, PEER_PORT)))
            .collect();
        let mut command = Command::new("ip");
        command.args(["netns", "exec", namespace, "etcd", "--name", plan.hosts[host]]);
        command.args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients]);
        command.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
        command.args(["--initial-cluster", &all.join(","), "--initial-cluster-state", "new"]);
        command.arg("--data-dir").arg(dir.join("etcd"));
        let log = File::create(dir.join("etcd.log"))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        Ok(Self(command.spawn().context("starting etcd")?))
    }
}

impl Drop for EtcdProcess {
    fn drop(&mut self) {
        // It may have been killed with its host.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
