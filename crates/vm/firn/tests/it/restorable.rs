//! VMs that could not be restored are refused, with each reason; the smaller checks around a checkpoint.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use firn_vmm::QemuVm as Monitor;
use serde_json::{Value, json};

use crate::own_qemu::resources_of;
use crate::session::{Answer, Session, eventually, text};
use crate::vm::Vm;

/// How long QEMU or a guest may take on a busy host.
const PATIENCE: Duration = Duration::from_secs(120);

/// A machine with places to plug devices in.
const PLUGGABLE: &[&str] = &[
    "qemu-system-x86_64",
    "-M",
    "q35",
    "-accel",
    "tcg",
    "-m",
    "64,slots=2,maxmem=1G",
    "-smp",
    "1,maxcpus=2",
    "-nodefaults",
    "-display",
    "none",
    "-device",
    "qemu-xhci,id=xhci",
    "-device",
    "pcie-root-port,id=rp1,chassis=1",
    "-device",
    "pcie-root-port,id=rp2,chassis=2",
];

fn monitor(path: &Path) -> Monitor {
    let mut monitor = None;
    eventually("a monitor", PATIENCE, || {
        monitor = Monitor::connect(path).ok();
        monitor.is_some()
    });
    monitor.unwrap()
}

pub fn execute(path: &Path, commands: &[(&str, Value)]) {
    let mut vm = monitor(path);
    for (command, arguments) in commands {
        vm.qmp().execute(command, arguments.clone()).unwrap();
    }
}

#[track_caller]
fn names_all(answer: &Answer, reasons: &[&str]) {
    for reason in reasons {
        assert_eq!(answer.err.matches(reason).count(), 1, "{reason:?} in {}", answer.err);
    }
}

#[test]
fn devices_that_were_added_later_are_refused_or_marked() {
    let session = Session::new();
    session.firn(&[&["run", "web", "--quiet", "--"], PLUGGABLE].concat()).succeeds();
    session.firn(&["checkpoint", "web", "-o", "before.firn"]).succeeds();
    let qmp = session.runtime_dir().join("web/qmp.sock");
    let cpu = json!({ "driver": "qemu64-x86_64-cpu", "id": "cpu1", "socket-id": 0, "core-id": 1, "thread-id": 0 });
    execute(
        &qmp,
        &[
            ("device_add", json!({ "driver": "usb-tablet", "id": "tablet", "bus": "xhci.0" })),
            ("netdev_add", json!({ "type": "user", "id": "n1" })),
            (
                "device_add",
                json!({ "driver": "virtio-net-pci", "id": "nic1", "netdev": "n1", "bus": "rp1" }),
            ),
            (
                "blockdev-add",
                json!({ "driver": "null-co", "node-name": "null", "read-only": true }),
            ),
            (
                "device_add",
                json!({ "driver": "virtio-blk-pci", "id": "disk1", "drive": "null", "bus": "rp2" }),
            ),
            (
                "object-add",
                json!({ "qom-type": "memory-backend-ram", "id": "m1", "size": 128 << 20 }),
            ),
            ("device_add", json!({ "driver": "pc-dimm", "id": "dimm1", "memdev": "m1" })),
            ("device_add", cpu),
        ],
    );
    let reasons = [
        "device tablet (usb-tablet) was added",
        "device nic1 (virtio-net-pci) was added",
        "device disk1 (virtio-blk-pci) was added",
        "device dimm1 (pc-dimm) was added",
        "device cpu1 (qemu64-x86_64-cpu) was added",
    ];
    let refused = session.firn(&["checkpoint", "web", "-o", "web.firn"]);
    names_all(&refused.fails(5, "could not be restored"), &reasons);
    assert!(session.files("web.firn").is_empty());
    let suspend = session.firn(&["suspend", "web", "-o", "web.firn"]);
    names_all(&suspend.fails(5, "could not be restored"), &reasons);
    let accepted =
        ["checkpoint", "web", "-o", "web.firn", "--strategy", "stop", "--accept-unrestorable"];
    let accepted = session.firn(&accepted).succeeds();
    assert!(accepted.out.contains("cannot be restored: device nic1"), "{}", accepted.out);
    let inspected = session.json(&["image", "inspect", "web.firn"]);
    assert_eq!(inspected["meta"]["unrestorable"].as_array().unwrap().len(), reasons.len());
    let inspected = session.firn(&["image", "inspect", "web.firn"]).succeeds();
    assert!(inspected.out.contains("device dimm1 (pc-dimm)"), "{}", inspected.out);
    let restored = session.firn(&["restore", "web.firn", "--name", "again"]);
    names_all(&restored.fails(5, "--accept-unrestorable"), &reasons);
    session.firn(&["image", "verify", "--restorable", "web.firn"]).fails(5, "could not restore");
    let verified = session.firn(&["image", "verify", "--restorable", "before.firn"]).succeeds();
    for what in ["QEMU", "machine", "accelerator", "disks", "memory", "userfaultfd"] {
        assert!(verified.out.contains(what), "{}", verified.out);
    }
    session.firn(&["restore", "before.firn", "--name", "again", "--wait"]).succeeds();
}

