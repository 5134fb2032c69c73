//! Changes are made once or not at all, and later reads return them, while servers are killed,
//! stopped and cut off.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use firn_cluster::VmId;
use firn_membership::{ChangeResult, ClusterName, ClusterRecord, MembershipStore, Revision};
use rustix::process::Signal;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::servers::{Kind, Servers, eventually};

const WRITERS: u16 = 3;

/// Duration of one fault: longer than an election takes.
const A_WHILE: Duration = Duration::from_secs(5);

/// The state that writers and readers share.
struct History {
    cluster: ClusterName,
    /// The newest revision that any client has received.
    newest: AtomicU64,
    ends: AtomicBool,
}

fn count(record: &ClusterRecord, writer: VmId) -> u64 {
    record.vms.get(&writer).map_or(0, |count| count.parse().unwrap())
}

/// Counts in a field of its own, by changes of the whole record. Returns how often a change was
/// confirmed, or seen.
async fn write(history: Arc<History>, members: Arc<dyn MembershipStore>, writer: VmId) -> u64 {
    let mut counted = 0;
    while !history.ends.load(Ordering::Relaxed) {
        let Ok(known) = members.read_record(&history.cluster).await else { continue };
        let mut record = known.record.unwrap();
        let there = count(&record, writer);
        // One more than was confirmed: the change whose answer was lost.
        assert!(
            there == counted || there == counted + 1,
            "{writer} counted {counted}, there is {there}"
        );
        counted = there + 1;
        record.vms.insert(writer, counted.to_string());
        record.register.version += 1;
        match members.change_record(&history.cluster, known.revision, &record).await {
            Ok(ChangeResult::Done(revision)) => {
                history.newest.fetch_max(revision.0, Ordering::SeqCst);
            }
            Ok(ChangeResult::Other(_)) => counted = there,
            // It may have been made, or not.
            Err(_) => counted = there,
        }
        sleep(Duration::from_millis(5)).await;
    }
    let known = loop {
        if let Ok(known) = members.read_record(&history.cluster).await {
            break known;
        }
    };
    let there = count(&known.record.unwrap(), writer);
    assert!(
        there == counted || there == counted + 1,
        "{writer} counted {counted}, there is {there}"
    );
    there
}

/// Reads; a revision that any client has received before must be there.
async fn read(history: Arc<History>, members: Arc<dyn MembershipStore>) -> u64 {
    let mut reads = 0;
    while !history.ends.load(Ordering::Relaxed) {
        let floor = history.newest.load(Ordering::SeqCst);
        if let Ok(known) = members.read_record(&history.cluster).await {
            let Revision(seen) = known.revision;
            assert!(seen >= floor, "revision {seen} is read after {floor} was told");
            history.newest.fetch_max(seen, Ordering::SeqCst);
            reads += 1;
        }
        sleep(Duration::from_millis(2)).await;
    }
    reads
}

/// Counts and reads during the faults.
async fn while_troubled(mut servers: Servers, trouble: impl AsyncFnOnce(&mut Servers)) {
    let (cluster, revision) = servers.cluster("web").await;
    let history = Arc::new(History {
        cluster: cluster.clone(),
        newest: AtomicU64::new(revision.0),
        ends: AtomicBool::new(false),
    });
    let (mut writers, mut readers) = (JoinSet::new(), JoinSet::new());
    for writer in 0..WRITERS {
        writers.spawn(write(Arc::clone(&history), servers.members().await, VmId(writer)));
        readers.spawn(read(Arc::clone(&history), servers.members().await));
    }
    trouble(&mut servers).await;
    sleep(Duration::from_secs(2)).await;
    history.ends.store(true, Ordering::Relaxed);
    let counted: u64 = writers.join_all().await.into_iter().sum();
    let reads: u64 = readers.join_all().await.into_iter().sum();
    let members = servers.members().await;
    let record = eventually("all is over", async || members.read_record(&cluster).await.ok())
        .await
        .record
        .unwrap();
    // Had two changes been made from one revision, the version would have been counted once for
    // both.
    assert_eq!(record.register.version, counted);
    assert!(
        counted > 20 && reads > 20,
        "{counted} changes and {reads} reads are too few to say anything"
    );
    eprintln!("{:?}: {counted} changes, {reads} reads", servers.kind);
}

async fn kills(servers: &mut Servers) {
    for _ in 0..3 {
        let leader = servers.leader().await;
        servers.kill(leader);
        sleep(A_WHILE).await;
        servers.begin(leader);
        sleep(Duration::from_secs(1)).await;
    }
    // All at once, as when the power fails.
    (0..3).for_each(|host| servers.kill(host));
    sleep(Duration::from_secs(1)).await;
    (0..3).for_each(|host| servers.begin(host));
    servers.leader().await;
}

async fn stops(servers: &mut Servers) {
    for _ in 0..2 {
        let leader = servers.leader().await;
        servers.signal(leader, Signal::STOP);
        sleep(A_WHILE).await;
        servers.signal(leader, Signal::CONT);
        sleep(Duration::from_secs(1)).await;
    }
}

async fn cuts(servers: &mut Servers) {
    for _ in 0..2 {
        let leader = servers.leader().await;
        if !servers.site.connect(leader, false) {
            firn_skip::skip_test("nobody can be cut off here");
            return;
        }
        sleep(A_WHILE).await;
        assert!(servers.site.connect(leader, true));
        sleep(Duration::from_secs(1)).await;
    }
}

macro_rules! both {
    ($name:ident, $trouble:expr) => {
        mod $name {
            use super::*;

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn embedded() {
                while_troubled(Servers::start(Kind::Embedded), $trouble).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn etcd() {
                while_troubled(Servers::start(Kind::Etcd), $trouble).await;
            }
        }
    };
}

both!(leaders_are_killed, async |servers: &mut Servers| kills(servers).await);
both!(leaders_are_stopped_and_wake, async |servers: &mut Servers| stops(servers).await);
both!(leaders_are_cut_off, async |servers: &mut Servers| cuts(servers).await);
