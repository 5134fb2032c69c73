//! One request for a lease: the state that was read, and the transaction that depends on it.
//!
//! ```text
//!   grant L ---> read: record r, own key k --- fenced? refuse
//!                 ^                          '--- if record == r and own key == k: put own key, L
//!                 |                                 | else
//!                 '---------------------------------'
//! ```
//!
//! The own key is compared so that only one of several transactions takes effect: an abandoned one
//! that arrives late would attach the key to an older etcd lease, which ends while the holder
//! believes in a newer one.

use etcd_client::{Compare, CompareOp, PutOptions, Txn, TxnOp, TxnResponse};
use firn_cluster::Host;

use super::{Etcd, at, known, ranges, strange};
use crate::{Cluster, Known, Trouble};

/// The state that a lease depends on, at one moment.
#[derive(Clone, Debug)]
pub struct Seen {
    pub known: Known,
    /// The change that made the host's own key what it is, or 0.
    own: i64,
}

impl Seen {
    fn of(answer: &TxnResponse) -> Result<Self, Trouble> {
        let [record, own] = &ranges(answer)[..] else { return Err(strange("ranges")) };
        let own = own.kvs().first().map_or(0, |pair| pair.mod_revision());
        Ok(Self { known: known(record.kvs().first())?, own })
    }

    /// Whether the host may have a lease.
    pub fn may(&self, host: Host) -> bool {
        let register = self.known.record.as_ref().map(|record| &record.register);
        register.is_some_and(|it| !it.is_ended() && !it.fence.contains(&host))
    }
}

impl Etcd {
    pub(super) async fn look(&self, cluster: &Cluster, host: Host) -> Result<Seen, Trouble> {
        Seen::of(&self.servers.txn(Txn::new().and_then(self.looks(cluster, host))).await?)
    }

    /// Attaches the host's key to the lease if the state is as it was read; otherwise returns the
    /// current state.
    pub(super) async fn attach(
        &self,
        (cluster, host): (&Cluster, Host),
        seen: &Seen,
        lease: &PutOptions,
    ) -> Result<Result<(), Seen>, Trouble> {
        let mine = self.keys.lease(cluster, host);
        let unmoved = Compare::mod_revision(mine.clone(), CompareOp::Equal, seen.own);
        let txn = Txn::new()
            .when([at(&self.keys.cluster(cluster), seen.known.revision)?, unmoved])
            .and_then([TxnOp::put(mine, "", Some(lease.clone()))])
            .or_else(self.looks(cluster, host));
        let answer = self.servers.txn(txn).await?;
        if answer.succeeded() { Ok(Ok(())) } else { Seen::of(&answer).map(Err) }
    }

    fn looks(&self, cluster: &Cluster, host: Host) -> [TxnOp; 2] {
        [self.keys.cluster(cluster), self.keys.lease(cluster, host)]
            .map(|key| TxnOp::get(key, None))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::net::TcpListener;
    use std::process::{Child, Command, Stdio};
    use std::time::Duration;

    use firn_cluster::Vm;
    use firn_cluster::failover::{Place, Register, Terms};

    use super::*;
    use crate::etcd::Options;
    use crate::{Members as _, Record, Revision};

    struct Server(Child);

    impl Drop for Server {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn serve(dir: &std::path::Path) -> (Server, String) {
        let port = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let [client, peer] = [port(), port()].map(|port| format!("http://127.0.0.1:{port}"));
        let mut command = Command::new("etcd");
        command.arg("--data-dir").arg(dir);
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &format!("default={peer}")]);
        (Server(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()), client)
    }

    async fn begun(etcd: &Etcd, web: &Cluster) {
        let place = Place { primary: Host(0), backup: None };
        let register = Register::new(BTreeMap::from([(Vm(0), place)]));
        let record = Record { register, vms: BTreeMap::from([(Vm(0), "web".to_owned())]) };
        for _ in 0..300 {
            let joined = etcd.join("a").await;
            if joined.is_ok() && etcd.change(web, Revision(0), &record).await.is_ok() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("etcd does not begin");
    }

    /// The older request was abandoned, and arrives after the newer one.
    #[tokio::test]
    async fn what_arrives_late_does_not_shorten_a_lease() {
        let dir = tempfile::tempdir().unwrap();
        let (_server, endpoint) = serve(dir.path());
        let options = Options { endpoints: vec![endpoint], prefix: "firn".to_owned(), tls: None };
        let terms = Terms { ttl: Duration::from_secs(3), drift_ppm_max: 0 };
        let etcd = Etcd::connect(&options, terms).await.unwrap();
        let web = Cluster::new("web").unwrap();
        begun(&etcd, &web).await;
        let mine = (&web, Host(0));
        let [early, late] =
            [etcd.servers.grant(60).await.unwrap(), etcd.servers.grant(60).await.unwrap()];
        let seen = etcd.look(&web, Host(0)).await.unwrap();
        assert!(etcd.attach(mine, &seen, &late).await.unwrap().is_ok());
        let now = etcd.attach(mine, &seen, &early).await.unwrap().unwrap_err();
        assert!(now.own > seen.own, "{now:?}");
        // It is of its own time again.
        assert!(etcd.attach(mine, &now, &early).await.unwrap().is_ok());
    }
}
