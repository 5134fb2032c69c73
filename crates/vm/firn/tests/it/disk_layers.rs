//! Layers of disks: no disk silently returns to an old state, and layers that nothing needs are merged.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::disks::Btrfs;
use crate::parts::part_of;
use crate::session::{Session, eventually, text};
use crate::vm::{Vm, qemu_img};

const PATIENCE: Duration = Duration::from_secs(120);

/// Bytes of each disk.
const DISK: &str = "16M";

/// A VM without a guest, with a qcow2 and a raw disk in a directory.
struct Bare<'a> {
    session: &'a Session,
    dir: PathBuf,
}

impl<'a> Bare<'a> {
    fn new(session: &'a Session, dir: &Path) -> Self {
        let dir = dir.to_owned();
        for (name, format) in [("disk0.qcow2", "qcow2"), ("disk1.raw", "raw")] {
            qemu_img(&["create", "-q", "-f", format, text(&dir.join(name)), DISK]);
        }
        Self { session, dir }
    }

    fn words(&self) -> Vec<String> {
        let drive = |name: &str, format: &str| {
            format!("file={},format={format},if=virtio", text(&self.dir.join(name)))
        };
        let (first, second) = (drive("disk0.qcow2", "qcow2"), drive("disk1.raw", "raw"));
        let plain =
            ["qemu-system-x86_64", "-M", "pc", "-m", "64", "-nodefaults", "-display", "none"];
        let drives = ["-drive", &first, "-drive", &second];
        plain.iter().chain(&drives).map(|&word| word.to_owned()).collect()
    }

    fn run(&self) -> &Self {
        self.session.firn(&run(&[], &self.words())).succeeds();
        self
    }

    /// Fills a part of both disks of a VM.
    fn write(&self, vm: &str, pattern: u8) {
        for drive in 0..2 {
            let said = qemu_io(self.session, vm, drive, &format!("write -P {pattern} 64k 256k"));
            assert_eq!(said, "", "{vm}: {pattern}");
            let at = 1024 + u32::from(pattern) * 64;
            qemu_io(self.session, vm, drive, &format!("write -P {pattern} {at}k 64k"));
        }
    }

    /// Both disks are as they were after this pattern was written.
    #[track_caller]
    fn has(&self, vm: &str, pattern: u8) {
        for drive in 0..2 {
            let said = qemu_io(self.session, vm, drive, &format!("read -P {pattern} 64k 256k"));
            assert_eq!(said, "", "{vm}, drive {drive}: not {pattern}");
            for other in 1..10u8 {
                let (at, there) = (1024 + u32::from(other) * 64, other <= pattern);
                let expected = if there { other } else { 0 };
                let said =
                    qemu_io(self.session, vm, drive, &format!("read -P {expected} {at}k 64k"));
                assert_eq!(said, "", "{vm}, drive {drive}: {other} where {pattern} was last");
            }
        }
    }

    /// The files of disks, in order.
    fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.dir).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.filter(|name| name.starts_with("disk")).collect();
        names.sort_unstable();
        names
    }

    /// Restores an image beside the VM, looks at its disks, and ends it.
    #[track_caller]
    fn restores(&self, image: &str, pattern: u8) {
        self.session.firn(&["restore", image, "--name", "copy", "--wait"]).succeeds();
        self.has("copy", pattern);
        self.session.firn(&["stop", "copy", "--discard"]).succeeds();
    }

    fn checkpoint(&self, image: &str) {
        self.session.firn(&["checkpoint", "web", "-o", image]).succeeds();
    }
}

/// `firn run` with options and a command line.
fn run<'a>(options: &[&'a str], words: &'a [String]) -> Vec<&'a str> {
    let words = words.iter().map(String::as_str);
    ["run", "web"].into_iter().chain(options.iter().copied()).chain(["--"]).chain(words).collect()
}

/// Reads or writes as a guest would. Returns what is wrong with it.
fn qemu_io(session: &Session, vm: &str, drive: usize, command: &str) -> String {
    let status = session.status(vm);
    qemu_io_by(Path::new(status["qmp"].as_str().unwrap()), drive, command)
}

/// The same through a monitor that no other client uses.
pub fn qemu_io_by(monitor: &Path, drive: usize, command: &str) -> String {
    qemu_io_on(monitor, &format!("virtio{drive}"), command)
}

