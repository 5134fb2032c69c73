//! A monitor that misbehaves: every wait must end, every error must name the command.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use firn_vmm::{DeviceStateError, LayoutError, QemuVm, QmpClient, QmpError};
use serde_json::{Value, json};

const GREETING: &[u8] = b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\r\n";
const PATIENCE: Duration = Duration::from_millis(300);

/// The false QEMU's end of the monitor.
struct Peer {
    stream: UnixStream,
    lines: BufReader<UnixStream>,
}

impl Peer {
    fn send(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes);
    }

    /// The next command; `None` when Firn has disconnected.
    fn command(&mut self) -> Option<Value> {
        let mut line = String::new();
        self.lines.read_line(&mut line).ok().filter(|&read| read > 0)?;
        Some(serde_json::from_str(&line).unwrap())
    }

    fn reply(&mut self, command: &Value, mut reply: Value) {
        reply["id"] = command["id"].clone();
        self.send(format!("{reply}\r\n").as_bytes());
    }

    /// Greets and accepts `qmp_capabilities`, as a true QEMU does.
    fn greet(&mut self) {
        self.send(GREETING);
        let command = self.command().unwrap();
        assert_eq!(command["execute"], "qmp_capabilities");
        assert_eq!(command["arguments"], Value::Null);
        self.reply(&command, json!({ "return": {} }));
    }
}

/// Runs a script as QEMU's side of a connection.
fn serve(script: impl FnOnce(Peer) + Send + 'static) -> (UnixStream, JoinHandle<()>) {
    let (ours, stream) = UnixStream::pair().unwrap();
    let lines = BufReader::new(stream.try_clone().unwrap());
    (ours, std::thread::spawn(|| script(Peer { stream, lines })))
}

/// A negotiated connection to a QEMU that then runs `script`.
fn greeted(script: impl FnOnce(Peer) + Send + 'static) -> QmpClient {
    let (stream, _thread) = serve(|mut peer| {
        peer.greet();
        script(peer);
    });
    QmpClient::negotiate(stream, PATIENCE).unwrap()
}

/// A VM whose QEMU replies to commands with `answer`.
fn vm(answer: impl Fn(&str, &Value) -> Value + Send + 'static) -> QemuVm {
    let qmp = greeted(move |mut peer| {
        while let Some(command) = peer.command() {
            let name = command["execute"].as_str().unwrap();
            let reply = match name {
                "query-version" => json!({ "qemu": { "major": 7, "minor": 2, "micro": 0 } }),
                name => answer(name, &command["arguments"]),
            };
            peer.reply(&command, json!({ "return": reply }));
        }
    });
    QemuVm::with_qmp(qmp).unwrap()
}

fn quickly<T>(work: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let result = work();
    assert!(begun.elapsed() < Duration::from_secs(3), "took {:?}", begun.elapsed());
    result
}

#[test]
fn qemu_reads_ahead_where_it_offers_that() {
    let (stream, thread) = serve(|mut peer| {
        peer.send(b"{\"QMP\": {\"version\": {}, \"capabilities\": [\"oob\"]}}\r\n");
        let command = peer.command().unwrap();
        assert_eq!(command["execute"], "qmp_capabilities");
        assert_eq!(command["arguments"], json!({ "enable": ["oob"] }));
        peer.reply(&command, json!({ "return": {} }));
    });
    QmpClient::negotiate(stream, PATIENCE).unwrap();
    thread.join().unwrap();
}

#[test]
fn a_peer_that_is_no_monitor_is_recognized() {
    let connect = |bytes: &'static [u8]| {
        let (stream, _thread) = serve(move |mut peer| peer.send(bytes));
        quickly(|| QmpClient::negotiate(stream, PATIENCE)).unwrap_err()
    };
    assert!(matches!(connect(b"SSH-2.0-OpenSSH\r\n"), QmpError::Reply { .. }));
    assert!(matches!(connect(b"{\"return\": {}}\r\n"), QmpError::Unexpected { .. }));
    assert!(matches!(connect(b""), QmpError::Closed { .. }));
}

