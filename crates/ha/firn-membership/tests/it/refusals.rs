//! Impossible requests are refused, with the reason.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use firn_cluster::failover::FailoverRecord;
use firn_cluster::{HostId, VmId};
use firn_membership::embedded::{RaftServer, bootstrap_server};
use firn_membership::{
    ChangeResult, ClusterName, ClusterRecord, LeaseResult, MembershipError, Revision,
};

use crate::servers::{Kind, Servers, TERMS, eventually, members};
use crate::wire::Tcp;

fn text(trouble: MembershipError) -> String {
    let MembershipError::Refused(text) = trouble else { panic!("{trouble:?}") };
    text
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

#[test]
fn two_hosts_are_no_cluster() {
    let dir = tempfile::tempdir().unwrap();
    let two = text(bootstrap_server(dir.path(), "a", &names(&["a", "b"])).unwrap_err());
    assert!(two.contains("Give three"), "{two}");
    assert!(bootstrap_server(dir.path(), "a", &names(&["a", "a", "a"])).is_err());
    let other = text(bootstrap_server(dir.path(), "d", &names(&["a", "b", "c"])).unwrap_err());
    assert!(other.contains("d is not one of the servers: a, b, c"), "{other}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left of it");
    bootstrap_server(dir.path(), "a", &names(&["a", "b", "c"])).unwrap();
    let twice = text(bootstrap_server(dir.path(), "a", &names(&["a", "b", "c"])).unwrap_err());
    assert!(twice.contains("founded once"), "{twice}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_has_forgotten_does_not_vote() {
    let dir = tempfile::tempdir().unwrap();
    let wire = || std::sync::Arc::new(Tcp { me: "a".to_owned(), addresses: Default::default() });
    let begin =
        async || RaftServer::start_server(dir.path(), "a", TERMS, wire()).await.err().map(text);
    let lost = begin().await.unwrap();
    assert!(lost.contains("members.redb is not there") && lost.contains("another name"), "{lost}");
    std::fs::write(dir.path().join("members.redb"), "something else").unwrap();
    let damaged =
        RaftServer::start_server(dir.path(), "a", TERMS, wire()).await.err().unwrap().to_string();
    assert!(damaged.contains("members.redb"), "{damaged}");
}

/// The server has lost entries that it had acknowledged: with one other it would be a majority that
/// lacks them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_founded_again_does_not_vote() {
    let mut servers = Servers::start(Kind::Embedded);
    let (web, _) = servers.cluster("web").await;
    // Until all three know each other.
    for host in 0..3 {
        servers.kill(host);
        let members = servers.members().await;
        eventually("the others go on", async || members.read_record(&web).await.ok()).await;
        servers.begin(host);
        eventually("all are there", async || members.read_record(&web).await.ok()).await;
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    servers.kill(2);
    let state = servers.site.disk(2).join("state");
    std::fs::remove_dir_all(&state).unwrap();
    bootstrap_server(&state, "c", &names(&["a", "b", "c"])).unwrap();
    servers.begin(2);
    let members = servers.members().await;
    eventually("the others go on", async || members.read_record(&web).await.ok()).await;
    servers.kill(1);
    tokio::time::sleep(Duration::from_secs(8)).await;
    assert!(members.read_record(&web).await.is_err(), "it was elected, or elects");
    servers.begin(1);
    eventually("a majority is back", async || members.read_record(&web).await.ok()).await;
}

async fn nobody_answers(kind: Kind) {
    // No process listens there.
    let members = members(kind, (1..4).map(|host| format!("127.250.250.{host}")).collect()).await;
    let (web, start) = (ClusterName::new("web").unwrap(), Instant::now());
    assert!(matches!(members.read_record(&web).await, Err(MembershipError::Unreachable(_))));
    assert!(matches!(
        members.request_lease(&web, HostId(1)).await,
        Err(MembershipError::Unreachable(_))
    ));
    assert!(members.change_record(&web, Revision(0), &nothing()).await.is_err());
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
}

/// A record of no VMs.
fn nothing() -> ClusterRecord {
    ClusterRecord { register: FailoverRecord::new(BTreeMap::new()), vms: BTreeMap::new() }
}

async fn what_is_not_so_is_refused(kind: Kind) {
    let mut servers = Servers::start(kind);
    let (web, revision) = servers.cluster("web").await;
    let members = servers.members().await;
    let none = ClusterName::new("none").unwrap();
    let known = eventually("it is read", async || members.read_record(&web).await.ok()).await;
    assert_eq!(known.revision, revision);
    let record = known.record.clone();
    let changed = members
        .change_record(&web, Revision(revision.0 + 1), record.as_ref().unwrap())
        .await
        .unwrap();
    assert_eq!(changed, ChangeResult::Other(known));
    assert!(
        matches!(members.request_lease(&none, HostId(1)).await, Ok(LeaseResult::Refused(known)) if known.record.is_none())
    );
    let record = record.unwrap();
    let refused = async |change: fn(&mut ClusterRecord)| {
        let mut bad = record.clone();
        change(&mut bad);
        // On a busy machine another server may be elected just now.
        let answer = async || match members.change_record(&web, revision, &bad).await {
            Err(MembershipError::Refused(text)) => Some(text),
            Err(_) => None,
            Ok(changed) => panic!("{changed:?}"),
        };
        eventually("it is refused", answer).await
    };
    let long = refused(|it| it.vms.extend((0..400).map(|vm| (VmId(vm), "x".repeat(63))))).await;
    assert!(long.contains("make smaller clusters"), "{long}");
    let other = refused(|it| it.register.checkpoint.marks.clear()).await;
    assert!(other.contains("its checkpoint is of other VMs"), "{other}");
    let nobody = refused(|it| it.register.fence.extend([HostId(60_000)])).await;
    assert!(nobody.contains("never joined"), "{nobody}");
    let hosts = [
        members.join_host("a").await.unwrap(),
        members.join_host("b").await.unwrap(),
        members.join_host("a").await.unwrap(),
    ];
    assert!(hosts[0] < hosts[1] && hosts[1] < hosts[2]);
    assert_eq!(members.read_view(&web).await.unwrap().names[&hosts[2]], "a");
    assert_eq!(members.list_clusters().await.unwrap(), std::slice::from_ref(&web));
    let ended = members.change_record(&web, revision, &record.to_ended()).await.unwrap();
    assert!(matches!(ended, ChangeResult::Done(_)));
    let left = members.read_record(&web).await.unwrap().record.unwrap().register;
    assert!(left.is_ended() && left.generation > record.register.generation);
    assert!(matches!(members.request_lease(&web, HostId(2)).await, Ok(LeaseResult::Refused(_))));
    let first = members.change_record(&web, Revision(0), &record).await.unwrap();
    assert!(matches!(first, ChangeResult::Other(_)), "it begins at its beginning again");
    // Without a majority, an error is returned soon.
    (1..3).for_each(|host| servers.kill(host));
    let start = Instant::now();
    assert!(
        members.read_record(&web).await.is_err()
            && members.request_lease(&web, HostId(1)).await.is_err()
    );
    assert!(members.change_record(&web, Revision(0), &nothing()).await.is_err());
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
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
    nobody_answers
    what_is_not_so_is_refused
}
