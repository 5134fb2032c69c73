//! QEMU's own programs as clients.

use std::os::unix::fs::MetadataExt;
use std::process::Command;

use firn_disks::{DiskError, LoggedDisk};

use crate::served::{Place, ok, words};

const MIB: u64 = 1 << 20;

#[test]
fn written_bytes_are_read_back_and_are_in_the_file() {
    let place = Place::raw(64 * MIB);
    let server = place.serve(&place.disk());
    let commands = [
        "write -P 1 0 64k",
        "write -P 2 100000 7",
        "write -P 3 63M 1M",
        "aio_write -P 4 8M 5M",
        "aio_write -P 5 16M 5M",
        "aio_flush",
        "write -f -P 6 1M 4k",
        "flush",
    ];
    place.io_ok("raw", &commands);
    let words = place.io_ok(
        "raw",
        &[
            "read -P 1 0 64k",
            "read -P 2 100000 7",
            "read -P 0 100007 1k",
            "read -P 3 63M 1M",
            "read -P 4 8M 5M",
            "read -P 5 16M 5M",
            "read -P 6 1M 4k",
            "read -P 0 32M 31M",
        ],
    );
    assert!(!words.contains("Pattern verification failed"), "{words}");
    drop(server);
    let bytes = place.bytes();
    assert!(bytes[..65536] == [1; 65536] && bytes[100_000..100_007] == [2; 7]);
    assert!(bytes[63 << 20..].iter().all(|&byte| byte == 3));
    assert_eq!(bytes.len() as u64, 64 * MIB);
}

#[test]
fn zeroes_and_trims_read_as_zeros_and_give_room_back() {
    let place = Place::raw(16 * MIB);
    let _server = place.serve(&place.disk());
    place.io_ok("raw", &["write -P 9 0 16M", "flush"]);
    let full = place.file().metadata().unwrap().blocks();
    let discard = format!("{},discard=unmap", place.options("raw"));
    let commands = ["discard 0 4M", "write -z -u 4M 4M", "write -z 8M 1M"];
    let mut io = Command::new("qemu-io");
    io.args(["--image-opts", &discard]);
    for it in commands {
        io.args(["-c", it]);
    }
    let output = io.output().unwrap();
    assert!(output.status.success(), "{}", words(&output));
    place.io_ok("raw", &["read -P 0 0 9M", "read -P 9 9M 7M"]);
    let now = place.file().metadata().unwrap().blocks();
    let room = (full - now) * 512;
    assert!((8 * MIB..9 * MIB).contains(&room), "{room} bytes were given back");
}

#[test]
fn a_qcow2_file_grows_and_is_sound() {
    let place = Place::qcow2(64 * MIB, 80 * MIB);
    let before = place.file().metadata().unwrap().len();
    let server = place.serve(&place.disk());
    place.io_ok("qcow2", &["write -P 1 0 10M", "write -P 2 40M 3M", "discard 0 1M", "flush"]);
    place.io_ok("qcow2", &["read -P 0 0 1M", "read -P 1 1M 9M", "read -P 2 40M 3M"]);
    let check = ["check", "--image-opts", &place.options("qcow2")];
    assert!(ok("qemu-img", &check).contains("No errors were found"));
    drop(server);
    assert!(place.file().metadata().unwrap().len() > before + 12 * MIB);
    let file = place.file();
    let file = file.to_str().unwrap();
    assert!(ok("qemu-img", &["check", "-f", "qcow2", file]).contains("No errors were found"));
    let read = ["-f", "qcow2", "-c", "read -P 2 40M 3M", file];
    assert!(!ok("qemu-io", &read).contains("failed"));
}

#[test]
fn disks_are_listed_and_an_unknown_name_is_an_error() {
    let place = Place::raw(MIB);
    let _server = place.serve(&place.disk());
    let socket = format!("nbd+unix:///?socket={}", place.socket().display());
    let list = ok("qemu-nbd", &["--list", "-k", place.socket().to_str().unwrap()]);
    assert!(list.contains("vda") && list.contains("1048576"), "{list}");
    assert!(ok("qemu-img", &["info", "-f", "raw", &socket]).contains("1 MiB"), "the only one");
    let wrong = format!("nbd+unix:///vdb?socket={}", place.socket().display());
    let output = Command::new("qemu-img").args(["info", "-f", "raw", &wrong]).output().unwrap();
    let words = words(&output);
    assert!(!output.status.success() && words.contains("there are: vda"), "{words}");
}

#[test]
fn a_file_is_opened_by_qemu_or_by_the_server_but_not_both() {
    let place = Place::raw(MIB);
    let server = place.serve(&place.disk());
    let file = place.file();
    let mut write = Command::new("qemu-io");
    write.args(["-f", "raw", "-c", "write 0 4k", file.to_str().unwrap()]);
    let output = write.output().unwrap();
    assert!(!output.status.success() && words(&output).contains("lock"), "{}", words(&output));
    drop(server);
    assert!(write.output().unwrap().status.success());
}

#[test]
fn a_file_larger_than_its_disk_is_refused() {
    let place = Place::raw(MIB);
    let refused = LoggedDisk::open(&place.file(), Some(MIB - 1)).err().unwrap();
    assert!(matches!(refused, DiskError::Size { .. }), "{refused}");
    assert_eq!(LoggedDisk::open(&place.file(), Some(2 * MIB)).unwrap().size(), 2 * MIB);
}

#[test]
fn errors_of_the_file_are_errors_of_the_request() {
    for (fault, words) in [
        ("disk.write@2=ENOSPC", "No space left on device"),
        ("disk.write@2=EIO", "Input/output error"),
        ("disk.sync@1=EIO", "Input/output error"),
        ("disk.read@1=EIO", "Input/output error"),
    ] {
        let place = Place::raw(MIB);
        let _served = place.child(Some(fault));
        let commands = ["write -P 1 0 4k", "write -P 2 4k 4k", "write -f 8k 4k", "read -P 1 0 4k"];
        let output = place.io("raw", &commands);
        let told = crate::served::words(&output);
        assert!(told.contains(words), "{fault}: {told}");
        assert!(told.contains("wrote 4096/4096 bytes at offset 0"), "{fault}: {told}");
    }
}
