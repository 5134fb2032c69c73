//! A port between two sockets, one in place of a VM's card and one in place of the outside.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use tempfile::TempDir;

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);

struct Scene {
    vm: UnixDatagram,
    port: NicPort,
    listener: UnixListener,
    /// QEMU's end, as QEMU has it open too.
    _ours: OwnedFd,
    dir: TempDir,
}

impl Scene {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("uplink");
        let listener = UnixListener::bind(&path).unwrap();
        let (theirs, ours) = create_socket_pair().unwrap();
        let port = NicPort::open(ours.try_clone().unwrap(), None, &path, None, true).unwrap();
        let vm = UnixDatagram::from(theirs);
        vm.set_read_timeout(Some(PATIENCE)).unwrap();
        vm.set_write_timeout(Some(PATIENCE)).unwrap();
        port.connect_uplink();
        Self { vm, port, listener, _ours: ours, dir }
    }

    fn outside(&self) -> UnixStream {
        let stream = self.listener.accept().unwrap().0;
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        eventually(|| self.port.port_status().is_connected);
        stream
    }
}

fn eventually(mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE);
        thread::sleep(Duration::from_millis(1));
    }
}

fn frame(stream: &mut UnixStream) -> Vec<u8> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut frame = vec![0; u32::from_be_bytes(length) as usize];
    stream.read_exact(&mut frame).unwrap();
    frame
}

#[test]
fn frames_pass_in_both_directions() {
    let scene = Scene::new();
    let mut outside = scene.outside();
    scene.vm.send(b"hello").unwrap();
    assert_eq!(frame(&mut outside), b"hello");
    outside.write_all(b"\0\0\0\x02hi\0\0\0\x03you").unwrap();
    for expected in [&b"hi"[..], b"you"] {
        let mut got = [0; 10];
        let bytes = scene.vm.recv(&mut got).unwrap();
        assert_eq!(&got[..bytes], expected);
    }
    let counts = |now: PortStatus| (now.left, now.came, now.delays.len());
    eventually(|| counts(scene.port.port_status()) == (1, 2, 1));
}

#[test]
fn frames_sent_before_the_pause_belong_to_the_ending_epoch() {
    let scene = Scene::new();
    let mut outside = scene.outside();
    scene.port.begin_protection();
    scene.port.cut_epoch(Epoch(1));
    scene.vm.send(b"two").unwrap();
    scene.port.cut_epoch(Epoch(2));
    scene.vm.send(b"three").unwrap();
    eventually(|| scene.port.port_status().held == BufferUsage { frames: 2, bytes: 8 });
    scene.port.commit_epoch(Epoch(2));
    assert_eq!(frame(&mut outside), b"two");
    assert_eq!(scene.port.port_status().held.frames, 1);
    scene.port.commit_epoch(Epoch(3));
    assert_eq!(frame(&mut outside), b"three");
}

#[test]
fn an_uplink_that_goes_is_connected_to_again_and_gets_whole_frames() {
    let scene = Scene::new();
    drop(scene.outside());
    let mut outside = scene.outside();
    scene.vm.send(b"again").unwrap();
    assert_eq!(frame(&mut outside), b"again");
    drop(outside);
    let path = scene.dir.path().join("uplink");
    std::fs::remove_file(&path).unwrap();
    let listener = UnixListener::bind(&path).unwrap();
    let mut outside = listener.accept().unwrap().0;
    outside.write_all(b"\0\0\0\x01x").unwrap();
    assert_eq!(scene.vm.recv(&mut [0; 2]).unwrap(), 1);
}

