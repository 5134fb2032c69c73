//! Failover without a person: a host is lost, and its VM, which is a file, continues at its backup,
//! after the last output of the lost one.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use firn_cluster::failover::{FailoverRecord, VmPlacement};
use firn_cluster::{HostId, VmId};
use firn_membership::{ClusterName, ClusterRecord, MembershipStore, Revision};
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

/// What was sent: by which host, in which generation, and the time of the check.
fn sent(dir: &Path) -> Vec<(HostId, u32, Duration)> {
    let text = fs::read_to_string(dir.join("sent")).unwrap_or_default();
    let line = |line: &str| {
        let mut words = line.split(' ');
        let mut next = || words.next()?.parse::<u64>().ok();
        Some((HostId(next()? as u16), next()? as u32, Duration::from_nanos(next()?)))
    };
    text.lines().filter_map(line).collect()
}

fn sent_by(dir: &Path, host: HostId) -> usize {
    sent(dir).iter().filter(|(by, ..)| *by == host).count()
}

async fn agents(servers: &Servers, cluster: &ClusterName, dir: &Path) -> (Agents, Vec<HostId>) {
    let start = |name| {
        let mut command = process::agent(&servers.site, servers.kind, name, cluster, dir);
        command.stdout(Stdio::null()).spawn().unwrap()
    };
    let agents = Agents(["a", "b", "c"].map(start).into());
    let mut hosts = Vec::new();
    for name in ["a", "b", "c"] {
        let file = dir.join(format!("{name}.host"));
        let number = async || fs::read_to_string(&file).ok()?.parse().ok();
        hosts.push(HostId(eventually("it joins", number).await));
    }
    (agents, hosts)
}

async fn make(
    members: &dyn MembershipStore,
    cluster: &ClusterName,
    primary: HostId,
    backup: HostId,
) {
    let place = VmPlacement { primary, backup: Some(backup) };
    let register = FailoverRecord::new(BTreeMap::from([(VmId(0), place)]));
    let record = ClusterRecord { register, vms: BTreeMap::from([(VmId(0), "web".to_owned())]) };
    eventually("there is a cluster", async || {
        let _ = members.change_record(cluster, Revision(0), &record).await;
        members.read_record(cluster).await.ok()?.record
    })
    .await;
}

/// Loses the host of the primary, whose server leads, as often as necessary: on a busy machine
/// another server may lead by then, or the primary may not have had its lease in time.
async fn lose_the_primary(kind: Kind, how: Signal) {
    for _ in 0..5 {
        if is_lost_and_goes_on(kind, how).await {
            return;
        }
    }
    panic!("each time another server leads, or the backup sends, before the primary is lost");
}

/// False if another server leads before the primary is lost, or if the primary had no lease.
/// Server and agent are lost together: at a host that lost its agent only, a server could continue
/// to lead, and no controller would run. In `firn-agent` they are one process.
async fn is_lost_and_goes_on(kind: Kind, how: Signal) -> bool {
    let servers = Servers::start(kind);
    let (members, cluster) = (servers.members().await, ClusterName::new("web").unwrap());
    let dir = tempfile::tempdir().unwrap();
    let (agents, hosts) = agents(&servers, &cluster, dir.path()).await;
    let lost = servers.leader().await;
    let (primary, backup) = (hosts[lost], hosts[(lost + 1) % hosts.len()]);
    make(&*members, &cluster, primary, backup).await;
    let sends = async || [primary, backup].into_iter().find(|it| sent_by(dir.path(), *it) > 100);
    if eventually("one of them sends", sends).await == backup {
        return false;
    }
    // Nothing happens as long as all hosts run.
    sleep(2 * TERMS.ttl).await;
    assert_eq!(sent_by(dir.path(), backup), 0);
    if servers.leader().await != lost {
        return false;
    }

    process::signal(agents.0[lost].id(), how);
    servers.signal(lost, how);
    let goes_on = async || (sent_by(dir.path(), backup) > 100).then_some(());
    eventually("the backup sends", goes_on).await;
    if how == Signal::STOP {
        process::signal(agents.0[lost].id(), Signal::CONT);
        servers.signal(lost, Signal::CONT);
        sleep(2 * TERMS.ttl).await;
    }
    does_not_overlap(&sent(dir.path()), primary, &format!("{kind:?}, {how:?}"));
    let known = eventually("it is read", async || members.read_record(&cluster).await.ok()).await;
    let register = known.record.unwrap().register;
    assert_eq!(register.primaries(), [backup].into());
    assert!(register.fence.is_empty());
    true
}

/// The old generation is the primary's, the new one is not, and begins after it.
fn does_not_overlap(all: &[(HostId, u32, Duration)], primary: HostId, what: &str) {
    let of = |wanted: u32| all.iter().filter(move |line| line.1 == wanted).map(|line| line.2);
    let (last, first) = (of(0).max().unwrap(), of(1).min().unwrap());
    assert!(
        last < first,
        "two send at once: {last:?} in the old timeline, {first:?} in the new one"
    );
    assert!(all.iter().all(|(host, generation, _)| (*host == primary) == (*generation == 0)));
    eprintln!("{what}: {:?} from the last to the first", first - last);
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