/// The same, on a drive or a node, or on a device (`-d ID`).
pub fn qemu_io_on(monitor: &Path, drive: &str, command: &str) -> String {
    let mut stream = UnixStream::connect(monitor).unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let line = json!({ "command-line": format!("qemu-io {drive} \"{command}\"") });
    let ask = json!({ "execute": "human-monitor-command", "arguments": line, "id": 1 });
    writeln!(stream, "{}\n{ask}", json!({ "execute": "qmp_capabilities" })).unwrap();
    let answer = loop {
        let line: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        if line["id"] == 1 {
            break line["return"].as_str().unwrap_or("failed").to_owned();
        }
    };
    let wrong = |line: &&str| line.contains("failed") || line.contains("rror");
    answer.lines().find(wrong).unwrap_or_default().to_owned()
}

fn words_of(command: &Value) -> Vec<String> {
    serde_json::from_value(command.clone()).unwrap()
}

#[test]
fn a_stopped_vm_is_not_started_on_its_old_disks() {
    let vm = Vm::new();
    let session = &vm.session;
    let bare = Bare::new(session, &session.path(""));
    bare.run().write("web", 1);
    bare.checkpoint("a.firn");
    bare.write("web", 2);
    let stopped = session.json(&["stop", "web"]);
    let words = bare.words();
    let refused =
        session.firn(&run(&[], &words)).fails(5, "disk0.qcow2 is an old state of the disk");
    assert!(
        refused.err.contains("--old-disk") && refused.err.contains("a.firn"),
        "{}",
        refused.err
    );
    let newest = stopped["overlays"][0].as_str().unwrap();
    assert!(refused.err.contains(newest), "{}", refused.err);
    assert_eq!(session.ls(), []);
    // A hypervisor that a user has started on them.
    let qmp = session.path("qmp");
    let monitor = format!("unix:{},server=on,wait=off", text(&qmp));
    let more = ["-qmp", &monitor].map(str::to_owned);
    let args = [&words[1..], &more].concat();
    let mut qemu = std::process::Command::new(&words[0]).args(args).spawn().unwrap();
    eventually("a monitor", PATIENCE, || UnixStream::connect(&qmp).is_ok());
    let pid = qemu.id().to_string();
    let attach = ["attach", "web", "--pid", &pid, "--qmp", text(&qmp)];
    session.firn(&attach).fails(5, "is an old state of the disk");
    qemu.kill().unwrap();
    qemu.wait().unwrap();
    // By what `firn stop` printed it has all that it wrote; the image is as it was.
    session.firn(&run(&[], &words_of(&stopped["command"]))).succeeds();
    bare.has("web", 2);
    bare.restores("a.firn", 1);
    let stopped = session.firn(&["stop", "web"]).succeeds();
    assert!(!stopped.out.contains("continue with"), "{}", stopped.out);
    session.firn(&run(&[], &words)).fails(5, "is an old state of the disk");
    // On purpose; from then on they are the newest.
    let old = session.firn(&run(&["--old-disk"], &words)).succeeds();
    assert!(old.out.contains("a.firn needs"), "{}", old.out);
    bare.has("web", 1);
    session.firn(&["stop", "web"]).succeeds();
    session.firn(&run(&[], &words)).succeeds();
    session.firn(&["stop", "web"]).succeeds();
    // A record that can't be read is never taken for none.
    std::fs::write(session.path(".firn-disks.json"), "{").unwrap();
    session.firn(&run(&[], &words)).fails(6, ".firn-disks.json is damaged");
}

#[test]
fn a_removed_image_frees_its_layers_and_others_are_merged() {
    let vm = Vm::new();
    let session = &vm.session;
    let bare = Bare::new(session, &session.path(""));
    let own = bare.files();
    bare.run().write("web", 1);
    bare.checkpoint("a.firn");
    bare.write("web", 2);
    session.firn(&["checkpoint", "web", "-o", "b.firn", "--parent", "a.firn"]).succeeds();
    bare.write("web", 3);
    session.firn(&["image", "rm", "a.firn"]).fails(5, "b.firn builds on it");
    session.firn(&["restore", "a.firn", "--name", "copy", "--wait"]).succeeds();
    let refused = session.firn(&["image", "rm", "a.firn", "b.firn"]);
    let refused = refused.fails(5, "a.firn is needed");
    assert!(refused.err.contains("of the VM copy, stands on its disk"), "{}", refused.err);
    session.firn(&["stop", "copy", "--discard"]).succeeds();
    session.firn(&["disk", "commit", "web"]).fails(5, "b.firn needs");
    bare.restores("b.firn", 2);
    session.firn(&["image", "merge", "b.firn"]).succeeds();
    session.firn(&["image", "rm", "a.firn"]).succeeds();
    let merged = session.json(&["disk", "merge", "web"]);
    assert_eq!(merged["merged"], 2, "one of each disk");
    bare.has("web", 3);
    bare.restores("b.firn", 2);
    session.firn(&["image", "rm", "b.firn"]).succeeds();
    let committed = session.json(&["disk", "commit", "web"]);
    assert_eq!(committed["committed"].as_array().unwrap().len(), 2, "{committed}");
    assert_eq!(bare.files(), own);
    assert_eq!(session.status("web")["state"], "running");
    bare.has("web", 3);
    bare.write("web", 4);
    session.firn(&["stop", "web"]).succeeds();
    bare.run().has("web", 4);
    // An image whose file was removed by other means keeps its layers until Firn is asked to forget it.
    bare.checkpoint("c.firn");
    std::fs::remove_file(session.path("c.firn")).unwrap();
    session.firn(&["disk", "commit", "web"]).fails(5, "c.firn needs");
    session.firn(&["image", "rm", "c.firn"]).succeeds();
    session.firn(&["disk", "commit", "web"]).succeeds();
    assert_eq!(bare.files(), own);
    session.firn(&["disk", "commit", "web"]).succeeds();
}

