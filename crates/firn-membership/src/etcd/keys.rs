//! The keys in etcd.

use firn_cluster::Host;

use crate::Cluster;

/// The keys with one prefix.
#[derive(Clone, Debug)]
pub struct Keys {
    prefix: String,
}

impl Keys {
    /// The keys with this prefix, with or without a `/` at its end.
    pub fn new(prefix: &str) -> Self {
        Self { prefix: prefix.trim_end_matches('/').to_owned() }
    }

    pub fn next(&self) -> String {
        format!("{}/next", self.prefix)
    }

    pub fn leader(&self) -> String {
        format!("{}/leader", self.prefix)
    }

    pub fn hosts(&self) -> String {
        format!("{}/hosts/", self.prefix)
    }

    pub fn host(&self, host: Host) -> String {
        format!("{}{}", self.hosts(), host.0)
    }

    pub fn clusters(&self) -> String {
        format!("{}/clusters/", self.prefix)
    }

    pub fn cluster(&self, cluster: &Cluster) -> String {
        format!("{}{cluster}", self.clusters())
    }

    pub fn leases(&self, cluster: &Cluster) -> String {
        format!("{}/leases/{cluster}/", self.prefix)
    }

    pub fn lease(&self, cluster: &Cluster, host: Host) -> String {
        format!("{}{}", self.leases(cluster), host.0)
    }

    /// The host that a key after a prefix is about.
    pub fn host_of(prefix: &str, key: &[u8]) -> Option<Host> {
        let number = std::str::from_utf8(key).ok()?.strip_prefix(prefix)?;
        number.parse().ok().map(Host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_name_hosts() {
        let (keys, web) = (Keys::new("firn/"), Cluster::new("web").unwrap());
        assert_eq!(keys.cluster(&web), "firn/clusters/web");
        let key = keys.lease(&web, Host(7));
        assert_eq!(key, "firn/leases/web/7");
        assert_eq!(Keys::host_of(&keys.leases(&web), key.as_bytes()), Some(Host(7)));
        let other = keys.leases(&Cluster::new("web2").unwrap());
        assert_eq!(Keys::host_of(&other, key.as_bytes()), None);
        assert_eq!(Keys::host_of(&keys.hosts(), b"firn/hosts/x"), None);
    }
}