#[test]
fn a_monitor_that_another_client_holds_times_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let _listener = UnixListener::bind(&path).unwrap();
    let error = quickly(|| QmpClient::connect(&path, PATIENCE)).unwrap_err();
    assert!(error.to_string().starts_with("connect: no answer from QEMU within"), "{error}");
}

#[test]
fn a_full_backlog_does_not_block_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let _listener = UnixListener::bind(&path).unwrap();
    // The standard library sets the largest backlog; a second listen() sets QEMU's.
    rustix::net::listen(&_listener, 1).unwrap();
    let waiting: Vec<UnixStream> = (0..2).map(|_| UnixStream::connect(&path).unwrap()).collect();
    let error = quickly(|| QmpClient::connect(&path, PATIENCE)).unwrap_err();
    assert!(matches!(error, QmpError::Connect { .. }), "{error:?}");
    drop(waiting);
}

#[test]
fn a_missing_socket_is_awaited_only_while_it_may_appear() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let error = quickly(|| QemuVm::connect(&path)).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("cannot connect to the QMP monitor at {}", path.display())
    );
    let mut looks = 0;
    let alive = || {
        looks += 1;
        looks < 5
    };
    assert!(quickly(|| QemuVm::connect_started(&path, alive)).is_err());
    assert_eq!(looks, 5);
}

#[test]
fn a_qemu_that_dies_in_the_middle_of_an_answer() {
    let mut qmp = greeted(|mut peer| {
        peer.command();
        peer.send(b"{\"return\": {\"runn");
    });
    let error = qmp.execute("query-status", Value::Null).unwrap_err();
    assert_eq!(
        error.to_string(),
        "query-status: QEMU closed the QMP connection before it answered"
    );
    assert!(matches!(qmp.execute("stop", Value::Null).unwrap_err(), QmpError::Closed { .. }));
}

#[test]
fn garbage_instead_of_an_answer() {
    let mut qmp = greeted(|mut peer| {
        peer.command();
        peer.send(b"\x00\xff{{{\r\n");
        peer.command();
    });
    let error = qmp.execute("stop", Value::Null).unwrap_err();
    assert_eq!(error.to_string(), "stop: QEMU's answer cannot be read");
}

#[test]
fn a_line_without_end() {
    let mut qmp = greeted(|mut peer| {
        peer.command();
        let block = vec![b'x'; 1 << 20];
        (0..20).for_each(|_| peer.send(&block));
        peer.command();
    });
    qmp.set_timeout(Duration::from_secs(20));
    let error = qmp.execute("stop", Value::Null).unwrap_err();
    assert!(matches!(error, QmpError::LineTooLong { .. }), "{error:?}");
}

#[test]
fn a_qemu_that_hangs() {
    let mut qmp = greeted(|mut peer| while peer.command().is_some() {});
    let error = quickly(|| qmp.execute("stop", Value::Null)).unwrap_err();
    assert!(error.to_string().starts_with("stop: no answer from QEMU within 3"), "{error}");
}

