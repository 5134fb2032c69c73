//! The keys in etcd.

use firn_cluster::HostId;

use crate::ClusterName;

/// The keys with one prefix.
#[derive(Clone, Debug)]
pub struct EtcdKeys {
    prefix: String,
}

impl EtcdKeys {
    /// The keys with this prefix, with or without a `/` at its end.
    pub fn new(prefix: &str) -> Self {
        Self { prefix: prefix.trim_end_matches('/').to_owned() }
    }

    pub fn next_host_key(&self) -> String {
        format!("{}/next", self.prefix)
    }

    pub fn leader_key(&self) -> String {
        format!("{}/leader", self.prefix)
    }

    pub fn hosts_prefix(&self) -> String {
        format!("{}/hosts/", self.prefix)
    }

    pub fn host_key(&self, host: HostId) -> String {
        format!("{}{}", self.hosts_prefix(), host.0)
    }

    pub fn clusters_prefix(&self) -> String {
        format!("{}/clusters/", self.prefix)
    }

    pub fn cluster_key(&self, cluster: &ClusterName) -> String {
        format!("{}{cluster}", self.clusters_prefix())
    }

    pub fn leases_prefix(&self, cluster: &ClusterName) -> String {
        format!("{}/leases/{cluster}/", self.prefix)
    }

    pub fn lease_key(&self, cluster: &ClusterName, host: HostId) -> String {
        format!("{}{}", self.leases_prefix(cluster), host.0)
    }

    /// The host that a key after a prefix is about.
    pub fn host_of(prefix: &str, key: &[u8]) -> Option<HostId> {
        let number = std::str::from_utf8(key).ok()?.strip_prefix(prefix)?;
        number.parse().ok().map(HostId)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_name_hosts() {
        let (keys, web) = (EtcdKeys::new("firn/"), ClusterName::new("web").unwrap());
        assert_eq!(keys.cluster_key(&web), "firn/clusters/web");
        let key = keys.lease_key(&web, HostId(7));
        assert_eq!(key, "firn/leases/web/7");
        assert_eq!(EtcdKeys::host_of(&keys.leases_prefix(&web), key.as_bytes()), Some(HostId(7)));
        let other = keys.leases_prefix(&ClusterName::new("web2").unwrap());
        assert_eq!(EtcdKeys::host_of(&other, key.as_bytes()), None);
        assert_eq!(EtcdKeys::host_of(&keys.hosts_prefix(), b"firn/hosts/x"), None);
    }
}
