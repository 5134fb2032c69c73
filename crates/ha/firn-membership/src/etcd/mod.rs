//! Membership by the user's etcd.
//!
//! ```text
//!   firn/next                     the number of the next host
//!   firn/hosts/7                  "b": the agent of host b is host 7
//!   firn/leader                   "a", attached to an etcd lease
//!   firn/clusters/web             the record, JSON
//!   firn/leases/web/7             empty, attached to an etcd lease: it exists while
//!                                 host 7 may believe in its lease
//! ```
//!
//! # Leases
//!
//! A lease of Firn is a *new* etcd lease each time, and one transaction that attaches the host's
//! key to it if the record still doesn't fence the host, and no other transaction of the host came
//! before (`lease`):
//!
//! ```text
//!   host  requests |                 |========= believes, counted from the request ========|
//!                   \               /                                                      .
//!   etcd             grant L2 ---- if record and key are unchanged: put leases/web/7, L2   .
//!                    |=================== L2, and so the key, lasts =======================.=====|
//! ```
//!
//! Both the grant and the put go through etcd's log, so they happen after the request.
//! `LeaseKeepAlive` doesn't: a server that was the leader, and was stopped or cut off, answers it
//! from memory, while its successor counts from before; and when the old leader returns, it revokes
//! leases that others have extended. A lease that no host extends is never revoked too early. Firn
//! revokes none either: the key would be gone while its holder believes in it. Leases that were
//! replaced expire by themselves, and so does the lease of a fenced host, which gets no other one.
//!
//! etcd counts whole seconds, so its lease is the next whole second after Firn's lease and the
//! drift of clocks. A new leader of etcd counts every lease from the start of its term: later than
//! necessary, never earlier.

mod keys;
mod lease;
mod options;
mod servers;

use std::collections::BTreeMap;
use std::collections::BTreeSet;

use etcd_client::{
    Compare, CompareOp, GetOptions, GetResponse, KeyValue, Txn, TxnOp, TxnOpResponse, TxnResponse,
};
use firn_cluster::HostId;
use firn_cluster::failover::LeaseTerms;

use self::keys::EtcdKeys;
pub use self::options::{EtcdOptions, EtcdTls};
use self::servers::EtcdServers;
use crate::{
    ChangeResult, ClusterName, ClusterRecord, LeaseResult, MembershipError, MembershipFuture,
    MembershipStore, RecordView, Revision, VersionedRecord,
};

/// How often an operation is tried that other hosts may conflict with.
const ATTEMPTS_MAX: usize = 8;

/// The membership store in etcd.
#[derive(Clone)]
pub struct EtcdStore {
    servers: EtcdServers,
    keys: EtcdKeys,
    ttl_s: i64,
}

impl EtcdStore {
    /// Prepares connections to these servers. They need not run yet.
    ///
    /// # Errors
    /// If the options can't be used.
    pub async fn connect(
        options: &EtcdOptions,
        terms: LeaseTerms,
    ) -> Result<Self, MembershipError> {
        if options.endpoints.is_empty() {
            return Err(MembershipError::Refused("etcd has no address".to_owned()));
        }
        let (servers, keys) =
            (EtcdServers::connect(options).await?, EtcdKeys::new(&options.prefix));
        Ok(Self { servers, keys, ttl_s: lease_seconds(terms) })
    }

    async fn join_by_number(&self, name: &str) -> Result<HostId, MembershipError> {
        let next = self.keys.next_host_key();
        for _ in 0..ATTEMPTS_MAX {
            let known = self.servers.get_pairs(next.clone(), None).await?.pop();
            let number = known.as_ref().map_or(Ok(0), decode_number)?;
            let after = number.checked_add(1).ok_or_else(|| {
                MembershipError::Refused(
                    "all numbers of hosts are taken: begin with another prefix".into(),
                )
            })?;
            let txn = Txn::new().when([unchanged_key(&next, known.as_ref())]).and_then([
                TxnOp::put(next.clone(), after.to_string(), None),
                TxnOp::put(self.keys.host_key(HostId(number)), name, None),
            ]);
            // If the answer is lost, a number may be lost, and nothing more.
            if self.servers.transact_repeatable(txn).await?.succeeded() {
                return Ok(HostId(number));
            }
        }
        Err(contention_error())
    }

    async fn put_record(
        &self,
        cluster: &ClusterName,
        from: Revision,
        to: &ClusterRecord,
    ) -> Result<ChangeResult, MembershipError> {
        let key = self.keys.cluster_key(cluster);
        let mut changes = vec![TxnOp::put(key.clone(), to.to_json()?, None)];
        self.check_joined(to).await?;
        if from == Revision(0) {
            changes.extend(self.initial_leases(cluster, to).await?);
        }
        let txn = Txn::new()
            .when([record_at(&key, from)?])
            .and_then(changes)
            .or_else([TxnOp::get(key.clone(), None)]);
        let answer = self.servers.transact_once(txn).await?;
        match answer.succeeded() {
            true => Ok(ChangeResult::Done(Revision(revision_of(&answer)?))),
            false => {
                Ok(ChangeResult::Other(decode_record(read_found_pairs(&answer).first_pair())?))
            }
        }
    }

