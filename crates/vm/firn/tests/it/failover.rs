//! Three hosts with an agent each, that agree who may run what: a VM of one goes on at another without a person, and is never heard twice.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair,
};
use rustix::process::Signal;
use serde_json::Value;

use crate::agent::{Agent, write_identity};
use crate::outside::Outside;
use crate::session::{Session, eventually, signal, text};
use crate::vm::Vm;

mod moves;
mod power_cut;
mod power_off;

const PATIENCE: Duration = Duration::from_secs(120);
const HOSTS: [&str; 3] = ["a", "b", "c"];
/// By etcd, and so the longest.
const LEASE: Duration = Duration::from_millis(4000);
const RAFT_LEASE: Duration = Duration::from_millis(1500);
/// Longer than by default: other tests and compilers make hosts stall.
const SILENCE: Duration = Duration::from_millis(4000);
const PORT: u16 = 7415;
const ETCD: u16 = 7416;

fn ip(args: &[&str]) -> Result<(), String> {
    let done = Command::new("ip").args(args).output().unwrap();
    match done.status.success() {
        true => Ok(()),
        false => Err(format!("{args:?}: {}", String::from_utf8_lossy(&done.stderr).trim())),
    }
}

/// Three network namespaces at a bridge, if this machine lets us; else all hosts are on its loopback.
struct Site {
    number: u32,
    has_namespaces: bool,
}

impl Site {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = (std::process::id() * 16 + NUMBER.fetch_add(1, Ordering::Relaxed)) % 60_000;
        let mut site = Self { number, has_namespaces: true };
        if let Err(why) = site.cabled() {
            eprintln!("no network namespaces here, all hosts are on the loopback: {why}");
            site.has_namespaces = false;
        }
        site
    }

    fn names(&self, host: usize) -> (String, String) {
        let (number, name) = (self.number, HOSTS[host]);
        (format!("firn-f{number}-{name}"), format!("ff{number}{name}"))
    }

    fn bridge(&self) -> String {
        format!("ff{}", self.number)
    }

    /// Of a network that is reserved for tests (RFC 2544), or of the loopback. The fourth is the bridge's.
    fn address(&self, host: usize) -> String {
        let (high, low) = (self.number / 250, self.number % 250);
        match self.has_namespaces {
            true => format!("198.{}.{low}.{}", 18 + high % 2, host + 1),
            false => format!("127.{}.{low}.{}", 1 + high % 250, host + 1),
        }
    }

    fn cabled(&self) -> Result<(), String> {
        let (bridge, own) = (self.bridge(), format!("{}/24", self.address(HOSTS.len())));
        ip(&["link", "add", &bridge, "type", "bridge"])?;
        ip(&["address", "add", &own, "dev", &bridge])?;
        ip(&["link", "set", &bridge, "up"])?;
        (0..HOSTS.len()).try_for_each(|host| {
            let ((space, port), address) = (self.names(host), format!("{}/24", self.address(host)));
            ip(&["netns", "add", &space])?;
            let peer = ["type", "veth", "peer", "name", "cable", "netns", &space];
            ip(&[&["link", "add", &port][..], &peer].concat())?;
            ip(&["link", "set", &port, "master", &bridge, "up"])?;
            ip(&["-n", &space, "address", "add", &address, "dev", "cable"])?;
            ip(&["-n", &space, "link", "set", "cable", "up"])?;
            ip(&["-n", &space, "link", "set", "lo", "up"])
        })
    }

    fn command(&self, host: usize, program: &std::path::Path) -> Command {
        match self.has_namespaces {
            true => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", &self.names(host).0]).arg(program);
                command
            }
            false => Command::new(program),
        }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        for host in 0..HOSTS.len() {
            let (space, port) = self.names(host);
            let _ = (ip(&["netns", "delete", &space]), ip(&["link", "delete", &port]));
        }
        let _ = ip(&["link", "delete", &self.bridge()]);
    }
}

/// An etcd beside the hosts; it ends with this value.
struct Etcd(Child);

impl Etcd {
    fn start(site: &Site, dir: &std::path::Path) -> Self {
        let address = site.address(HOSTS.len());
        let [client, peer] = [ETCD, ETCD + 1].map(|port| format!("http://{address}:{port}"));
        let mut command = Command::new("etcd");
        command.arg("--data-dir").arg(dir.join("etcd"));
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &format!("default={peer}")]);
        Self(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Embedded,
    Etcd,
}

/// `web` at `a`, protected by `b`; and `c`.
struct Hosts {
    agents: Vec<Agent>,
    others: [Session; 2],
    outside: Outside,
    // The last to go: then another test may begin.
    vm: Vm,
    _etcd: Option<Etcd>,
    site: Site,
}

