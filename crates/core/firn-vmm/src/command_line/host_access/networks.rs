//! Back ends of network cards. Without `restrict=on`, the back end `user` connects the guest with all
//! networks of the host, and with services that listen for the host only.

use super::finding::{Exempt, Finding};
use super::values::{Words, check_keys, known_type, only_value, read_properties};

/// What a guest can do through `-netdev user`.
pub(super) const USER_EFFECT: &str = "lets the guest connect to networks and services of this host";

/// Properties of `user`, without ports, programs and files.
const USER: Words = "dhcpstart dns domainname host hostname ipv4 ipv6 ipv6-dns ipv6-host ipv6-prefix \
    ipv6-prefixlen net restrict";

/// Properties of the card, which `-nic` and `-net nic` describe as well.
const CARD: Words = "addr id mac macaddr model name netdev type vectors";

const TYPES: &[(&str, Words)] = &[("hubport", "hubid"), ("nic", ""), ("none", ""), ("user", USER)];

/// The findings of `-netdev`, `-nic` or `-net`.
pub(super) fn check_network(name: &str, value: &str, exempt: &Exempt<'_>) -> Vec<Finding> {
    let properties = match read_properties(value, "type", name == "netdev") {
        Ok(properties) => properties,
        Err(finding) => return vec![finding],
    };
    let keys = match known_type(&properties, "type", TYPES, exempt) {
        Ok(keys) => keys.copied().unwrap_or_default(),
        Err(_) => return vec![Finding::of_option("connects to something of this host")],
    };
    let is_user = only_value(&properties, "type").is_some_and(|kind| kind == "user");
    let is_restricted = only_value(&properties, "restrict").is_some_and(|it| it == "on");
    let is_open = is_user && !is_restricted && !exempt.covers_key("type");
    let of_user = is_open.then(|| Finding::of_option(USER_EFFECT));
    of_user.into_iter().chain(check_keys(&properties, &[CARD, keys], exempt)).collect()
}
