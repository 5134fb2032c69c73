//! Disks of a user's own QEMU that are mirrored while it is protected: they fail over with memory, and stay the user's own.

use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

use firn_lab::guest::{GuestControl, JobState};
use firn_vmm::QemuVm;
use serde_json::{Value, json};

use crate::attached_disks::OwnQemu;
use crate::faults::points;
use crate::filters::graph;
use crate::hypervisor_dies::{answer, start};
use crate::network::{kill_standby, some_time};
use crate::outside::Outside;
use crate::own_qemu::resources_of;
use crate::parts::part_of;
use crate::protect::{committed_of, protect, standby_called};
use crate::session::{Session, eventually, kill, text};
use crate::vm::{LOAD, Vm, qemu_img, writes};

const PATIENCE: Duration = Duration::from_secs(90);
/// How often a VM is killed. More by the environment.
const ROUNDS: &str = "FIRN_ROUNDS";

/// A guest in a user's own QEMU, with a qcow2 disk that has a backing file and no id, a raw disk as a graph of nodes, a card and a
/// balloon; attached. It writes to its disks, and checks what it wrote by what is in its memory. A client counts with it.
fn attached(outside: &Outside) -> (Vm, OwnQemu) {
    let vm = Vm::one_of_hosts();
    let (uplink, path) = (vm.session.path("uplink"), |name| vm.session.path(name));
    outside.listen(&uplink);
    qemu_img(&["create", "-q", "-f", "raw", text(&path("base.raw")), "16M"]);
    let top = path("top.qcow2");
    let backing = ["-b", "base.raw", "-F", "raw", text(&top)];
    qemu_img(&[&["create", "-q", "-f", "qcow2"][..], &backing].concat());
    qemu_img(&["create", "-q", "-f", "raw", text(&path("plain.raw")), "16M"]);
    let netdev = format!("stream,id=net,server=off,addr.type=unix,addr.path={}", text(&uplink));
    let vm = vm.with(&[
        "-drive",
        "file=top.qcow2,format=qcow2,if=virtio",
        "-blockdev",
        r#"{"driver":"file","node-name":"plain-file","filename":"plain.raw"}"#,
        "-blockdev",
        "driver=raw,node-name=plain,file=plain-file,discard=unmap",
        "-device",
        "virtio-blk-pci,drive=plain,id=second",
        "-netdev",
        &netdev,
        "-device",
        "virtio-net-pci,netdev=net,romfile=",
        "-device",
        "virtio-balloon-pci,free-page-reporting=on",
    ]);
    let qemu = OwnQemu::guest(&vm);
    drop(vm.control());
    qemu.attach(&vm.session);
    let vm = vm.with_load();
    vm.write_to_disks();
    let mut control = vm.control();
    control.spawn_job("count", &["firn-guest", "net-dma", "count"]).unwrap();
    control.wait_output("count", "ready", PATIENCE).unwrap();
    drop(control);
    outside.is_answered(20);
    (vm, qemu)
}

/// Objects, character devices, jobs, nodes and network, without the sizes of files.
pub fn state(monitor: &mut QemuVm) -> Value {
    let mut state = graph(monitor);
    for node in state["nodes"].as_array_mut().unwrap() {
        *node = json!([node["node-name"], node["drv"], node["file"], node["ro"]]);
    }
    state["block-jobs"] = monitor.qmp().execute("query-block-jobs", Value::Null).unwrap();
    state
}

/// How many requests the guest has made of a disk; none of what it found was wrong.
#[track_caller]
fn requests(vm: &Vm, number: usize) -> u64 {
    let report = vm.disk_report(number);
    assert_eq!(report["wrong"], 0, "disk{number}: {report}");
    report["progress"].as_u64().unwrap()
}

/// Changes the balloon's size until the QEMU ends.
fn change_balloon(mut monitor: QemuVm) -> JoinHandle<()> {
    std::thread::spawn(move || {
        for size in [168_u64 << 20, 192 << 20].into_iter().cycle() {
            if monitor.qmp().execute("balloon", json!({ "value": size })).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(300));
        }
    })
}

/// The guest continues to write to its disks, and has checked many blocks from before.
#[track_caller]
fn disks_are_well(vm: &Vm) {
    let before = [requests(vm, 0), requests(vm, 1)];
    eventually("disks go on", PATIENCE, || {
        (0..2).all(|number| requests(vm, number) > before[number] + 100)
    });
}