impl Hosts {
    fn start(kind: Kind) -> Self {
        Self::start_with(kind, |uplink| format!("firn,id=net,uplink={uplink}"))
    }

    /// The same, with another back end for its card.
    fn start_with(kind: Kind, netdev: fn(&str) -> String) -> Self {
        Self::start_faulty(kind, netdev, None, [None; 3])
    }

    /// The same, where the supervisor of the VM and the agents have faults. The supervisor of a standby has that of its agent.
    fn start_faulty(
        kind: Kind,
        netdev: fn(&str) -> String,
        supervisor: Option<&str>,
        agents: [Option<&str>; 3],
    ) -> Self {
        let (mut vm, others, site) =
            (Vm::one_of_hosts(), [Session::new(), Session::new()], Site::new());
        vm.session.arm(supervisor);
        let outside = Outside::start();
        let uplink = vm.session.path("uplink");
        outside.listen(&uplink);
        let etcd = (kind == Kind::Etcd).then(|| Etcd::start(&site, &vm.session.path("")));
        let sessions = [&vm.session, &others[0], &others[1]];
        configure(kind, &site, sessions);
        let start = |(host, session): (usize, &&Session)| {
            let program = Session::program_beside("firn-agent");
            Agent::spawn_with(site.command(host, &program), session, agents[host])
        };
        let agents = sessions.iter().enumerate().map(start).collect();
        let netdev = netdev(text(&uplink));
        let card = ["-netdev", &netdev, "-device", "virtio-net-pci,netdev=net,romfile="];
        let vm = vm.with(&card).booted_with(&[]);
        let mut control = vm.control();
        control.spawn_job("count", &["firn-guest", "net-dma", "count"]).unwrap();
        control.wait_output("count", "ready", PATIENCE).unwrap();
        outside.is_answered(20);
        Self { agents, others, outside, vm, _etcd: etcd, site }
    }

    fn protect(&self) {
        let a = &self.vm.session;
        eventually("it is protected", PATIENCE, || {
            let protect = a.firn(&["protect", "web", "--backup", "b"]);
            eprintln!("{}{}", protect.out, protect.err);
            protect.code == 0
        });
        eventually("it has a backup", PATIENCE, || place(a)["backup"].as_str().is_some());
        eprintln!("{}", a.firn(&["cluster", "status"]).succeeds().out);
        assert!(place(a)["primary"].as_str().unwrap().starts_with("a "));
        assert!(place(a)["backup"].as_str().unwrap().starts_with("b "));
        assert_eq!(a.status("web")["lease"], 0);
        self.outside.is_answered(50);
    }

    /// All processes of host `a`.
    fn processes(&self) -> Vec<i64> {
        let status = self.vm.session.status("web");
        let of_vm = ["guard_pid", "watcher_pid", "supervisor_pid", "pid"]
            .map(|it| status[it].as_i64().unwrap());
        of_vm.into_iter().chain([self.agents[0].pid()]).collect()
    }

    /// The VM runs at `b`, without anybody having said so, and is heard.
    fn goes_on(&self, since: Instant) {
        let b = &self.others[0];
        eventually("it runs at b", PATIENCE, || {
            matches!(b.status("web")["state"].as_str(), Some("running" | "protected"))
        });
        eprintln!("it runs at b after {:?}", since.elapsed());
        self.outside.is_answered(20);
        eprintln!("it is heard after {:?}", since.elapsed());
        assert!(self.outside.heard().undone.is_empty(), "{:?}", self.outside.heard().undone);
        assert_eq!(b.status("web")["lease"], 1);
    }

    /// Its memory is what its writers wrote. The socket of its agent has the name of the newest QEMU's, which is a standby's by now: it is
    /// started anew.
    fn is_well_at_last(&self) {
        let b = &self.others[0];
        b.firn(&["suspend", "web", "-o", "web.firn"]).succeeds();
        b.firn(&["restore", "web.firn"]).succeeds();
        self.vm.is_well();
    }

    /// And is protected again, by `c`.
    fn is_protected_again(&self) {
        let b = &self.others[0];
        eventually("it has another backup", PATIENCE, || {
            let place = place(b);
            place["backup"].as_str().is_some_and(|it| it.starts_with("c "))
        });
        assert_eq!(b.status("web")["state"], "protected");
        eprintln!("{}", b.firn(&["cluster", "status"]).succeeds().out);
        self.outside.is_answered(50);
        assert!(self.outside.heard().undone.is_empty(), "{:?}", self.outside.heard().undone);
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let sessions = [&self.vm.session, &self.others[0], &self.others[1]];
        for (host, session) in HOSTS.iter().zip(sessions) {
            for file in ["agent.log", "run/web/log"] {
                let log = fs::read_to_string(session.path(file)).unwrap_or_default();
                let last = log.lines().count().saturating_sub(40);
                let last: Vec<&str> = log.lines().skip(last).collect();
                eprintln!("{file} of {host} ends:\n{}", last.join("\n"));
            }
        }
    }
}