    /// Checks that the hosts of a record have joined. Numbers are given in order and never taken
    /// back.
    async fn check_joined(&self, record: &ClusterRecord) -> Result<(), MembershipError> {
        let next = self.servers.get_pairs(self.keys.next_host_key(), None).await?.pop();
        let next = next.as_ref().map_or(Ok(0), decode_number)?;
        match record.named_hosts().into_iter().find(|host| host.0 >= next) {
            Some(host) => Err(MembershipError::Refused(format!(
                "the record names {host}, which has never joined"
            ))),
            None => Ok(()),
        }
    }

    /// The leases of a new cluster: it begins as if all its hosts had just been granted one, so
    /// they have time to request theirs.
    async fn initial_leases(
        &self,
        cluster: &ClusterName,
        record: &ClusterRecord,
    ) -> Result<Vec<TxnOp>, MembershipError> {
        let lease = self.servers.grant_lease(self.ttl_s).await?;
        let put = |host| TxnOp::put(self.keys.lease_key(cluster, host), "", Some(lease.clone()));
        Ok(record.named_hosts().into_iter().map(put).collect())
    }

    async fn grant_lease(
        &self,
        cluster: &ClusterName,
        host: HostId,
    ) -> Result<LeaseResult, MembershipError> {
        let lease = self.servers.grant_lease(self.ttl_s).await?;
        let mut seen = self.read_lease_state(cluster, host).await?;
        for _ in 0..ATTEMPTS_MAX {
            if !seen.may_have_lease(host) {
                return Ok(LeaseResult::Refused(seen.known));
            }
            match self.attach_lease((cluster, host), &seen, &lease).await? {
                Ok(()) => return Ok(LeaseResult::Granted(seen.known)),
                Err(other) => seen = other,
            }
        }
        Err(contention_error())
    }

    async fn read_all(&self, cluster: &ClusterName) -> Result<RecordView, MembershipError> {
        let all = || Some(GetOptions::new().with_prefix());
        let [leases, hosts] = [self.keys.leases_prefix(cluster), self.keys.hosts_prefix()];
        let txn = Txn::new().and_then([
            TxnOp::get(self.keys.cluster_key(cluster), None),
            TxnOp::get(leases.clone(), all()),
            TxnOp::get(hosts.clone(), all()),
        ]);
        let answer = self.servers.transact_repeatable(txn).await?;
        let [record, held, named] = &get_responses(&answer)[..] else {
            return Err(unusable_answer("ranges"));
        };
        let of_host = |prefix: &str, pair: &KeyValue| EtcdKeys::host_of(prefix, pair.key());
        let leases = held.kvs().iter().filter_map(|pair| of_host(&leases, pair)).collect();
        let name = |pair: &KeyValue| {
            Some((of_host(&hosts, pair)?, String::from_utf8_lossy(pair.value()).into_owned()))
        };
        let names: BTreeMap<_, _> = named.kvs().iter().filter_map(name).collect();
        let known = decode_record(record.kvs().first())?;
        Ok(RecordView { known, leases, given_up: BTreeSet::new(), names })
    }

    /// Takes the leader's key if no host has it, or extends it.
    async fn take_leadership(&self, name: &str) -> Result<String, MembershipError> {
        let key = self.keys.leader_key();
        let put = TxnOp::put(key.clone(), name, Some(self.servers.grant_lease(self.ttl_s).await?));
        let keep = Txn::new()
            .when([Compare::value(key.clone(), CompareOp::Equal, name)])
            .and_then([put.clone()])
            .or_else([TxnOp::get(key.clone(), None)]);
        let take = Txn::new()
            .when([Compare::create_revision(key.clone(), CompareOp::Equal, 0)])
            .and_then([put])
            .or_else([TxnOp::txn(keep)]);
        let answer = self.servers.transact_repeatable(take).await?;
        let other = read_found_pairs(&answer)
            .first_pair()
            .map(|pair| String::from_utf8_lossy(pair.value()).into_owned());
        Ok(other.unwrap_or_else(|| name.to_owned()))
    }
}

impl MembershipStore for EtcdStore {
    fn join_host<'a>(&'a self, name: &'a str) -> MembershipFuture<'a, HostId> {
        Box::pin(self.join_by_number(name))
    }

