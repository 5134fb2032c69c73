//! A tap device as the uplink, in a network namespace of its own: the kernel answers a VM.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::host::{Authority, eventually, write_config};

/// An address of a network that is reserved for tests: RFC 2544.
const KERNEL: Ipv4Addr = Ipv4Addr::new(198, 18, 7, 1);
const VM: Ipv4Addr = Ipv4Addr::new(198, 18, 7, 2);
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];

/// An answer's operation follows its types (RFC 826).
const ANSWER: [u8; 10] = [8, 6, 0, 1, 8, 0, 6, 4, 0, 2];

struct Namespace(String);

impl Namespace {
    /// A network with a tap that is up, if this machine allows it.
    fn with_tap() -> Option<Self> {
        let name = format!("firn-tap-{}", std::process::id());
        let namespace = Self(name.clone());
        let address = format!("{KERNEL}/24");
        let steps: [&[&str]; 4] = [
            &["netns", "add", &name],
            &["-n", &name, "tuntap", "add", "firn0", "mode", "tap"],
            &["-n", &name, "address", "add", &address, "dev", "firn0"],
            &["-n", &name, "link", "set", "firn0", "up"],
        ];
        let is_done = |step: &[&str]| {
            Command::new("ip").args(step).output().is_ok_and(|done| done.status.success())
        };
        steps.into_iter().all(is_done).then_some(namespace)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "delete", &self.0]).output();
    }
}

struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Who has the kernel's address? (RFC 826)
fn question() -> Vec<u8> {
    let head = [&[0xff; 6][..], &MAC, &[8, 6], &[0, 1, 8, 0, 6, 4, 0, 1]].concat();
    [&head[..], &MAC, &VM.octets(), &[0; 6], &KERNEL.octets(), &[0; 18]].concat()
}

#[test]
fn the_kernel_answers_behind_a_tap() {
    let Some(namespace) = Namespace::with_tap() else {
        return firn_skip::skip_test("no network namespaces or no tap devices here");
    };
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let identity = authority.issue(&["a"], |_| ());
    let listen = "127.0.0.1:0".parse().unwrap();
    let file = write_config(dir.path(), &authority.pem(), identity, "a", listen, &[]);
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text + "[networks.lan]\ntap = \"firn0\"\n").unwrap();
    let program = env!("CARGO_BIN_EXE_firn-agent");
    let mut command = Command::new("ip");
    command.args(["netns", "exec", &namespace.0, "ip", "link", "set", "lo", "up"]);
    assert!(command.status().unwrap().success());
    let mut command = Command::new("ip");
    command.args(["netns", "exec", &namespace.0, program, "run"]).arg(&file);
    let mut agent = Agent(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(agent.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("listens at"), "{line}");
    let socket = dir.path().join("run/.network/lan.sock");
    let mut card = UnixStream::connect(socket).unwrap();
    card.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let frame = [&60_u32.to_be_bytes()[..], &question()].concat();
    assert_eq!(frame.len(), 64);
    let mut heard = Vec::new();
    // The kernel sends other frames on a device that has just come up; no frame of that form is
    // among them.
    eventually("an answer", || {
        card.write_all(&frame).unwrap();
        let mut piece = [0; 4096];
        let count = card.read(&mut piece).unwrap_or_default();
        heard.extend_from_slice(&piece[..count]);
        heard.windows(ANSWER.len()).any(|it| it == ANSWER)
    });
}
