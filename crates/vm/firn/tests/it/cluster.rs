//! Two VMs on two hosts, marked together and kept by a third, which all of them fail over to. The hosts are agents on this machine's loopback.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::process::Command;
use std::time::{Duration, Instant};

use firn_lab::guest::{GuestControl, JobState, QemuArgs, accel};
use serde_json::Value;

use crate::agent::{Agent, Network, certified};
use crate::outside::Outside;
use crate::parts::part_of;
use crate::session::{Session, eventually, kill, text};
use crate::vm::{Vm, image};

const PATIENCE: Duration = Duration::from_secs(120);
const NAMES: [&str; 3] = ["a", "b", "c"];

/// The card of a VM.
fn card(last: u8) -> [String; 4] {
    let device = format!("virtio-net-pci,netdev=net,romfile=,mac=52:54:00:12:34:{last:02x}");
    ["-netdev", "firn,id=net,network=lan", "-device", &device].map(str::to_owned)
}

/// `web` at `a`, `peer` at `b`; `c` keeps the copies.
struct Hosts {
    agents: Vec<Agent>,
    outside: Outside,
    /// What had come late, or never, before anything was protected: while two guests look for each other's addresses some do.
    before: (u64, u64),
    /// Of the two. A standby's QEMU takes the names of their sockets.
    controls: Vec<GuestControl>,
    b: Session,
    c: Session,
    _network: Network,
    // The last to go: then another test may begin.
    web: Vm,
}

impl Hosts {
    /// Supervisors at `a` and `b` have a fault, `c` asks some later than others.
    fn start(fault: Option<&str>) -> Self {
        Self::start_with(fault, "")
    }

    /// The same with more in the configuration of each agent.
    fn start_with(fault: Option<&str>, more: &str) -> Self {
        let (mut web, mut b, c) = (Vm::one_of_hosts(), Session::new(), Session::new());
        let network = Network::loopback();
        certified(&network, &NAMES, &[&web.session, &b, &c]);
        let outside = Outside::start();
        for (session, has_uplink) in [(&web.session, true), (&b, false), (&c, true)] {
            let path = session.path("uplink");
            outside.listen(&path);
            let mut file =
                OpenOptions::new().append(true).open(session.path("agent.toml")).unwrap();
            file.write_all(b"[networks.lan]\n").unwrap();
            if has_uplink {
                writeln!(file, "uplink = {:?}", text(&path)).unwrap();
            }
            file.write_all(more.as_bytes()).unwrap();
            if !more.is_empty() {
                found(session);
            }
        }
        let late = Some("cluster.ask=EIO");
        let faults = [(&web.session, None), (&b, None), (&c, late)];
        let agents = (0..).zip(faults);
        let agents = agents
            .map(|(side, (it, fault))| Agent::start_with(&network, side, it, fault))
            .collect();
        for session in [&web.session, &b, &c] {
            eventually("all are there", PATIENCE, || {
                let peers = session.json(&["agent", "status"])["peers"].clone();
                peers.as_array().unwrap().iter().all(|peer| peer["health"] == "alive")
            });
        }
        web.session.arm(fault);
        b.arm(fault);
        let words = card(0x56);
        let web = web.with(&words.each_ref().map(String::as_str)).booted_with(&[]);
        web.session.firn(&["status", "web"]).succeeds();
        let controls = vec![web.control(), peer(&b)];
        let before = (0, 0);
        let mut hosts = Self { agents, outside, before, controls, b, c, _network: network, web };
        hosts.controls[0].spawn_job("count", &["firn-guest", "net-dma", "count"]).unwrap();
        for (side, to) in ["10.0.2.16:7009", "10.0.2.15:7009"].into_iter().enumerate() {
            let gossip = ["firn-guest", "net-dma", "gossip", to];
            hosts.controls[side].spawn_job("gossip", &gossip).unwrap();
        }
        hosts.goes_on(50);
        hosts.before = hosts.wrong();
        hosts
    }

    /// What each of the two knows.
    #[track_caller]
    fn known(&mut self) -> [Value; 2] {
        [0, 1].map(|side| {
            let control = &mut self.controls[side];
            let state = control.poll_job("gossip").unwrap();
            let JobState::Running { stdout, .. } = state else { unreachable!("{state:?}") };
            let last = stdout.lines().rfind(|line| line.contains("received"));
            last.map_or(Value::Null, |line| serde_json::from_str(line).unwrap())
        })
    }

