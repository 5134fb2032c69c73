//! Two hosts with an agent each, in network namespaces of their own: a VM of one is protected by the other, and goes on there.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair,
};
use rustix::process::Signal;
use serde_json::Value;

use crate::session::{Session, eventually, kill, signal};
use crate::tiny_guest::TinyGuest;
use crate::vm::{Vm, writes};

const PATIENCE: Duration = Duration::from_secs(60);

/// The addresses of `a` and `b`, of a network that is reserved for tests: RFC 2544.
const ADDRESSES: [&str; 2] = ["198.18.0.1", "198.18.0.2"];
const PORT: u16 = 7415;

/// Two network namespaces with a cable between them, if this machine lets us; else both hosts are on its loopback.
pub struct Network {
    namespaces: Option<[String; 2]>,
}

fn ip(args: &[&str]) -> Output {
    Command::new("ip").args(args).output().unwrap()
}

impl Network {
    pub fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        // The one before may not be gone yet.
        let (pid, number) = (std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let names = ["a", "b"].map(|side| format!("firn-{side}-{pid}-{number}"));
        let network = Self { namespaces: Some(names.clone()) };
        match network.cabled(&names) {
            Ok(()) => network,
            Err(why) => {
                eprintln!("no network namespaces here, both hosts are on the loopback: {why}");
                Self { namespaces: None }
            }
        }
    }

    /// All hosts are on this machine's loopback.
    pub fn loopback() -> Self {
        Self { namespaces: None }
    }

    fn cabled(&self, [a, b]: &[String; 2]) -> Result<(), String> {
        let [at_a, at_b] = ADDRESSES.map(|address| format!("{address}/30"));
        let steps: [&[&str]; 9] = [
            &["netns", "add", a],
            &["netns", "add", b],
            &["-n", a, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", b],
            &["-n", a, "address", "add", &at_a, "dev", "cable"],
            &["-n", b, "address", "add", &at_b, "dev", "cable"],
            &["-n", a, "link", "set", "cable", "up"],
            &["-n", b, "link", "set", "cable", "up"],
            &["-n", a, "link", "set", "lo", "up"],
            &["-n", b, "link", "set", "lo", "up"],
        ];
        for step in steps {
            let done = ip(step);
            if !done.status.success() {
                return Err(String::from_utf8_lossy(&done.stderr).trim().to_owned());
            }
        }
        Ok(())
    }

    fn address(&self, side: usize) -> String {
        match &self.namespaces {
            Some(_) => format!("{}:{PORT}", ADDRESSES[side]),
            None => format!("127.0.0.1:{}", usize::from(PORT) + side),
        }
    }

    /// A command of one of the hosts.
    fn command(&self, side: usize, program: &std::path::Path) -> Command {
        match &self.namespaces {
            Some(names) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", &names[side]]).arg(program);
                command
            }
            None => Command::new(program),
        }
    }

    /// Nothing passes any more, and nobody is told.
    fn cut(&self) -> bool {
        let cut = |names: &[String; 2]| ip(&["-n", &names[1], "link", "set", "cable", "down"]);
        self.namespaces.as_ref().is_some_and(|names| cut(names).status.success())
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in self.namespaces.iter().flatten() {
            ip(&["netns", "delete", name]);
        }
    }
}

/// An agent; it ends with this value. If its test fails, it is told what the agent said.
pub struct Agent {
    child: Child,
    log: PathBuf,
}

impl Agent {
    pub fn start(network: &Network, side: usize, session: &Session) -> Self {
        Self::start_with(network, side, session, None)
    }

    pub fn start_with(
        network: &Network,
        side: usize,
        session: &Session,
        fault: Option<&str>,
    ) -> Self {
        let program = Session::program_beside("firn-agent");
        Self::spawn_with(network.command(side, &program), session, fault)
    }

    /// By a command that only lacks what it is to do.
    pub fn spawn(command: Command, session: &Session) -> Self {
        Self::spawn_with(command, session, None)
    }

    pub fn spawn_with(mut command: Command, session: &Session, fault: Option<&str>) -> Self {
        command.arg("run").arg(session.path("agent.toml")).stdout(Stdio::piped());
        let log = session.path("agent.log");
        command.stderr(fs::File::create(&log).unwrap());
        command.env("FIRN_RUNTIME_DIR", session.runtime_dir()).env_remove("FIRN_FAULT");
        command.env("FIRN_QEMU_ALLOW", firn_lab::guest::default_program());
        command.env("FIRN_STATE_DIR", session.state_dir());
        command.envs(fault.map(|fault| ("FIRN_FAULT", fault)));
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("listens at"), "{line}");
        Self { child, log }
    }

    pub fn pid(&self) -> i64 {
        self.child.id().into()
    }

    /// What it has logged.
    pub fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("{}:\n{}", self.log.display(), self.said());
        }
    }
}

