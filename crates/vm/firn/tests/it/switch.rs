//! Two hosts with an agent each and a network between them: a VM of each, and a TCP connection between the two.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::time::{Duration, Instant};

use firn_lab::guest::{GuestControl, JobState, QemuArgs, accel};
use serde_json::Value;

use crate::agent::{Agent, Network, configure, health};
use crate::session::{Session, eventually, kill, text};
use crate::vm::{Vm, image};

const PATIENCE: Duration = Duration::from_secs(120);

/// The card of a VM; addresses of cards differ in their last byte, as those of the guests do.
fn card(number: u8) -> [String; 4] {
    let device = format!("virtio-net-pci,netdev=net,romfile=,mac=52:54:00:12:34:{number:02x}");
    ["-netdev", "firn,id=net,network=lan", "-device", &device].map(str::to_owned)
}

/// `web` at `a`, and at `b` a client whose address is 10.0.2.16.
struct Hosts {
    agents: [Agent; 2],
    client: GuestControl,
    network: Network,
    b: Session,
    // The last to go: then another test may begin.
    web: Vm,
}

impl Hosts {
    fn start() -> Self {
        let (web, b, network) = (Vm::one_of_hosts(), Session::new(), Network::new());
        configure(&network, [&web.session, &b]);
        for session in [&web.session, &b] {
            let mut file =
                OpenOptions::new().append(true).open(session.path("agent.toml")).unwrap();
            file.write_all(b"[networks.lan]\n").unwrap();
        }
        let agents = [Agent::start(&network, 0, &web.session), Agent::start(&network, 1, &b)];
        for session in [&web.session, &b] {
            eventually("both are there", PATIENCE, || health(session) == "alive");
        }
        let words = card(0x15);
        let web = web.with(&words.each_ref().map(String::as_str)).booted_with(&[]);
        web.control().spawn_job("echo", &["firn-guest", "net-dma", "echo"]).unwrap();
        let client = client(&b);
        Self { agents, client, network, b, web }
    }

    /// Protects `web` by `b`.
    fn protect(&self) {
        self.web.session.firn(&["protect", "web", "--backup", "b"]).succeeds();
        let committed = || self.b.status("web")["standby"]["committed"].as_u64().unwrap();
        eventually("epochs", PATIENCE, || committed() >= 5);
    }

    /// How many echoes the client has had over its one connection, and how long one took at most.
    #[track_caller]
    fn echoes(&mut self) -> (u64, u64) {
        let state = self.client.poll_job("talk").unwrap();
        let JobState::Running { stdout, .. } = state else {
            unreachable!("the connection is to last: {state:?}")
        };
        let Some(last) = stdout.lines().rfind(|line| line.contains("progress")) else {
            return (0, 0);
        };
        let last: Value = serde_json::from_str(last).unwrap();
        (last["progress"].as_u64().unwrap(), last["longest_ms"].as_u64().unwrap())
    }

    #[track_caller]
    fn goes_on(&mut self, echoes: u64) {
        let (before, _) = self.echoes();
        let start = Instant::now();
        while self.echoes().0 < before + echoes {
            assert!(start.elapsed() < PATIENCE, "{} echoes after {before}", self.echoes().0);
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Boots the client. It runs at `b` and isn't protected.
fn client(b: &Session) -> GuestControl {
    let args = QemuArgs::new(image(), accel::choose_accel().accel)
        .memory_mib(128)
        .append_kernel_arg("no_timer_check")
        .append_kernel_arg("firn.ip=10.0.2.16")
        .with_agent_socket(&b.path("client.sock"));
    let program = text(args.program_name().as_ref()).to_owned();
    let words = [vec![program], args.args(), card(0x16).to_vec()].concat();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    b.firn(&[&["run", "client", "--quiet", "--"], &words[..]].concat()).succeeds();
    GuestControl::connect(&b.path("client.sock"), PATIENCE).unwrap()
}

/// What `firn agent status` says of frames from there and to there, at a host.
fn lane(session: &Session, to: &str) -> Value {
    let network = session.json(&["agent", "status"])["networks"][0].clone();
    let lanes = network["lanes"].as_array().unwrap();
    lanes.iter().find(|lane| lane["to"] == to).unwrap().clone()
}

/// A VM is killed with its host, and goes on at the other: a connection from there to it goes on too.
#[test]
fn a_connection_outlives_the_host_of_one_end() {
    let mut hosts = Hosts::start();
    let reached = hosts.client.run_program(&["busybox", "ping", "-c", "1", "-W", "5", "10.0.2.15"]);
    eprintln!("{}", reached.unwrap());
    hosts.client.spawn_job("talk", &["firn-guest", "net-dma", "talk", "10.0.2.15:7007"]).unwrap();
    hosts.goes_on(40);
    hosts.protect();
    hosts.goes_on(20);
    eprintln!("{}", hosts.b.firn(&["agent", "status"]).succeeds().out);
    assert!(lane(&hosts.b, "host a")["frames_in"].as_u64().unwrap() > 60);
    let (before, longest) = hosts.echoes();
    eprintln!("protected: {before} echoes, the longest took {longest} ms");
    kill(hosts.web.pid());
    hosts.agents[0].kill();
    let b = &hosts.b;
    eventually("the standby knows", PATIENCE, || b.status("web")["standby"]["ended"].is_string());
    b.firn(&["failover", "web"]).succeeds();
    hosts.goes_on(40);
    let (after, longest) = hosts.echoes();
    eprintln!("failed over: {after} echoes, the longest took {longest} ms");
    hosts.web.is_well();
    let (b, vms) = (&hosts.b, lane(&hosts.b, "VMs"));
    assert_eq!(
        (lane(b, "host a")["connected"].clone(), vms["connected"].clone()),
        (0.into(), 2.into())
    );
}

/// An agent that is killed takes its switch with it. The cards connect to its successor by themselves, and the connection goes on.
#[test]
fn a_connection_outlives_the_agents() {
    let mut hosts = Hosts::start();
    hosts.client.spawn_job("talk", &["firn-guest", "net-dma", "talk", "10.0.2.15:7007"]).unwrap();
    hosts.goes_on(40);
    for side in [0, 1] {
        hosts.agents[side].kill();
        let session = [&hosts.web.session, &hosts.b][side];
        hosts.agents[side] = Agent::start(&hosts.network, side, session);
        hosts.goes_on(40);
    }
}
