//! A VM by the command line that Proxmox VE 9 makes (`qm showcmd`), while another client uses its
//! monitor: qemu-server connects to it every few seconds.
//!
//! Left out is what only QEMU of Proxmox has (`-id`, the machine version `+pve0`) and what a test
//! has no host for (KVM's processor flags, io_uring, a bridge). A disk is on a qcow2 file, and one
//! on a block device, as LVM has it; both below a throttle.
//!
//! Source: qemu-server, `src/test/cfg2cmd/simple1.conf.cmd`.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::disk_layers::qemu_io_on;
use crate::edges::LoopDevice;
use crate::session::{Session, eventually, kill, text};
use crate::vm::{Vm, qemu_img};

const PATIENCE: Duration = Duration::from_secs(60);
const DISK_BYTES: usize = 16 << 20;

/// A VM of Proxmox, in the background (`-daemonize`).
struct ProxmoxVm {
    dir: PathBuf,
    pid: String,
    /// Its disks, by the names of their devices.
    disks: Vec<&'static str>,
    _device: Option<LoopDevice>,
}

/// The process that QEMU has written to its pid file. A restored QEMU has the same file.
fn read_pid(dir: &Path) -> String {
    std::fs::read_to_string(dir.join("100.pid")).unwrap().trim().to_owned()
}

/// A disk below a throttle, as qemu-server names the nodes.
fn blockdev(device: &str, format: &str, driver: &str, file: &Path) -> [String; 4] {
    let cache = json!({ "direct": driver == "host_device", "no-flush": false });
    let file = json!({ "aio": "threads", "cache": cache, "detect-zeroes": "unmap", "discard": "unmap",
        "driver": driver, "filename": file, "node-name": format!("e-{device}"), "read-only": false });
    let format = json!({ "cache": cache, "detect-zeroes": "unmap", "discard": "unmap",
        "driver": format, "file": file, "node-name": format!("f-{device}"), "read-only": false });
    let (group, drive) = (format!("throttle-drive-{device}"), format!("drive-{device}"));
    let throttle = json!({ "detect-zeroes": "unmap", "discard": "unmap", "driver": "throttle",
        "file": format, "node-name": drive, "read-only": false, "throttle-group": group });
    let group = json!({ "id": group, "limits": {}, "qom-type": "throttle-group" });
    ["-object".into(), group.to_string(), "-blockdev".into(), throttle.to_string()]
}

/// A SCSI disk on such a node.
fn scsi_disk(device: &str, lun: usize) -> [String; 2] {
    let options = format!(
        "scsi-hd,bus=scsihw0.0,channel=0,scsi-id=0,lun={lun},drive=drive-{device},id={device},\
         device_id=drive-{device},write-cache=on"
    );
    ["-device".into(), options]
}

/// The words of a command line, with the directory of the test: QEMU in the background has `/` as its
/// working directory.
fn words_in(dir: &Path, line: &str) -> Vec<String> {
    line.replace("DIR", text(dir)).split_whitespace().map(str::to_owned).collect()
}

/// What Proxmox VE gives a VM of the machine type `q35` in a file: buses, slots, USB controllers.
const Q35_DEVICES: &str = r#"
[device "ehci"]
  driver = "ich9-usb-ehci1"
  multifunction = "on"
  bus = "pcie.0"
  addr = "1d.7"

[device "uhci-1"]
  driver = "ich9-usb-uhci1"
  multifunction = "on"
  bus = "pcie.0"
  addr = "1d.0"
  masterbus = "ehci.0"
  firstport = "0"

# The slot of the first PCI Express device.
[device "ich9-pcie-port-1"]
  driver = "pcie-root-port"
  x-speed = "16"
  x-width = "32"
  multifunction = "on"
  bus = "pcie.0"
  addr = "1c.0"
  port = "1"
  chassis = "1"

[device "pcidmi"]
  driver = "i82801b11-bridge"
  bus = "pcie.0"
  addr = "1e.0"

[device "pci.0"]
  driver = "pci-bridge"
  bus = "pcidmi"
  addr = "1.0"
  chassis_nr = "1"
  shpc = "on"
"#;

