//! Disks that belong to a VM's epochs: wherever it goes on, its disks are those that its memory knows.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use crate::hypervisor_dies::{answer, start};
use crate::protect::{committed_of, lose, protect};
use crate::session::{Session, eventually, kill, text};
use crate::vm::{Vm, qemu_img, writes};

const PATIENCE: Duration = Duration::from_secs(60);
const SERVED: [(&str, &str); 2] = [("d0.raw", "raw"), ("d1.qcow2", "qcow2")];

/// A guest that writes to disks which Firn serves, and checks what it wrote by what is in its memory.
fn booted(vm: Vm) -> Vm {
    let mut words = Vec::new();
    for (number, (name, format)) in SERVED.iter().enumerate() {
        let path = vm.session.path(name);
        qemu_img(&["create", "-q", "-f", format, text(&path), "16M"]);
        let file = text(&path);
        words.push("-drive".to_owned());
        words.push(format!("file={file},format={format},if=none,id=d{number},firn=on"));
        words.push("-device".to_owned());
        words.push(format!("virtio-blk-pci,drive=d{number}"));
    }
    words.extend(["-device", "virtio-balloon-pci,free-page-reporting=on"].map(str::to_owned));
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let vm = vm.with(&words).booted_with(&[]);
    let mut control = vm.control();
    for (number, device) in ["/dev/vda", "/dev/vdb"].iter().enumerate() {
        let write = ["firn-guest", "disk-dma", "write", "--rate", "60", "--device", device];
        let job = format!("disk{number}");
        control.spawn_job(&job, &write).unwrap();
        control.wait_output(&job, "progress", PATIENCE).unwrap();
    }
    vm
}

/// How many requests the guest has made of a disk; none of what it found was wrong.
#[track_caller]
fn requests(vm: &Vm, number: usize) -> u64 {
    let report = vm.disk_report(number);
    assert_eq!(report["wrong"], 0, "disk{number}: {report}");
    report["progress"].as_u64().unwrap()
}

/// The guest goes on writing to its disks, and has looked at many blocks from before.
#[track_caller]
fn disks_are_well(vm: &Vm) {
    let before = [requests(vm, 0), requests(vm, 1)];
    eventually("disks go on", PATIENCE, || {
        (0..2).all(|number| requests(vm, number) > before[number] + 100)
    });
}

fn protected(vm: &Vm, name: &str, standby: &str, more: &[&str]) {
    let address = format!("unix:{}", text(&vm.session.path("standby")));
    let words = [&["standby", standby, "--listen", &address], more].concat();
    let child = start(vm, &words);
    eventually("the standby listens", PATIENCE, || vm.session.path("standby").exists());
    protect(vm, name, child, &[]);
}

/// Whoever served it may hold its lock a moment longer.
fn is_sound(file: &Path) {
    let mut check = Command::new("qemu-img");
    check.args(["check", "-f", "qcow2", text(file)]);
    let is_locked =
        |checked: &Output| String::from_utf8_lossy(&checked.stderr).contains("Failed to lock");
    let mut checked = check.output().unwrap();
    eventually("nobody has the disk", PATIENCE, || {
        if is_locked(&checked) {
            checked = check.output().unwrap();
        }
        !is_locked(&checked)
    });
    let said = String::from_utf8_lossy(&checked.stdout);
    assert!(said.contains("No errors were found"), "{checked:?}");
}

fn supervisor(session: &Session) -> i64 {
    session.status("web")["supervisor_pid"].as_i64().unwrap()
}

/// The VM is lost, goes on at its standby, is protected from there, and lost again.
#[test]
fn a_lost_vm_continues_with_the_disks_of_its_epoch() {
    let vm = booted(Vm::one_of_hosts());
    let session = &vm.session;
    session.firn(&["checkpoint", "web", "-o", "web.firn"]).fails(5, "images can't keep such disks");
    session.firn(&["suspend", "web", "-o", "web.firn"]).fails(5, "images can't keep such disks");
    session.firn(&["detach", "web"]).fails(5, "Firn serves the VM's disks");
    // A successor serves them again: what the guest wants meanwhile waits.
    kill(supervisor(session));
    eventually("a successor", PATIENCE, || session.status("web")["recoveries"] == 1);
    disks_are_well(&vm);

    let elsewhere: PathBuf = session.path("elsewhere.raw");
    let disk = format!("d0={}", text(&elsewhere));
    protected(&vm, "web", "twin", &["--disk", &disk]);
    // Who is asked from here on is the standby: its QEMU has taken the name of the socket.
    eventually("epochs", PATIENCE, || committed_of(&vm, "twin") >= 20);
    lose(&vm, "web", "twin");
    session.firn(&["failover", "twin"]).succeeds();
    disks_are_well(&vm);
    assert!(elsewhere.exists() && session.path("twin.d1.qcow2").exists());

    protected(&vm, "twin", "third", &[]);
    eventually("epochs", PATIENCE, || committed_of(&vm, "third") >= 10);
    lose(&vm, "twin", "third");
    session.firn(&["failover", "third"]).succeeds();
    disks_are_well(&vm);
    vm.is_well();
    // Back to a name that was used: the disk of that time stays, and is not in the way.
    protected(&vm, "third", "twin", &[]);
    assert!(session.path("twin.d1.2.qcow2").exists());
    session.firn(&["stop", "twin", "--discard"]).succeeds();
    assert!(!session.path("twin.d1.2.qcow2").exists());
    session.firn(&["stop", "third"]).succeeds();
    is_sound(&session.path("third.d1.qcow2"));
    is_sound(&session.path("twin.d1.qcow2"));
}

