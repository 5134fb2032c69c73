//! What two copies of one guest have of their own: keys of TLS, machine IDs, names, addresses; and what becomes of
//! its connections and of its frozen file systems.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::identity::RandomGuest;
use crate::session::{Session, eventually};

const PATIENCE: Duration = Duration::from_secs(120);
const CARD: [&str; 4] = ["-netdev", "user,id=n", "-device", "virtio-net-pci,netdev=n"];

fn save_and_stop(session: &Session) {
    session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
    session.firn(&["stop", "web"]).succeeds();
}

fn clone_port(session: &Session, number: u32) -> RandomGuest {
    RandomGuest::connect_to(&session.path(&format!("run/web-{number}/user-port")))
}

/// Port of the host that is free at these addresses.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A TLS server that each copy starts draws another random number and another key of X25519. One that ran at the
/// checkpoint has a generator of its own, which the kernel can't mix: what it does is printed.
#[test]
fn copies_make_different_keys_of_tls() {
    let session = Session::new();
    RandomGuest::run_with(&session, &[]);
    let mut guest = RandomGuest::connect(&session);
    guest.order("serve 4433", "serving");
    let before = guest.order("tls 4433", "tls ");
    assert_eq!(before.len(), 129, "{before}");
    drop(guest);
    save_and_stop(&session);
    session.firn(&["restore", "web.firn", "--count", "2"]).succeeds();
    let drawn = [1, 2].map(|number| {
        let mut copy = clone_port(&session, number);
        copy.order("serve 4434", "serving");
        let new = copy.order("tls 4434", "tls ");
        (new, copy.order("tls 4433", "tls "))
    });
    let [(first, first_old), (second, second_old)] = &drawn;
    let parts = |hello: &str| hello.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned()));
    let [(random, key), (other_random, other_key)] = [first, second].map(|it| parts(it).unwrap());
    assert_eq!((random.len(), key.len(), other_key.len()), (64, 64, 64), "{first} {second}");
    assert!(random != other_random && key != other_key, "{first} {second}");
    let is_same = if first_old == second_old { "the same" } else { "others" };
    eprintln!(
        "a server that ran at the checkpoint drew {is_same} in both: {first_old} {second_old}"
    );
}

/// By a program that the guest agent runs.
#[test]
fn copies_get_identities_and_addresses_of_their_own() {
    let session = Session::new();
    RandomGuest::run_with(&session, &CARD);
    assert_eq!(RandomGuest::connect(&session).order("id", "id "), "golden golden");
    save_and_stop(&session);
    let port = free_port();
    let netdev = format!("n=user,hostfwd=tcp:127.0.77.{{}}:{port}-:80");
    let restore = ["restore", "web.firn", "--count", "2", "--netdev", &netdev];
    let facts = session.json(&[&restore[..], &["--guest-exec", "/bin/become box-{}"]].concat());
    let mut ids = Vec::new();
    for number in [1, 2] {
        let ended = &facts["clones"][number as usize - 1]["guest_exec"];
        assert_eq!(ended["out"], format!("this is box-{number} now\n"), "{facts}");
        let (id, name) = {
            let shown = clone_port(&session, number).order("id", "id ");
            let (id, name) = shown.split_once(' ').unwrap();
            (id.to_owned(), name.to_owned())
        };
        assert_eq!((id.len(), name), (32, format!("box-{number}")));
        // The clone with this name answers at its own address, which `firn ls` shows.
        let address = format!("127.0.77.{number}:{port}");
        let listed = session.firn(&["ls"]).succeeds().out;
        assert!(listed.contains(&format!("ports of web-{number}: tcp:{address}-:80")), "{listed}");
        let mut answer = String::new();
        TcpStream::connect(&address).unwrap().read_to_string(&mut answer).unwrap();
        assert_eq!(answer.trim(), format!("{id} box-{number}"));
        ids.push(id);
    }
    assert_ne!(ids[0], ids[1]);
    // A program that fails, and one that does not exist: the VM runs.
    session.firn(&["stop", "web-1", "web-2"]).succeeds();
    let failed = session.firn(&["restore", "web.firn", "--guest-exec", "/bin/false"]);
    failed.fails(1, "/bin/false in the guest ended with exit code 1");
    assert!(RandomGuest::connect(&session).order("id", "id ").starts_with("golden"));
    session.firn(&["stop", "web"]).succeeds();
    let failed = session.firn(&["restore", "web.firn", "--guest-exec", "/bin/none"]);
    failed.fails(1, "the guest agent refused guest-exec");
    assert!(RandomGuest::connect(&session).order("id", "id ").starts_with("golden"));
}

