//! Elections that end: how long a server waits for the next one is drawn anew each time.
//!
//! ```text
//!   raft's own timer                         both wait 1.4 s, once and for all:  each round both vote for themselves, at once
//!     a  |-------------| vote |-------------| vote |-------------| vote ...
//!     b  |--------------| vote |-------------| vote |-------------| vote ...
//!
//!   here, from the first round without a leader on
//!     a  |-------------| vote |-----------------| vote: b says yes, for its own time is not over
//!     b  |--------------| vote |-------------------------|
//! ```
//!
//! openraft draws a server's time once, when it begins, and looks at it three times in a second at most. Of three servers of which one is lost both
//! others are needed; if those two drew alike, and a vote takes longer than they differ by, because it has to be on a busy disk at both, nobody ever
//! wins. So its timer is left only what it alone knows: that a leader is silent.

use std::hash::{BuildHasher as _, RandomState};
use std::ops::Range;
use std::time::Duration;

use openraft::{BasicNode, Raft};
use tokio::time::sleep;

use super::Types;

type RaftMetrics = openraft::RaftMetrics<u64, BasicNode>;

/// Has raft elect, as long as nobody leads, whenever such a time has passed in which no other server did; until raft ends.
pub async fn hold(raft: Raft<Types>, times_ms: Range<u64>) {
    let mut metrics = raft.metrics();
    loop {
        let (term, leader) = {
            let seen = metrics.borrow_and_update();
            (seen.current_term, seen.current_leader)
        };
        raft.runtime_config().elect(leader.is_some());
        let is_news = |it: &RaftMetrics| (it.current_term, it.current_leader) != (term, leader);
        let news = async { metrics.wait_for(is_news).await.is_err() };
        let is_over = tokio::select! {
            is_over = news => is_over,
            () = sleep(drawn(&times_ms)), if leader.is_none() => {
                raft.trigger().elect().await.is_err()
            }
        };
        if is_over {
            return;
        }
    }
}

fn drawn(times_ms: &Range<u64>) -> Duration {
    let by_chance = RandomState::new().hash_one("election");
    let many = times_ms.end.saturating_sub(times_ms.start).max(1);
    Duration::from_millis(times_ms.start + by_chance % many)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::{Arc, Mutex};

    use tokio::time::timeout;

    use super::super::message::{self, Message, Rpc};
    use super::super::running::{Running, run};
    use super::super::{Wire, found};
    use super::*;
    use crate::{Later, Trouble};

    #[test]
    fn times_differ() {
        let drawn: Vec<Duration> = (0..100).map(|_| drawn(&(1000..2000))).collect();
        let is_within = |it: &Duration| (1000..2000).contains(&(it.as_millis() as u64));
        assert!(drawn.iter().all(is_within), "{drawn:?}");
        assert!(drawn.iter().any(|it| *it != drawn[0]));
    }

    /// How long a vote takes to get to another server.
    const VOTE: Duration = Duration::from_millis(300);

    /// Between servers of this process; votes are slow.
    #[derive(Clone, Default)]
    struct Slow(Arc<Mutex<BTreeMap<String, Running>>>);

    struct At(Slow, &'static str);

    impl Wire for At {
        fn call<'a>(&'a self, to: &'a str, bytes: Vec<u8>) -> Later<'a, Vec<u8>> {
            Box::pin(async move {
                let server = self.0.0.lock().unwrap().get(to).cloned();
                let server = server.ok_or(Trouble::Unreachable("it is lost".to_owned()))?;
                let Message::Raft(letter) = message::decode(&bytes)? else { unreachable!() };
                if matches!(letter.rpc, Rpc::Vote(_)) {
                    sleep(VOTE).await;
                }
                server.told(self.1, letter).await
            })
        }
    }

    /// Of three one is lost, and raft's own timers of the two others would have both elect at once for ever.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn two_whose_timers_are_the_same_elect_one_of_them() {
        let (dir, slow) = (tempfile::tempdir().unwrap(), Slow::default());
        let names = ["a", "b", "c"].map(str::to_owned);
        for me in ["a", "b"] {
            found(&dir.path().join(me), me, &names).unwrap();
        }
        for me in ["a", "b"] {
            let wire: Arc<dyn Wire> = Arc::new(At(slow.clone(), me));
            let running = run(&dir.path().join(me), me, &wire, 1000..1001).await.unwrap();
            slow.0.lock().unwrap().insert(me.to_owned(), running);
        }
        let mut metrics = slow.0.lock().unwrap()["a"].raft.metrics();
        let leads = metrics.wait_for(|it| it.current_leader.is_some());
        let leader = timeout(Duration::from_secs(60), leads).await.unwrap().unwrap().current_leader;
        assert!(leader.is_some());
    }
}