/// Firn killed while it merges: what is written is never lost, and what is left of the merge is done by the successor.
#[test]
fn killed_while_layers_are_merged() {
    let mut vm = Vm::new();
    for point in part_of(["merge.recorded", "merge.begun", "merge.ended", "merge.settled"]) {
        let dir = vm.session.path(point);
        std::fs::create_dir(&dir).unwrap();
        vm.session.arm(Some(point));
        let bare = Bare::new(&vm.session, &dir);
        bare.run();
        vm.session.arm(None);
        let bare = Bare { session: &vm.session, dir };
        for (image, pattern) in [("a.firn", 1), ("b.firn", 2), ("c.firn", 3)] {
            bare.write("web", pattern);
            bare.checkpoint(image);
        }
        bare.write("web", 4);
        vm.session.firn(&["image", "rm", "a.firn"]).succeeds();
        vm.session.firn(&["disk", "merge", "web"]).succeeds();
        assert_eq!(vm.session.status("web")["recoveries"], 1, "{point}");
        assert_eq!(bare.files().len(), 6, "{point}: {:?}", bare.files());
        bare.has("web", 4);
        bare.restores("b.firn", 2);
        bare.restores("c.firn", 3);
        vm.session.firn(&["stop", "web"]).succeeds();
    }
    for point in part_of([
        "disk-commit.recorded",
        "disk-commit.ready",
        "disk-commit.paused",
        "disk-commit.completed",
        "disk-commit.settled",
    ]) {
        let dir = vm.session.path(point);
        std::fs::create_dir(&dir).unwrap();
        vm.session.arm(Some(point));
        Bare::new(&vm.session, &dir).run();
        vm.session.arm(None);
        let bare = Bare { session: &vm.session, dir };
        bare.write("web", 1);
        bare.checkpoint("a.firn");
        bare.write("web", 2);
        vm.session.firn(&["image", "rm", "a.firn"]).succeeds();
        vm.session.firn(&["disk", "commit", "web"]).succeeds();
        let status = vm.session.status("web");
        assert_eq!(
            (&status["recoveries"], &status["state"]),
            (&json!(1), &json!("running")),
            "{point}"
        );
        assert_eq!(bare.files(), ["disk0.qcow2", "disk1.raw"], "{point}");
        bare.has("web", 2);
        vm.session.firn(&["stop", "web"]).succeeds();
        bare.run().has("web", 2);
        vm.session.firn(&["stop", "web"]).succeeds();
    }
}

/// How many checkpoints a series makes, and how many it keeps.
fn rounds() -> (usize, usize) {
    match std::env::var("FIRN_RUNS").ok().and_then(|runs| runs.parse().ok()) {
        Some(runs) => (runs, 10),
        None => (8, 3),
    }
}

fn allocated(file: &Path) -> u64 {
    file.metadata().map_or(0, |metadata| metadata.blocks() * 512)
}

/// The layers of a series stay few, whatever the guest writes meanwhile, and each image that is kept restores.
#[test]
fn a_series_runs_in_bounded_space() {
    let (runs, keep) = rounds();
    let vm = Vm::boot_with_disks();
    let session = &vm.session;
    let (times, keep_text) = (runs.to_string(), keep.to_string());
    let series = ["checkpoint", "web", "-o", "web.firn", "--every", "1s", "--keep", &keep_text];
    session.firn(&[&series[..], &["--times", &times]].concat()).succeeds();
    vm.is_well();
    let images = session.files("web-");
    let count = images.len();
    assert!((keep..=keep + keep / 4).contains(&count), "{images:?}");
    let files = session.files("disk");
    assert!(files.len() <= 2 * (count + 2), "{files:?}");
    let sum =
        |names: &[String]| names.iter().map(|name| allocated(&session.path(name))).sum::<u64>();
    let (kept, disks) = (sum(&images), sum(&files));
    let own = 32 << 20;
    eprintln!(
        "{runs} checkpoints: {count} images of {kept} bytes, {} disk files of {disks} bytes",
        files.len()
    );
    assert!(kept + disks <= 2 * (kept + own), "{kept} {disks}");
    // The guest writes while all is merged; then it is restored from each image.
    session.firn(&["stop", "web", "--discard"]).succeeds();
    for image in &images {
        session.firn(&["restore", image, "--name", "web", "--wait"]).succeeds();
        vm.is_well();
        session.firn(&["stop", "web", "--discard"]).succeeds();
    }
}