/// The primary's supervisor dies under protection: the guest's writes wait for the successor, and go on.
#[test]
fn a_supervisor_that_dies_under_protection_is_succeeded_by_one_that_serves_the_disks() {
    let vm = booted(Vm::one_of_hosts());
    let session = &vm.session;
    // A standby's QEMU takes the name of this socket.
    let mut control = vm.control();
    protected(&vm, "web", "twin", &[]);
    eventually("epochs", PATIENCE, || committed_of(&vm, "twin") >= 5);
    kill(supervisor(session));
    eventually("a successor", PATIENCE, || session.status("web")["state"] == "running");
    let last = session.status("web")["last"]["text"].to_string();
    assert!(last.contains("not protected any more"), "{last}");
    let progress = |control: &mut firn_lab::guest::GuestControl, number: usize| {
        let state = control.poll_job(&format!("disk{number}")).unwrap();
        let firn_lab::guest::JobState::Running { stdout, .. } = state else {
            unreachable!("{state:?}")
        };
        let last = stdout.lines().rfind(|line| line.contains("progress")).unwrap().to_owned();
        let report: serde_json::Value = serde_json::from_str(&last).unwrap();
        assert_eq!(report["wrong"], 0, "{report}");
        report["progress"].as_u64().unwrap()
    };
    for number in 0..2 {
        let before = progress(&mut control, number);
        eventually("disks go on", PATIENCE, || progress(&mut control, number) > before + 100);
    }
    writes(&mut control);
    // The standby stays as it is until somebody decides.
    let stopped = session.json(&["stop", "twin", "--discard"]);
    assert_eq!(stopped["overlays"], serde_json::json!([]), "{stopped}");
    assert!(!session.path("twin.d0.raw").exists() && !session.path("twin.d1.qcow2").exists());
}

/// The standby's file system is full: protection ends and says why, and the guest runs on.
#[test]
fn a_full_disk_at_the_standby_ends_protection() {
    let mut vm = booted(Vm::one_of_hosts());
    let mut control = vm.control();
    vm.session.arm(Some("disk.write@300=ENOSPC"));
    let address = format!("unix:{}", text(&vm.session.path("standby")));
    let standby = start(&vm, &["standby", "twin", "--listen", &address]);
    eventually("the standby listens", PATIENCE, || vm.session.path("standby").exists());
    vm.session.arm(None);
    let session = &vm.session;
    let protect = session.firn(&["protect", "web", "--to", &address]);
    eventually("the end", PATIENCE, || session.status("web")["state"] == "running");
    let last = session.status("web")["last"]["text"].to_string();
    assert!(last.contains("the VM's disk here") || last.contains("takes nothing more"), "{last}");
    eprintln!("protect: {} {}; {last}", protect.code, protect.err);
    let before = writes(&mut control);
    eventually("writers go on", PATIENCE, || writes(&mut control) > before);
    assert!(session.firn(&["failover", "twin"]).code != 0);
    session.firn(&["stop", "twin"]);
    drop(answer(standby));
}

#[test]
fn an_unsuitable_disk_file_is_refused_before_the_start() {
    let vm = Vm::one_of_hosts();
    let session = &vm.session;
    let run = |disk: &str| {
        session.firn(&["run", "web", "--", "qemu-system-x86_64", "-m", "64", "-drive", disk])
    };
    run("file=nowhere,format=raw,if=none,id=d,firn=on").fails(2, "opening the disk d");
    run("file=nowhere,if=none,id=d,firn=on").fails(2, "format=raw|qcow2");
    std::fs::write(session.path("odd"), [0; 700]).unwrap();
    run("file=odd,format=raw,if=none,id=d,firn=on").fails(2, "700 bytes");
    run("file=odd,format=qcow2,if=none,id=d,firn=on").fails(2, "no qcow2 file");
    assert_eq!(session.ls(), []);
}