/// While the peer does not read the uplink, the VM waits, and none of its frames is lost or
/// duplicated.
#[test]
fn a_slow_uplink_slows_the_vm() {
    let scene = Scene::new();
    let mut outside = scene.outside();
    let frames = 200_u32;
    let sender = scene.vm.try_clone().unwrap();
    let sending = thread::spawn(move || {
        for number in 0..frames {
            let mut frame = vec![0; 8000];
            frame[..4].copy_from_slice(&number.to_be_bytes());
            sender.send(&frame).unwrap();
        }
    });
    for number in 0..frames {
        if number % 50 == 0 {
            thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(frame(&mut outside)[..4], number.to_be_bytes());
    }
    sending.join().unwrap();
}

/// At the bound the card isn't read: the sender has to wait.
#[test]
fn a_closed_gate_is_bounded() {
    let scene = Scene::new();
    let _outside = scene.outside();
    scene.port.begin_protection();
    scene.port.cut_epoch(Epoch(1));
    scene.vm.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let full = (0..10_000).map(|_| scene.vm.send(&[7; 60_000])).find_map(Result::err).unwrap();
    assert_eq!(full.kind(), ErrorKind::WouldBlock);
    let held = scene.port.port_status().held;
    assert!(
        held.bytes > BYTES_MAX - 100_000 && held.bytes < BYTES_MAX + FRAME_BYTES_MAX,
        "{held:?}"
    );
    scene.port.commit_epoch(Epoch(2));
}

#[test]
fn an_invalid_frame_ends_the_connection_and_not_the_port() {
    let scene = Scene::new();
    scene.outside().write_all(&[0xff; 100]).unwrap();
    let mut outside = scene.outside();
    scene.vm.send(b"still here").unwrap();
    assert_eq!(frame(&mut outside), b"still here");
}

/// QEMU drops frames that wait for room when it stops the VM. So there is room for them, also at
/// the bound.
#[test]
fn a_vm_that_is_about_to_be_stopped_has_room() {
    let scene = Scene::new();
    scene.port.begin_protection();
    scene.port.cut_epoch(Epoch(1));
    scene.vm.set_nonblocking(true).unwrap();
    let large = vec![7; 60_000];
    let fill = || {
        let (mut sent, mut since) = (0, Instant::now());
        while since.elapsed() < Duration::from_millis(300) {
            match scene.vm.send(&large) {
                Ok(_) => (sent, since) = (sent + 1, Instant::now()),
                Err(_) => thread::sleep(Duration::from_millis(1)),
            }
        }
        sent
    };
    assert!(fill() * large.len() > BYTES_MAX, "it is at the bound");
    assert_eq!(fill(), 0);
    let held = scene.port.port_status().held.frames;
    for _ in 0..3 {
        scene.port.prepare_pause();
        scene.vm.send(b"the last one").unwrap();
        scene.port.cut_epoch(Epoch(2));
        scene.port.finish_pause();
    }
    let more = scene.port.port_status().held.frames - held;
    assert!(more > 3, "{more}: what waited in the socket is taken too");
    fill();
    assert_eq!(fill(), 0, "it is at the bound again");
}

fn boot_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

#[test]
fn frames_that_need_a_lease_wait_until_it_is_valid() {
    let scene = Scene::new();
    let mut outside = scene.outside();
    let page = scene.dir.path().join("lease");
    let grant = |ms| crate::lease::write_lease(&page, 3, boot_time() + Duration::from_millis(ms));
    scene.port.set_lease(Some(OutputLease::new(&page, 3)));
    scene.vm.send(b"early").unwrap();
    eventually(|| scene.port.port_status().waits_for_lease);
    outside.set_read_timeout(Some(3 * RETRY_INTERVAL)).unwrap();
    assert!(outside.read(&mut [0]).is_err(), "it has left without a lease");
    outside.set_read_timeout(Some(PATIENCE)).unwrap();
    grant(60_000).unwrap();
    assert_eq!(frame(&mut outside), b"early");
    scene.vm.send(b"held").unwrap();
    assert_eq!(frame(&mut outside), b"held");
    // It ends by itself, while it sends.
    grant(50).unwrap();
    let end = boot_time() + Duration::from_millis(50);
    let mut sent: u64 = 0;
    while boot_time() < end + Duration::from_millis(100) {
        scene.vm.send(&sent.to_le_bytes()).unwrap();
        sent += 1;
    }
    assert!(scene.port.port_status().waits_for_lease && scene.port.port_status().left < sent + 2);
    let left = scene.port.port_status().left;
    thread::sleep(3 * RETRY_INTERVAL);
    assert_eq!(scene.port.port_status().left, left, "it sends after the end");
    // The buffered frames of this generation leave in their order: none was lost.
    scene.port.set_lease(None);
    for number in 0..sent {
        assert_eq!(frame(&mut outside), number.to_le_bytes());
    }
}

/// The whole process is stopped, as by a debugger, and continues after its lease has ended. The
/// process is this test again, as a child.
#[test]
fn a_stopped_host_that_wakes_sends_no_frame() {
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("uplink")).unwrap();
    let page = dir.path().join("lease");
    crate::lease::write_lease(&page, 1, boot_time() + Duration::from_secs(60)).unwrap();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["port::tests::send_for_ever", "--exact", "--ignored", "--nocapture"])
        .env("FIRN_SCENE", dir.path())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let mut outside = listener.accept().unwrap().0;
    outside.set_read_timeout(Some(PATIENCE)).unwrap();
    (0..100).for_each(|_| drop(frame(&mut outside)));
    let signal = |signal| {
        let pid = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    };
    signal(rustix::process::Signal::STOP);
    crate::lease::write_lease(&page, 1, boot_time()).unwrap();
    // Frames that left before are in the socket.
    outside.set_read_timeout(Some(3 * RETRY_INTERVAL)).unwrap();
    let mut buffer = vec![0; 1 << 20];
    while outside.read(&mut buffer).is_ok() {}
    signal(rustix::process::Signal::CONT);
    let woken = outside.read(&mut buffer);
    // At most one frame was between the check and the write.
    assert!(woken.as_ref().map_or(0, |bytes| *bytes) <= 12, "{woken:?}");
    assert!(outside.read(&mut buffer).is_err(), "it goes on sending");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
