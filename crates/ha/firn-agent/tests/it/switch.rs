//! The network between VMs of several hosts. VMs are sockets that send frames and check the frames
//! that arrive.

use std::fs;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use firn_control::HostHealth;
use firn_control::api::TrafficView;
use firn_supervisor::NetworkName;

use crate::host::{Authority, Host, PATIENCE, eventually, free_address};
use crate::relay::Relay;

const LAN: &str = "[networks.lan]\n";
const ALL: u8 = 0xff;

/// A VM's card. Addresses are one byte long here; the rest of them is zero.
struct Card {
    stream: UnixStream,
    address: u8,
}

impl Card {
    fn of(host: &Host, address: u8) -> Self {
        let path = host.base.network_socket(&NetworkName::new("lan").unwrap());
        Self::over(UnixStream::connect(path).unwrap(), address)
    }

    fn over(stream: UnixStream, address: u8) -> Self {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Self { stream, address }
    }

    fn send(&mut self, to: u8, text: &str) {
        self.send_bytes(to, text.as_bytes());
    }

    fn send_bytes(&mut self, to: u8, payload: &[u8]) {
        let mac = |byte| if byte == ALL { [ALL; 6] } else { [2, 0, 0, 0, 0, byte] };
        let frame = [&mac(to)[..], &mac(self.address), &[0x88, 0xb5], payload].concat();
        let length = (frame.len() as u32).to_be_bytes();
        self.stream.write_all(&[&length[..], &frame].concat()).unwrap();
    }

    /// The next frame's payload.
    #[track_caller]
    fn hears(&mut self) -> Vec<u8> {
        let mut length = [0; 4];
        self.stream.read_exact(&mut length).unwrap();
        let mut frame = vec![0; u32::from_be_bytes(length) as usize];
        self.stream.read_exact(&mut frame).unwrap();
        frame.split_off(14)
    }

    #[track_caller]
    fn hears_text(&mut self) -> String {
        String::from_utf8(self.hears()).unwrap()
    }
}

/// Hosts that are all linked.
fn linked<const N: usize>(names: [&str; N], more: &str) -> [Host; N] {
    let authority = Authority::new();
    let at = names.map(|_| free_address());
    let hosts = std::array::from_fn(|own| {
        let peers: Vec<(&str, SocketAddr)> =
            (0..N).filter(|peer| *peer != own).map(|peer| (names[peer], at[peer])).collect();
        Host::start_with(&authority, names[own], at[own], &peers, more)
    });
    for host in &hosts {
        for peer in names.iter().filter(|peer| **peer != host.cluster().host.as_str()) {
            eventually("links", || lane(host, &format!("host {peer}")).connected == 1);
        }
    }
    hosts
}

fn lane(host: &Host, to: &str) -> TrafficView {
    let network = host.cluster().networks.remove(0);
    network.lanes.into_iter().find(|lane| lane.to == to).unwrap()
}

/// Waits until so many VMs are connected there: a broadcast frame reaches the connected ones.
fn connected(host: &Host, vms: u64) {
    eventually("cards", || lane(host, "VMs").connected == vms);
}

#[test]
fn a_frame_reaches_vms_of_both_hosts() {
    let [a, b] = linked(["a", "b"], LAN);
    let (mut x, mut y, mut z) = (Card::of(&a, 1), Card::of(&b, 2), Card::of(&b, 3));
    connected(&b, 2);
    x.send(ALL, "who is there?");
    assert_eq!(y.hears_text(), "who is there?");
    assert_eq!(z.hears_text(), "who is there?");
    y.send(1, "me");
    assert_eq!(x.hears_text(), "me");
    x.send(2, "for you alone");
    x.send(ALL, "for all");
    assert_eq!(y.hears_text(), "for you alone");
    assert_eq!(y.hears_text(), "for all");
    assert_eq!(z.hears_text(), "for all", "the other frame was not for it");
    let counts = |lane: TrafficView| (lane.frames_in, lane.frames_out, lane.dropped);
    eventually("counts", || counts(lane(&a, "host b")) == (1, 3, 0));
    assert_eq!(counts(lane(&b, "host a")), (3, 1, 0));
    assert_eq!(counts(lane(&b, "VMs")), (1, 5, 0));
    assert_eq!(a.cluster().networks[0].addresses, 2);
}

/// Each frame arrives once, in order, also at a VM that all three hosts have learned; and no frame
/// loops.
#[test]
fn a_vm_that_moved_is_found_by_its_announcement() {
    let [a, b, c] = linked(["a", "b", "c"], LAN);
    let (mut x, mut y, mut z) = (Card::of(&a, 1), Card::of(&b, 2), Card::of(&c, 3));
    for host in [&a, &b, &c] {
        connected(host, 1);
    }
    y.send(ALL, "first at b");
    assert_eq!((x.hears_text(), z.hears_text()), ("first at b".into(), "first at b".into()));
    x.send(2, "to b");
    assert_eq!(y.hears_text(), "to b");
    // It continues at c: its backup's card is plugged in there, and announces itself. The one at b
    // is not gone yet.
    let mut moved = Card::of(&c, 2);
    connected(&c, 2);
    moved.send(ALL, "now at c");
    for card in [&mut x, &mut y, &mut z] {
        assert_eq!(card.hears_text(), "now at c");
    }
    x.send(2, "to c");
    assert_eq!(moved.hears_text(), "to c");
    z.send(2, "within c");
    assert_eq!(moved.hears_text(), "within c");
    x.send(ALL, "end");
    assert_eq!((y.hears_text(), z.hears_text()), ("end".into(), "end".into()));
    for host in [&a, &b, &c] {
        assert!(host.cluster().networks[0].lanes.iter().all(|lane| lane.dropped == 0));
    }
}

