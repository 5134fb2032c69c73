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

use etcd_client::{
    Compare, CompareOp, GetOptions, GetResponse, KeyValue, Txn, TxnOp, TxnOpResponse, TxnResponse,
};
use firn_cluster::Host;
use firn_cluster::failover::Terms;

use self::keys::Keys;
pub use self::options::{Options, Tls};
use self::servers::Servers;
use crate::{Changed, Cluster, Known, Later, Leased, Members, Record, Revision, Trouble, View};

/// How often an operation is tried that other hosts may conflict with.
const TRIES_MAX: usize = 8;

/// The membership store in etcd.
#[derive(Clone)]
pub struct Etcd {
    servers: Servers,
    keys: Keys,
    ttl_s: i64,
}

impl Etcd {
    /// Prepares connections to these servers. They need not run yet.
    ///
    /// # Errors
    /// If the options can't be used.
    pub async fn connect(options: &Options, terms: Terms) -> Result<Self, Trouble> {
        if options.endpoints.is_empty() {
            return Err(Trouble::Refused("etcd has no address".to_owned()));
        }
        let (servers, keys) = (Servers::connect(options).await?, Keys::new(&options.prefix));
        Ok(Self { servers, keys, ttl_s: whole_seconds(terms) })
    }

    async fn join_as(&self, name: &str) -> Result<Host, Trouble> {
        let next = self.keys.next();
        for _ in 0..TRIES_MAX {
            let known = self.servers.get(next.clone(), None).await?.pop();
            let number = known.as_ref().map_or(Ok(0), number)?;
            let after = number.checked_add(1).ok_or_else(|| {
                Trouble::Refused("all numbers of hosts are taken: begin with another prefix".into())
            })?;
            let txn = Txn::new().when([unmoved(&next, known.as_ref())]).and_then([
                TxnOp::put(next.clone(), after.to_string(), None),
                TxnOp::put(self.keys.host(Host(number)), name, None),
            ]);
            // If the answer is lost, a number may be lost, and nothing more.
            if self.servers.txn(txn).await?.succeeded() {
                return Ok(Host(number));
            }
        }
        Err(contended())
    }

    async fn changed(
        &self,
        cluster: &Cluster,
        from: Revision,
        to: &Record,
    ) -> Result<Changed, Trouble> {
        let key = self.keys.cluster(cluster);
        let mut changes = vec![TxnOp::put(key.clone(), to.to_json()?, None)];
        self.have_joined(to).await?;
        if from == Revision(0) {
            changes.extend(self.first_leases(cluster, to).await?);
        }
        let txn = Txn::new()
            .when([at(&key, from)?])
            .and_then(changes)
            .or_else([TxnOp::get(key.clone(), None)]);
        let answer = self.servers.change(txn).await?;
        match answer.succeeded() {
            true => Ok(Changed::Done(Revision(revision_of(&answer)?))),
            false => Ok(Changed::Other(known(gets(&answer).next())?)),
        }
    }

    /// Checks that the hosts of a record have joined. Numbers are given in order and never taken
    /// back.
    async fn have_joined(&self, record: &Record) -> Result<(), Trouble> {
        let next = self.servers.get(self.keys.next(), None).await?.pop();
        let next = next.as_ref().map_or(Ok(0), number)?;
        match record.hosts().into_iter().find(|host| host.0 >= next) {
            Some(host) => {
                Err(Trouble::Refused(format!("the record names {host}, which has never joined")))
            }
            None => Ok(()),
        }
    }

    /// The leases of a new cluster: it begins as if all its hosts had just been granted one, so
    /// they have time to request theirs.
    async fn first_leases(
        &self,
        cluster: &Cluster,
        record: &Record,
    ) -> Result<Vec<TxnOp>, Trouble> {
        let lease = self.servers.grant(self.ttl_s).await?;
        let put = |host| TxnOp::put(self.keys.lease(cluster, host), "", Some(lease.clone()));
        Ok(record.hosts().into_iter().map(put).collect())
    }

    async fn leased(&self, cluster: &Cluster, host: Host) -> Result<Leased, Trouble> {
        let lease = self.servers.grant(self.ttl_s).await?;
        let mut seen = self.look(cluster, host).await?;
        for _ in 0..TRIES_MAX {
            if !seen.may(host) {
                return Ok(Leased::Refused(seen.known));
            }
            match self.attach((cluster, host), &seen, &lease).await? {
                Ok(()) => return Ok(Leased::Granted(seen.known)),
                Err(other) => seen = other,
            }
        }
        Err(contended())
    }

    async fn seen(&self, cluster: &Cluster) -> Result<View, Trouble> {
        let all = || Some(GetOptions::new().with_prefix());
        let [leases, hosts] = [self.keys.leases(cluster), self.keys.hosts()];
        let txn = Txn::new().and_then([
            TxnOp::get(self.keys.cluster(cluster), None),
            TxnOp::get(leases.clone(), all()),
            TxnOp::get(hosts.clone(), all()),
        ]);
        let answer = self.servers.txn(txn).await?;
        let [record, held, named] = &ranges(&answer)[..] else { return Err(strange("ranges")) };
        let of_host = |prefix: &str, pair: &KeyValue| Keys::host_of(prefix, pair.key());
        let leases = held.kvs().iter().filter_map(|pair| of_host(&leases, pair)).collect();
        let name = |pair: &KeyValue| {
            Some((of_host(&hosts, pair)?, String::from_utf8_lossy(pair.value()).into_owned()))
        };
        let names: BTreeMap<_, _> = named.kvs().iter().filter_map(name).collect();
        Ok(View { known: known(record.kvs().first())?, leases, names })
    }