#[ignore = "a part of another test"]
fn send_for_ever() {
    let dir = std::path::PathBuf::from(std::env::var_os("FIRN_SCENE").unwrap());
    let (theirs, ours) = create_socket_pair().unwrap();
    let port =
        NicPort::open(ours.try_clone().unwrap(), None, &dir.join("uplink"), None, true).unwrap();
    port.set_lease(Some(OutputLease::new(&dir.join("lease"), 1)));
    port.connect_uplink();
    let vm = UnixDatagram::from(theirs);
    loop {
        vm.send(b"frame...").unwrap();
    }
}

const VM: [u8; 6] = [2, 0, 0, 0, 0, 5];

fn membership() -> ClusterMembership {
    let mac = |last| firn_cluster::switch::MacAddress([2, 0, 0, 0, 0, last]);
    let members = [(firn_cluster::VmId(0), mac(5)), (firn_cluster::VmId(1), mac(6))].into();
    let (cluster, own, generation) = (1, firn_cluster::VmId(0), Generation(1));
    ClusterMembership { cluster, own, members, generation, layout: 0 }
}

/// Sends a frame from the outside, behind its length.
fn comes(byte: u8) -> Vec<u8> {
    [&[0, 0, 0, 15][..], &VM, &[2, 0, 0, 0, 0, 9, 8, 0, byte]].concat()
}