#[test]
fn a_qemu_that_trickles() {
    let mut qmp = greeted(|mut peer| {
        peer.command();
        for _ in 0..1000 {
            peer.send(b" ");
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    let error = quickly(|| qmp.execute("stop", Value::Null)).unwrap_err();
    assert!(matches!(error, QmpError::TimedOut { .. }), "{error:?}");
}

#[test]
fn a_qemu_that_does_not_read() {
    let mut qmp = greeted(|peer| {
        std::thread::sleep(Duration::from_secs(2));
        drop(peer);
    });
    let long = json!({ "command-line": "x".repeat(4 << 20) });
    let error = quickly(|| qmp.execute("human-monitor-command", long)).unwrap_err();
    assert!(matches!(error, QmpError::TimedOut { .. }), "{error:?}");
}

#[test]
fn a_late_answer_is_not_taken_for_the_next_one() {
    let mut qmp = greeted(|mut peer| {
        let late = peer.command().unwrap();
        let next = peer.command().unwrap();
        peer.reply(&late, json!({ "return": "late" }));
        peer.reply(&next, json!({ "return": "next" }));
        peer.command();
    });
    assert!(qmp.execute("first", Value::Null).is_err());
    assert_eq!(qmp.execute("second", Value::Null).unwrap(), "next");
}

#[test]
fn answers_in_pieces_and_in_one_packet() {
    let mut qmp = greeted(|mut peer| {
        let (one, two) = (peer.command().unwrap(), peer.command().unwrap());
        let event = "{\"event\": \"STOP\", \"timestamp\": {}}\r\n";
        let reply = |command: &Value, n: i32| json!({ "return": n, "id": command["id"] });
        let all = format!("{event}{}\r\n{event}{}\r\n", reply(&one, 1), reply(&two, 2));
        for piece in all.as_bytes().chunks(7) {
            peer.send(piece);
            std::thread::sleep(Duration::from_millis(1));
        }
        peer.command();
    });
    let (one, two) = (qmp.send("a", Value::Null).unwrap(), qmp.send("b", Value::Null).unwrap());
    assert_eq!(qmp.wait_reply(one).unwrap(), 1);
    assert_eq!(qmp.wait_reply(two).unwrap(), 2);
    assert_eq!(qmp.take_events().len(), 2);
}

#[test]
fn events_are_kept_up_to_a_limit_and_can_be_waited_for() {
    let mut qmp = greeted(|mut peer| {
        let command = peer.command().unwrap();
        for number in 0..1000 {
            let event = json!({ "event": "E", "data": { "n": number } });
            peer.send(format!("{event}\r\n").as_bytes());
        }
        peer.reply(&command, json!({ "return": {} }));
        peer.send(b"{\"event\": \"LATE\"}\r\n");
        peer.command();
    });
    qmp.execute("flood", Value::Null).unwrap();
    let last = qmp.wait_event("E", PATIENCE, |data| data["n"] == 999).unwrap();
    assert!(last.is_some());
    assert!(qmp.wait_event("LATE", PATIENCE, |_| true).unwrap().is_some());
    assert!(qmp.wait_event("NEVER", PATIENCE, |_| true).unwrap().is_none());
    assert_eq!(qmp.take_events().len(), 255);
}

#[test]
fn a_refusal_carries_qemus_words() {
    let mut qmp = greeted(|mut peer| {
        let command = peer.command().unwrap();
        let error = json!({ "class": "GenericError", "desc": "Guest is on fire" });
        peer.reply(&command, json!({ "error": error }));
    });
    let error = qmp.execute("cont", Value::Null).unwrap_err();
    assert_eq!(error.to_string(), "cont: QEMU says: Guest is on fire");
    assert!(error.has_class("GenericError"));
}

#[test]
fn answers_of_the_wrong_shape_name_their_command() {
    let mut vm = vm(|_, _| json!([1, "x"]));
    for error in [
        vm.status().unwrap_err(),
        vm.vcpus().unwrap_err(),
        vm.machine_type().unwrap_err(),
        vm.page_table_roots().unwrap_err(),
        vm.disks().unwrap_err(),
    ] {
        assert!(matches!(error, QmpError::Unexpected { .. }), "{error:?}");
        assert!(error.to_string().contains("in QEMU's answer"), "{error}");
    }
}

/// A QEMU with one backend of 1 MiB, which the given flat view shows.
fn vm_with(size: u64, mtree: &'static str, hva: &'static str) -> QemuVm {
    vm(move |command, arguments| match command {
        "query-memdev" => json!([{ "id": "ram", "size": size, "share": true }]),
        _ => match arguments["command-line"].as_str() {
            Some("info mtree -f") => mtree.into(),
            Some(line) if line.starts_with("gpa2hva") => hva.into(),
            _ => "".into(),
        },
    })
}

const VIEW: &str = "FlatView #0\n AS \"memory\", root: system\n  0000000000000000-00000000000fffff (prio 0, ram): ram\n";
const HVA: &str = "Host virtual address for 0x0 (ram) is 0x7f0000000000";

#[test]
fn layouts_that_make_no_sense_are_errors() {
    let layout = |size, mtree, hva| vm_with(size, mtree, hva).layout();
    assert_eq!(layout(1 << 20, VIEW, HVA).unwrap().locations[0].hva.0, 0x7f00_0000_0000);

    let error = |size, mtree, hva| layout(size, mtree, hva).unwrap_err();
    assert!(matches!(error(1 << 20, "", HVA), LayoutError::NoView));
    assert!(matches!(
        error(1 << 20, "FlatView #0\n AS \"memory\", root: x\n", HVA),
        LayoutError::NoRam { .. }
    ));
    assert!(matches!(error(1 << 20, VIEW, "nothing"), LayoutError::NoHostAddress { .. }));
    for size in [0, 4095, 1 << 12, u64::MAX, !4095] {
        assert!(matches!(error(size, VIEW, HVA), LayoutError::Map(_)), "{size}");
    }
    let huge = "FlatView #0\n AS \"memory\", root: x\n  0000000000000000-ffffffffffffffff (prio 0, ram): ram\n";
    assert!(matches!(error(1 << 20, huge, HVA), LayoutError::Map(_)));
}

#[test]
fn a_save_that_writes_nothing_is_an_error() {
    let mut vm = vm(|command, _| match command {
        "query-fdsets" => json!([]),
        "add-fd" => json!({ "fdset-id": 3, "fd": 9 }),
        _ => json!({}),
    });
    let error = vm.stop_and_save_device_state().unwrap_err();
    assert!(matches!(error, DeviceStateError::Size { bytes: 0 }), "{error:?}");
}

/// A QEMU that receives a pipe, and handles the command to save to it with `does`.
fn asked_to_hold(reply: Option<Value>) -> QemuVm {
    let qmp = greeted(move |mut peer| {
        while let Some(command) = peer.command() {
            let answer = match command["execute"].as_str().unwrap() {
                "query-version" => json!({ "qemu": { "major": 7, "minor": 2, "micro": 0 } }),
                "query-fdsets" => json!([]),
                "add-fd" => json!({ "fdset-id": 3, "fd": 9 }),
                "xen-save-devices-state" => match &reply {
                    Some(reply) => {
                        peer.reply(&command, reply.clone());
                        continue;
                    }
                    None => continue,
                },
                _ => json!({}),
            };
            peer.reply(&command, json!({ "return": answer }));
        }
    });
    QemuVm::with_qmp(qmp).unwrap()
}

#[test]
fn a_qemu_that_cannot_be_paused_by_pipe_is_recognized() {
    let refusal = json!({ "error": { "class": "GenericError", "desc": "Could not open it" } });
    assert!(asked_to_hold(Some(refusal)).begin_pause().unwrap().is_none());
    let error = asked_to_hold(Some(json!({ "return": {} }))).begin_pause().unwrap_err();
    assert!(matches!(error, DeviceStateError::Size { bytes: 0 }), "{error:?}");
    let error = quickly(|| asked_to_hold(None).begin_pause().map(drop)).unwrap_err();
    assert!(matches!(error, DeviceStateError::Qmp(QmpError::TimedOut { .. })), "{error:?}");
}

#[test]
fn a_load_that_never_ends_times_out() {
    let load = |bytes: usize| {
        let mut vm = vm(|_, _| json!({}));
        quickly(|| vm.load_device_state(&vec![0; bytes])).unwrap_err()
    };
    assert!(matches!(load(1000), DeviceStateError::TimedOut { bytes: 1000, .. }));
    let more_than_a_socket_holds = 8 << 20;
    assert!(matches!(load(more_than_a_socket_holds), DeviceStateError::TimedOut { .. }));
}
