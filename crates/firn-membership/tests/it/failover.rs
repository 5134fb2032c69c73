//! Nobody does anything: a host is lost, and its VM, which is a file, goes on at its backup, after the last thing that the lost one sent.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use firn_cluster::failover::{Place, Register};
use firn_cluster::{Host, Vm};
use firn_membership::{Cluster, Members, Record, Revision};
use rustix::process::Signal;
use tokio::time::sleep;

use crate::process;
use crate::servers::{Kind, Servers, TERMS, eventually};

/// Three agents; they end with this value.
struct Agents(Vec<Child>);

impl Drop for Agents {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What was sent: by whom, in which timeline, when it looked.
fn sent(dir: &Path) -> Vec<(Host, u32, Duration)> {
    let text = fs::read_to_string(dir.join("sent")).unwrap_or_default();
    let line = |line: &str| {
        let mut words = line.split(' ');
        let mut next = || words.next()?.parse::<u64>().ok();
        Some((Host(next()? as u16), next()? as u32, Duration::from_nanos(next()?)))
    };
    text.lines().filter_map(line).collect()
}

fn sent_by(dir: &Path, host: Host) -> usize {
    sent(dir).iter().filter(|(by, ..)| *by == host).count()
}

async fn agents(servers: &Servers, cluster: &Cluster, dir: &Path) -> (Agents, Vec<Host>) {
    let start = |name| {
        let mut command = process::agent(&servers.site, servers.kind, name, cluster, dir);
        command.stdout(Stdio::null()).spawn().unwrap()
    };
    let agents = Agents(["a", "b", "c"].map(start).into());
    let mut hosts = Vec::new();
    for name in ["a", "b", "c"] {
        let file = dir.join(format!("{name}.host"));
        let number = async || fs::read_to_string(&file).ok()?.parse().ok();
        hosts.push(Host(eventually("it joins", number).await));
    }
    (agents, hosts)
}

async fn make(members: &dyn Members, cluster: &Cluster, primary: Host, backup: Host) {
    let place = Place { primary, backup: Some(backup) };
    let register = Register::new(BTreeMap::from([(Vm(0), place)]));
    let record = Record { register, vms: BTreeMap::from([(Vm(0), "web".to_owned())]) };
    eventually("there is a cluster", async || {
        let _ = members.change(cluster, Revision(0), &record).await;
        members.read(cluster).await.ok()?.record
    })
    .await;
}

/// Loses the agent of the primary, and a server with it.
async fn lose_the_primary(kind: Kind, how: Signal) {
    let servers = Servers::start(kind);
    let (members, cluster) = (servers.members().await, Cluster::new("web").unwrap());
    let dir = tempfile::tempdir().unwrap();
    let (agents, hosts) = agents(&servers, &cluster, dir.path()).await;
    make(&*members, &cluster, hosts[0], hosts[1]).await;
    eventually("the primary sends", async || (sent_by(dir.path(), hosts[0]) > 100).then_some(()))
        .await;
    // Nothing happens as long as all are there.
    sleep(2 * TERMS.ttl).await;
    assert_eq!(sent_by(dir.path(), hosts[1]), 0);

    process::signal(agents.0[0].id(), how);
    let leader = servers.leader().await;
    servers.signal(leader, how);
    let goes_on = async || (sent_by(dir.path(), hosts[1]) > 100).then_some(());
    eventually("the backup sends", goes_on).await;
    if how == Signal::STOP {
        process::signal(agents.0[0].id(), Signal::CONT);
        servers.signal(leader, Signal::CONT);
        sleep(2 * TERMS.ttl).await;
    }
    let all = sent(dir.path());
    let last =
        all.iter().filter(|(_, generation, _)| *generation == 0).map(|line| line.2).max().unwrap();
    let first =
        all.iter().filter(|(_, generation, _)| *generation == 1).map(|line| line.2).min().unwrap();
    assert!(
        last < first,
        "two send at once: {last:?} in the old timeline, {first:?} in the new one"
    );
    assert!(all.iter().all(|(host, generation, _)| (*host == hosts[0]) == (*generation == 0)));
    eprintln!("{kind:?}, {how:?}: {:?} from the last to the first", first - last);
    let known = eventually("it is read", async || members.read(&cluster).await.ok()).await;
    let register = known.record.unwrap().register;
    assert_eq!(register.primaries(), [hosts[1]].into());
    assert!(register.fence.is_empty());
}

macro_rules! both {
    ($name:ident, $how:expr) => {
        mod $name {
            use super::*;

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn embedded() {
                lose_the_primary(Kind::Embedded, $how).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn etcd() {
                lose_the_primary(Kind::Etcd, $how).await;
            }
        }
    };
}

both!(a_primary_is_killed, Signal::KILL);
both!(a_primary_is_stopped_and_wakes, Signal::STOP);