/// A member that is about to be paused is given no frames until it runs again, and has read the
/// frames that it was given before.
#[test]
fn a_paused_member_receives_no_frame() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("uplink");
    let listener = UnixListener::bind(&path).unwrap();
    let (theirs, ours) = create_socket_pair().unwrap();
    let vm = UnixDatagram::from(theirs.try_clone().unwrap());
    let port = NicPort::open(ours, Some(theirs), &path, None, true).unwrap();
    port.connect_uplink();
    let mut outside = listener.accept().unwrap().0;
    assert!(port.join_cluster(membership()) && port.is_new());
    let mut got = [0; 100];
    outside.write_all(&comes(1)).unwrap();
    eventually(|| port.port_status().came == 1);
    let reader = vm.try_clone().unwrap();
    let reads = thread::spawn(move || {
        thread::sleep(READ_TIMEOUT / 4);
        let first = reader.recv(&mut got).map(|_| got[14]).unwrap();
        (first, reader.recv(&mut got).map(|_| got[0]).unwrap())
    });
    port.prepare_pause();
    assert!(
        port.shared.is_card_queue_empty() && !port.shared.lock_output().is_stuck,
        "it was waited for"
    );
    assert_eq!(reads.join().unwrap(), (1, PROBE[0]));
    outside.write_all(&comes(2)).unwrap();
    vm.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    assert!(vm.recv(&mut got).is_err(), "it stands still");
    assert!(port.cut_epoch(Epoch(1)).is_some());
    port.finish_pause();
    vm.recv(&mut got).unwrap();
    assert_eq!((got[14], port.port_status().came), (2, 2));
    assert!(!port.is_new() && !port.is_open());
    assert!(!port.join_cluster(membership()) && !port.leave_cluster(), "what it sends is held");
    port.release_output();
    assert!(port.leave_cluster() && port.membership().is_none());
}

/// A card that reads nothing delays the pause only briefly, and not in each epoch.
#[test]
fn a_member_that_reads_nothing_is_not_waited_for() {
    let (theirs, ours) = create_socket_pair().unwrap();
    let port = NicPort::open(ours, Some(theirs), Path::new("/none"), None, true).unwrap();
    port.join_cluster(membership());
    for _ in 0..3 {
        port.prepare_pause();
        assert!(port.shared.lock_output().is_stuck);
        port.finish_pause();
    }
    let since = Instant::now();
    (0..100).for_each(|_| port.prepare_pause());
    assert!(since.elapsed() < 100 * READ_TIMEOUT / 4, "{:?}", since.elapsed());
}

/// The thread that cuts is woken for a global checkpoint, for sent frames, and for frames that wait
/// for a cut.
#[test]
fn the_protection_of_a_member_receives_its_cuts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("uplink");
    let listener = UnixListener::bind(&path).unwrap();
    let (theirs, ours) = create_socket_pair().unwrap();
    let vm = UnixDatagram::from(theirs);
    let port = NicPort::open(ours, None, &path, None, true).unwrap();
    port.connect_uplink();
    let mut outside = listener.accept().unwrap().0;
    port.join_cluster(membership());
    let (of, news) = (membership().generation, port.member_events());
    let told_until = |holds: &dyn Fn() -> bool| {
        while !holds() {
            news.recv_timeout(PATIENCE).expect("nobody says so");
        }
    };
    port.cut_epoch(Epoch(1));
    vm.send(&[&[2, 0, 0, 0, 0, 9], &VM[..], &[8, 0, 7]].concat()).unwrap();
    port.cut_epoch(Epoch(2));
    assert!(news.is_empty());
    assert!(port.record_global_checkpoint(of, Epoch(2)) && !news.is_empty());
    assert_eq!(frame(&mut outside)[14], 7);
    told_until(&|| port.released_up_to() == FrameNumber(1));

    // Because a frame has left for another member, only a new cut can be its mark.
    vm.send(&[&[2, 0, 0, 0, 0, 6], &VM[..], &[8, 0, 8]].concat()).unwrap();
    frame(&mut outside);
    let mut other = ClusterOutput::without_backup(ClusterMembership {
        own: firn_cluster::VmId(1),
        ..membership()
    });
    other.cut_epoch();
    other.request_mark(of, RequestNumber { term: 1, count: 1 });
    other.cut_epoch();
    other.push_frame(&[&VM[..], &[2, 0, 0, 0, 0, 6, 8, 0, 5]].concat());
    let wrapped = other.next_frame().unwrap();
    outside.write_all(&[&(wrapped.len() as u32).to_be_bytes()[..], &wrapped].concat()).unwrap();
    told_until(&|| port.is_cut_needed());
}
