//! Disks that QEMU reaches over the network: an image has them as copies, and a restore needs no server.
//!
//! The server is `qemu-nbd`. For Firn an address of Ceph RBD or iSCSI differs in its options only, of which the unit tests of
//! `firn-vmm` have each form.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use serde_json::Value;

use crate::attached_disks::{OwnQemu, has_word, let_it_work, write_word};
use crate::session::{eventually, text};
use crate::vm::{Vm, qemu_img};

const PATIENCE: Duration = Duration::from_secs(120);

/// A server of one disk.
struct NbdServer {
    child: Child,
    socket: PathBuf,
}

impl NbdServer {
    fn start(file: &Path, export: &str) -> Self {
        let socket = file.with_extension("socket");
        let mut command = Command::new("qemu-nbd");
        command.args(["--persistent", "--format", "raw", "--export-name", export, "--socket"]);
        let child = command.arg(&socket).arg(file).spawn().unwrap();
        eventually("the server", PATIENCE, || socket.exists());
        Self { child, socket }
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A VM with two disks on servers: one by `-drive`, one by nodes of its own.
fn boot() -> (Vm, OwnQemu, [NbdServer; 2]) {
    let vm = Vm::new();
    let servers = ["one", "two"].map(|export| {
        let file = vm.session.path(&format!("{export}.raw"));
        qemu_img(&["create", "-q", "-f", "raw", text(&file), "20M"]);
        NbdServer::start(&file, export)
    });
    let [one, two] = servers.each_ref().map(|server| text(&server.socket).to_owned());
    let drive = format!("file=nbd:unix:{one}:exportname=one,format=raw,if=none,id=disk0");
    let node = format!(
        r#"{{"driver":"nbd","node-name":"store","server":{{"type":"unix","path":"{two}"}},"export":"two"}}"#
    );
    let vm = vm
        .with(&["-drive", &drive, "-device", "virtio-blk-pci,drive=disk0"])
        .with(&["-blockdev", &node, "-blockdev", "raw,node-name=disk1,file=store"])
        .with(&["-device", "virtio-blk-pci,drive=disk1"]);
    let qemu = OwnQemu::guest(&vm);
    drop(vm.control());
    qemu.attach(&vm.session);
    (vm, qemu, servers)
}

#[track_caller]
fn disks_are_right(vm: &Vm) {
    vm.is_well();
    for number in 0..2 {
        let report = vm.disk_report(number);
        assert_eq!(report["wrong"], 0, "disk{number}: {report}");
    }
}

fn methods(saved: &Value) -> Vec<&str> {
    saved["drives"].as_array().unwrap().iter().map(|it| it["how"].as_str().unwrap()).collect()
}

#[test]
fn disks_on_the_network_are_copied_and_restored_without_it() {
    let (vm, mut qemu, mut servers) = boot();
    let vm = vm.with_load();
    vm.write_to_disks();
    let session = &vm.session;
    let doctor = session.firn(&["doctor", "web"]);
    assert!(!doctor.out.contains("refused"), "{}", doctor.out);
    let saves: [(&str, &[&str], &str); 3] = [
        ("a.firn", &[], "copy"),
        ("b.firn", &["--parent", "a.firn"], "copy of changes"),
        ("c.firn", &["--strategy", "cow"], "copy"),
    ];
    for (image, options, method) in saves {
        write_word(&vm, image);
        let saved = session.json(&[&["checkpoint", "web", "-o", image], options].concat());
        assert_eq!(methods(&saved), [method, method], "{saved}");
        let_it_work();
        disks_are_right(&vm);
    }
    let overlay = ["checkpoint", "web", "-o", "no.firn", "--disks", "overlay"];
    session.firn(&overlay).fails(5, "disk0: nbd+unix");
    session.firn(&["detach", "web"]).succeeds();
    write_word(&vm, "newest");
    qemu.power_cycle();
    has_word(&vm, "newest");
    qemu.end();
    servers.iter_mut().for_each(NbdServer::kill);
    for (image, ..) in saves {
        session.firn(&["restore", image, "--name", "web", "--wait"]).succeeds();
        let_it_work();
        disks_are_right(&vm);
        has_word(&vm, image);
        // The next image has the same disks under the same names.
        let again = session.json(&["checkpoint", "web", "-o", "again.firn"]);
        assert_eq!(again["drives"].as_array().unwrap().len(), 2, "{again}");
        session.firn(&["stop", "web", "--discard"]).succeeds();
    }
    session.firn(&["restore", "again.firn", "--name", "web", "--wait"]).succeeds();
    has_word(&vm, "c.firn");
    disks_are_right(&vm);
}

/// A server that dies takes the save with it, and leaves nothing.
#[test]
fn a_server_that_is_gone_fails_the_save() {
    let (vm, _qemu, mut servers) = boot();
    let session = &vm.session;
    session.firn(&["checkpoint", "web", "-o", "good.firn"]).succeeds();
    let before = all_files(&vm);
    servers[1].kill();
    let failed = session.firn(&["checkpoint", "web", "-o", "bad.firn"]);
    assert_eq!(failed.code, 1, "{}{}", failed.out, failed.err);
    assert!(failed.err.contains("disk"), "{}", failed.err);
    assert_eq!(all_files(&vm), before);
    session.firn(&["image", "verify", "good.firn"]).succeeds();
}

fn all_files(vm: &Vm) -> Vec<String> {
    let entries = std::fs::read_dir(vm.session.path("")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut files: Vec<String> =
        names.filter(|name| name.contains(".firn") || name.contains("web-")).collect();
    files.sort();
    files
}
