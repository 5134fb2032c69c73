//! What can't be done is refused, with the reason.

use std::time::{Duration, Instant};

use firn_cluster::Host;
use firn_membership::embedded::{Server, found};
use firn_membership::{Changed, Cluster, Leased, Revision, Trouble};

use crate::servers::{Kind, Servers, TERMS, eventually, members};
use crate::wire::Tcp;

fn text(trouble: Trouble) -> String {
    let Trouble::Refused(text) = trouble else { panic!("{trouble:?}") };
    text
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

#[test]
fn two_hosts_are_no_cluster() {
    let dir = tempfile::tempdir().unwrap();
    let two = text(found(dir.path(), "a", &names(&["a", "b"])).unwrap_err());
    assert!(two.contains("Give three"), "{two}");
    assert!(found(dir.path(), "a", &names(&["a", "a", "a"])).is_err());
    let other = text(found(dir.path(), "d", &names(&["a", "b", "c"])).unwrap_err());
    assert!(other.contains("d is not one of the servers: a, b, c"), "{other}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left of it");
    found(dir.path(), "a", &names(&["a", "b", "c"])).unwrap();
    let twice = text(found(dir.path(), "a", &names(&["a", "b", "c"])).unwrap_err());
    assert!(twice.contains("founded once"), "{twice}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_has_forgotten_does_not_vote() {
    let dir = tempfile::tempdir().unwrap();
    let wire = || std::sync::Arc::new(Tcp { me: "a".to_owned(), addresses: Default::default() });
    let begin = async || Server::begin(dir.path(), "a", TERMS, wire()).await.err().map(text);
    let lost = begin().await.unwrap();
    assert!(lost.contains("members.redb is not there") && lost.contains("another name"), "{lost}");
    std::fs::write(dir.path().join("members.redb"), "something else").unwrap();
    let damaged = Server::begin(dir.path(), "a", TERMS, wire()).await.err().unwrap().to_string();
    assert!(damaged.contains("members.redb"), "{damaged}");
}

async fn nobody_answers(kind: Kind) {
    // Nobody listens there.
    let members = members(kind, (1..4).map(|host| format!("127.250.250.{host}")).collect()).await;
    let (web, start) = (Cluster::new("web").unwrap(), Instant::now());
    assert!(matches!(members.read(&web).await, Err(Trouble::Unreachable(_))));
    assert!(matches!(members.lease(&web, Host(1)).await, Err(Trouble::Unreachable(_))));
    assert!(members.change(&web, Revision(0), None).await.is_err());
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
}

async fn what_is_not_so_is_refused(kind: Kind) {
    let mut servers = Servers::start(kind);
    let (web, revision) = servers.cluster("web").await;
    let members = servers.members().await;
    let none = Cluster::new("none").unwrap();
    let known = eventually("it is read", async || members.read(&web).await.ok()).await;
    assert_eq!(known.revision, revision);
    let record = known.record.clone();
    let changed = members.change(&web, Revision(revision.0 + 1), record.as_ref()).await.unwrap();
    assert_eq!(changed, Changed::Other(known));
    assert!(
        matches!(members.lease(&none, Host(1)).await, Ok(Leased::Refused(known)) if known.record.is_none())
    );
    let mut long = record.unwrap();
    long.vms.insert(firn_cluster::Vm(0), "x".repeat(20_000));
    let long = text(members.change(&web, revision, Some(&long)).await.unwrap_err());
    assert!(long.contains("make smaller clusters"), "{long}");
    let hosts = [
        members.join("a").await.unwrap(),
        members.join("b").await.unwrap(),
        members.join("a").await.unwrap(),
    ];
    assert!(hosts[0] < hosts[1] && hosts[1] < hosts[2]);
    assert_eq!(members.view(&web).await.unwrap().names[&hosts[2]], "a");
    assert_eq!(members.clusters().await.unwrap(), std::slice::from_ref(&web));
    let ended = members.change(&web, revision, None).await.unwrap();
    assert!(matches!(ended, Changed::Done(_)));
    assert!(members.clusters().await.unwrap().is_empty());
    // Without a majority nothing is answered, soon.
    (1..3).for_each(|host| servers.kill(host));
    let start = Instant::now();
    assert!(members.read(&web).await.is_err() && members.lease(&web, Host(1)).await.is_err());
    assert!(members.change(&web, Revision(0), None).await.is_err());
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
