//! Tests of the bridge, against a daemon that answers as each of them has written down.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::thread::JoinHandle;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::*;
use crate::message::{GET_TYPE, LIST_AUTH, MONITOR_COMMAND, MONITOR_COMMAND_WITH_FILES, OPEN};
use crate::testing::{ReceivedCall, TestDaemon};

const WAIT: Duration = Duration::from_secs(20);

/// A bridge between a client and a daemon.
struct BridgePair {
    client: BufReader<UnixStream>,
    daemon: TestDaemon,
    thread: JoinHandle<Result<(), LibvirtError>>,
}

impl BridgePair {
    fn start() -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let opening =
            std::thread::spawn(|| LibvirtConnection::open_driver(ours, "qemu:///system", WAIT));
        let mut daemon = TestDaemon(theirs);
        daemon.answer(LIST_AUTH, XdrWriter::default().number(1).number(0));
        daemon.answer(OPEN, XdrWriter::default());
        let connection = opening.join().unwrap().unwrap();
        let domain = Domain { name: "web".into(), uuid: [7; 16], id: 1 };
        let (client, bridged) = UnixStream::pair().unwrap();
        client.set_read_timeout(Some(WAIT)).unwrap();
        let bridge = MonitorBridge::new(bridged, connection, domain);
        let thread = std::thread::spawn(|| bridge.run());
        let mut pair = Self { client: BufReader::new(client), daemon, thread };
        assert!(pair.read_line().get("QMP").is_some());
        pair
    }

    fn send_line(&mut self, line: &str) {
        self.client.get_mut().write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    fn read_line(&mut self) -> Value {
        let mut line = String::new();
        self.client.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    fn answer(&mut self, procedure: message::Procedure, result: &str) -> ReceivedCall {
        self.daemon.answer(procedure, XdrWriter::default().string(result))
    }
}

fn command_of(call: &ReceivedCall) -> Value {
    let mut reader = XdrReader(&call.payload);
    assert_eq!(Domain::decode(&mut reader).unwrap().name, "web");
    serde_json::from_str(&reader.string().unwrap()).unwrap()
}

#[test]
fn commands_are_called_one_after_the_other_and_have_their_ids_again() {
    let mut pair = BridgePair::start();
    pair.send_line(r#"{"execute": "qmp_capabilities", "id": 1}"#);
    assert_eq!(pair.read_line(), json!({ "return": {}, "id": 1 }));
    pair.send_line("{\"execute\": \"query-a\", \"id\": 2}\n{\"execute\": \"query-b\", \"id\": 3}");
    let first = pair.daemon.read_call();
    assert_eq!(command_of(&first), json!({ "execute": "query-a" }));
    let is_silent = |daemon: &TestDaemon| {
        let wait = rustix::event::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        poll(&mut [PollFd::new(&daemon.0, PollFlags::IN)], Some(&wait)) == Ok(0)
    };
    assert!(is_silent(&pair.daemon), "the second call waits for the reply to the first");
    pair.daemon.refuse(MONITOR_COMMAND, first.serial, 68, "cannot acquire state change lock");
    let refused = pair.read_line();
    assert_eq!(refused["id"], 2);
    assert_eq!(refused["error"]["desc"], "libvirt says: cannot acquire state change lock");
    pair.answer(MONITOR_COMMAND, r#"{"return": {"b": 1}, "id": "libvirt-9"}"#);
    assert_eq!(pair.read_line(), json!({ "return": { "b": 1 }, "id": 3 }));
}

#[test]
fn a_descriptor_reaches_the_daemon() {
    let mut pair = BridgePair::start();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let fds = [writer.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let line = [io::IoSlice::new(b"{\"execute\": \"add-fd\", \"id\": 2}\n")];
    let client = pair.client.get_ref();
    rustix::net::sendmsg(client, &line, &mut control, SendFlags::empty()).unwrap();
    drop(writer);
    let call = pair.answer(MONITOR_COMMAND_WITH_FILES, r#"{"return": {"fd": 5}}"#);
    assert_eq!(command_of(&call), json!({ "execute": "add-fd" }));
    rustix::io::write(&call.fds[0], b"state").unwrap();
    drop(call);
    let mut state = String::new();
    std::fs::File::from(reader).read_to_string(&mut state).unwrap();
    assert_eq!(state, "state", "and no copy of the descriptor is left");
    assert_eq!(pair.read_line()["return"]["fd"], 5);
}

#[test]
fn events_come_before_the_reply_to_the_command_that_causes_them() {
    let mut pair = BridgePair::start();
    pair.send_line(r#"{"execute": "cont", "id": 2}"#);
    pair.answer(MONITOR_COMMAND, r#"{"return": {}}"#);
    let barrier = pair.daemon.read_call();
    assert_eq!(barrier.procedure, GET_TYPE.number);
    pair.daemon.send_event("RESUME", Some(r#"{"why": 1}"#));
    let resumed = pair.read_line();
    assert_eq!(resumed["event"], "RESUME");
    assert_eq!(resumed["data"], json!({ "why": 1 }));
    assert_eq!(resumed["timestamp"], json!({ "seconds": 1700, "microseconds": 20 }));
    pair.daemon.refuse(GET_TYPE, barrier.serial, 3, "no type");
    assert_eq!(pair.read_line(), json!({ "return": {}, "id": 2 }));
}

/// While the VM is paused each call would make the pause longer.
#[test]
fn a_paused_vm_waits_for_no_call_of_the_bridge() {
    let mut pair = BridgePair::start();
    for (id, command) in ["stop", "xen-save-devices-state"].iter().enumerate() {
        pair.send_line(&json!({ "execute": command, "id": id }).to_string());
        pair.answer(MONITOR_COMMAND, r#"{"return": {}}"#);
        assert_eq!(pair.read_line(), json!({ "return": {}, "id": id }), "{command}");
    }
}

#[test]
fn a_domain_that_ends_closes_the_connection() {
    let mut pair = BridgePair::start();
    pair.send_line(r#"{"execute": "quit", "id": 2}"#);
    let call = pair.daemon.read_call();
    pair.daemon.refuse(MONITOR_COMMAND, call.serial, 55, "domain is not running");
    let mut rest = String::new();
    assert_eq!(pair.client.read_line(&mut rest).unwrap(), 0);
    assert!(pair.thread.join().unwrap().is_err());
}

#[test]
fn the_commands_of_a_client_that_has_left_are_executed() {
    let mut pair = BridgePair::start();
    pair.send_line("{\"execute\": \"query-a\", \"id\": 2}\n{\"execute\": \"cont\", \"id\": 3}");
    let BridgePair { client, mut daemon, thread } = pair;
    let first = daemon.read_call();
    drop(client);
    std::thread::sleep(Duration::from_millis(20));
    let reply = XdrWriter::default().string(r#"{"return": {}}"#);
    daemon.refuse(MONITOR_COMMAND, first.serial, 68, "later");
    let second = daemon.answer(MONITOR_COMMAND, reply);
    assert_eq!(command_of(&second), json!({ "execute": "cont" }));
    daemon.answer(GET_TYPE, XdrWriter::default().string("QEMU"));
    thread.join().unwrap().unwrap();
}

#[test]
fn a_daemon_that_sends_nonsense_is_left() {
    let mut pair = BridgePair::start();
    pair.daemon.0.write_all(&[0xff; 64]).unwrap();
    let error = pair.thread.join().unwrap().unwrap_err();
    assert!(matches!(error, LibvirtError::Message { .. }), "{error}");
}
