//! Agent configuration: `agent.toml` of each host.

use std::fs;
use std::path::Path;

use anyhow::Result;

use super::certificates::SiteAuthority;
use super::network::{TAP, host_address};
use super::{ConsensusKind, SitePlan, etcd};

/// The port that agents listen at.
const PORT: u16 = 7415;

/// The file's name.
pub(super) const FILE: &str = "agent.toml";

/// Writes the configuration and certificates of a host into its directory.
pub(super) fn write_config(
    dir: &Path,
    plan: &SitePlan<'_>,
    number: usize,
    authority: &SiteAuthority,
) -> Result<()> {
    fs::create_dir_all(dir)?;
    authority.write_certificate(dir, plan.hosts[number])?;
    Ok(fs::write(dir.join(FILE), config_text(plan, number))?)
}

fn config_text(plan: &SitePlan<'_>, number: usize) -> String {
    let at = |host: usize| format!("{}:{PORT}", host_address(host));
    let others = plan.hosts.iter().enumerate().filter(|(host, _)| *host != number);
    let peers: String = others.map(|(host, name)| format!("{name} = {:?}\n", at(host))).collect();
    format!(
        "name = {:?}\nlisten = {:?}\ncertificate = \"cert.pem\"\nkey = \"key.pem\"\nauthority = \"ca.pem\"\n\
         networks.lan = {{ tap = {TAP:?} }}\n[peers]\n{peers}{}",
        plan.hosts[number],
        at(number),
        membership_section(plan)
    )
}

fn membership_section(plan: &SitePlan<'_>) -> String {
    let by = match plan.agreement {
        None => return String::new(),
        Some(ConsensusKind::Embedded) => {
            format!("servers = {:?}\nstate-dir = \"state\"\n", plan.hosts)
        }
        Some(ConsensusKind::Etcd) => format!("etcd = {:?}\n", etcd::client_endpoints()),
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
        let mut plan = SitePlan {
            hosts: &hosts,
            agreement: Some(ConsensusKind::Embedded),
            lease: Duration::from_secs(4),
        };
        let b = config_text(&plan, 1);
        assert!(b.contains("name = \"b\"\nlisten = \"10.77.0.2:7415\""), "{b}");
        assert!(b.contains("[peers]\na = \"10.77.0.1:7415\"\nc = \"10.77.0.3:7415\"\n"), "{b}");
        assert!(b.contains("lease-ms = 4000\nservers = [\"a\", \"b\", \"c\"]"), "{b}");
        plan.agreement = None;
        assert!(!config_text(&plan, 1).contains("membership"));
    }
}
