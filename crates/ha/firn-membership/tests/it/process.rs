//! Processes of a test: this program again, in another role.

use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use firn_cluster::failover::HostGuard;
use firn_cluster::{Generation, HostId};
use firn_membership::embedded::RaftServer;
use firn_membership::{
    ClusterMember, ClusterName, FailoverTiming, HostActions, LeaseResult, MembershipFuture,
    NoEvidence, StartRequest, read_boot_clock, run_controllers,
};
use rustix::process::{Pid, Signal};
use tokio::net::TcpListener;
use tokio::time::sleep;

use crate::servers::{Kind, TERMS, eventually, members};
use crate::site::{HOSTS, Site};
use crate::wire::{self, Tcp};

/// Ports: between servers, and of etcd for its clients.
pub const RAFT: u16 = 7415;
pub const CLIENTS: u16 = 7416;

pub fn signal(id: u32, signal: Signal) {
    rustix::process::kill_process(Pid::from_raw(id as i32).unwrap(), signal).unwrap();
}

fn again(mut command: Command, what: &str) -> Command {
    command.args([what, "--exact", "--ignored", "--nocapture"]);
    command
}

fn addresses(site: &Site) -> String {
    let all: Vec<String> = (0..HOSTS.len()).map(|host| site.address(host)).collect();
    all.join(",")
}

fn addresses_of_env() -> Vec<String> {
    std::env::var("FIRN_MEMBERS").unwrap().split(',').map(str::to_owned).collect()
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// A server of the embedded kind at a host.
pub fn node(site: &Site, host: usize) -> Command {
    let this = std::env::current_exe().unwrap();
    let mut command = again(site.command(host, &this), "process::serve");
    command.env("FIRN_MEMBERS", addresses(site)).env("FIRN_HOST", host.to_string());
    command.env("FIRN_STATE", site.disk(host).join("state"));
    command
}

#[test]
#[ignore = "a part of other tests"]
fn serve() {
    let host: usize = std::env::var("FIRN_HOST").unwrap().parse().unwrap();
    let all = addresses_of_env();
    let at = |(host, address): (&&str, &String)| (host.to_string(), format!("{address}:{RAFT}"));
    let addresses = HOSTS.iter().zip(&all).map(at).collect();
    let own = format!("{}:{RAFT}", all[host]);
    runtime().block_on(async {
        let listener = TcpListener::bind(own).await.unwrap();
        let wire = Arc::new(Tcp { me: HOSTS[host].to_owned(), addresses });
        let state = std::env::var("FIRN_STATE").unwrap();
        let server =
            RaftServer::start_server(Path::new(&state), HOSTS[host], TERMS, wire).await.unwrap();
        wire::serve(server, listener).await;
    });
}

/// Host 1: requests its lease again and again, and sends while it may: a line with the time of the
/// check.
pub fn holder(site: &Site, kind: Kind, cluster: &ClusterName, sent: &Path) -> Command {
    let mut command = again(Command::new(std::env::current_exe().unwrap()), "process::hold");
    command.env("FIRN_MEMBERS", addresses(site)).env("FIRN_KIND", format!("{kind:?}"));
    command.env("FIRN_CLUSTER", cluster.as_str()).env("FIRN_SENT", sent);
    command
}

#[test]
#[ignore = "a part of other tests"]
fn hold() {
    let kind =
        if std::env::var("FIRN_KIND").unwrap() == "Etcd" { Kind::Etcd } else { Kind::Embedded };
    let cluster = ClusterName::new(std::env::var("FIRN_CLUSTER").unwrap()).unwrap();
    let sent = std::env::var("FIRN_SENT").unwrap();
    let guard = Arc::new(std::sync::Mutex::new(HostGuard::new(HostId(1), TERMS)));
    runtime().block_on(async {
        tokio::spawn(renew(kind, cluster, Arc::clone(&guard)));
        let mut file = std::fs::File::options().create(true).append(true).open(sent).unwrap();
        loop {
            let looked = read_boot_clock();
            if guard.lock().unwrap().may_send(looked) {
                writeln!(file, "{}", looked.as_nanos()).unwrap();
            }
            sleep(Duration::from_millis(1)).await;
        }
    });
}

async fn renew(kind: Kind, cluster: ClusterName, guard: Arc<std::sync::Mutex<HostGuard>>) {
    let members = members(kind, addresses_of_env()).await;
    loop {
        let asked = read_boot_clock();
        if let Ok(answer) = members.request_lease(&cluster, HostId(1)).await {
            let mut guard = guard.lock().unwrap();
            match answer {
                LeaseResult::Granted(known) => {
                    drop(guard.record_grant(asked, &known.record.unwrap().register))
                }
                LeaseResult::Refused(known) => {
                    drop(guard.learn_record(&known.record.unwrap().register))
                }
            }
        }
        sleep(Duration::from_millis(500)).await;
    }
}

/// An agent, with a VM that is a file: each line is something that it sent, with the generation and
/// the time of the check.
pub fn agent(site: &Site, kind: Kind, name: &str, cluster: &ClusterName, dir: &Path) -> Command {
    let mut command = again(Command::new(std::env::current_exe().unwrap()), "process::live");
    command.env("FIRN_MEMBERS", addresses(site)).env("FIRN_KIND", format!("{kind:?}"));
    command.env("FIRN_CLUSTER", cluster.as_str()).env("FIRN_NAME", name).env("FIRN_DIR", dir);
    command
}

/// The generation that runs here.
struct Runs(std::sync::Mutex<Option<Generation>>);

impl HostActions for Runs {
    fn stop_vms<'a>(
        &'a self,
        _: &'a ClusterName,
        generation: Generation,
    ) -> MembershipFuture<'a, ()> {
        let ended = self.0.lock().unwrap().take();
        assert_eq!(ended, Some(generation));
        Box::pin(async { Ok(()) })
    }

    fn run_vms<'a>(
        &'a self,
        _: &'a ClusterName,
        start: &'a StartRequest,
    ) -> MembershipFuture<'a, ()> {
        assert_eq!(self.0.lock().unwrap().replace(start.generation), None, "two run at once");
        Box::pin(async { Ok(()) })
    }
}