    /// Takes the leader's key if no host has it, or extends it.
    async fn led_by(&self, name: &str) -> Result<String, Trouble> {
        let key = self.keys.leader();
        let put = TxnOp::put(key.clone(), name, Some(self.servers.grant(self.ttl_s).await?));
        let keep = Txn::new()
            .when([Compare::value(key.clone(), CompareOp::Equal, name)])
            .and_then([put.clone()])
            .or_else([TxnOp::get(key.clone(), None)]);
        let take = Txn::new()
            .when([Compare::create_revision(key.clone(), CompareOp::Equal, 0)])
            .and_then([put])
            .or_else([TxnOp::txn(keep)]);
        let answer = self.servers.txn(take).await?;
        let other =
            gets(&answer).next().map(|pair| String::from_utf8_lossy(pair.value()).into_owned());
        Ok(other.unwrap_or_else(|| name.to_owned()))
    }
}

impl Members for Etcd {
    fn join<'a>(&'a self, name: &'a str) -> Later<'a, Host> {
        Box::pin(self.join_as(name))
    }

    fn clusters(&self) -> Later<'_, Vec<Cluster>> {
        Box::pin(async {
            let prefix = self.keys.clusters();
            let options = GetOptions::new().with_prefix().with_keys_only();
            let pairs = self.servers.get(prefix.clone(), Some(options)).await?;
            let name =
                |pair: &KeyValue| pair.key_str().ok()?.strip_prefix(&prefix).map(str::to_owned);
            pairs.iter().filter_map(name).map(Cluster::new).collect()
        })
    }

    fn read<'a>(&'a self, cluster: &'a Cluster) -> Later<'a, Known> {
        Box::pin(async { known(self.servers.get(self.keys.cluster(cluster), None).await?.first()) })
    }

    fn change<'a>(
        &'a self,
        cluster: &'a Cluster,
        from: Revision,
        to: &'a Record,
    ) -> Later<'a, Changed> {
        Box::pin(self.changed(cluster, from, to))
    }

    fn lease<'a>(&'a self, cluster: &'a Cluster, host: Host) -> Later<'a, Leased> {
        Box::pin(self.leased(cluster, host))
    }

    fn view<'a>(&'a self, cluster: &'a Cluster) -> Later<'a, View> {
        Box::pin(self.seen(cluster))
    }

    fn lead<'a>(&'a self, name: &'a str) -> Later<'a, String> {
        Box::pin(self.led_by(name))
    }

    fn leader(&self) -> Later<'_, Option<String>> {
        Box::pin(async {
            let pair = self.servers.get(self.keys.leader(), None).await?.pop();
            Ok(pair.map(|pair| String::from_utf8_lossy(pair.value()).into_owned()))
        })
    }
}

/// The next whole second after a lease and the drift of clocks.
fn whole_seconds(terms: Terms) -> i64 {
    let ppm = f64::from(terms.drift_ppm_max) / 1e6;
    (terms.ttl.as_secs_f64() * (1.0 + ppm)).floor() as i64 + 1
}

/// The condition that a key is unchanged since it was read.
fn unmoved(key: &str, pair: Option<&KeyValue>) -> Compare {
    Compare::mod_revision(key, CompareOp::Equal, pair.map_or(0, KeyValue::mod_revision))
}

/// The condition that a record has this revision.
fn at(key: &str, revision: Revision) -> Result<Compare, Trouble> {
    let revision = i64::try_from(revision.0).map_err(|_| strange("revision"))?;
    Ok(Compare::mod_revision(key, CompareOp::Equal, revision))
}

fn known(pair: Option<&KeyValue>) -> Result<Known, Trouble> {
    let Some(pair) = pair else { return Ok(Known::default()) };
    let record = Record::from_json(pair.value()).map_err(|why| {
        let key = String::from_utf8_lossy(pair.key());
        Trouble::Refused(format!("{key} in etcd: {why}; has another program changed it?"))
    })?;
    Ok(Known { revision: Revision(pair.mod_revision().unsigned_abs()), record: Some(record) })
}

fn number(pair: &KeyValue) -> Result<u16, Trouble> {
    let number = pair.value_str().ok().and_then(|text| text.parse().ok());
    number.ok_or_else(|| strange("number of a host"))
}

fn ranges(answer: &TxnResponse) -> Vec<GetResponse> {
    let range = |response| match response {
        TxnOpResponse::Get(range) => vec![range],
        TxnOpResponse::Txn(inner) => ranges(&inner),
        _ => Vec::new(),
    };
    answer.op_responses().into_iter().flat_map(range).collect()
}

fn gets(answer: &TxnResponse) -> Gets {
    Gets(ranges(answer))
}

struct Gets(Vec<GetResponse>);

impl Gets {
    /// The first pair, if the key exists.
    fn next(&self) -> Option<&KeyValue> {
        self.0.first()?.kvs().first()
    }
}

fn revision_of(answer: &TxnResponse) -> Result<u64, Trouble> {
    let header = answer.header().ok_or_else(|| strange("header"))?;
    Ok(header.revision().unsigned_abs())
}

fn strange(what: &str) -> Trouble {
    Trouble::Refused(format!("etcd answers without a usable {what}"))
}

fn contended() -> Trouble {
    Trouble::Unreachable("other hosts changed it at the same time, repeatedly".to_owned())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn etcd_counts_longer_than_the_holder() {
        let seconds = |ms, drift_ppm_max| {
            whole_seconds(Terms { ttl: Duration::from_millis(ms), drift_ppm_max })
        };
        assert_eq!((seconds(3000, 1000), seconds(2999, 0), seconds(3999, 1000)), (4, 3, 5));
    }
}
