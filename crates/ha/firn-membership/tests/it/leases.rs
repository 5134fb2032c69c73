//! No lease for a fenced host; a lease expires at its holder before it expires at the store.

use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use firn_cluster::failover::HeldLease;
use firn_cluster::{Generation, HostId};
use firn_membership::{ClusterName, LeaseResult, MembershipStore, RecordView, read_boot_clock};
use rustix::process::Signal;
use tokio::time::sleep;

use crate::process;
use crate::servers::{Kind, Servers, TERMS, change, eventually};

/// Host 1, in this process.
struct Holder {
    lease: Mutex<HeldLease>,
    ends: AtomicBool,
}

impl Holder {
    fn is_held(&self) -> bool {
        self.lease.lock().unwrap().is_held(read_boot_clock())
    }
}

/// Requests a lease as often as it can.
async fn hold(holder: Arc<Holder>, members: Arc<dyn MembershipStore>, cluster: ClusterName) {
    while !holder.ends.load(Ordering::Relaxed) {
        let asked = read_boot_clock();
        if let Ok(LeaseResult::Granted(_)) = members.request_lease(&cluster, HostId(1)).await {
            holder.lease.lock().unwrap().record_grant(asked);
        }
        sleep(Duration::from_millis(20)).await;
    }
}

/// Polls leases while host 1 holds one, through a fault; then fences it, in another fault, and
/// waits until it is harmless.
async fn a_holder_is_seen_and_fenced(kind: Kind) {
    let mut servers = Servers::start(kind);
    let (cluster, _) = servers.cluster("web").await;
    let other = servers.cluster("other").await.0;
    let members = servers.members().await;
    let holder =
        Arc::new(Holder { lease: Mutex::new(HeldLease::new(TERMS)), ends: AtomicBool::new(false) });
    let holding = tokio::spawn(hold(Arc::clone(&holder), servers.members().await, cluster.clone()));
    eventually("a lease is granted", async || holder.is_held().then_some(())).await;
    let mut views = watch(&*members, &cluster, &holder, Duration::from_secs(2)).await;
    let leader = servers.leader().await;
    servers.kill(leader);
    views += watch(&*members, &cluster, &holder, Duration::from_secs(6)).await;
    servers.begin(leader);
    assert!(views > 10, "{views} views say nothing");
    eventually("it holds one again", async || holder.is_held().then_some(())).await;

    change(&*members, &cluster, |record| {
        record.register.fence.insert(HostId(1));
    })
    .await;
    let fenced = read_boot_clock();
    let leader = servers.leader().await;
    servers.signal(leader, Signal::STOP);
    eventually("it is harmless", async || {
        let view = members.read_view(&cluster).await.ok()?;
        (!view.leases.contains(&HostId(1))).then_some(())
    })
    .await;
    assert!(!holder.is_held(), "nobody may run while it may send");
    let took = read_boot_clock() - fenced;
    servers.signal(leader, Signal::CONT);
    // It continues to request its lease.
    sleep(2 * TERMS.ttl).await;
    assert!(!holder.is_held(), "it was granted a lease");
    holder.ends.store(true, Ordering::Relaxed);
    holding.await.unwrap();
    eventually("others are granted leases", async || {
        let second = members.request_lease(&cluster, HostId(2)).await;
        let elsewhere = members.request_lease(&other, HostId(1)).await;
        matches!((second, elsewhere), (Ok(LeaseResult::Granted(_)), Ok(LeaseResult::Granted(_))))
            .then_some(())
    })
    .await;
    eprintln!("{kind:?}: {views} views; a fenced host was harmless after {took:?}");
}

/// A host that holds a lease during the whole time of a poll is in the view.
async fn watch(
    members: &dyn MembershipStore,
    cluster: &ClusterName,
    holder: &Holder,
    time: Duration,
) -> u32 {
    let (end, mut views) = (read_boot_clock() + time, 0);
    while read_boot_clock() < end {
        let lease = holder.lease.lock().unwrap().clone();
        if let Ok(RecordView { leases, .. }) = members.read_view(cluster).await {
            if lease.is_held(read_boot_clock()) {
                assert!(leases.contains(&HostId(1)), "it holds a lease that nobody sees");
                views += 1;
            }
        }
        sleep(Duration::from_millis(50)).await;
    }
    views
}