/// Bytes of each disk that its VM writes again and again.
const REWRITTEN: u64 = 2 << 20;

/// The space that the files of a file system take.
fn used_bytes(dir: &Path) -> u64 {
    rustix::fs::syncfs(std::fs::File::open(dir).unwrap()).unwrap();
    let found = rustix::fs::statvfs(dir).unwrap();
    (found.f_blocks - found.f_bfree) * found.f_frsize
}

/// The same where files share blocks: copies of disks go with their images, and with them what the VM has written over since.
#[test]
fn a_series_on_a_file_system_that_clones() {
    let Some(mount) = Btrfs::mount() else {
        firn_skip::skip_test("no btrfs can be made and mounted here (mkfs.btrfs, root)");
        return;
    };
    let (runs, keep) = rounds();
    let vm = Vm::new();
    let session = &vm.session;
    let bare = Bare::new(session, mount.0.path());
    let monitor = session.path("monitor");
    let own = format!("unix:{},server=on,wait=off", text(&monitor));
    let words = [bare.words(), vec!["-qmp".to_owned(), own]].concat();
    session.firn(&run(&[], &words)).succeeds();
    bare.write("web", 1);
    let before = used_bytes(mount.0.path());
    let (times, keep_text) = (runs.to_string(), keep.to_string());
    let series = ["checkpoint", "web", "-o", "web.firn", "--every", "1s", "--keep", &keep_text];
    let mut making =
        session.command(&[&series[..], &["--times", &times]].concat()).spawn().unwrap();
    let mut pattern = 0_u8;
    let made = loop {
        if let Some(made) = making.try_wait().unwrap() {
            break made;
        }
        pattern = pattern.wrapping_add(1);
        for drive in 0..2 {
            qemu_io_by(&monitor, drive, &format!("write -P {pattern} 2M {REWRITTEN}"));
        }
        std::thread::sleep(Duration::from_millis(300));
    };
    assert!(made.success(), "{made}");
    let images = session.files("web-");
    assert_eq!(bare.files().len(), 2 * (images.len() + 1), "{:?}", bare.files());
    let used = used_bytes(mount.0.path()).saturating_sub(before);
    let kept = 2 * REWRITTEN * (images.len() as u64 + 1);
    eprintln!(
        "{runs} checkpoints, {pattern} writes: {} images, {used} bytes of {kept}",
        images.len()
    );
    assert!(used <= 2 * kept, "{used} {kept}");
    bare.write("web", 2);
    for image in &images {
        bare.restores(image, 1);
    }
    session.firn(&["restore", &images[0], "--name", "copy", "--wait"]).succeeds();
    session.firn(&["image", "rm", &images[0]]).fails(5, "disk0.qcow2.copy-");
    session.firn(&["stop", "copy", "--discard"]).succeeds();
    let all: Vec<&str> =
        ["image", "rm"].into_iter().chain(images.iter().map(String::as_str)).collect();
    session.firn(&all).succeeds();
    assert_eq!(bare.files(), ["disk0.qcow2", "disk1.raw"]);
    bare.has("web", 2);
}

/// The guest writes to both disks all the time.
#[test]
fn disks_are_committed_under_load() {
    let vm = Vm::boot_with_disks();
    let session = &vm.session;
    for image in ["a.firn", "b.firn"] {
        session.firn(&["checkpoint", "web", "-o", image]).succeeds();
        vm.is_well();
    }
    session.firn(&["image", "rm", "a.firn", "b.firn"]).succeeds();
    session.firn(&["disk", "commit", "web"]).succeeds();
    assert_eq!(session.files("disk"), ["disk0.raw", "disk1.qcow2"]);
    vm.is_well();
    session.firn(&["checkpoint", "web", "-o", "c.firn"]).succeeds();
    session.firn(&["stop", "web", "--discard"]).succeeds();
    session.firn(&["restore", "c.firn", "--name", "web", "--wait"]).succeeds();
    vm.is_well();
}
