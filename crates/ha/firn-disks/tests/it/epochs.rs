//! Logs and standbys of a disk that real clients write to.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};

use firn_cluster::Epoch;
use firn_disks::{DiskChange, FileStore, LoggedDisk, StandbyDisk, wire};

use crate::client::{Client, READ, WRITE};
use crate::served::{Place, ok};

const MIB: u64 = 1 << 20;
const BOUND: usize = 4 << 20;

/// A standby whose copy is a file beside the primary's.
struct Copy {
    standby: StandbyDisk<FileStore>,
}

impl Copy {
    fn new(place: &Place, disk: &LoggedDisk) -> Self {
        let length = place.file().metadata().unwrap().len();
        let store = FileStore::create(&place.dir.path().join("copy"), length).unwrap();
        Self { standby: StandbyDisk::new(disk.size(), store, BOUND) }
    }

    fn receive(&mut self, epoch: Epoch, changes: &[DiskChange]) {
        for message in wire::encode_changes(3, changes) {
            let (disk, changes) = wire::decode_changes(&message).unwrap();
            assert_eq!(disk, 3);
            self.standby.receive_changes(epoch, changes).unwrap();
        }
    }

    fn seed(&mut self, disk: &LoggedDisk) -> bool {
        let seed = disk.seed_step().unwrap();
        self.receive(Epoch(0), &seed.changes);
        seed.is_whole
    }

    /// The guest is paused.
    fn cut(&mut self, disk: &LoggedDisk) -> Epoch {
        let log = disk.cut_log().unwrap();
        if log.epoch == Epoch(1) {
            self.standby.complete_epoch(Epoch(0)).unwrap();
        }
        self.receive(log.epoch, &log.changes);
        self.standby.complete_epoch(log.epoch).unwrap();
        log.epoch
    }

    /// The contents of the standby, with bytes that QEMU may have appended.
    fn take_up(self, place: &Place, committed: Epoch) -> Vec<u8> {
        let mut standby = self.standby;
        standby.commit_epoch(committed).unwrap();
        assert_eq!(standby.promote_disk().unwrap().0, committed);
        std::fs::read(place.dir.path().join("copy")).unwrap()
    }
}

fn differ(one: &[u8], other: &[u8]) -> Option<usize> {
    assert_eq!(one.len(), other.len());
    one.iter().zip(other).position(|(one, other)| one != other)
}

#[test]
fn a_disk_is_copied_while_qemu_writes_to_it() {
    let place = Place::raw(64 * MIB);
    let disk = place.disk();
    let _server = place.serve(&disk);
    place.io_ok("raw", &["write -P 7 3M 20M", "write -P 8 50M 1M"]);
    disk.begin_protection(BOUND);
    let mut copy = Copy::new(&place, &disk);
    let mut bench = Command::new("qemu-img")
        .args([
            "bench",
            "-w",
            "-q",
            "--pattern=90",
            "-c",
            "3000",
            "-d",
            "8",
            "-s",
            "12k",
            "-S",
            "20k",
        ])
        .args(["--image-opts", &place.options("raw")])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    // More bytes are written than the log may contain, so this ends only if the log is fetched.
    while bench.try_wait().unwrap().is_none() {
        copy.seed(&disk);
    }
    assert!(bench.wait().unwrap().success());
    while !copy.seed(&disk) {}
    assert_eq!(copy.cut(&disk), Epoch(1));
    let at_cut = place.bytes();
    assert!(at_cut.iter().filter(|&&byte| byte == 90).count() > 20 << 20, "it was written to");
    place.io_ok("raw", &["write -P 1 0 1M", "discard 2M 1M", "write -z 50M 1M"]);
    assert_eq!(copy.cut(&disk), Epoch(2));
    assert_eq!(differ(&copy.take_up(&place, Epoch(1)), &at_cut), None);
}

#[test]
fn holes_stay_holes() {
    let place = Place::raw(1 << 30);
    let disk = place.disk();
    let _server = place.serve(&disk);
    place.io_ok("raw", &["write -P 7 1000M 1M", "write -P 7 5M 4M"]);
    disk.begin_protection(BOUND);
    let mut copy = Copy::new(&place, &disk);
    let mut steps = 1;
    while !copy.seed(&disk) {
        steps += 1;
    }
    assert!(steps < 10, "{steps} steps for 5 MiB");
    copy.cut(&disk);
    place.io_ok("raw", &["discard 6M 1M", "write -z -u 7M 1M"]);
    copy.cut(&disk);
    copy.cut(&disk);
    let copied = copy.take_up(&place, Epoch(2));
    assert_eq!(differ(&copied, &place.bytes()), None);
    let room = place.dir.path().join("copy").metadata().unwrap().blocks() * 512;
    assert!(room < 4 * MIB, "{room} bytes are taken");
}