impl ProxmoxVm {
    /// A VM of the machine type `q35`, without disks. Its option file is removed after the start if
    /// `without_file` is set.
    fn start_q35(session: &Session, without_file: bool) -> Self {
        let (dir, file) = (session.path(""), session.path("pve-q35.cfg"));
        std::fs::write(&file, Q35_DEVICES).unwrap();
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args(words_in(&dir, Q35_LINE))
            .current_dir(&dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        assert!(command.status().unwrap().success());
        if without_file {
            std::fs::remove_file(file).unwrap();
        }
        Self { pid: read_pid(&dir), dir, disks: Vec::new(), _device: None }
    }

    fn start(session: &Session) -> Self {
        let (dir, file) = (session.path(""), session.path("vm-100-disk-0.qcow2"));
        qemu_img(&["create", "-q", "-f", "qcow2", text(&file), "16M"]);
        let device = LoopDevice::with_bytes(session, DISK_BYTES);
        let mut disks = vec!["scsi0"];
        let mut args = words_in(&dir, LINE);
        args.extend(blockdev("scsi0", "qcow2", "file", &file));
        args.extend(scsi_disk("scsi0", 0));
        match &device {
            Ok(_) => {
                args.extend(blockdev("scsi1", "raw", "host_device", &session.path("block")));
                args.extend(scsi_disk("scsi1", 1));
                disks.push("scsi1");
            }
            Err(why) => firn_skip::skip_test(format_args!("no disk on a block device: {why}")),
        }
        let mut command = Command::new("qemu-system-x86_64");
        command.args(&args).current_dir(&dir).stdin(Stdio::null()).stdout(Stdio::null());
        assert!(command.status().unwrap().success());
        Self { pid: read_pid(&dir), dir, disks, _device: device.ok() }
    }

    fn monitor(&self) -> PathBuf {
        self.dir.join("100.qmp")
    }

    fn write(&self, number: usize) {
        for disk in &self.disks {
            let write = format!("write -P {number} 1M 256k");
            let wrong = qemu_io_on(&self.dir.join("test.qmp"), &format!("-d {disk}"), &write);
            assert_eq!(wrong, "", "{disk}");
        }
    }

    /// Nodes with their dirty bitmaps, and jobs.
    fn block_state(&self) -> Value {
        let mut vm = firn_vmm::QemuVm::connect(&self.dir.join("test.qmp")).unwrap();
        let mut nodes: Vec<Value> = vm.qmp().query("query-named-block-nodes").unwrap();
        nodes.sort_by_key(|node| node["node-name"].to_string());
        let shown = |node: &Value| {
            let keys = ["node-name", "drv", "file", "ro", "dirty-bitmaps"];
            json!(keys.map(|key| &node[key]))
        };
        let jobs: Value = vm.qmp().query("query-jobs").unwrap();
        json!([nodes.iter().map(shown).collect::<Vec<_>>(), jobs])
    }

    fn end(&self) {
        kill(self.pid.parse().unwrap());
        eventually("its end", PATIENCE, || !Path::new(&format!("/proc/{}", self.pid)).exists());
    }
}

impl Drop for ProxmoxVm {
    fn drop(&mut self) {
        let line = std::fs::read(format!("/proc/{}/cmdline", self.pid)).unwrap_or_default();
        if String::from_utf8_lossy(&line).contains("test.qmp") {
            kill(self.pid.parse().unwrap());
        }
    }
}

/// The last monitor is the test's own.
const LINE: &str = "-accel tcg -name simple -no-shutdown \
    -chardev socket,id=qmp,path=DIR/100.qmp,server=on,wait=off -mon chardev=qmp,mode=control \
    -chardev socket,id=qmp-event,path=DIR/qmeventd.sock,reconnect=5 -mon chardev=qmp-event,mode=control \
    -pidfile DIR/100.pid -daemonize -smbios type=1,uuid=7b10d7af-b932-4c66-b2c3-3996152ec465 \
    -smp 2,sockets=1,cores=2,maxcpus=2 -nodefaults -boot menu=on,strict=on,reboot-timeout=1000 \
    -vnc unix:DIR/100.vnc,password=on -cpu qemu64,+lahf_lm,+sep -m 64 \
    -global PIIX4_PM.disable_s3=1 -global PIIX4_PM.disable_s4=1 \
    -device pci-bridge,id=pci.1,chassis_nr=1,bus=pci.0,addr=0x1e \
    -device pci-bridge,id=pci.2,chassis_nr=2,bus=pci.0,addr=0x1f \
    -device vmgenid,guid=c773c261-d800-4348-9f5d-167fadd53cf8 \
    -device piix3-usb-uhci,id=uhci,bus=pci.0,addr=0x1.0x2 -device usb-tablet,id=tablet,bus=uhci.0,port=1 \
    -device VGA,id=vga,bus=pci.0,addr=0x2 \
    -device virtio-balloon-pci,id=balloon0,bus=pci.0,addr=0x3,free-page-reporting=on \
    -device ide-cd,bus=ide.1,unit=0,id=ide2 -device virtio-scsi-pci,id=scsihw0,bus=pci.0,addr=0x5 \
    -netdev type=user,id=net0 -device virtio-net-pci,mac=A2:C0:43:77:08:A0,netdev=net0,bus=pci.0,addr=0x12,\
id=net0,rx_queue_size=1024,tx_queue_size=256,host_mtu=1500 \
    -machine hpet=off,type=pc -qmp unix:DIR/test.qmp,server=on,wait=off";

/// As above, for `q35`: source `src/test/cfg2cmd/q35-simple.conf.cmd`.
const Q35_LINE: &str = "-accel tcg -name simple -no-shutdown \
    -chardev socket,id=qmp,path=DIR/100.qmp,server=on,wait=off -mon chardev=qmp,mode=control \
    -pidfile DIR/100.pid -daemonize -smp 1,sockets=1,cores=1,maxcpus=1 -nodefaults \
    -vnc unix:DIR/100.vnc,password=on -cpu qemu64 -m 64 -readconfig DIR/pve-q35.cfg \
    -device vmgenid,guid=c773c261-d800-4348-9f5d-167fadd53cf8 \
    -device usb-tablet,id=tablet,bus=ehci.0,port=1 -device VGA,id=vga,bus=pcie.0,addr=0x1 \
    -device virtio-balloon-pci,id=balloon0,bus=pci.0,addr=0x3,free-page-reporting=on \
    -netdev type=user,id=net0 -device virtio-net-pci,netdev=net0,bus=pci.0,addr=0x12,id=net0 \
    -machine type=q35 -qmp unix:DIR/test.qmp,server=on,wait=off";

/// What qemu-server does with a monitor: it connects, asks, and leaves. Its time-out is 3 s.
fn ask_status(monitor: &Path) -> std::io::Result<Value> {
    let mut stream = UnixStream::connect(monitor)?;
    stream.set_read_timeout(Some(Duration::from_secs(3)))?;
    writeln!(
        stream,
        "{}\n{}",
        json!({ "execute": "qmp_capabilities" }),
        json!({ "execute": "query-status", "id": 1 })
    )?;
    for line in BufReader::new(stream).lines() {
        let answer: Value = serde_json::from_str(&line?)?;
        if answer["id"] == 1 {
            return Ok(answer["return"].clone());
        }
    }
    Err(std::io::ErrorKind::UnexpectedEof.into())
}

/// Asks for the status all the time, until dropped.
struct StatusClient {
    is_over: AtomicBool,
    answers: AtomicUsize,
}

impl StatusClient {
    fn ask_on(&self, monitor: &Path) {
        while !self.is_over.load(Ordering::Relaxed) {
            if ask_status(monitor).is_ok() {
                self.answers.fetch_add(1, Ordering::Relaxed);
            }
            thread::sleep(Duration::from_millis(200));
        }
    }
}

#[test]
fn a_vm_of_proxmox_is_saved_and_restored() {
    let vm = Vm::new();
    let session = &vm.session;
    let qemu = ProxmoxVm::start(session);
    let before = qemu.block_state();
    let monitor = qemu.monitor();
    let client = StatusClient { is_over: AtomicBool::new(false), answers: AtomicUsize::new(0) };
    thread::scope(|scope| {
        scope.spawn(|| client.ask_on(&monitor));
        save_and_detach(session, &qemu, &client);
        client.is_over.store(true, Ordering::Relaxed);
    });
    assert_eq!(qemu.block_state(), before);
    qemu.end();
    for (image, number) in [("b.firn", 2), ("a.firn", 1)] {
        session.firn(&["restore", image, "--name", "web", "--wait"]).succeeds();
        let monitor = PathBuf::from(session.status("web")["qmp"].as_str().unwrap());
        for disk in &qemu.disks {
            let read = format!("read -P {number} 1M 256k");
            assert_eq!(qemu_io_on(&monitor, &format!("-d {disk}"), &read), "", "{image}, {disk}");
        }
        // A restored VM can be saved again: its disks are files of Firn's now, below the throttle.
        let again = format!("again-{image}");
        session.firn(&["checkpoint", "web", "-o", &again]).succeeds();
        session.firn(&["image", "verify", &again]).succeeds();
        session.firn(&["stop", "web", "--discard"]).succeeds();
    }
}

fn save_and_detach(session: &Session, qemu: &ProxmoxVm, client: &StatusClient) {
    let (pid, monitor) = (qemu.pid.clone(), qemu.monitor());
    let of_vm = ["--pid", &pid, "--qmp", text(&monitor)];
    let checks = session.json(&[&["doctor"][..], &of_vm].concat());
    let row = |operation: &str| {
        let mut rows = checks.as_array().unwrap().iter();
        rows.find(|row| row["operation"] == operation).unwrap()
    };
    for operation in ["checkpoint", "checkpoint --parent IMAGE", "restore"] {
        assert_ne!(row(operation)["verdict"], "refused", "{checks}");
    }
    session.firn(&[&["attach", "web"][..], &of_vm].concat()).succeeds();
    qemu.write(1);
    session.firn(&["checkpoint", "web", "-o", "a.firn"]).succeeds();
    qemu.write(2);
    let saved = session.json(&["checkpoint", "web", "-o", "b.firn", "--parent", "a.firn"]);
    let methods = saved["drives"].as_array().unwrap().iter().map(|drive| drive["how"].clone());
    assert!(methods.into_iter().all(|how| how == "copy of changes"), "{saved}");
    qemu.write(3);
    session.firn(&["detach", "web"]).succeeds();
    let answers = client.answers.load(Ordering::Relaxed);
    eventually("its manager reaches it again", PATIENCE, || {
        client.answers.load(Ordering::Relaxed) > answers
    });
    assert_eq!(ask_status(&monitor).map(|status| status["status"].clone()).unwrap(), "running");
}

#[test]
fn a_vm_with_devices_in_a_file_is_saved_and_restored() {
    let vm = Vm::new();
    let session = &vm.session;
    let qemu = ProxmoxVm::start_q35(session, false);
    let (pid, monitor) = (qemu.pid.clone(), qemu.monitor());
    session.firn(&["attach", "web", "--pid", &pid, "--qmp", text(&monitor)]).succeeds();
    session.firn(&["checkpoint", "web", "-o", "a.firn"]).succeeds();
    session.firn(&["detach", "web"]).succeeds();
    qemu.end();
    // A restore does not depend on the file.
    std::fs::remove_file(session.path("pve-q35.cfg")).unwrap();
    session.firn(&["restore", "a.firn", "--name", "web", "--wait"]).succeeds();
    session.firn(&["checkpoint", "web", "-o", "b.firn"]).succeeds();
    let args = session.json(&["image", "inspect", "b.firn"])["meta"]["qemu"]["user_args"].clone();
    let has = |word: &str| args.as_array().unwrap().iter().any(|it| it == word);
    assert!(has("pci-bridge,id=pci.0,bus=pcidmi,addr=1.0,chassis_nr=1,shpc=on"), "{args}");
    assert!(!has("-readconfig"), "{args}");
}

#[test]
fn devices_in_a_file_that_is_gone_are_named() {
    let vm = Vm::new();
    let session = &vm.session;
    let qemu = ProxmoxVm::start_q35(session, true);
    let (pid, monitor) = (qemu.pid.clone(), qemu.monitor());
    let of_vm = ["--pid", &pid, "--qmp", text(&monitor)];
    let checks = session.firn(&[&["doctor"][..], &of_vm].concat());
    assert_eq!(checks.code, 5, "{}", checks.err);
    assert!(checks.out.contains("pve-q35.cfg: Firn could not read"), "{}", checks.out);
    let attached = session.firn(&[&["attach", "web"][..], &of_vm].concat()).succeeds();
    assert!(attached.out.contains("pve-q35.cfg: "), "{}", attached.out);
    session.firn(&["checkpoint", "web", "-o", "a.firn"]).fails(5, "Firn could not read this file");
    assert!(!session.path("a.firn").exists());
}