/// The same, over a connection to the guest that is open already.
#[track_caller]
fn progress(control: &mut GuestControl, number: usize) -> u64 {
    let state = control.poll_job(&format!("disk{number}")).unwrap();
    let JobState::Running { stdout, .. } = state else { unreachable!("{state:?}") };
    let last = stdout.lines().rfind(|line| line.contains("progress")).unwrap();
    let report: Value = serde_json::from_str(last).unwrap();
    assert_eq!(report["wrong"], 0, "disk{number}: {report}");
    report["progress"].as_u64().unwrap()
}

/// Has the standby's QEMU give back the names of the sockets by which a test reaches the VM.
struct KeptNames(Vec<(std::path::PathBuf, std::path::PathBuf)>);

impl KeptNames {
    fn keep(session: &Session) -> Self {
        let kept_name = |name: &str| (session.path(name), session.path(&format!("{name}.kept")));
        let names: Vec<_> = ["agent", "heart", "qmp", "monitor"].map(kept_name).into();
        for (path, kept) in &names {
            std::fs::hard_link(path, kept).unwrap();
        }
        Self(names)
    }

    fn give_back(&self) {
        for (path, kept) in &self.0 {
            let _ = std::fs::remove_file(path);
            std::fs::hard_link(kept, path).unwrap();
        }
    }
}

fn last_text(session: &Session) -> String {
    session.status("web")["last"]["text"].to_string()
}

fn is_running(session: &Session) -> bool {
    session.status("web")["state"] == "running"
}

/// A host is lost under load: clients see nothing undone, and the disks are those that memory knows.
#[test]
fn a_lost_vm_continues_with_disks_that_agree_with_its_memory() {
    let rounds: u32 = std::env::var(ROUNDS).map_or(2, |rounds| rounds.parse().unwrap());
    for round in 0..rounds {
        let outside = Outside::start();
        let (vm, mut qemu) = attached(&outside);
        let session = &vm.session;
        let balloon = change_balloon(qemu.monitor());
        protect(&vm, "web", standby_called(&vm, "twin"), &[]);
        let status = session.status("web");
        eprintln!("round {round}: {}", status["protection"]);
        assert_eq!(status["protection"]["mirrored"].as_array().unwrap().len(), 2, "{status}");
        outside.is_answered(200);
        eventually("epochs", PATIENCE, || committed_of(&vm, "twin") >= 10);
        std::thread::sleep(some_time());
        kill_standby(&vm, "web");
        qemu.child.wait().unwrap();
        balloon.join().unwrap();
        let has_ended = || session.status("twin")["standby"]["ended"].is_string();
        eventually("the end", PATIENCE, has_ended);
        session.firn(&["failover", "twin"]).succeeds();
        outside.is_answered(20);
        assert!(outside.heard().undone.is_empty(), "round {round}: {:?}", outside.heard().undone);
        disks_are_well(&vm);
        vm.is_well();
        if round > 0 {
            continue;
        }
        // From now on Firn serves its disks, and it is protected like any such VM.
        protect(&vm, "twin", standby_called(&vm, "third"), &[]);
        eventually("epochs", PATIENCE, || committed_of(&vm, "third") >= 5);
        kill_standby(&vm, "twin");
        let has_ended = || session.status("third")["standby"]["ended"].is_string();
        eventually("the end", PATIENCE, has_ended);
        session.firn(&["failover", "third"]).succeeds();
        outside.is_answered(20);
        assert!(outside.heard().undone.is_empty(), "{:?}", outside.heard().undone);
        disks_are_well(&vm);
    }
}