#[test]
fn below_the_bound_nothing_is_lost_or_doubled() {
    const FRAMES: u32 = 20_000;
    let [a, b] = linked(["a", "b"], LAN);
    let (mut x, mut y) = (Card::of(&a, 1), Card::of(&b, 2));
    connected(&b, 1);
    y.send(ALL, "here");
    assert_eq!(
        {
            connected(&a, 1);
            y.send(ALL, "here");
            x.hears_text()
        },
        "here"
    );
    let sending = thread::spawn(move || {
        for number in 0..FRAMES {
            x.send_bytes(2, &number.to_be_bytes().repeat(1 + number as usize % 300));
            // An acknowledgement now and then, as in any protocol.
            if number % 1000 == 999 {
                while x.hears() != b"go on" {}
            }
        }
        x
    });
    let since = Instant::now();
    for number in 0..FRAMES {
        assert_eq!(y.hears()[..4], number.to_be_bytes());
        if number % 1000 == 999 {
            y.send(1, "go on");
        }
    }
    eprintln!("{FRAMES} frames between hosts: {:?}", since.elapsed());
    drop(sending.join().unwrap());
    assert_eq!((lane(&a, "host b").dropped, lane(&b, "VMs").dropped), (0, 0));
}

#[test]
fn a_blocked_port_blocks_no_other() {
    let [a, b] = linked(["a", "b"], LAN);
    let (mut x, mut slow, mut y) = (Card::of(&a, 1), Card::of(&a, 2), Card::of(&b, 3));
    slow.send(ALL, "soon silent");
    y.send(ALL, "here");
    eventually("both are known", || a.cluster().networks[0].addresses == 2);
    let since = Instant::now();
    for number in 0..4000_u32 {
        x.send_bytes(2, &[7; 4000]);
        if number % 20 == 0 {
            x.send_bytes(3, &number.to_be_bytes());
            loop {
                let heard = y.hears();
                if heard == number.to_be_bytes() {
                    break;
                }
                assert_eq!(heard, b"soon silent");
            }
        }
    }
    eprintln!("beside a port that takes nothing: {:?}", since.elapsed());
    let dropped = lane(&a, "VMs").dropped;
    assert!((1..4000).contains(&dropped), "{dropped} of 4000");
    // Frames that wait for it when it leaves are dropped as well, and counted.
    drop(slow);
    eventually("its end", || lane(&a, "VMs").connected == 1);
    let gone = lane(&a, "VMs").dropped - dropped;
    assert!(gone > 900, "4 MiB were waiting: {gone} frames");
}

#[test]
fn an_invalid_frame_closes_only_its_port() {
    let [a, b] = linked(["a", "b"], LAN);
    let (mut x, mut y) = (Card::of(&a, 1), Card::of(&b, 2));
    connected(&b, 1);
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 100_000], &[0, 1, 16, 1, 7]] {
        let mut stranger = Card::of(&a, 3).stream;
        // The connection may be closed before everything is sent.
        let _ = stranger.write_all(garbage);
        let read = stranger.read(&mut [0]);
        assert!(!matches!(read, Ok(1..)), "{read:?}");
        eventually("its end", || lane(&a, "VMs").connected == 1);
    }
    // Too short for a source address, empty, and truncated.
    let mut short = Card::of(&a, 4).stream;
    short.write_all(&[0, 0, 0, 3, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 60, 1]).unwrap();
    drop(short);
    x.send(ALL, "still here");
    assert_eq!(y.hears_text(), "still here");
    eventually("its end", || lane(&a, "VMs").connected == 1);
    assert_eq!(a.cluster().networks[0].addresses, 1);
}

#[test]
fn a_host_that_returns_is_linked_again() {
    let authority = Authority::new();
    let [at_a, at_b] = [free_address(), free_address()];
    let start_b = || Host::start_with(&authority, "b", at_b, &[("a", at_a)], LAN);
    let a = Host::start_with(&authority, "a", at_a, &[("b", at_b)], LAN);
    let mut x = Card::of(&a, 1);
    for _ in 0..3 {
        let mut b = start_b();
        eventually("a link", || lane(&a, "host b").connected == 1);
        eventually("a link", || lane(&b, "host a").connected == 1);
        let mut y = Card::of(&b, 2);
        connected(&b, 1);
        x.send(ALL, "are you there?");
        assert_eq!(y.hears_text(), "are you there?");
        y.send(1, "yes");
        assert_eq!(x.hears_text(), "yes");
        b.kill();
        eventually("its end", || lane(&a, "host b").connected == 0);
        assert!(lane(&a, "host b").trouble.is_some());
        // Addresses behind it are not known any more, and frames for them are dropped.
        x.send(2, "and now?");
    }
}

