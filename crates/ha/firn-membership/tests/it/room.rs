//! Full disks: nothing that was acknowledged is lost, and work continues when there is room.

use std::time::Duration;

use firn_cluster::VmId;
use firn_membership::{ChangeResult, ClusterName, MembershipStore};
use tokio::time::sleep;

use crate::servers::{Kind, Servers, eventually};
use crate::site::Site;

/// Changes the record until that fails, or a while has passed; returns the number of the newest
/// change that was acknowledged.
async fn change_until_it_fails(
    members: &dyn MembershipStore,
    cluster: &ClusterName,
    from: u64,
) -> (u64, bool) {
    let mut newest = from;
    for number in from + 1..from + 400 {
        let Ok(known) = members.read_record(cluster).await else { return (newest, true) };
        let mut record = known.record.unwrap();
        // Large enough to fill the disk.
        record.vms.extend((1..120).map(|vm| (VmId(vm), format!("{number:063}"))));
        record.vms.insert(VmId(0), number.to_string());
        match members.change_record(cluster, known.revision, &record).await {
            Ok(ChangeResult::Done(_)) => newest = number,
            _ => return (newest, true),
        }
    }
    (newest, false)
}

async fn number(members: &dyn MembershipStore, cluster: &ClusterName) -> u64 {
    let known =
        eventually("it can be read", async || members.read_record(cluster).await.ok()).await;
    known.record.unwrap().vms[&VmId(0)].parse().unwrap()
}

/// Fills the disks of these hosts.
async fn disks_are_full(kind: Kind, hosts: &[usize]) {
    let site = Site::new();
    if !site.bound_disks() {
        firn_skip::skip_test("no small file systems can be mounted here");
        return;
    }
    let mut servers = Servers::start_at(kind, site);
    let (cluster, _) = servers.cluster("web").await;
    let members = servers.members().await;
    let (newest, _) = change_until_it_fails(&*members, &cluster, 0).await;
    assert!(newest > 0);
    hosts.iter().for_each(|&host| servers.site.fill(host, true));
    let mut last = newest;
    let mut has_failed = false;
    let is_majority = hosts.len() > 1;
    // Disks that have room must not run out of it.
    for _ in 0..if is_majority { 20 } else { 3 } {
        let (newest, failed) = change_until_it_fails(&*members, &cluster, last).await;
        (last, has_failed) = (newest, has_failed || failed);
        if has_failed {
            break;
        }
    }
    assert!(has_failed || !is_majority, "a majority writes without room");
    if !is_majority {
        // Without this server, the others continue.
        eventually("the others go on", async || {
            let (newest, _) = change_until_it_fails(&*members, &cluster, last).await;
            let more = newest > last;
            last = newest;
            more.then_some(())
        })
        .await;
    }
    hosts.iter().for_each(|&host| servers.site.fill(host, false));
    sleep(Duration::from_secs(3)).await;
    servers.revive();
    let there = number(&*members, &cluster).await;
    assert!(there == last || there == last + 1, "{last} was acknowledged, {there} is there");
    eventually("it can be changed again", async || {
        let (newest, _) = change_until_it_fails(&*members, &cluster, there + 1).await;
        (newest > there + 1).then_some(())
    })
    .await;
    // All of them, also the one whose disk was full.
    servers.kill((hosts[0] + 1) % 3);
    eventually("the one that had no room is a server again", async || {
        let (newest, _) = change_until_it_fails(&*members, &cluster, there + 5000).await;
        (newest > there + 5000).then_some(())
    })
    .await;
}

macro_rules! both {
    ($name:ident, $hosts:expr) => {
        mod $name {
            use super::*;

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn embedded() {
                disks_are_full(Kind::Embedded, $hosts).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn etcd() {
                disks_are_full(Kind::Etcd, $hosts).await;
            }
        }
    };
}

both!(one_disk_is_full, &[0]);
both!(all_disks_are_full, &[0, 1, 2]);