/// Where the VM is, as hosts have agreed.
fn place(session: &Session) -> Value {
    let output = session.firn(&["--json", "cluster", "status"]);
    let status: Value = serde_json::from_str(&output.out).unwrap_or_default();
    status["clusters"][0]["vms"][0].clone()
}

fn configure(kind: Kind, site: &Site, sessions: [&Session; 3]) {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let etcd = format!("etcd = [\"http://{}:{ETCD}\"]\n", site.address(HOSTS.len()));
    for (host, session) in sessions.into_iter().enumerate() {
        let mut params = CertificateParams::new(vec![HOSTS[host].to_owned()]).unwrap();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        write_identity(session, params, &authority);
        let at = |host: usize| format!("{}:{PORT}", site.address(host));
        let peers = (0..3).filter(|it| *it != host);
        let peers: String = peers.map(|it| format!("{} = \"{}\"\n", HOSTS[it], at(it))).collect();
        let (lease, agree) = match kind {
            Kind::Embedded => {
                (RAFT_LEASE, "servers = [\"a\", \"b\", \"c\"]\nstate-dir = \"state\"\n")
            }
            Kind::Etcd => (LEASE, etcd.as_str()),
        };
        let config = format!(
            "name = \"{}\"\nlisten = \"{}\"\ncertificate = \"cert.pem\"\nkey = \"key.pem\"\n\
             authority = \"ca.pem\"\n[peers]\n{peers}[membership]\nlease-ms = {}\nsilence-ms = {}\n{agree}",
            HOSTS[host],
            at(host),
            lease.as_millis(),
            SILENCE.as_millis()
        );
        fs::write(session.path("agent.toml"), config).unwrap();
        if kind == Kind::Embedded {
            let mut found = Command::new(Session::program_beside("firn-agent"));
            found.arg("found").arg(session.path("agent.toml"));
            assert!(found.output().unwrap().status.success());
        }
    }
}

fn a_host_is_killed(kind: Kind) {
    let hosts = Hosts::start(kind);
    hosts.protect();
    let since = Instant::now();
    hosts.processes().into_iter().for_each(|pid| signal(pid, Signal::KILL));
    hosts.goes_on(since);
    hosts.is_protected_again();
    // Released, it is nobody's affair any more.
    let b = &hosts.others[0];
    b.firn(&["release", "web"]).succeeds();
    eventually("it is no cluster", PATIENCE, || place(b).is_null());
    assert!(b.status("web")["lease"].is_null());
    hosts.outside.is_answered(20);
    hosts.is_well_at_last();
}

#[test]
fn a_vm_whose_host_is_killed_fails_over_automatically() {
    a_host_is_killed(Kind::Embedded);
}

#[test]
fn also_where_hosts_agree_by_etcd() {
    a_host_is_killed(Kind::Etcd);
}

/// Everything of a host stands still, and wakes when its VM runs elsewhere: nothing of the old one is heard, and it is ended.
#[test]
fn a_frozen_host_that_wakes_sends_no_frame() {
    a_host_is_frozen(&Hosts::start(Kind::Embedded));
}

/// Nor through a card that is not Firn's own. At the other host it has filters from the start, because it needs the lease there.
#[test]
fn a_frozen_host_sends_no_frame_through_filters() {
    let netdev =
        |uplink: &str| format!("stream,id=net,server=off,addr.type=unix,addr.path={uplink}");
    let hosts = Hosts::start_with(Kind::Embedded, netdev);
    a_host_is_frozen(&hosts);
    let b = &hosts.others[0];
    assert_eq!(b.status("web")["network"][0]["filtered"], true);
    b.firn(&["release", "web"]).succeeds();
    eventually("it needs no lease", PATIENCE, || b.status("web")["lease"].is_null());
    eventually("it has no filters", PATIENCE, || b.status("web")["network"].is_null());
    hosts.outside.is_answered(20);
}