/// No process is notified that the network is dead: VMs of one host continue at once, and the link
/// is back when the network is.
#[test]
fn a_link_over_a_dead_network_ends() {
    let authority = Authority::new();
    let [at_a, at_b] = [free_address(), free_address()];
    let [to_a, to_b] = [Relay::to(at_a), Relay::to(at_b)];
    let a = Host::start_with(&authority, "a", at_a, &[("b", to_b.address)], LAN);
    let b = Host::start_with(&authority, "b", at_b, &[("a", to_a.address)], LAN);
    eventually("a link", || lane(&b, "host a").connected == 1);
    let (mut x, mut near, mut far) = (Card::of(&a, 1), Card::of(&a, 2), Card::of(&b, 3));
    connected(&a, 2);
    connected(&b, 1);
    for relay in [&to_a, &to_b] {
        relay.cut(true);
    }
    let since = Instant::now();
    // More than the queue of a link and the kernel's buffers hold.
    for _ in 0..30 {
        for _ in 0..500 {
            x.send_bytes(ALL, &[9; 1400]);
        }
        for _ in 0..500 {
            assert_eq!(near.hears(), [9; 1400]);
        }
    }
    eprintln!("15000 frames beside a dead link: {:?}", since.elapsed());
    eventually("lost", || a.peer("b").health == HostHealth::Lost);
    eventually("no link", || lane(&a, "host b").connected == 0);
    assert!(lane(&a, "host b").dropped > 0);
    for relay in [&to_a, &to_b] {
        relay.cut(false);
    }
    eventually("a link", || lane(&a, "host b").connected == 1 && lane(&b, "host a").connected == 1);
    x.send(ALL, "again");
    while far.hears() != b"again" {}
}

#[test]
fn a_network_missing_at_the_peer_is_reported() {
    let authority = Authority::new();
    let [at_a, at_b] = [free_address(), free_address()];
    let a = Host::start_with(&authority, "a", at_a, &[("b", at_b)], LAN);
    let _b = Host::start_with(&authority, "b", at_b, &[("a", at_a)], "[networks.other]\n");
    let trouble = || lane(&a, "host b").trouble.unwrap_or_default();
    eventually("it is told", || trouble().contains("host b has no network lan"));
}

/// The uplink of a host is for its own VMs: frames between it and other hosts would loop.
#[test]
fn vms_of_a_host_go_out_by_its_own_uplink() {
    let authority = Authority::new();
    let [at_a, at_b] = [free_address(), free_address()];
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("world");
    let more = format!("{LAN}uplink = \"{}\"\n", path.display());
    let a = Host::start_with(&authority, "a", at_a, &[("b", at_b)], &more);
    let b = Host::start_with(&authority, "b", at_b, &[("a", at_a)], LAN);
    eventually("a link", || lane(&b, "host a").connected == 1);
    eventually("trouble", || lane(&a, "uplink").trouble.is_some_and(|it| it.contains("No such")));
    for _ in 0..2 {
        let listener = UnixListener::bind(&path).unwrap();
        let mut world = Card::over(listener.accept().unwrap().0, 9);
        eventually("the uplink", || lane(&a, "uplink").connected == 1);
        let (mut x, mut y) = (Card::of(&a, 1), Card::of(&b, 2));
        connected(&a, 1);
        connected(&b, 1);
        y.send(ALL, "to a's VMs");
        assert_eq!(x.hears_text(), "to a's VMs");
        x.send(ALL, "to everybody");
        assert_eq!(
            (world.hears_text(), y.hears_text()),
            ("to everybody".into(), "to everybody".into())
        );
        world.send(ALL, "from outside");
        assert_eq!(x.hears_text(), "from outside");
        x.send(9, "back");
        assert_eq!(world.hears_text(), "back");
        x.send(ALL, "end");
        assert_eq!((world.hears_text(), y.hears_text()), ("end".into(), "end".into()));
        drop((world, listener, x, y));
        fs::remove_file(&path).unwrap();
        eventually("it is gone", || lane(&a, "uplink").connected == 0);
        connected(&b, 0);
    }
}

#[test]
fn the_socket_is_for_its_owner_and_goes_with_the_agent() {
    use std::os::unix::fs::PermissionsExt as _;
    let authority = Authority::new();
    let mut a = Host::start_with(&authority, "a", free_address(), &[], LAN);
    let path = a.cluster().networks[0].socket.clone();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let directory = fs::metadata(path.parent().unwrap()).unwrap();
    assert_eq!(directory.permissions().mode() & 0o777, 0o700);
    let mut x = Card::of(&a, 1);
    connected(&a, 1);
    a.kill();
    let since = Instant::now();
    assert_eq!(x.stream.read(&mut [0]).unwrap(), 0);
    assert!(since.elapsed() < Duration::from_secs(20));
}