/// Writes what an agent needs for each host.
pub fn configure(network: &Network, sessions: [&Session; 2]) {
    certified(network, &["a", "b"], &sessions);
}

/// The same for any number.
pub fn certified(network: &Network, names: &[&str], sessions: &[&Session]) {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    for (side, name) in names.iter().enumerate() {
        let mut params = CertificateParams::new(vec![(*name).to_owned()]).unwrap();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        write_identity(sessions[side], params, &authority);
        let own = network.address(side);
        let others = names.iter().enumerate().filter(|(other, _)| *other != side);
        let peers = others.map(|(at, peer)| format!("{peer} = \"{}\"\n", network.address(at)));
        let config = format!(
            "name = \"{name}\"\nlisten = \"{own}\"\ncertificate = \"cert.pem\"\nkey = \"key.pem\"\n\
             authority = \"ca.pem\"\n[peers]\n{}",
            peers.collect::<String>()
        );
        fs::write(sessions[side].path("agent.toml"), config).unwrap();
    }
}

/// Writes a host's certificate, with its key and its authority.
pub fn write_identity(
    session: &Session,
    params: CertificateParams,
    authority: &CertifiedIssuer<'_, KeyPair>,
) {
    let (key, path) = (KeyPair::generate().unwrap(), |file| session.path(file));
    let certificate = params.signed_by(&key, authority).unwrap();
    fs::write(path("cert.pem"), certificate.pem()).unwrap();
    fs::write(path("key.pem"), key.serialize_pem()).unwrap();
    fs::set_permissions(path("key.pem"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(path("ca.pem"), authority.pem()).unwrap();
}

pub fn health(session: &Session) -> Value {
    session.json(&["agent", "status"])["peers"][0]["health"].clone()
}

fn standby(session: &Session) -> Value {
    session.status("web")["standby"].clone()
}

/// A VM on `a`, protected by `b`.
struct Cluster {
    vm: Vm,
    b: Session,
    agents: [Agent; 2],
    network: Network,
}

impl Cluster {
    fn start() -> Self {
        let (vm, b, network) =
            (Vm::one_of_hosts().booted_with(&[]), Session::new(), Network::new());
        configure(&network, [&vm.session, &b]);
        let agents = [Agent::start(&network, 0, &vm.session), Agent::start(&network, 1, &b)];
        let cluster = Self { vm, b, agents, network };
        for session in [&cluster.vm.session, &cluster.b] {
            eventually("both are there", PATIENCE, || health(session) == "alive");
        }
        cluster
    }

    fn protect(&self) {
        let said = self.vm.session.firn(&["protect", "web", "--backup", "b"]).succeeds().out;
        assert!(said.contains("web is protected: every 100 ms to b"), "{said}");
        let committed = || standby(&self.b)["committed"].as_u64().unwrap();
        eventually("epochs", PATIENCE, || committed() >= 5);
    }

    /// The VM runs on `b`, from the newest epoch that is there.
    fn fail_over(&self) {
        let newest = standby(&self.b)["committed"].clone();
        let run = self.b.json(&["failover", "web"]);
        eprintln!("failover: {run}");
        assert_eq!(run["epoch"], newest);
        self.vm.is_well();
        assert_eq!(self.b.status("web")["state"], "running");
    }
}

#[test]
fn a_vm_whose_host_dies_continues_at_its_backup() {
    let mut cluster = Cluster::start();
    cluster.protect();
    let (a, b) = (&cluster.vm.session, &cluster.b);
    let seen = a.json(&["agent", "status"]);
    eprintln!("{}", a.firn(&["agent", "status"]).succeeds().out);
    let vms = seen["vms"].as_array().unwrap();
    assert_eq!((&vms[0]["host"], &vms[0]["backup"]), (&"a".into(), &"b".into()), "{seen}");
    assert_eq!((&vms[1]["host"], &vms[1]["primary"]), (&"b".into(), &"a".into()), "{seen}");
    a.firn(&["protect", "web", "--backup", "b"]).fails(4, "VM web is protected");
    a.firn(&["protect", "web", "--backup", "c"]).fails(2, "host c is no peer of a");
    // Released and protected again: the standby that was is replaced.
    a.firn(&["release", "web"]).succeeds();
    eventually("the standby is gone", PATIENCE, || b.ls().is_empty());
    cluster.protect();
    let since = Instant::now();
    kill(cluster.vm.pid());
    cluster.agents[0].kill();
    let b = &cluster.b;
    eventually("the standby knows", PATIENCE, || standby(b)["ended"].is_string());
    eprintln!("the standby knows after {:?}", since.elapsed());
    eventually("lost", PATIENCE, || health(b) == "lost");
    eprintln!("a is lost after {:?}", since.elapsed());
    let output = b.firn(&["agent", "status"]).succeeds().out;
    eprintln!("{output}");
    assert!(output.contains("`firn failover web` here continues from epoch"), "{output}");
    cluster.fail_over();
    assert!(!b.firn(&["agent", "status"]).succeeds().out.contains("failover"));
}

/// What its user stops was not lost: its standby goes, and nothing advises to run it.
#[test]
fn a_vm_that_is_stopped_leaves_no_standby() {
    let cluster = Cluster::start();
    cluster.protect();
    let (a, b) = (&cluster.vm.session, &cluster.b);
    a.firn(&["stop", "web"]).succeeds();
    eventually("the standby is gone", PATIENCE, || b.ls().is_empty());
    for session in [a, b] {
        let output = session.firn(&["agent", "status"]).succeeds().out;
        assert!(!output.contains("failover"), "{output}");
    }
}

/// The network is gone and comes back: both ends notice, the VM runs on, and can be protected again.
#[test]
fn a_vm_whose_backup_is_cut_off_runs_on_unprotected() {
    let cluster = Cluster::start();
    // The standby's QEMU has the same command line, and takes the name of this socket.
    let mut control = cluster.vm.control();
    cluster.protect();
    if !cluster.network.cut() {
        return firn_skip::skip_test("there is no cable to cut");
    }
    let (a, b) = (&cluster.vm.session, &cluster.b);
    let since = Instant::now();
    eventually("unprotected", PATIENCE, || a.status("web")["state"] == "running");
    eventually("the standby knows", PATIENCE, || standby(b)["ended"].is_string());
    eprintln!("both know after {:?}", since.elapsed());
    assert_eq!(health(a), "lost");
    let before = writes(&mut control);
    eventually("writers go on", PATIENCE, || writes(&mut control) > before);
    a.firn(&["protect", "web", "--backup", "b"]).fails(1, "connecting to host b");
    assert_eq!(a.status("web")["state"], "running");
}

/// Supervisor, guard and watcher of a VM are killed at once, and no command is given: the host's agent starts them again.
#[test]
fn an_agent_starts_a_vms_supervisor_again() {
    let (vm, b) = (Vm::one_of_hosts(), Session::new());
    let (network, a) = (Network::loopback(), &vm.session);
    configure(&network, [a, &b]);
    let mut guest = TinyGuest::run(a, &[]);
    let agent = Agent::start(&network, 0, a);
    let before = a.status("web");
    let pids =
        ["guard_pid", "watcher_pid", "supervisor_pid"].map(|it| before[it].as_i64().unwrap());
    // Not one of them sees another one die.
    pids.iter().for_each(|&pid| signal(pid, Signal::STOP));
    signal(agent.pid(), Signal::STOP);
    pids.iter().for_each(|&pid| kill(pid));
    std::thread::sleep(Duration::from_secs(3));
    assert!(keepers(a).is_empty(), "only an agent does it");
    signal(agent.pid(), Signal::CONT);
    eventually("supervisor, guard and watcher", PATIENCE, || keepers(a).len() == 3);
    assert!(keepers(a).iter().all(|pid| !pids.contains(pid)));
    let after = a.status("web");
    assert_eq!((&after["recoveries"], &after["pid"]), (&1.into(), &before["pid"]));
    assert_eq!(after["state"], "running");
    guest.answers();
}

/// Supervisors and guards of a session's VMs, by their command lines and environment: a command of Firn's would start what
/// is missing.
fn keepers(session: &Session) -> Vec<i64> {
    let runtime = format!("FIRN_RUNTIME_DIR={}", session.runtime_dir().display());
    let has_word = |pid: i64, file: &str, words: &[&str]| {
        let text = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let mut found = text.split(|&byte| byte == 0);
        found.any(|word| words.iter().any(|it| it.as_bytes() == word))
    };
    let entries = fs::read_dir("/proc").unwrap();
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let roles = [firn_supervisor::SUPERVISE, firn_supervisor::GUARD];
    let is_ours =
        |pid: &i64| has_word(*pid, "environ", &[&runtime]) && has_word(*pid, "cmdline", &roles);
    pids.filter(is_ours).collect()
}