fn a_host_is_frozen(hosts: &Hosts) {
    hosts.protect();
    let processes = hosts.processes();
    let since = Instant::now();
    processes.iter().for_each(|&pid| signal(pid, Signal::STOP));
    std::thread::sleep(Duration::from_millis(500));
    let before = hosts.outside.heard().frames_by[0];
    hosts.goes_on(since);
    // Else the old host, awake, might be the one that protects it, and what has ended there would have given way to a standby.
    hosts.is_protected_again();
    processes.iter().for_each(|&pid| signal(pid, Signal::CONT));
    let a = &hosts.vm.session;
    eventually("it is ended", PATIENCE, || a.status("web")["state"] == "ended");
    std::thread::sleep(2 * LEASE);
    let heard = hosts.outside.heard();
    assert_eq!(heard.frames_by[0], before, "frames of the old one");
    // It may have connected again, its questions were cut off.
    let later: u64 = heard.frames_by.iter().skip(2).sum();
    assert_eq!(later, 0, "{:?}", heard.frames_by);
    assert!(heard.undone.is_empty(), "{:?}", heard.undone);
    drop(heard);
    let last = a.status("web")["last"]["text"].to_string();
    assert!(last.contains("it runs"), "{last}");
    hosts.outside.is_answered(20);
}

/// The VM alone dies, its host does not.
#[test]
fn a_vm_whose_hypervisor_dies_continues_at_its_backup() {
    let hosts = Hosts::start(Kind::Embedded);
    hosts.protect();
    let since = Instant::now();
    signal(hosts.vm.pid(), Signal::KILL);
    // Seen before the failover: its host, which is there, may be the one that stands by from then on.
    let a = &hosts.vm.session;
    eventually("it has ended", PATIENCE, || a.status("web")["state"] == "ended");
    hosts.goes_on(since);
}

/// A hypervisor that does not answer counts as lost, though its process is there: its host gives up the lease, and ends it.
#[test]
fn a_vm_whose_hypervisor_hangs_continues_at_its_backup() {
    let hosts = Hosts::start(Kind::Embedded);
    hosts.protect();
    let (pid, since) = (hosts.vm.pid(), Instant::now());
    signal(pid, Signal::STOP);
    let a = &hosts.vm.session;
    // It is ended as soon as it runs elsewhere, which may be before anybody has looked.
    eventually("its host knows", PATIENCE, || a.status("web")["protection_end"]["how"] == "lost");
    eprintln!("its host knows after {:?}", since.elapsed());
    hosts.goes_on(since);
    // Else it may have given way to a standby.
    let is_gone = || !std::path::Path::new(&format!("/proc/{pid}")).exists();
    eventually("it is ended", PATIENCE, is_gone);
}

/// A person decides nothing against the record: who holds the lease runs the VM, unless that host is declared dead by its name.
#[test]
fn a_manual_failover_obeys_the_record() {
    let hosts = Hosts::start(Kind::Embedded);
    hosts.protect();
    let (a, b) = (&hosts.vm.session, &hosts.others[0]);
    let refused = b.firn(&["failover", "web"]).fails(5, "host a holds the lease of web");
    assert!(refused.err.contains("--i-know-it-is-dead a"), "{}", refused.err);
    let other = ["failover", "web", "--i-know-it-is-dead", "c"];
    b.firn(&other).fails(5, "the record says that web runs at host a");
    assert_eq!(a.status("web")["state"], "protected", "nothing happened to it");
    hosts.outside.is_answered(20);
    let since = Instant::now();
    let run = b.firn(&["failover", "web", "--i-know-it-is-dead", "a"]).succeeds().out;
    assert!(run.contains("by the record of the hosts, generation 1"), "{run}");
    hosts.goes_on(since);
    // What was declared dead is ended where it was, and not heard; that host may be the next backup.
    eventually("it has a backup", PATIENCE, || place(b)["backup"].as_str().is_some());
    eventually("it is protected", PATIENCE, || b.status("web")["state"] == "protected");
    // Stopped by its user, it leaves no record and no standby.
    b.firn(&["stop", "web"]).succeeds();
    eventually("it is no cluster", PATIENCE, || place(b).is_null());
    for host in [a, &hosts.others[1]] {
        let standby = || host.ls().iter().any(|(_, state)| state == "standby");
        eventually("no standby is left", PATIENCE, || !standby());
    }
}

/// Its backup dies: it is not held for long, and protected by the third.
#[test]
fn a_vm_whose_backup_is_lost_is_protected_by_another_host() {
    let mut hosts = Hosts::start(Kind::Embedded);
    hosts.protect();
    let b = &hosts.others[0];
    let standby = b.status("web");
    for pid in ["guard_pid", "watcher_pid", "supervisor_pid", "pid"] {
        signal(standby[pid].as_i64().unwrap(), Signal::KILL);
    }
    hosts.agents[1].kill();
    let a = &hosts.vm.session;
    eventually("it has another backup", PATIENCE, || {
        place(a)["backup"].as_str().is_some_and(|it| it.starts_with("c "))
    });
    hosts.outside.is_answered(50);
    assert!(hosts.outside.heard().undone.is_empty());
    assert_eq!(a.status("web")["lease"], 0, "nothing was rolled back");
}
