//! Filters of a network card, without a guest: QEMU itself announces the card's address.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use firn_vmm::{FilterSide, QemuVm};
use serde_json::{Value, json};

use crate::need_qemu;
use crate::qemu::{Qemu, words};

/// An announcement: its length, and the frame.
const FRAME_BYTES: usize = 4 + 60;
const PATIENCE: Duration = Duration::from_secs(30);

/// Reads announcements until `count` have come.
fn read_frames(stream: &mut UnixStream, count: usize) -> Vec<u8> {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut frames = vec![0; count * FRAME_BYTES];
    stream.read_exact(&mut frames).unwrap();
    assert!(frames.chunks(FRAME_BYTES).all(|frame| frame[..4] == [0, 0, 0, 60]));
    frames
}

/// Nothing comes within the time that all announcements take.
fn hears_nothing(stream: &mut UnixStream) {
    stream.set_read_timeout(Some(Duration::from_millis(1500))).unwrap();
    let error = stream.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
}

fn add_side(vm: &mut QemuVm, dir: &Path, side: FilterSide) -> UnixStream {
    let path = dir.join(side.word());
    let listener = UnixListener::bind(&path).unwrap();
    vm.add_filter_socket(0, side, listener.as_fd()).unwrap();
    drop(listener);
    let stream = UnixStream::connect(&path).unwrap();
    vm.add_filter("net", 0, side).unwrap();
    stream
}

/// The names of what this module adds to.
fn names(vm: &mut QemuVm) -> BTreeSet<String> {
    let list = |value: Value, key: &str| -> Vec<String> {
        let items = value.as_array().unwrap().iter();
        items.map(|item| item[key].as_str().unwrap().to_owned()).collect()
    };
    let objects = vm.qmp().execute("qom-list", json!({ "path": "/objects" })).unwrap();
    let devices = vm.qmp().execute("query-chardev", Value::Null).unwrap();
    list(objects, "name").into_iter().chain(list(devices, "label")).collect()
}

#[test]
fn frames_pass_by_the_filters_and_by_nothing_else() {
    need_qemu!();
    let dir = tempfile::tempdir().unwrap();
    let outside = UnixListener::bind(dir.path().join("outside")).unwrap();
    let netdev = format!(
        "-netdev stream,id=net,server=off,addr.type=unix,addr.path={} \
         -device virtio-net-pci,netdev=net,romfile=",
        dir.path().join("outside").display()
    );
    let qemu = Qemu::start(&words(&netdev));
    let (mut outside, _) = outside.accept().unwrap();
    let mut vm = qemu.vm();
    let before = (names(&mut vm), vm.device_paths().unwrap());
    let cards = vm.connected_cards().unwrap();
    assert_eq!((cards.len(), &*cards[0].netdev, &*cards[0].kind), (1, "net", "stream"));
    vm.announce_self().unwrap();
    let announced = read_frames(&mut outside, 5);

    let mut released = add_side(&mut vm, dir.path(), FilterSide::Released);
    let mut captured = add_side(&mut vm, dir.path(), FilterSide::Captured);
    assert!(vm.has_filter(0, FilterSide::Captured).unwrap());
    assert_ne!(vm.device_paths().unwrap(), before.1, "a filter counts as a device");
    vm.announce_self().unwrap();
    let frames = read_frames(&mut captured, 5);
    assert_eq!(frames, announced);
    hears_nothing(&mut outside);
    released.write_all(&frames).unwrap();
    assert_eq!(read_frames(&mut outside, 5), announced);

    // No process takes the frames: they are dropped.
    drop(captured);
    vm.announce_self().unwrap();
    hears_nothing(&mut outside);
    let mut captured = UnixStream::connect(dir.path().join(FilterSide::Captured.word())).unwrap();
    hears_nothing(&mut captured);
    vm.announce_self().unwrap();
    assert_eq!(read_frames(&mut captured, 5), announced);

    // What is in the socket still leaves. QEMU closes its end when it has read the other one's.
    vm.remove_filter(0, FilterSide::Captured).unwrap();
    vm.remove_filter(0, FilterSide::Captured).unwrap();
    (0..500).for_each(|_| released.write_all(&frames).unwrap());
    released.shutdown(std::net::Shutdown::Write).unwrap();
    released.set_read_timeout(Some(PATIENCE)).unwrap();
    let reader = std::thread::spawn(move || {
        let left = read_frames(&mut outside, 2500);
        (outside, left)
    });
    assert_eq!(released.read(&mut [0; 1]).unwrap(), 0);
    for side in [FilterSide::Released, FilterSide::Captured] {
        vm.remove_filter(0, side).unwrap();
        vm.remove_filter_socket(0, side).unwrap();
        vm.remove_filter_socket(0, side).unwrap();
    }
    let (mut outside, left) = reader.join().unwrap();
    assert_eq!(left, frames.repeat(500));
    assert_eq!((names(&mut vm), vm.device_paths().unwrap()), before);
    vm.announce_self().unwrap();
    assert_eq!(read_frames(&mut outside, 5), announced);
}

/// A refused descriptor is not left in QEMU.
#[test]
fn a_filter_that_qemu_refuses_leaves_nothing() {
    need_qemu!();
    let dir = tempfile::tempdir().unwrap();
    let qemu = Qemu::start(&words("-netdev user,id=net -device e1000,netdev=net,romfile="));
    let mut vm = qemu.vm();
    let before = names(&mut vm);
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", qemu.pid())).unwrap().count();
    let had = descriptors();
    let path = dir.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    vm.add_filter_socket(0, FilterSide::Captured, listener.as_fd()).unwrap();
    vm.add_filter_socket(0, FilterSide::Captured, listener.as_fd()).unwrap_err();
    vm.add_filter("none", 0, FilterSide::Captured).unwrap_err();
    vm.remove_filter(0, FilterSide::Captured).unwrap();
    vm.remove_filter_socket(0, FilterSide::Captured).unwrap();
    assert_eq!(names(&mut vm), before);
    let since = Instant::now();
    while descriptors() != had {
        assert!(since.elapsed() < PATIENCE, "{} descriptors, not {had}", descriptors());
        std::thread::sleep(Duration::from_millis(10));
    }
}