/// A release leaves QEMU as it was. So does another program that ends a job, and then the protection ends with the reason. A disk
/// can't be resized meanwhile.
#[test]
fn release_leaves_a_users_own_qemu_as_it_was() {
    let outside = Outside::start();
    let (vm, qemu) = attached(&outside);
    let session = &vm.session;
    let mut monitor = qemu.monitor();
    let resources = || {
        let mut resources = resources_of(qemu.child.id());
        resources.remove("threads");
        resources
    };
    let (before, had) = (state(&mut monitor), resources());
    let names = KeptNames::keep(session);
    let protected = || {
        protect(&vm, "web", standby_called(&vm, "twin"), &[]);
        names.give_back();
    };
    let ended = |monitor: &mut QemuVm, why: &str| {
        eventually("the end", PATIENCE, || is_running(session));
        let last = last_text(session);
        assert!(last.contains(why), "{last}");
        session.firn(&["release", "web"]);
        eventually("nothing is left", PATIENCE, || state(monitor) == before);
        let end = session.status("twin")["standby"]["end"].clone();
        assert_eq!(end["how"], "unprotected", "{end}");
        session.firn(&["stop", "twin", "--discard"]).succeeds();
        names.give_back();
        disks_are_well(&vm);
    };
    protected();
    outside.is_answered(50);
    let mut resize = |name: &str, target: Value| {
        let mut arguments = json!({ "size": 32 << 20 });
        arguments[name] = target;
        monitor.qmp().execute("block_resize", arguments).unwrap_err().to_string()
    };
    for (key, name) in [("device", "virtio0"), ("node-name", "plain")] {
        let refused = resize(key, name.into());
        assert!(refused.contains("is in use"), "{refused}");
    }
    session.firn(&["release", "web"]).succeeds();
    assert_eq!(state(&mut monitor), before);
    eventually("descriptors", PATIENCE, || resources() == had);
    session.firn(&["stop", "twin", "--discard"]).succeeds();
    names.give_back();

    protected();
    monitor.qmp().execute("job-cancel", json!({ "id": "firn-mirror0" })).unwrap();
    ended(&mut monitor, "its job was cancelled");

    protected();
    monitor.qmp().execute("block-job-complete", json!({ "device": "firn-mirror1" })).unwrap();
    ended(&mut monitor, "another program has completed");

    outside.is_answered(50);
    session.firn(&["detach", "web"]).succeeds();
    assert!(outside.heard().undone.is_empty());
    disks_are_well(&vm);
}

/// The supervisor is killed at each step, and in the middle of a write of the guest: the guest continues with its own disks, and a
/// successor removes what is left.
#[test]
fn killed_while_disks_are_mirrored() {
    let mut vm = Vm::one_of_hosts();
    let monitor = vm.session.path("monitor");
    let qmp = format!("unix:{},server=on,wait=off", text(&monitor));
    vm = vm.with(&["-qmp", &qmp]);
    vm.create_disks("16M");
    let vm = vm.booted(&LOAD);
    vm.write_to_disks();
    let mut vm = vm;
    vm.session.firn(&["suspend", "web", "-o", "web.firn"]).succeeds();
    let writing: Vec<String> = ["mirror.write@400", "mirror.write@900"].map(String::from).into();
    let points = points(&["mirror."]).into_iter().filter(|point| *point != "mirror.write");
    let points: Vec<String> = points.map(str::to_owned).chain(writing).collect();
    for point in part_of(points) {
        killed_at(&mut vm, &monitor, &point);
    }
}

fn killed_at(vm: &mut Vm, monitor: &Path, point: &str) {
    vm.session.arm(Some(point));
    vm.session.firn(&["restore", "web.firn", "--mode", "eager", "--wait"]).succeeds();
    vm.session.arm(None);
    let session = &vm.session;
    let mut control = vm.control();
    let mut monitor = QemuVm::connect(monitor).unwrap();
    let before = state(&mut monitor);
    let mut standby = standby_called(vm, "twin");
    let address = format!("unix:{}", text(&session.path("standby")));
    let protected = session.firn(&["protect", "web", "--to", &address]);
    let died = "the supervisor died";
    match (protected.code, point.starts_with("mirror.write")) {
        (0, true) => {}
        (0, false) => drop(session.firn(&["release", "web"]).fails(8, died)),
        _ => drop(protected.fails(8, died)),
    }
    let is_over = || session.status("web")["recoveries"] == 1 && is_running(session);
    eventually(point, PATIENCE, is_over);
    eventually("nothing is left", PATIENCE, || state(&mut monitor) == before);
    eprintln!("{point}: {}", last_text(session));
    let written = writes(&mut control);
    eventually("writers go on", PATIENCE, || writes(&mut control) > written);
    // The standby's QEMU has taken the name of the socket by which a test reaches the guest.
    for number in 0..2 {
        let before = progress(&mut control, number);
        eventually("disks go on", PATIENCE, || progress(&mut control, number) > before + 100);
    }
    drop(control);
    // A standby that no primary has introduced itself to ends.
    drop(std::os::unix::net::UnixStream::connect(session.path("standby")));
    eventually("the standby knows", PATIENCE, || standby.try_wait().unwrap().is_some());
    session.firn(&["stop", "twin", "--discard"]);
    session.firn(&["stop", "web", "--discard"]).succeeds();
}

