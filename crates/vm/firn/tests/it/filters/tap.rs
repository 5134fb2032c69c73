//! Cards with the usual back ends of a user's QEMU: a tap at a bridge, with the offloads that virtio has with it, and user-mode
//! networking. Two hosts in network namespaces; the client is outside, at the bridge between them.
//!
//! ```text
//!   namespace a:  QEMU -- tap0 -- bridge -- cable ==.
//!                                                    bridge: the client
//!   namespace b:  QEMU -- tap0 -- bridge -- cable =='
//! ```

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::network::{kill_standby, some_time};
use crate::session::{Answer, eventually, kill, signal, text};
use crate::vm::{LOAD, Vm, writes};

const PATIENCE: Duration = Duration::from_secs(90);
const HOSTS: [&str; 2] = ["a", "b"];
/// Of the guest's programs.
const ECHO_PORT: u16 = 7007;
const COUNT_PORT: u16 = 7008;

/// Two network namespaces with a tap each; they end with this value.
struct Site(u32);

impl Site {
    /// `None` if this machine has no namespaces for us.
    fn new() -> Option<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = std::process::id() * 16 + NUMBER.fetch_add(1, Ordering::Relaxed);
        let site = Self(number % 60_000);
        match site.cabled() {
            Ok(()) => Some(site),
            Err(why) => {
                firn_skip::skip_test(format_args!("no network namespaces here: {why}"));
                None
            }
        }
    }

    fn space(&self, host: usize) -> String {
        format!("firn-t{}-{}", self.0, HOSTS[host])
    }

    fn address(&self, last: u8) -> String {
        format!("198.{}.{}.{last}", 18 + (self.0 / 250) % 2, self.0 % 250)
    }

    fn cabled(&self) -> Result<(), String> {
        let bridge = format!("ft{}", self.0);
        ip(&["link", "add", &bridge, "type", "bridge"])?;
        ip(&["address", "add", &format!("{}/24", self.address(1)), "dev", &bridge])?;
        ip(&["link", "set", &bridge, "up"])?;
        (0..HOSTS.len()).try_for_each(|host| {
            let (space, port) = (self.space(host), format!("ft{}{}", self.0, HOSTS[host]));
            ip(&["netns", "add", &space])?;
            let peer = ["type", "veth", "peer", "name", "cable", "netns", &space];
            ip(&[&["link", "add", &port][..], &peer].concat())?;
            ip(&["link", "set", &port, "master", &bridge, "up"])?;
            let address = format!("{}/24", self.address(2 + host as u8));
            for line in [
                "link set lo up",
                "link add bridge0 type bridge",
                "link set cable master bridge0 up",
                "tuntap add tap0 mode tap",
                "link set tap0 master bridge0 up",
                "link set bridge0 up",
                &format!("address add {address} dev bridge0"),
            ] {
                let words: Vec<&str> = line.split_whitespace().collect();
                ip(&[&["-n", &space][..], &words].concat())?;
            }
            Ok(())
        })
    }

    /// A command of Firn at a host.
    fn command(&self, vm: &Vm, host: usize, args: &[&str]) -> Command {
        let firn = vm.session.command(args);
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.space(host)]).arg(firn.get_program());
        command.args(firn.get_args()).current_dir(vm.session.path("")).stdin(Stdio::null());
        for (key, value) in firn.get_envs() {
            match value {
                Some(value) => command.env(key, value),
                None => command.env_remove(key),
            };
        }
        command
    }

    fn firn(&self, vm: &Vm, host: usize, args: &[&str]) -> Answer {
        Answer::of(self.command(vm, host, args).output().unwrap())
    }

    fn standby(&self, vm: &Vm, name: &str) -> Child {
        let address = format!("unix:{}", text(&vm.session.path("standby")));
        let mut command = self.command(vm, 1, &["standby", name, "--listen", &address]);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        eventually("the standby listens", PATIENCE, || vm.session.path("standby").exists());
        child
    }

    /// Boots a guest at host a, with this card and these words for its kernel.
    fn booted(&self, card: &[&str]) -> Vm {
        let words = format!("firn.ip={}", self.address(15));
        let vm = Vm::one_of_hosts().with_kernel_words(words.leak()).with(card);
        let args = vm.qemu_args();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        self.firn(&vm, 0, &[&["run", "web", "--quiet", "--"], &args[..]].concat()).succeeds();
        let vm = vm.writing(&LOAD);
        let mut control = vm.control();
        for (job, program) in [("echo", "echo"), ("count", "count")] {
            control.spawn_job(job, &["firn-guest", "net-dma", program]).unwrap();
            control.wait_output(job, "ready", PATIENCE).unwrap();
        }
        vm
    }

    fn protect(&self, vm: &Vm, standby: &str) -> String {
        let child = self.standby(vm, standby);
        let address = format!("unix:{}", text(&vm.session.path("standby")));
        let printed = vm.session.firn(&["protect", "web", "--to", &address]).succeeds().out;
        crate::hypervisor_dies::answer(child).succeeds();
        printed
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        for (host, name) in HOSTS.iter().enumerate() {
            let port = format!("ft{}{name}", self.0);
            let _ = (ip(&["netns", "delete", &self.space(host)]), ip(&["link", "delete", &port]));
        }
        let _ = ip(&["link", "delete", &format!("ft{}", self.0)]);
    }
}