/// A QEMU that was started without Firn; killed when dropped.
struct Stranger(Child);

impl Stranger {
    fn start(session: &Session, args: &[&str], stdin: Stdio) -> (Self, PathBuf) {
        let qmp = session.path("qmp");
        let monitor = format!("unix:{},server=on,wait=off", text(&qmp));
        let log = std::fs::File::create(session.path("qemu.log")).unwrap();
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-accel", "tcg", "-display", "none"]).args(args).args(["-qmp", &monitor]);
        let child = command.stdin(stdin).stderr(log).spawn().unwrap();
        (Self(child), qmp)
    }

    fn attach(&self, session: &Session, qmp: &Path) {
        drop(monitor(qmp));
        let pid = self.0.id().to_string();
        session.firn(&["attach", "web", "--pid", &pid, "--qmp", text(qmp)]).succeeds();
    }

    /// What it has more of than before.
    fn more_than(&self, before: &BTreeMap<String, usize>) -> Vec<String> {
        let is_more =
            |(name, count): &(String, usize)| before.get(name).is_none_or(|it| count > it);
        let more = resources_of(self.0.id()).into_iter().filter(is_more);
        more.map(|(name, count)| format!("{count} x {name}")).collect()
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn descriptors_removed_devices_and_other_media_are_refused() {
    let session = Session::new();
    let (a, b) = (session.path("a.iso"), session.path("b.iso"));
    [&a, &b].iter().for_each(|iso| std::fs::write(iso, vec![0; 1 << 20]).unwrap());
    let (drive, secret) =
        (format!("if=ide,media=cdrom,id=cd,file={}", text(&a)), session.path("key"));
    std::fs::write(&secret, "secret").unwrap();
    let object = format!("secret,id=key,file={}", text(&secret));
    let (ours, theirs) = UnixStream::pair().unwrap();
    let args = [
        "-M",
        "pc",
        "-m",
        "64",
        "-nodefaults",
        "-netdev",
        "socket,id=n,fd=0",
        "-device",
        "qemu-xhci,id=xhci",
        "-device",
        "usb-tablet,id=tablet,bus=xhci.0",
        "-drive",
        &drive,
        "-object",
        &object,
    ];
    let (qemu, qmp) = Stranger::start(&session, &args, Stdio::from(OwnedFd::from(theirs)));
    qemu.attach(&session, &qmp);
    let save = || session.firn(&["checkpoint", "web", "-o", "web.firn"]);
    names_all(&save().fails(5, "could not be restored"), &["-netdev socket,id=n,fd=0: "]);
    std::fs::remove_file(&secret).unwrap();
    let other = json!({ "device": "cd", "filename": text(&b), "format": "raw" });
    execute(&qmp, &[("blockdev-change-medium", other), ("device_del", json!({ "id": "tablet" }))]);
    let reasons = [
        "-netdev socket,id=n,fd=0: ",
        "secret key cannot be read again",
        "drive cd has another medium",
        "device tablet (usb-tablet)",
    ];
    names_all(&save().fails(5, "could not be restored"), &reasons);
    drop(ours);
}

/// With QEMU's default video card, and a second monitor whose client stays connected: QEMU keeps a descriptor that was passed to
/// it as long as any client is there.
#[test]
fn a_first_checkpoint_waits_for_the_firmware_and_detach_leaves_nothing() {
    let session = Session::new();
    let second = session.path("second.qmp");
    let second_monitor = format!("unix:{},server=on,wait=off", text(&second));
    let args = ["-M", "pc", "-m", "64", "-qmp", &second_monitor];
    let (qemu, qmp) = Stranger::start(&session, &args, Stdio::null());
    let _stays_connected = monitor(&second);
    drop(monitor(&qmp));
    let before = resources_of(qemu.0.id());
    qemu.attach(&session, &qmp);
    session.firn(&["checkpoint", "web", "-o", "0.firn"]).succeeds();
    // A save that fails after the cut.
    let nowhere = ["--strategy", "cow", "--reference", "/nowhere/x"];
    session
        .firn(&[&["checkpoint", "web", "-o", "1.firn"], &nowhere[..]].concat())
        .fails(1, "/nowhere/x");
    assert!(session.files("1.firn").is_empty());
    for round in 0..20 {
        let strategy = ["cow", "pre-copy", "stop"][round % 3];
        session.firn(&["checkpoint", "web", "-o", "web.firn", "--strategy", strategy]).succeeds();
    }
    session.firn(&["detach", "web"]).succeeds();
    let mut left = Vec::new();
    let limit = Instant::now() + Duration::from_secs(60);
    while Instant::now() < limit {
        left = qemu.more_than(&before);
        if left.is_empty() {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(left.is_empty(), "left in QEMU: {left:?}");
    session.firn(&["restore", "web.firn", "--wait"]).succeeds();
    session.firn(&["checkpoint", "web", "-o", "x", "--every", "0s"]).fails(2, "less than 100 ms");
    // Right after the start: the firmware has not mapped the default card's memory yet.
    for round in 0..4 {
        let vga = "qemu-system-x86_64 -M pc -m 64 -accel tcg -display none".split(' ');
        let run: Vec<&str> = ["run", "vga", "--"].into_iter().chain(vga).collect();
        session.firn(&run).succeeds();
        let image = format!("vga{round}.firn");
        session.firn(&["checkpoint", "vga", "-o", &image]).succeeds();
        session.firn(&["stop", "vga"]).succeeds();
    }
    session.firn(&["restore", "vga3.firn", "--wait"]).succeeds();
}

/// A vhost-user backend that can do nothing but be migrated, so that QEMU itself refuses no save. It answers what QEMU asks for
/// at its start (QEMU `docs/interop/vhost-user.rst`).
fn serve_vhost_user(socket: &Path) {
    use std::io::{Read, Write};
    const GET_FEATURES: u32 = 1;
    const GET_PROTOCOL_FEATURES: u32 = 15;
    /// VHOST_F_LOG_ALL and VHOST_USER_F_PROTOCOL_FEATURES.
    const FEATURES: u32 = 1 << 26 | 1 << 30;
    /// VHOST_USER_PROTOCOL_F_LOG_SHMFD.
    const PROTOCOL_FEATURES: u32 = 1 << 1;
    const REPLY: u32 = 0b101;
    let mut stream = None;
    eventually("QEMU's socket", PATIENCE, || {
        stream = UnixStream::connect(socket).ok();
        stream.is_some()
    });
    let mut stream = stream.unwrap();
    std::thread::spawn(move || {
        let mut header = [0; 12];
        while stream.read_exact(&mut header).is_ok() {
            let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
            let mut payload = vec![0; word(8) as usize];
            stream.read_exact(&mut payload).unwrap();
            let features = match word(0) {
                GET_FEATURES => FEATURES,
                GET_PROTOCOL_FEATURES => PROTOCOL_FEATURES,
                _ => continue,
            };
            let answer = [word(0), REPLY, 8, features, 0].map(u32::to_le_bytes).concat();
            stream.write_all(&answer).unwrap();
        }
    });
}

/// Each device whose memory or state no image can hold is a reason; none keeps Firn from managing the VM.
#[test]
fn devices_with_memory_of_their_own_are_refused_or_marked() {
    let session = Session::new();
    let memory = |id: &str| format!("memory-backend-memfd,id={id},share=on,size=16M");
    let line = [
        "-M pc,nvdimm=on -m 64,slots=4,maxmem=1G -nodefaults",
        "-object memory-backend-ram,id=m1,size=128M",
        "-device virtio-mem-pci,id=plugged,memdev=m1,requested-size=0",
        &format!("-object {} -device nvdimm,id=nv1,memdev=m2", memory("m2")),
        &format!("-object {} -device virtio-pmem-pci,id=pm1,memdev=m3", memory("m3")),
    ]
    .join(" ");
    let reasons = [
        "plugged (virtio-mem-pci) gives guest memory and takes it back",
        "nv1 (nvdimm) is persistent memory",
        "pm1 (virtio-pmem-pci) is persistent memory",
    ];
    are_refused_or_marked(&session, &line, &reasons);
}

/// The same of a device that another process runs.
#[test]
fn devices_of_other_processes_are_refused_or_marked() {
    let session = Session::new();
    let socket = session.path("vhost.sock");
    let line = format!(
        "-M pc -m 64 -nodefaults -chardev socket,id=vu,path={},server=on \
         -netdev vhost-user,id=n1,chardev=vu -device virtio-net-pci,id=nic1,netdev=n1",
        text(&socket)
    );
    let backend = std::thread::spawn(move || serve_vhost_user(&socket));
    let reasons = ["is run by another process, which writes to guest memory unseen"];
    are_refused_or_marked(&session, &line, &reasons);
    backend.join().unwrap();
}

/// A checkpoint of a QEMU of this command line is refused with these reasons, or marked with them.
#[track_caller]
fn are_refused_or_marked(session: &Session, line: &str, reasons: &[&str]) {
    let args: Vec<&str> = line.split(' ').collect();
    let (qemu, qmp) = Stranger::start(session, &args, Stdio::null());
    qemu.attach(session, &qmp);
    let save = ["checkpoint", "web", "-o", "web.firn"];
    let refused = session.firn(&save).fails(5, "could not be restored");
    eprintln!("{}", refused.err);
    names_all(&refused, reasons);
    assert!(session.files("web.firn").is_empty());
    let suspend = session.firn(&["suspend", "web", "-o", "web.firn"]);
    names_all(&suspend.fails(5, "could not be restored"), reasons);
    let accepted = session.json(&[&save[..], &["--accept-unrestorable"]].concat());
    assert_eq!(accepted["unrestorable"].as_array().unwrap().len(), reasons.len(), "{accepted}");
    let inspected = session.json(&["image", "inspect", "web.firn"]);
    assert_eq!(inspected["meta"]["unrestorable"], accepted["unrestorable"]);
    let restored = session.firn(&["restore", "web.firn", "--name", "again"]);
    names_all(&restored.fails(5, "--accept-unrestorable"), reasons);
    assert_eq!(session.status("web")["state"], "running");
    session.firn(&["detach", "web"]).succeeds();
}

#[test]
fn a_paused_vm_stays_paused_and_eager_needs_no_userfaultfd() {
    let mut vm = Vm::resumed();
    let qmp = vm.session.runtime_dir().join("web/qmp.sock");
    let is_paused = |vm: &Vm| vm.session.status("web")["state"] == "paused";
    execute(&qmp, &[("stop", Value::Null)]);
    vm.session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
    assert!(is_paused(&vm));
    vm.session.firn(&["stop", "web"]).succeeds();
    let restored = vm.session.firn(&["restore", "web.firn", "--wait"]).succeeds();
    assert!(restored.out.contains("paused after"), "{}", restored.out);
    assert!(is_paused(&vm));
    execute(&qmp, &[("cont", Value::Null)]);
    vm.is_well();
    vm.session.firn(&["stop", "web"]).succeeds();

    vm.session.arm(Some("restore.userfaultfd=EIO"));
    let lazy = vm.session.firn(&["restore", "web.firn", "--run"]);
    assert!(lazy.err.contains("--mode eager"), "{}", lazy.err);
    lazy.fails(7, "attaching to QEMU");
    let eager = ["restore", "web.firn", "--run", "--mode", "eager", "--wait"];
    let eager = vm.session.firn(&eager).succeeds();
    assert!(eager.out.contains("without userfaultfd"), "{}", eager.out);
    assert!(eager.out.contains("running after"), "{}", eager.out);
    vm.session.arm(None);
    assert_eq!(vm.session.status("web")["state"], "running");
    vm.is_well();
}
