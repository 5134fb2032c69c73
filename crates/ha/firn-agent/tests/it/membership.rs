//! Three hosts with membership, by their agents' connections.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use firn_agent::{AgentConfig, DetectorTiming};
use firn_control::api::MembershipView;
use firn_control::client;
use firn_supervisor::{Failure, FailureKind};

use crate::command::agent;
use crate::host::{Authority, Host, eventually, free_address, pair, write_config};

const NAMES: [&str; 3] = ["a", "b", "c"];

/// The configuration of the three hosts.
pub fn configured() -> Vec<(tempfile::TempDir, PathBuf)> {
    let authority = Authority::new();
    let addresses = NAMES.map(|name| (name, free_address()));
    let one = |(name, address): (&str, _)| {
        let dir = tempfile::Builder::new().prefix("firn-agent-").tempdir().unwrap();
        let peers: Vec<_> = addresses.iter().copied().filter(|(peer, _)| *peer != name).collect();
        let identity = authority.issue(&[name], |_| ());
        let file = write_config(dir.path(), &authority.pem(), identity, name, address, &peers);
        let mut text = OpenOptions::new().append(true).open(&file).unwrap();
        let servers = "servers = [\"a\", \"b\", \"c\"]\nstate-dir = \"state\"\n";
        // Longer than by default: other tests and compilers make hosts stall.
        let times = "lease-ms = 1500\nsilence-ms = 4000\n";
        write!(text, "[membership]\n{servers}{times}").unwrap();
        (dir, file)
    };
    addresses.into_iter().map(one).collect()
}

fn start((dir, file): (tempfile::TempDir, PathBuf)) -> Result<Host, Failure> {
    Host::with_config(dir, AgentConfig::load(&file).unwrap(), DetectorTiming::default())
}

fn found(file: &Path) -> (Option<i32>, String) {
    let out = agent(&["found", file.to_str().unwrap()]).output().unwrap();
    let said = [out.stdout, out.stderr].concat();
    (out.status.code(), String::from_utf8_lossy(&said).into_owned())
}

fn view(host: &Host) -> MembershipView {
    client::read_records(&host.base).unwrap()
}

#[test]
fn three_hosts_elect_a_leader_and_tolerate_the_loss_of_one() {
    let configured = configured();
    for (_, file) in &configured {
        let (code, said) = found(file);
        assert_eq!(code, Some(0), "{said}");
        assert!(said.contains("one of the servers a, b, c"), "{said}");
        let (code, said) = found(file);
        assert!(code == Some(2) && said.contains("founded once"), "{said}");
    }
    let mut hosts: Vec<Host> = configured.into_iter().map(|it| start(it).unwrap()).collect();
    eventually("somebody leads", || view(&hosts[0]).leader.is_some());
    let first = view(&hosts[0]);
    assert_eq!((first.kind.as_str(), first.lease_ms, first.trouble), ("embedded", 1500, None));
    let leader = NAMES.iter().position(|name| Some(*name) == first.leader.as_deref()).unwrap();
    hosts[leader].kill();
    let left = (leader + 1) % NAMES.len();
    eventually("another one leads", || {
        let now = view(&hosts[left]).leader;
        now.is_some() && now != first.leader
    });
    hosts[left].kill();
    let last = (leader + 2) % NAMES.len();
    eventually("without a majority nobody leads", || view(&hosts[last]).leader.is_none());
    assert!(view(&hosts[last]).trouble.is_some());
}

#[test]
fn a_host_that_was_not_founded_does_not_begin() {
    let one = configured().remove(0);
    let Err(failure) = start(one) else { panic!("it begins") };
    let said = failure.to_string();
    assert!(said.contains("members.redb is not there"), "{said}");
    assert_eq!(failure.kind, FailureKind::Usage);
}

#[test]
fn a_host_without_consensus_reports_that() {
    let [a, _b] = pair();
    let failure = client::read_records(&a.base).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Usage);
    assert!(failure.hint.unwrap().contains("[membership]"));
}
