//! Agent configuration: `agent.toml` of each host.

use std::fs;
use std::path::Path;

use anyhow::Result;

use super::certificates::Authority;
use super::network::{TAP, host_address};
use super::{Agreement, Plan, etcd};

/// The port that agents listen at.
const PORT: u16 = 7415;

/// The file's name.
pub(super) const FILE: &str = "agent.toml";

/// Writes the configuration and certificates of a host into its directory.
pub(super) fn write(
    dir: &Path,
    plan: &Plan<'_>,
    number: usize,
    authority: &Authority,
) -> Result<()> {
    fs::create_dir_all(dir)?;
    authority.certify(dir, plan.hosts[number])?;
    Ok(fs::write(dir.join(FILE), text(plan, number))?)
}

fn text(plan: &Plan<'_>, number: usize) -> String {
    let at = |host: usize| format!("{}:{PORT}", host_address(host));
    let others = plan.hosts.iter().enumerate().filter(|(host, _)| *host != number);
    let peers: String = others.map(|(host, name)| format!("{name} = {:?}\n", at(host))).collect();
    format!(
        "name = {:?}\nlisten = {:?}\ncertificate = \"cert.pem\"\nkey = \"key.pem\"\nauthority = \"ca.pem\"\n\
         networks.lan = {{ tap = {TAP:?} }}\n[peers]\n{peers}{}",
        plan.hosts[number],
        at(number),
        membership(plan)
    )
}

fn membership(plan: &Plan<'_>) -> String {
    let by = match plan.agreement {
        None => return String::new(),
        Some(Agreement::Embedded) => {
            format!("servers = {:?}\nstate-dir = \"state\"\n", plan.hosts)
        }
        Some(Agreement::Etcd) => format!("etcd = {:?}\n", etcd::endpoints()),
    };
    format!("[membership]\nlease-ms = {}\n{by}", plan.lease.as_millis())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_host_knows_the_others_and_not_itself() {
        let hosts = ["a", "b", "c"];
        let mut plan = Plan {
            hosts: &hosts,
            agreement: Some(Agreement::Embedded),
            lease: Duration::from_secs(4),
        };
        let b = text(&plan, 1);
        assert!(b.contains("name = \"b\"\nlisten = \"10.77.0.2:7415\""), "{b}");
        assert!(b.contains("[peers]\na = \"10.77.0.1:7415\"\nc = \"10.77.0.3:7415\"\n"), "{b}");
        assert!(b.contains("lease-ms = 4000\nservers = [\"a\", \"b\", \"c\"]"), "{b}");
        plan.agreement = None;
        assert!(!text(&plan, 1).contains("membership"));
    }
}