#[test]
fn a_qcow2_file_that_grew_is_sound_on_the_standby() {
    let place = Place::qcow2(64 * MIB, 80 * MIB);
    let disk = place.disk();
    let _server = place.serve(&disk);
    disk.begin_protection(64 << 20);
    let mut copy = Copy::new(&place, &disk);
    copy.seed(&disk);
    place.io_ok("qcow2", &["write -P 1 0 10M", "flush"]);
    while !copy.seed(&disk) {}
    copy.cut(&disk);
    place.io_ok("qcow2", &["write -P 2 20M 10M", "flush"]);
    let second = copy.cut(&disk);
    place.io_ok("qcow2", &["write -P 3 0 40M", "flush"]);
    copy.cut(&disk);
    copy.take_up(&place, second);
    let path = place.dir.path().join("copy");
    let path = path.to_str().unwrap();
    assert!(ok("qemu-img", &["check", "-f", "qcow2", path]).contains("No errors were found"));
    for read in ["read -P 1 0 10M", "read -P 2 20M 10M", "read -P 0 30M 20M"] {
        let words = ok("qemu-io", &["-f", "qcow2", "-c", read, path]);
        assert!(words.contains("read ") && !words.contains("failed"), "{read}: {words}");
    }
}

/// Sends writes without reading the replies, until some wait.
fn fill(client: &mut Client, disk: &LoggedDisk) -> u64 {
    let data = vec![5; 256 << 10];
    let mut sent = 0;
    while disk.log_pressure().waiting == 0 {
        // One at a time, so that a waiting write is in the server and not in the socket.
        client.request(WRITE, 0, sent * data.len() as u64, data.len() as u32, &data);
        sent += 1;
        while disk.log_pressure().waiting == 0
            && disk.log_pressure().bytes < (sent as usize) * data.len()
        {
            std::thread::yield_now();
        }
    }
    sent
}

fn protected(place: &Place, disk: &LoggedDisk) {
    disk.begin_protection(1 << 20);
    while !disk.seed_step().unwrap().is_whole {}
    assert_eq!(place.bytes().len() as u64, disk.size());
}

fn answered(client: &mut Client, count: u64) {
    let mut replies: Vec<_> = (0..count)
        .map(|_| {
            let head = client.take(16);
            assert_eq!(head[4..8], [0; 4], "nothing fails");
            u64::from_be_bytes(head[8..].try_into().unwrap())
        })
        .collect();
    replies.sort_unstable();
    assert!(replies.iter().copied().eq((0..count).map(|index| index * (256 << 10))));
}

#[test]
fn writes_wait_for_the_cut_where_the_log_is_full() {
    let place = Place::raw(64 * MIB);
    let disk = place.disk();
    let _server = place.serve(&disk);
    protected(&place, &disk);
    let mut client = Client::ready(&place.socket());
    let sent = fill(&mut client, &disk);
    assert_eq!(sent, 5, "four fill the log");
    let mut other = Client::ready(&place.socket());
    other.request(READ, 0, 0, 4, b"");
    assert_eq!((other.reply(0), other.take(4)), (0, vec![5; 4]), "reads go on");
    let log = disk.cut_log().unwrap();
    assert_eq!(log.changes.len(), 4);
    answered(&mut client, sent);
    assert_eq!(disk.cut_log().unwrap().changes.len(), 1);
}

/// A connection ends with writes that wait. The client sends newer ones on another connection, and
/// those remain.
#[test]
fn pending_writes_of_an_ended_connection_do_not_overwrite_newer_ones() {
    let place = Place::raw(64 * MIB);
    let disk = place.disk();
    let _server = place.serve(&disk);
    protected(&place, &disk);
    let mut client = Client::ready(&place.socket());
    let sent = fill(&mut client, &disk);
    let at = (sent - 1) * (256 << 10);
    drop(client);
    let mut next = Client::ready(&place.socket());
    disk.cut_log().unwrap();
    next.request(WRITE, 0, at, 4, b"newe");
    assert_eq!(next.reply(at), 0);
    while disk.log_pressure().waiting > 0 {
        std::thread::yield_now();
    }
    assert_eq!(place.bytes()[at as usize..][..4], *b"newe");
    assert_eq!(disk.cut_log().unwrap().changes.len(), 1, "the one that was answered");
}

#[test]
fn a_vm_that_is_stopped_does_not_wait_for_a_cut_that_waits_for_it() {
    let place = Place::raw(64 * MIB);
    let disk = place.disk();
    let _server = place.serve(&disk);
    protected(&place, &disk);
    let mut client = Client::ready(&place.socket());
    let sent = fill(&mut client, &disk);
    disk.begin_drain();
    answered(&mut client, sent);
    assert_eq!(disk.cut_log().unwrap().changes.len() as u64, sent, "all belong to the epoch");
    assert_eq!(fill(&mut client, &disk), 5, "the bound is back");
    disk.end_protection();
    answered(&mut client, 5);
}

#[test]
fn a_server_that_is_dropped_does_not_wait_for_a_cut() {
    let place = Place::raw(64 * MIB);
    let disk = place.disk();
    let server = place.serve(&disk);
    protected(&place, &disk);
    let mut client = Client::ready(&place.socket());
    fill(&mut client, &disk);
    drop(server);
    drop(disk);
    let disk = place.disk();
    let _server = place.serve(&disk);
    place.io_ok("raw", &["read -P 5 0 1M", "read -P 0 1M 1M", "write -P 6 1M 256k"]);
    assert!(Path::exists(&place.socket()));
}
