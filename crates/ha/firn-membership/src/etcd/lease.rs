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
use firn_cluster::HostId;

use super::{EtcdStore, decode_record, get_responses, record_at, unusable_answer};
use crate::{ClusterName, MembershipError, VersionedRecord};

/// The state that a lease depends on, at one moment.
#[derive(Clone, Debug)]
pub struct LeaseState {
    pub known: VersionedRecord,
    /// The change that made the host's own key what it is, or 0.
    own: i64,
}

impl LeaseState {
    fn from_answer(answer: &TxnResponse) -> Result<Self, MembershipError> {
        let [record, own] = &get_responses(answer)[..] else {
            return Err(unusable_answer("ranges"));
        };
        let own = own.kvs().first().map_or(0, |pair| pair.mod_revision());
        Ok(Self { known: decode_record(record.kvs().first())?, own })
    }

    /// Whether the host may have a lease.
    pub fn may_have_lease(&self, host: HostId) -> bool {
        let register = self.known.record.as_ref().map(|record| &record.register);
        register.is_some_and(|it| !it.is_ended() && !it.fence.contains(&host))
    }
}

impl EtcdStore {
    pub(super) async fn read_lease_state(
        &self,
        cluster: &ClusterName,
        host: HostId,
    ) -> Result<LeaseState, MembershipError> {
        LeaseState::from_answer(
            &self
                .servers
                .transact_repeatable(Txn::new().and_then(self.state_reads(cluster, host)))
                .await?,
        )
    }

    /// Attaches the host's key to the lease if the state is as it was read; otherwise returns the
    /// current state.
    pub(super) async fn attach_lease(
        &self,
        (cluster, host): (&ClusterName, HostId),
        seen: &LeaseState,
        lease: &PutOptions,
    ) -> Result<Result<(), LeaseState>, MembershipError> {
        let mine = self.keys.lease_key(cluster, host);
        let unmoved = Compare::mod_revision(mine.clone(), CompareOp::Equal, seen.own);
        let txn = Txn::new()
            .when([record_at(&self.keys.cluster_key(cluster), seen.known.revision)?, unmoved])
            .and_then([TxnOp::put(mine, "", Some(lease.clone()))])
            .or_else(self.state_reads(cluster, host));
        let answer = self.servers.transact_repeatable(txn).await?;
        if answer.succeeded() { Ok(Ok(())) } else { LeaseState::from_answer(&answer).map(Err) }
    }

    fn state_reads(&self, cluster: &ClusterName, host: HostId) -> [TxnOp; 2] {
        [self.keys.cluster_key(cluster), self.keys.lease_key(cluster, host)]
            .map(|key| TxnOp::get(key, None))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::net::TcpListener;
    use std::process::{Child, Command, Stdio};
    use std::time::Duration;

    use firn_cluster::VmId;
    use firn_cluster::failover::{FailoverRecord, LeaseTerms, VmPlacement};

    use super::*;
    use crate::etcd::EtcdOptions;
    use crate::{ClusterRecord, MembershipStore as _, Revision};

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

    async fn begun(etcd: &EtcdStore, web: &ClusterName) {
        let placement = VmPlacement { primary: HostId(0), backup: None };
        let register = FailoverRecord::new(BTreeMap::from([(VmId(0), placement)]));
        let record = ClusterRecord { register, vms: BTreeMap::from([(VmId(0), "web".to_owned())]) };
        for _ in 0..300 {
            let joined = etcd.join_host("a").await;
            if joined.is_ok() && etcd.change_record(web, Revision(0), &record).await.is_ok() {
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
        let options =
            EtcdOptions { endpoints: vec![endpoint], prefix: "firn".to_owned(), tls: None };
        let terms = LeaseTerms { ttl: Duration::from_secs(3), drift_ppm_max: 0 };
        let etcd = EtcdStore::connect(&options, terms).await.unwrap();
        let web = ClusterName::new("web").unwrap();
        begun(&etcd, &web).await;
        let mine = (&web, HostId(0));
        let [early, late] = [
            etcd.servers.grant_lease(60).await.unwrap(),
            etcd.servers.grant_lease(60).await.unwrap(),
        ];
        let seen = etcd.read_lease_state(&web, HostId(0)).await.unwrap();
        assert!(etcd.attach_lease(mine, &seen, &late).await.unwrap().is_ok());
        let now = etcd.attach_lease(mine, &seen, &early).await.unwrap().unwrap_err();
        assert!(now.own > seen.own, "{now:?}");
        // It is of its own time again.
        assert!(etcd.attach_lease(mine, &now, &early).await.unwrap().is_ok());
    }
}