fn ip(args: &[&str]) -> Result<(), String> {
    let done = Command::new("ip").args(args).output().map_err(|error| error.to_string())?;
    match done.status.success() {
        true => Ok(()),
        false => Err(format!("{args:?}: {}", String::from_utf8_lossy(&done.stderr).trim())),
    }
}

/// One TCP connection, over which large messages go and come back.
struct Talk {
    echoes: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Talk {
    const BYTES: usize = 60_000;

    fn start(address: &str) -> Self {
        let stream = TcpStream::connect((address, ECHO_PORT)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let (echoes, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (counted, over) = (Arc::clone(&echoes), Arc::clone(&is_over));
        let talk = move || exchange(&stream, &counted, &over);
        Self { echoes, is_over, thread: Some(std::thread::spawn(talk)) }
    }

    /// Waits until more echoes have come by this connection.
    #[track_caller]
    fn goes_on(&self) {
        let before = self.echoes.load(Ordering::Relaxed);
        eventually("echoes", PATIENCE, || {
            assert!(!self.thread.as_ref().unwrap().is_finished(), "the connection has ended");
            self.echoes.load(Ordering::Relaxed) >= before + 10
        });
    }

    #[track_caller]
    fn is_silent(&self) {
        std::thread::sleep(Duration::from_millis(300));
        let before = self.echoes.load(Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(700));
        assert_eq!(self.echoes.load(Ordering::Relaxed), before);
    }

    fn end(mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn exchange(mut stream: &TcpStream, echoes: &AtomicU64, is_over: &AtomicBool) {
    let mut number = 0_u64;
    while !is_over.load(Ordering::Relaxed) {
        number += 1;
        let message: Vec<u8> =
            (0..Talk::BYTES as u64 / 8).flat_map(|at| (number * 8191 + at).to_le_bytes()).collect();
        stream.write_all(&message).unwrap();
        let mut echo = vec![0; message.len()];
        stream.read_exact(&mut echo).unwrap();
        assert!(echo == message, "message {number} came back as another");
        echoes.fetch_add(1, Ordering::Relaxed);
    }
}

/// A client that asks for numbers, and notices if any was undone.
#[derive(Clone, Default)]
struct Counts(Arc<Mutex<CountsHeard>>);

#[derive(Default)]
struct CountsHeard {
    numbers: BTreeMap<u64, u64>,
    questions: BTreeMap<u64, u64>,
    undone: Vec<(u64, u64)>,
    targets: Vec<String>,
    is_over: bool,
}

impl Counts {
    fn start(targets: &[String]) -> Self {
        let counts = Self::default();
        counts.0.lock().unwrap().targets = targets.to_vec();
        let client = counts.clone();
        std::thread::spawn(move || client.ask());
        counts
    }

    fn ask(&self) {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
        for question in 1_u64.. {
            let targets = {
                let heard = self.0.lock().unwrap();
                if heard.is_over {
                    return;
                }
                heard.targets.clone()
            };
            for target in &targets {
                let _ = socket.send_to(&question.to_le_bytes(), (target.as_str(), COUNT_PORT));
            }
            let mut answer = [0; 16];
            while let Ok((16, _)) = socket.recv_from(&mut answer) {
                let number = |at: usize| u64::from_le_bytes(answer[at..at + 8].try_into().unwrap());
                self.hear(number(0), number(8));
            }
        }
    }

    fn hear(&self, question: u64, number: u64) {
        let heard = &mut *self.0.lock().unwrap();
        let other = *heard.questions.entry(number).or_insert(question);
        let before = *heard.numbers.entry(question).or_insert(number);
        if other != question || before != number {
            heard.undone.push((question, number));
        }
    }

    #[track_caller]
    fn is_answered(&self, count: usize) {
        let answers = || self.0.lock().unwrap().numbers.len();
        let before = answers();
        eventually("answers", PATIENCE, || answers() >= before + count);
    }

    fn undone(&self) -> Vec<(u64, u64)> {
        self.0.lock().unwrap().undone.clone()
    }
}

impl Drop for Counts {
    fn drop(&mut self) {
        if Arc::strong_count(&self.0) == 2 {
            self.0.lock().unwrap().is_over = true;
        }
    }
}

const TAP: [&str; 4] = [
    "-netdev",
    "tap,id=net,ifname=tap0,script=no,downscript=no",
    "-device",
    "virtio-net-pci,netdev=net,romfile=",
];

/// Whole segments of TCP that the guest leaves to the card, and their headers, pass through filters unharmed, and one connection
/// survives: the protection, a standby that is slow, the death of the supervisor, the release, and the loss of the host.
#[test]
fn a_connection_through_a_tap_outlives_the_host() {
    let Some(site) = Site::new() else { return };
    let vm = site.booted(&TAP);
    let features = "ethtool -k eth0 2>/dev/null; cat /sys/class/net/eth0/device/features";
    eprintln!("features: {:?}", vm.control().run_program(&["sh", "-c", features]));
    let mut control = vm.control();
    let address = site.address(15);
    let (talk, counts) = (Talk::start(&address), Counts::start(std::slice::from_ref(&address)));
    talk.goes_on();
    let printed = site.protect(&vm, "twin");
    assert!(!printed.contains("not buffered"), "{printed}");
    talk.goes_on();
    counts.is_answered(100);
    let standby = vm.session.status("twin")["supervisor_pid"].as_i64().unwrap();
    signal(standby, Signal::STOP);
    talk.is_silent();
    signal(standby, Signal::CONT);
    talk.goes_on();

    let since = Instant::now();
    kill(vm.session.status("web")["supervisor_pid"].as_i64().unwrap());
    eventually("a successor", PATIENCE, || vm.session.status("web")["state"] == "running");
    talk.is_silent();
    vm.session.firn(&["release", "web"]).succeeds();
    talk.goes_on();
    eprintln!("the connection went on {:?} after the supervisor's death", since.elapsed());
    assert!(vm.session.status("web")["network"].is_null());
    vm.session.firn(&["stop", "twin"]).succeeds();
    writes(&mut control);

    site.protect(&vm, "next");
    talk.goes_on();
    counts.is_answered(100);
    std::thread::sleep(some_time());
    kill_standby(&vm, "web");
    let has_ended = || vm.session.status("next")["standby"]["ended"].is_string();
    eventually("the end", PATIENCE, has_ended);
    vm.session.firn(&["failover", "next"]).succeeds();
    talk.goes_on();
    counts.is_answered(50);
    assert_eq!(counts.undone(), []);
    talk.end();
    vm.is_well();
}

/// User-mode networking, whose connections end with their QEMU: nothing that a client heard is undone.
#[test]
fn user_mode_networking_is_held_too() {
    let Some(site) = Site::new() else { return };
    let ports = format!("user,id=net,hostfwd=udp::{COUNT_PORT}-10.0.2.15:{COUNT_PORT}");
    let card = ["-netdev", &ports, "-device", "virtio-net-pci,netdev=net,romfile="];
    let vm = Vm::one_of_hosts().with(&card);
    let args = vm.qemu_args();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    site.firn(&vm, 0, &[&["run", "web", "--quiet", "--"], &args[..]].concat()).succeeds();
    let vm = vm.writing(&LOAD);
    let mut control = vm.control();
    control.spawn_job("count", &["firn-guest", "net-dma", "count"]).unwrap();
    control.wait_output("count", "ready", PATIENCE).unwrap();
    let counts = Counts::start(&[site.address(2)]);
    counts.is_answered(20);
    let printed = site.protect(&vm, "twin");
    assert!(!printed.contains("not buffered"), "{printed}");
    counts.is_answered(200);
    std::thread::sleep(some_time());
    kill_standby(&vm, "web");
    let has_ended = || vm.session.status("twin")["standby"]["ended"].is_string();
    eventually("the end", PATIENCE, has_ended);
    vm.session.firn(&["failover", "twin"]).succeeds();
    counts.0.lock().unwrap().targets = vec![site.address(3)];
    counts.is_answered(50);
    assert_eq!(counts.undone(), []);
    vm.is_well();
}

/// A card whose frames QEMU does not filter is named, with the reason, before and at the protection; the others are held.
#[test]
fn a_card_without_filters_is_named() {
    let Some(site) = Site::new() else { return };
    let queues = "tap,id=many,ifname=tap1,script=no,downscript=no,queues=2";
    let card = ["-netdev", queues, "-device", "virtio-net-pci,netdev=many,romfile=,mq=on"];
    let vm = site.booted(&[&TAP[..], &card].concat());
    let checks = vm.session.json(&["doctor", "web"]);
    let protect =
        checks.as_array().unwrap().iter().find(|it| it["operation"] == "protect").unwrap();
    assert_eq!(protect["verdict"], "limited", "{protect}");
    assert!(protect["reasons"][0].to_string().contains("several queues"), "{protect}");
    let printed = site.protect(&vm, "twin");
    let named: Vec<&str> = printed.lines().filter(|line| line.contains("not buffered")).collect();
    assert!(
        named.len() == 1 && named[0].contains("id=many") && named[0].contains("queues"),
        "{printed}"
    );
    let status = vm.session.status("web");
    assert_eq!(status["network"].as_array().unwrap().len(), 1, "{}", status["network"]);
    assert_eq!(status["network"][0]["id"], "net");
    vm.session.firn(&["release", "web"]).succeeds();
}