    fn list_clusters(&self) -> MembershipFuture<'_, Vec<ClusterName>> {
        Box::pin(async {
            let prefix = self.keys.clusters_prefix();
            let options = GetOptions::new().with_prefix().with_keys_only();
            let pairs = self.servers.get_pairs(prefix.clone(), Some(options)).await?;
            let name =
                |pair: &KeyValue| pair.key_str().ok()?.strip_prefix(&prefix).map(str::to_owned);
            pairs.iter().filter_map(name).map(ClusterName::new).collect()
        })
    }

    fn read_record<'a>(
        &'a self,
        cluster: &'a ClusterName,
    ) -> MembershipFuture<'a, VersionedRecord> {
        Box::pin(async {
            decode_record(
                self.servers.get_pairs(self.keys.cluster_key(cluster), None).await?.first(),
            )
        })
    }

    fn change_record<'a>(
        &'a self,
        cluster: &'a ClusterName,
        from: Revision,
        to: &'a ClusterRecord,
    ) -> MembershipFuture<'a, ChangeResult> {
        Box::pin(self.put_record(cluster, from, to))
    }

    fn request_lease<'a>(
        &'a self,
        cluster: &'a ClusterName,
        host: HostId,
    ) -> MembershipFuture<'a, LeaseResult> {
        Box::pin(self.grant_lease(cluster, host))
    }

    fn read_view<'a>(&'a self, cluster: &'a ClusterName) -> MembershipFuture<'a, RecordView> {
        Box::pin(self.read_all(cluster))
    }

    fn request_leadership<'a>(&'a self, name: &'a str) -> MembershipFuture<'a, String> {
        Box::pin(self.take_leadership(name))
    }

    fn current_leader(&self) -> MembershipFuture<'_, Option<String>> {
        Box::pin(async {
            let pair = self.servers.get_pairs(self.keys.leader_key(), None).await?.pop();
            Ok(pair.map(|pair| String::from_utf8_lossy(pair.value()).into_owned()))
        })
    }
}

/// The next whole second after a lease and the drift of clocks.
fn lease_seconds(terms: LeaseTerms) -> i64 {
    let ppm = f64::from(terms.drift_ppm_max) / 1e6;
    (terms.ttl.as_secs_f64() * (1.0 + ppm)).floor() as i64 + 1
}

/// The condition that a key is unchanged since it was read.
fn unchanged_key(key: &str, pair: Option<&KeyValue>) -> Compare {
    Compare::mod_revision(key, CompareOp::Equal, pair.map_or(0, KeyValue::mod_revision))
}

/// The condition that a record has this revision.
fn record_at(key: &str, revision: Revision) -> Result<Compare, MembershipError> {
    let revision = i64::try_from(revision.0).map_err(|_| unusable_answer("revision"))?;
    Ok(Compare::mod_revision(key, CompareOp::Equal, revision))
}

fn decode_record(pair: Option<&KeyValue>) -> Result<VersionedRecord, MembershipError> {
    let Some(pair) = pair else { return Ok(VersionedRecord::default()) };
    let record = ClusterRecord::from_json(pair.value()).map_err(|why| {
        let key = String::from_utf8_lossy(pair.key());
        MembershipError::Refused(format!("{key} in etcd: {why}; has another program changed it?"))
    })?;
    Ok(VersionedRecord {
        revision: Revision(pair.mod_revision().unsigned_abs()),
        record: Some(record),
    })
}

fn decode_number(pair: &KeyValue) -> Result<u16, MembershipError> {
    let number = pair.value_str().ok().and_then(|text| text.parse().ok());
    number.ok_or_else(|| unusable_answer("number of a host"))
}

fn get_responses(answer: &TxnResponse) -> Vec<GetResponse> {
    let range = |response| match response {
        TxnOpResponse::Get(range) => vec![range],
        TxnOpResponse::Txn(inner) => get_responses(&inner),
        _ => Vec::new(),
    };
    answer.op_responses().into_iter().flat_map(range).collect()
}

fn read_found_pairs(answer: &TxnResponse) -> FoundPairs {
    FoundPairs(get_responses(answer))
}

struct FoundPairs(Vec<GetResponse>);

impl FoundPairs {
    /// The first pair, if the key exists.
    fn first_pair(&self) -> Option<&KeyValue> {
        self.0.first()?.kvs().first()
    }
}

fn revision_of(answer: &TxnResponse) -> Result<u64, MembershipError> {
    let header = answer.header().ok_or_else(|| unusable_answer("header"))?;
    Ok(header.revision().unsigned_abs())
}

fn unusable_answer(what: &str) -> MembershipError {
    MembershipError::Refused(format!("etcd answers without a usable {what}"))
}

fn contention_error() -> MembershipError {
    MembershipError::Unreachable("other hosts changed it at the same time, repeatedly".to_owned())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn etcd_counts_longer_than_the_holder() {
        let seconds = |ms, drift_ppm_max| {
            lease_seconds(LeaseTerms { ttl: Duration::from_millis(ms), drift_ppm_max })
        };
        assert_eq!((seconds(3000, 1000), seconds(2999, 0), seconds(3999, 1000)), (4, 3, 5));
    }
}