/// With QEMU's agent and a file system of Linux.
#[test]
fn a_real_guest_is_frozen_and_thawed() {
    let session = Session::new();
    let disk = session.path("disk.raw");
    std::fs::File::create(&disk).unwrap().set_len(16 << 20).unwrap();
    let made = std::process::Command::new("mkfs.ext4").arg("-q").arg(&disk).status();
    if !made.is_ok_and(|status| status.success()) {
        return firn_skip::skip_test("there is no mkfs.ext4 (e2fsprogs)");
    }
    RandomGuest::run_with(&session, &["-drive", "file=disk.raw,format=raw,if=virtio"]);
    let mut guest = RandomGuest::connect(&session);
    guest.order("mount", "mounted");
    guest.order("write", "written");
    let facts = session.json(&["checkpoint", "web", "-o", "web.firn", "--freeze"]);
    eprintln!("{}", facts["freeze"]);
    assert_eq!(
        (&facts["freeze"]["file_systems"], &facts["freeze"]["thawed"]),
        (&1.into(), &true.into())
    );
    guest.order("write", "written");
    drop(guest);
    session.firn(&["stop", "web", "--discard"]).succeeds();
    // A copy is frozen until Firn thaws it; then its writes end.
    session.firn(&["restore", "web.firn"]).succeeds();
    RandomGuest::connect(&session).order("write", "written");
    eventually("the journal has that", PATIENCE, || session.status("web").get("frozen").is_none());
}

/// The back end `user` of QEMU does not know a connection of before. The guest finds that out, though its program
/// only waits for what the peer sends.
#[test]
fn a_connection_of_before_ends_in_a_copy_that_only_waits() {
    let session = Session::new();
    let monitor = ["-qmp", "unix:monitor,server=on,wait=off"];
    RandomGuest::run_with(&session, &[&CARD[..], &monitor].concat());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut guest = RandomGuest::connect(&session);
    guest.send(&format!("connect {port}"));
    let (mut peer, _) = listener.accept().unwrap();
    let mut line = String::new();
    BufReader::new(peer.try_clone().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line.trim(), "hello");
    peer.write_all(b"welcome\n").unwrap();
    guest.read_word("connected");
    guest.send("send");
    assert_eq!(guest.read_word("sen"), "t", "the connection works");
    // The VM that was saved keeps it.
    session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
    assert_eq!(guest.order("state", "state "), "open");
    let listed = session.json(&["image", "inspect", "web.firn"]);
    let peer = format!("10.0.2.2:{port}");
    assert_eq!(listed["meta"]["connections"][0]["peer"], peer, "{listed}");
    drop(guest);
    session.firn(&["stop", "web"]).succeeds();
    session.firn(&["restore", "web.firn"]).succeeds();
    let mut copy = RandomGuest::connect(&session);
    let begun = Instant::now();
    eventually("the connection has ended", PATIENCE, || copy.order("state", "state ") == "closed");
    eprintln!("ended within {:?}", begun.elapsed());
    // Nothing of Firn's stays in the VM.
    let mut qemu = firn_vmm::QemuVm::connect(&session.path("monitor")).unwrap();
    let objects = qemu.qmp().execute("qom-list", json!({ "path": "/objects" })).unwrap();
    let devices = qemu.qmp().execute("query-chardev", json!({})).unwrap();
    for found in [objects, devices].map(|it| it.to_string()) {
        assert!(!found.contains("firn-probe"), "{found}");
    }
}