    fn received(&mut self) -> [u64; 2] {
        self.known().map(|known| known["received"].as_u64().unwrap_or_default())
    }

    #[track_caller]
    fn goes_on(&mut self, messages: u64) {
        let before = self.received();
        let start = Instant::now();
        loop {
            let now = self.received();
            if (0..2).all(|side| now[side] >= before[side] + messages) {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "{now:?} after {before:?}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    #[track_caller]
    fn protect(&self) {
        let c = &self.c;
        c.firn(&["cluster", "create", "shop", "--vm", "web@a", "--vm", "peer@b"]).succeeds();
        eprintln!("{}", c.firn(&["cluster", "protect", "shop"]).succeeds().out);
        // On a busy machine an epoch may be committed too late for one of them.
        let make = || {
            let answer = c.firn(&["--json", "cluster", "checkpoint", "shop"]);
            let made: Option<Value> = serde_json::from_str(&answer.out).ok();
            made.and_then(|made| made["checkpoint"]["number"].as_u64())
        };
        let mut first = None;
        eventually("global checkpoints", PATIENCE, || {
            let number = make();
            first = first.or(number);
            number >= first.map(|first| first + 4) && number.is_some()
        });
        eprintln!("{}", c.firn(&["cluster", "status"]).succeeds().out);
    }

    /// Both hosts are lost at once.
    fn fail_over(&mut self) {
        for agent in &mut self.agents[..2] {
            agent.kill();
        }
        kill_vm(&self.web.session, "web");
        kill_vm(&self.b, "peer");
        let c = &self.c;
        let ended = |vm: &str| c.status(vm)["standby"]["ended"].is_string();
        eventually("the standbys know", PATIENCE, || ended("web") && ended("peer"));
        c.firn(&["failover", "web"]).fails(5, "belongs to a cluster");
        let since = Instant::now();
        eprintln!("{}", c.firn(&["cluster", "failover", "shop"]).succeeds().out);
        eprintln!("it took {:?}", since.elapsed());
        self.connect();
    }

    /// Where they run now.
    fn connect(&mut self) {
        let peer = GuestControl::connect(&self.b.path("peer.sock"), PATIENCE).unwrap();
        self.controls = vec![self.web.control(), peer];
    }

    /// What they have told each other and the client is consistent.
    fn is_consistent(&mut self) {
        self.goes_on(100);
        self.outside.is_answered(20);
        assert_eq!(self.wrong(), (0, 0));
        let heard = self.outside.heard();
        eprintln!("{} answers came twice", heard.repeated);
        assert!(heard.undone.is_empty(), "{:?}", heard.undone);
    }

    /// Of both, since the cluster was first protected: orphans and repeated ones, and what is missing.
    fn wrong(&mut self) -> (u64, u64) {
        let known = self.known();
        eprintln!("{known:?}");
        let sum = |what: &str| known.iter().map(|it| it[what].as_u64().unwrap()).sum::<u64>();
        let (late, lost) = self.before;
        (sum("orphans") + sum("repeated") - late, sum("missing") - lost)
    }
}

/// Makes a host a server of those that agree.
fn found(session: &Session) {
    let mut found = Command::new(Session::program_beside("firn-agent"));
    found.arg("found").arg(session.path("agent.toml"));
    assert!(found.output().unwrap().status.success());
}

/// All processes of a VM.
fn kill_vm(session: &Session, vm: &str) {
    let status = session.status(vm);
    for pid in ["guard_pid", "watcher_pid", "supervisor_pid", "pid"] {
        kill(status[pid].as_i64().unwrap());
    }
}

/// Boots the other VM.
fn peer(b: &Session) -> GuestControl {
    let args = QemuArgs::new(image(), accel::choose_accel().accel)
        .memory_mib(128)
        .append_kernel_arg("no_timer_check mitigations=off nokaslr firn.bare")
        .append_kernel_arg("firn.ip=10.0.2.16")
        .with_agent_socket(&b.path("peer.sock"));
    let program = text(args.program_name().as_ref()).to_owned();
    let words = [vec![program], args.args(), card(0x16).to_vec()].concat();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    b.firn(&[&["run", "peer", "--quiet", "--"], &words[..]].concat()).succeeds();
    GuestControl::connect(&b.path("peer.sock"), PATIENCE).unwrap()
}

/// All primaries are killed at once. Nobody has received what its peer has not sent, nothing that was under way is lost, and the client
/// outside sees nothing undone.
#[test]
fn a_cluster_continues_from_one_consistent_state() {
    let mut hosts = Hosts::start(None);
    hosts.outside.is_answered(20);
    hosts.protect();
    hosts.goes_on(50);
    hosts.outside.is_answered(20);
    hosts.web.session.firn(&["release", "web"]).fails(5, "with the cluster");
    hosts.fail_over();
    hosts.is_consistent();
    hosts.controls.clear();
    hosts.web.is_well();
}

/// The same where a receiver does not mark before it delivers (one of them has received what the other has not
/// sent), or where nothing is held: marks and holding are needed.
#[test]
fn without_marks_or_holding_the_state_is_not_consistent() {
    for fault in part_of(["net.marker=EIO", "net.hold=EIO"]) {
        let mut hosts = Hosts::start(Some(fault));
        hosts.protect();
        hosts.goes_on(50);
        hosts.fail_over();
        hosts.goes_on(20);
        if fault.contains("hold") {
            hosts.outside.is_answered(20);
        }
        let (orphans, _) = hosts.wrong();
        let undone = !hosts.outside.heard().undone.is_empty();
        assert!(orphans > 0 || (undone && fault.contains("hold")), "{fault} would not matter");
    }
}

/// Who is released runs on, is heard again, and can be protected again.
#[test]
fn a_cluster_that_is_released_runs_on() {
    let mut hosts = Hosts::start(None);
    let c = &hosts.c;
    c.firn(&["cluster", "protect", "shop"]).fails(2, "no cluster shop");
    c.firn(&["cluster", "create", "shop", "--vm", "web@c"]).fails(2, "web runs on this host");
    c.firn(&["cluster", "create", "shop", "--vm", "nobody@a"])
        .fails(3, "there is no VM called nobody");
    hosts.protect();
    for _ in 0..2 {
        hosts.c.firn(&["cluster", "release", "shop"]).succeeds();
        hosts.goes_on(50);
        hosts.outside.is_answered(20);
        hosts.c.firn(&["cluster", "failover", "shop"]).fails(5, "not protected");
        hosts.c.firn(&["cluster", "protect", "shop"]).succeeds();
        hosts.goes_on(50);
    }
    let (orphans, _) = hosts.wrong();
    assert_eq!(orphans, 0);
}

/// Where hosts agree, nobody has to ask for it: one host is killed, and both VMs run at the third, which alone has their lease. What still
/// ran elsewhere is ended; and a host that was not told of the cluster protects it again by itself.
#[test]
fn a_cluster_fails_over_without_a_person() {
    let agree = "[membership]\nlease-ms = 1500\nsilence-ms = 4000\nservers = [\"a\", \"b\", \"c\"]\nstate-dir = \"state\"\n";
    let mut hosts = Hosts::start_with(None, agree);
    hosts.protect();
    hosts.goes_on(50);
    hosts.outside.is_answered(20);
    let since = Instant::now();
    hosts.agents[0].kill();
    kill_vm(&hosts.web.session, "web");
    let c = &hosts.c;
    let runs = |vm: &str| c.status(vm)["state"] == "running";
    eventually("both run at c", PATIENCE, || runs("web") && runs("peer"));
    eprintln!("both run at c after {:?}", since.elapsed());
    hosts.connect();
    hosts.is_consistent();
    eprintln!("both are heard after {:?}", since.elapsed());
    // What has its name at b may be its copy by now.
    let ended = "peer is ended here: its cluster shop";
    eventually("the other is ended", PATIENCE, || hosts.agents[1].said().contains(ended));
    assert_ne!(hosts.b.status("peer")["state"], "running");
    for vm in ["web", "peer"] {
        assert_eq!(hosts.c.status(vm)["lease"], 1);
    }
    // Just after the failover the record names b as the next backup, before b has copies.
    eventually("b protects them", PATIENCE, || {
        let status = hosts.b.json(&["cluster", "status"]);
        let vms = status["clusters"][0]["vms"].as_array().cloned().unwrap_or_default();
        let is_kept = |vm: &Value| vm["backup"].as_str().is_some_and(|it| it.starts_with("b "));
        let is_protected = |vm: &str| hosts.c.status(vm)["state"] == "protected";
        vms.len() == 2 && vms.iter().all(is_kept) && is_protected("web") && is_protected("peer")
    });
    eprintln!("{}", hosts.b.firn(&["cluster", "status"]).succeeds().out);
    hosts.is_consistent();
    hosts.b.firn(&["cluster", "release", "shop"]).succeeds();
    hosts.is_consistent();
    assert!(hosts.c.status("web")["lease"].is_null());
}