/// A process of its own; it ends with this value.
struct Sender(Child);

impl Drop for Sender {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The times at which something was sent.
fn sent(file: &Path) -> Vec<Duration> {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).map(Duration::from_nanos).collect()
}

/// A holder is stopped as by a debugger, or a host that freezes; it is fenced, and wakes.
async fn a_frozen_holder_wakes_and_sends_nothing(kind: Kind) {
    let servers = Servers::start(kind);
    let (cluster, _) = servers.cluster("web").await;
    let members = servers.members().await;
    let file = servers.site.dir.path().join("sent");
    let mut command = process::holder(&servers.site, kind, &cluster, &file);
    let sender = Sender(command.stdout(Stdio::null()).spawn().unwrap());
    eventually("it sends", async || (sent(&file).len() > 100).then_some(())).await;
    process::signal(sender.0.id(), Signal::STOP);
    change(&*members, &cluster, |record| {
        record.register.generation = record.register.generation.next();
        record.register.fence.insert(HostId(1));
    })
    .await;
    eventually("it is harmless", async || {
        let view = members.read_view(&cluster).await.ok()?;
        (!view.leases.contains(&HostId(1))).then_some(())
    })
    .await;
    let over = read_boot_clock();
    let before = sent(&file).len();
    process::signal(sender.0.id(), Signal::CONT);
    sleep(2 * TERMS.ttl).await;
    let all = sent(&file);
    assert!(all.iter().all(|looked| *looked < over), "it sends after its lease was over");
    // At most one line was under way when it was stopped.
    assert!(all.len() <= before + 1, "{} lines after {before}", all.len());
}

/// A holder that reaches no server any more stops by itself, before another host may replace it.
async fn a_holder_whose_servers_are_gone_stops(kind: Kind) {
    let mut servers = Servers::start(kind);
    let (cluster, _) = servers.cluster("web").await;
    let file = servers.site.dir.path().join("sent");
    let mut command = process::holder(&servers.site, kind, &cluster, &file);
    let _sender = Sender(command.stdout(Stdio::null()).spawn().unwrap());
    eventually("it sends", async || (sent(&file).len() > 100).then_some(())).await;
    (1..3).for_each(|host| servers.kill(host));
    let killed = read_boot_clock();
    sleep(2 * TERMS.ttl).await;
    let last = *sent(&file).last().unwrap();
    assert!(last < killed + TERMS.ttl, "it sends for {:?} without a majority", last - killed);
    (1..3).for_each(|host| servers.begin(host));
    eventually("it sends again", async || (*sent(&file).last().unwrap() > last).then_some(()))
        .await;
}

macro_rules! both {
    ($($name:ident)*) => {
        $(mod $name {
            use super::*;

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn embedded() {
                super::$name(Kind::Embedded).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn etcd() {
                super::$name(Kind::Etcd).await;
            }
        })*
    };
}

both! {
    a_holder_is_seen_and_fenced
    a_frozen_holder_wakes_and_sends_nothing
    a_holder_whose_servers_are_gone_stops
}

/// A lease that its holder has given up is over at once; a report of an earlier generation ends no
/// lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_is_given_up_is_over_at_once() {
    let servers = Servers::start(Kind::Embedded);
    let (cluster, _) = servers.cluster("web").await;
    let members = servers.members().await;
    let is_there = async |host| {
        let view = members.read_view(&cluster).await.ok()?;
        Some((view.leases.contains(&host), view.given_up.contains(&host)))
    };
    let granted = async || {
        let lease = members.request_lease(&cluster, HostId(1)).await;
        matches!(lease, Ok(LeaseResult::Granted(_))).then_some(())
    };
    eventually("a lease is granted", granted).await;
    change(&*members, &cluster, |record| record.register.generation = Generation(1)).await;
    members.report_lease_given_up(&cluster, HostId(1), Generation(0)).await.unwrap();
    eventually("a late report ends no lease", async || is_there(HostId(1)).await.filter(|it| it.0))
        .await;
    eventually("the lease is over", async || {
        members.report_lease_given_up(&cluster, HostId(1), Generation(1)).await.ok()?;
        is_there(HostId(1)).await.filter(|it| *it == (false, true))
    })
    .await;
    eventually("another lease is granted", granted).await;
    assert_eq!(is_there(HostId(1)).await, Some((true, false)));
}