#[test]
#[ignore = "a part of other tests"]
fn live() {
    let env = |name| std::env::var(name).unwrap();
    let kind = if env("FIRN_KIND") == "Etcd" { Kind::Etcd } else { Kind::Embedded };
    let (cluster, name, dir) =
        (ClusterName::new(env("FIRN_CLUSTER")).unwrap(), env("FIRN_NAME"), env("FIRN_DIR"));
    runtime().block_on(async {
        let members = members(kind, addresses_of_env()).await;
        let host = eventually("it joins", async || members.join_host(&name).await.ok()).await;
        std::fs::write(format!("{dir}/{name}.host"), host.0.to_string()).unwrap();
        let runs = Arc::new(Runs(std::sync::Mutex::default()));
        let hosts: Arc<dyn HostActions> = runs.clone();
        let post = Arc::new(ClusterMember::new(Arc::clone(&members), hosts, cluster, host, TERMS));
        let kept = Arc::clone(&post);
        tokio::spawn(async move { kept.follow_record().await });
        let timing = FailoverTiming { lease: TERMS, silence: Duration::ZERO };
        tokio::spawn(async move {
            run_controllers(members, &name, timing, Arc::new(NoEvidence)).await;
        });
        let mut file =
            std::fs::File::options().create(true).append(true).open(format!("{dir}/sent")).unwrap();
        loop {
            let (looked, generation) = (read_boot_clock(), *runs.0.lock().unwrap());
            if let (Some(generation), true) = (generation, post.may_send()) {
                let line = format!("{} {} {}\n", host.0, generation.0, looked.as_nanos());
                file.write_all(line.as_bytes()).unwrap();
            }
            sleep(Duration::from_millis(1)).await;
        }
    });
}