/// A supervisor that is killed between two writes is noticed by the guest's next write, which succeeds.
#[test]
fn a_guest_writes_on_when_its_supervisor_dies() {
    let outside = Outside::start();
    let (vm, qemu) = attached(&outside);
    let session = &vm.session;
    let mut monitor = qemu.monitor();
    let before = state(&mut monitor);
    let names = KeptNames::keep(session);
    protect(&vm, "web", standby_called(&vm, "twin"), &[]);
    names.give_back();
    disks_are_well(&vm);
    kill(session.status("web")["supervisor_pid"].as_i64().unwrap());
    eventually("a successor", PATIENCE, || is_running(session));
    assert!(last_text(session).contains("not protected any more"), "{}", last_text(session));
    disks_are_well(&vm);
    assert!(monitor.status().unwrap().running);
    session.firn(&["release", "web"]).succeeds();
    eventually("nothing is left", PATIENCE, || state(&mut monitor) == before);
    session.firn(&["stop", "twin", "--discard"]).succeeds();
    names.give_back();
    vm.is_well();
}

/// The standby's file system is full, or Firn fails to log a write: the protection ends with the reason, and the guest continues.
#[test]
fn a_mirror_that_fails_ends_the_protection() {
    let outside = Outside::start();
    let (mut vm, qemu) = attached(&outside);
    let mut monitor = qemu.monitor();
    let before = state(&mut monitor);
    let names = KeptNames::keep(&vm.session);
    let address = format!("unix:{}", text(&vm.session.path("standby")));
    vm.session.arm(Some("disk.write@300=ENOSPC"));
    let standby = start(&vm, &["standby", "twin", "--listen", &address]);
    eventually("the standby listens", PATIENCE, || vm.session.path("standby").exists());
    vm.session.arm(None);
    let session = &vm.session;
    let protect = session.firn(&["protect", "web", "--to", &address]);
    eventually("the end", PATIENCE, || is_running(session));
    let last = last_text(session);
    assert!(last.contains("the VM's disk here") || last.contains("takes nothing more"), "{last}");
    eprintln!("protect: {} {}; {last}", protect.code, protect.err);
    names.give_back();
    session.firn(&["release", "web"]);
    eventually("nothing is left", PATIENCE, || state(&mut monitor) == before);
    disks_are_well(&vm);
    session.firn(&["stop", "twin", "--discard"]);
    drop(answer(standby));
}

/// What can't be mirrored is named before anything changes, by `firn protect` and by `firn doctor`.
#[test]
fn a_disk_that_cannot_be_mirrored_is_named() {
    let vm = Vm::one_of_hosts();
    let session = &vm.session;
    for name in ["kept.raw", "lost.raw"] {
        qemu_img(&["create", "-q", "-f", "raw", text(&session.path(name)), "16M"]);
    }
    let vm = vm.with(&[
        "-drive",
        "file=kept.raw,format=raw,if=virtio,id=kept",
        "-drive",
        "file=lost.raw,format=raw,if=virtio,id=lost,snapshot=on",
    ]);
    let qemu = OwnQemu::guest(&vm);
    drop(vm.control());
    let session = &vm.session;
    qemu.attach(session);
    let mut monitor = qemu.monitor();
    let before = state(&mut monitor);
    let address = format!("unix:{}", text(&session.path("standby")));
    let refused = session.firn(&["protect", "web", "--to", &address]).fails(5, "its disk lost");
    assert!(refused.err.contains("leave out snapshot"), "{}", refused.err);
    let doctor = session.firn(&["doctor", "web"]).out;
    assert!(doctor.contains("its disk lost, which can't be mirrored"), "{doctor}");
    assert_eq!(state(&mut monitor), before);
    assert!(is_running(session));
}
