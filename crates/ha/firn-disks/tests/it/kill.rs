//! The server is killed, and a successor takes over the socket and the file. QEMU connects again by
//! itself.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::served::Place;

const BLOCK: usize = 64 << 10;
const BLOCKS: usize = 32;

/// A qemu-io process, which gets its commands line by line.
struct Io {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Io {
    fn start(place: &Place) -> Self {
        let mut child = Command::new("qemu-io")
            .args(["--image-opts", &place.options("raw")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (to, from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, to, from: BufReader::new(from) }
    }

    fn tell(&mut self, command: &str) {
        writeln!(self.to, "{command}").unwrap();
    }

    /// Waits until it has printed this.
    fn said(&mut self, words: &str) {
        let mut line = String::new();
        while !line.contains(words) {
            line.clear();
            assert!(self.from.read_line(&mut line).unwrap() > 0, "qemu-io ended before {words:?}");
            assert!(!line.contains("failed"), "{line}");
        }
    }

    fn write(&mut self, block: usize, fill: usize) {
        self.tell(&format!("write -P {fill} {} {BLOCK}", block * BLOCK));
    }

    fn wrote(&mut self, block: usize) {
        self.said(&format!("wrote {BLOCK}/{BLOCK} bytes at offset {}", block * BLOCK));
    }

    fn end(self) {
        let Self { mut child, to, .. } = self;
        // It reads its input ahead of the running command: only the end of its input is sure to be
        // noticed.
        drop(to);
        assert!(child.wait().unwrap().success());
    }
}

#[test]
fn acknowledged_writes_survive_a_kill_and_others_are_repeated() {
    let place = Place::raw((BLOCK * BLOCKS) as u64);
    let mut served = place.child(None);
    let mut io = Io::start(&place);
    for block in 0..BLOCKS {
        // Each eighth is in flight, or done, or not begun when the server dies.
        io.write(block, block + 1);
        if block % 8 == 7 {
            served.kill();
            let bytes = place.bytes();
            for done in 0..block {
                let there = &bytes[done * BLOCK..][..BLOCK];
                assert!(
                    there.iter().all(|&byte| byte == done as u8 + 1),
                    "{done} was acknowledged"
                );
            }
            let torn = bytes[block * BLOCK..][..BLOCK].chunks(512);
            let is_whole = |sector: &[u8]| {
                sector.iter().all(|byte| *byte == sector[0] && [0, block as u8 + 1].contains(byte))
            };
            assert!(torn.into_iter().all(is_whole), "a sector of {block} is torn");
            served = place.child(None);
        }
        io.wrote(block);
    }
    io.end();
    let bytes = place.bytes();
    let wrong = (0..BLOCKS * BLOCK).find(|at| bytes[*at] != (at / BLOCK) as u8 + 1);
    assert_eq!(wrong, None);
}

#[test]
fn a_request_without_a_reply_is_repeated() {
    let place = Place::raw((BLOCK * BLOCKS) as u64);
    let mut served = place.child(Some("disk.changed@3"));
    let mut io = Io::start(&place);
    for block in 0..2 {
        io.write(block, block + 1);
        io.wrote(block);
    }
    io.write(2, 3);
    served.wait();
    assert!(
        place.bytes()[2 * BLOCK..3 * BLOCK].iter().all(|&byte| byte == 3),
        "it was carried out"
    );
    let _successor = place.child(None);
    io.wrote(2);
    io.tell(&format!("read -P 3 {} {BLOCK}", 2 * BLOCK));
    io.said("read ");
    io.end();
}

#[test]
fn a_request_that_was_not_carried_out_was_not_answered() {
    let place = Place::raw((BLOCK * BLOCKS) as u64);
    let held = place.dir.path().join("held");
    let mut served = place.child(Some(&format!("disk.write@3=WAIT:{}", held.display())));
    let mut io = Io::start(&place);
    for block in 0..2 {
        io.write(block, block + 1);
        io.wrote(block);
    }
    io.write(2, 3);
    while !held.exists() {
        std::thread::yield_now();
    }
    served.kill();
    let _successor = place.child(None);
    io.wrote(2);
    io.end();
    assert!(place.bytes()[2 * BLOCK..3 * BLOCK].iter().all(|&byte| byte == 3), "it was answered");
}

#[test]
fn a_successor_waits_for_the_file_of_a_predecessor_that_lives_and_then_gives_up() {
    let place = Place::raw(BLOCK as u64);
    let _served = place.child(None);
    let refused = firn_disks::LoggedDisk::open(&place.file(), None).err().unwrap();
    assert!(refused.to_string().contains("in use"), "{refused}");
    place.io_ok("raw", &["write -P 1 0 4k"]);
}

#[test]
fn a_socket_takes_the_place_of_a_stale_one_and_of_nothing_else() {
    let place = Place::raw(BLOCK as u64);
    drop(std::os::unix::net::UnixListener::bind(place.socket()).unwrap());
    let disk = place.disk();
    let server = place.serve(&disk);
    let mode = std::os::unix::fs::MetadataExt::mode(&place.socket().metadata().unwrap());
    assert_eq!(mode & 0o777, 0o600);
    place.io_ok("raw", &["read 0 4k"]);
    drop(server);
    assert!(!place.socket().exists(), "it goes with the server");
    std::fs::write(place.socket(), "a file of the user").unwrap();
    let taken =
        firn_disks::nbd::NbdServer::start(&place.socket(), Default::default()).err().unwrap();
    assert!(taken.to_string().contains("no socket"), "{taken}");
    assert_eq!(std::fs::read(place.socket()).unwrap(), b"a file of the user");
}
