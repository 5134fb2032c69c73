//! Disks of VMs that Firn did not start: a checkpoint copies them, and leaves them where they are.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::disk_layers::qemu_io_by;
use crate::own_qemu::resources_of;
use crate::session::{Session, eventually, text};
use crate::vm::{Vm, qemu_img};

const PATIENCE: Duration = Duration::from_secs(120);
const MACHINE: [&str; 8] =
    ["qemu-system-x86_64", "-M", "pc", "-m", "64", "-nodefaults", "-display", "none"];

/// A QEMU that its user started, with a monitor for Firn and one for the test.
pub struct OwnQemu {
    args: Vec<String>,
    pub dir: PathBuf,
    pub child: Child,
}

impl OwnQemu {
    fn start(session: &Session, args: Vec<String>) -> Self {
        let dir = session.path("");
        let monitors = ["qmp", "monitor"].map(|name| dir.join(name));
        let monitors = monitors.iter().flat_map(|path| {
            ["-qmp".to_owned(), format!("unix:{},server=on,wait=off", text(path))]
        });
        let args: Vec<String> = args.into_iter().chain(monitors).collect();
        let child = spawn(&args, &dir);
        Self { args, dir, child }
    }

    /// A QEMU without a guest, with these words for its disk.
    pub fn bare(session: &Session, disk: &[&str]) -> Self {
        let args = MACHINE.iter().chain(disk).map(|&word| word.to_owned()).collect();
        Self::start(session, args)
    }

    /// A guest that writes to disks, in shared memory.
    pub fn guest(vm: &Vm) -> Self {
        let ram = "memory-backend-memfd,id=ram,size=192M,share=on";
        let shared = ["-object", ram, "-machine", "memory-backend=ram"].map(str::to_owned);
        Self::start(&vm.session, vm.qemu_args().into_iter().chain(shared).collect())
    }

    pub fn attach(&self, session: &Session) {
        let (pid, qmp) = (self.child.id().to_string(), self.dir.join("qmp"));
        eventually("the monitor", PATIENCE, || qmp.exists());
        session.firn(&["attach", "web", "--pid", &pid, "--qmp", text(&qmp)]).succeeds();
    }

    /// Ends it without any warning, and starts it by the same command line.
    pub fn power_cycle(&mut self) {
        self.end();
        self.child = spawn(&self.args, &self.dir);
    }

    pub fn end(&mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
        for monitor in ["qmp", "monitor"] {
            let _ = std::fs::remove_file(self.dir.join(monitor));
        }
    }

    pub fn monitor(&self) -> firn_vmm::QemuVm {
        let path = self.dir.join("monitor");
        eventually("the monitor", PATIENCE, || path.exists());
        firn_vmm::QemuVm::connect(&path).unwrap()
    }

    /// Block nodes with their files and dirty bitmaps, jobs, and the files that are open.
    fn block_state(&self) -> Value {
        let mut vm = self.monitor();
        let nodes: Vec<Value> = vm.qmp().query("query-named-block-nodes").unwrap();
        let keys = ["node-name", "drv", "file", "ro", "backing_file"];
        let mut nodes: Vec<Value> = nodes
            .iter()
            .map(|node| {
                let bitmaps = node["dirty-bitmaps"].as_array().cloned().unwrap_or_default();
                let names: Vec<&Value> = bitmaps.iter().map(|bitmap| &bitmap["name"]).collect();
                json!([keys.map(|key| &node[key]), names])
            })
            .collect();
        nodes.sort_by_key(Value::to_string);
        let jobs: Vec<Value> = vm.qmp().query("query-jobs").unwrap();
        json!({ "nodes": nodes, "jobs": jobs, "files": self.open_files() })
    }

    fn open_files(&self) -> Vec<PathBuf> {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap();
        let targets = fds.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
        let mut files: Vec<PathBuf> =
            targets.filter(|target| target.starts_with(&self.dir)).collect();
        files.sort();
        files
    }

    fn is_running(&self) -> bool {
        self.monitor().status().unwrap().running
    }
}

impl Drop for OwnQemu {
    fn drop(&mut self) {
        self.end();
    }
}

fn spawn(args: &[String], dir: &Path) -> Child {
    let log = std::fs::File::create(dir.join("qemu.log")).unwrap();
    Command::new(&args[0]).args(&args[1..]).current_dir(dir).stderr(log).spawn().unwrap()
}

/// The block state without dirty bitmaps.
fn without_bitmaps(mut state: Value) -> Value {
    for node in state["nodes"].as_array_mut().unwrap() {
        node[1] = json!([]);
    }
    state
}

/// How the drives of a checkpoint were kept, each the same way.
#[track_caller]
fn method(saved: &Value) -> String {
    let drives = saved["drives"].as_array().unwrap();
    let methods: Vec<&str> = drives.iter().map(|drive| drive["how"].as_str().unwrap()).collect();
    assert!(methods.iter().all(|method| *method == methods[0]), "{methods:?}");
    methods[0].to_owned()
}

/// Writes a word where the guest's own load does not write.
pub fn write_word(vm: &Vm, word: &str) {
    for device in ["vda", "vdb"] {
        let write = format!("echo {word} | dd of=/dev/{device} bs=4096 seek=4352 && sync");
        vm.control().run_program(&["sh", "-c", &write]).unwrap();
    }
}

#[track_caller]
pub fn has_word(vm: &Vm, word: &str) {
    for device in ["vda", "vdb"] {
        let read = format!(
            "echo 3 > /proc/sys/vm/drop_caches; dd if=/dev/{device} bs=4096 skip=4352 count=1 | head -n 1"
        );
        let found = vm.control().run_program(&["sh", "-c", &read]).unwrap();
        assert!(found.lines().any(|line| line == word), "{device}: {found:?}, not {word}");
    }
}

/// Long enough for the guest to check some hundred blocks of each disk.
pub fn let_it_work() {
    std::thread::sleep(Duration::from_secs(2));
}

pub fn boot() -> (Vm, OwnQemu) {
    let mut vm = Vm::new();
    vm.create_disks("20M");
    let qemu = OwnQemu::guest(&vm);
    (vm, qemu)
}

#[test]
fn disks_of_an_attached_vm_stay_where_they_are() {
    let (vm, mut qemu) = boot();
    drop(vm.control());
    let before = qemu.block_state();
    qemu.attach(&vm.session);
    let vm = vm.with_load();
    vm.write_to_disks();
    let session = &vm.session;
    let saves: [(&str, &[&str], &str); 4] = [
        ("a.firn", &[], "copy"),
        ("b.firn", &["--parent", "a.firn"], "copy of changes"),
        ("c.firn", &["--parent", "b.firn"], "copy of changes"),
        ("d.firn", &["--strategy", "cow"], "copy"),
    ];
    for (image, options, expected) in saves {
        write_word(&vm, image);
        let saved = session.json(&[&["checkpoint", "web", "-o", image], options].concat());
        assert_eq!(method(&saved), expected, "{saved}");
        eprintln!("{image}: {}", saved["report"]["pause"]);
        assert_eq!(without_bitmaps(qemu.block_state()), before, "{image}");
        let_it_work();
        vm.is_well();
    }
    session.firn(&["detach", "web"]).succeeds();
    assert_eq!(qemu.block_state(), before);
    write_word(&vm, "newest");
    qemu.power_cycle();
    has_word(&vm, "newest");
    qemu.end();
    for (image, ..) in saves {
        session.firn(&["restore", image, "--name", "web", "--wait"]).succeeds();
        let_it_work();
        vm.is_well();
        has_word(&vm, image);
        session.firn(&["stop", "web", "--discard"]).succeeds();
    }
}

/// Descriptors and mappings of QEMU; its threads come and go with the requests of disks.
fn files_in_use(qemu: &OwnQemu) -> std::collections::BTreeMap<String, usize> {
    let mut resources = resources_of(qemu.child.id());
    resources.remove("threads");
    resources
}

/// Shared memory, two disks, each strategy, whole and incremental: after `detach` QEMU has what it had, no more and no less.
#[test]
fn detach_leaves_a_vm_with_disks_as_it_was() {
    let vm = Vm::new();
    let session = &vm.session;
    for (name, format) in [("disk0.qcow2", "qcow2"), ("disk1.raw", "raw")] {
        qemu_img(&["create", "-q", "-f", format, text(&session.path(name)), "16M"]);
    }
    let line = "-accel tcg -object memory-backend-memfd,id=ram,size=64M,share=on -machine memory-backend=ram \
        -drive file=disk0.qcow2,format=qcow2,if=virtio -drive file=disk1.raw,format=raw,if=virtio";
    let words: Vec<&str> = line.split_whitespace().collect();
    let qemu = OwnQemu::bare(session, &words);
    drop(qemu.monitor());
    let threads = || resources_of(qemu.child.id())["threads"];
    // Until the firmware has set up the disks.
    let (mut files, mut since) = (files_in_use(&qemu), Instant::now());
    while since.elapsed() < Duration::from_secs(2) {
        std::thread::sleep(Duration::from_millis(20));
        let now = files_in_use(&qemu);
        if now != std::mem::replace(&mut files, now.clone()) {
            since = Instant::now();
        }
    }
    let (blocks, least) = (qemu.block_state(), threads());
    for round in 0..2 {
        qemu.attach(session);
        let mut newest: Option<String> = None;
        for (number, strategy) in ["trace", "cow", "pre-copy", "stop"].iter().enumerate() {
            for parent in [None, newest.clone()].iter().skip(usize::from(number > 0)) {
                for drive in 0..2 {
                    let write = format!("write -P {} 1M 128k", 1 + number);
                    assert_eq!(qemu_io_by(&qemu.dir.join("monitor"), drive, &write), "");
                }
                let image = format!("{round}-{strategy}-{}.firn", parent.is_some());
                let mut save = vec!["checkpoint", "web", "-o", &image, "--strategy", strategy];
                save.extend(parent.iter().flat_map(|parent| ["--parent", parent.as_str()]));
                let saved = session.json(&save);
                let expected = if parent.is_some() { "copy of changes" } else { "copy" };
                assert_eq!(method(&saved), expected, "{saved}");
                newest = Some(image);
            }
        }
        session.firn(&["detach", "web"]).succeeds();
        assert_eq!(qemu.block_state(), blocks);
        is_soon(&files, || files_in_use(&qemu));
        eventually("its threads", PATIENCE, || threads() <= least);
        assert!(qemu.is_running());
    }
}

/// QEMU closes files when it is idle.
#[track_caller]
fn is_soon<T: PartialEq + std::fmt::Debug>(expected: &T, mut found: impl FnMut() -> T) {
    let limit = Instant::now() + Duration::from_secs(20);
    while found() != *expected && Instant::now() < limit {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(found(), *expected);
}

/// How many checkpoints a series makes.
fn rounds() -> u8 {
    std::env::var("FIRN_RUNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(18)
}

/// A series of a VM that Firn did not start copies its disks, and the guest overwrites a large part of them each time. Copies
/// that only removed images needed don't pile up below those that are needed.
#[test]
fn a_series_of_copies_runs_in_bounded_space() {
    const KEEP: usize = 3;
    let vm = Vm::new();
    let session = &vm.session;
    let own = [("disk0.qcow2", "qcow2"), ("disk1.raw", "raw")];
    for (name, format) in own {
        qemu_img(&["create", "-q", "-f", format, text(&session.path(name)), "16M"]);
    }
    let drives = own.map(|(name, format)| format!("file={name},format={format},if=virtio"));
    let qemu =
        OwnQemu::bare(session, &["-accel", "tcg", "-drive", &drives[0], "-drive", &drives[1]]);
    let before = qemu.block_state();
    qemu.attach(session);
    let monitor = qemu.dir.join("monitor");
    let series = "checkpoint web -o web.firn --every 100ms --keep 3 --times 1".split(' ');
    let series: Vec<&str> = series.collect();
    let bytes = |name: &String| allocated_bytes(&session.path(name));
    let mut most = 0.0;
    for round in 1..=rounds() {
        for drive in 0..2 {
            assert_eq!(qemu_io_by(&monitor, drive, &format!("write -P {round} 1M 2M")), "");
        }
        session.firn(&series).succeeds();
        let (images, files) = (session.files("web-"), session.files("disk"));
        assert!(images.len() <= KEEP, "{images:?}");
        // What the images that are kept have to have: the disks once, and what changed in between.
        let newest: Vec<String> =
            images.iter().flat_map(|image| kept_files(session, image)).collect();
        let disks: u64 = own.iter().map(|(name, _)| allocated_bytes(&session.path(name))).sum();
        let kept = images.iter().chain(&newest).map(bytes).sum::<u64>() + disks;
        let all: u64 = images.iter().chain(&files).map(bytes).sum();
        most = f64::max(most, all as f64 / (kept + disks) as f64);
        assert!(all <= 2 * (kept + disks), "{round}: {all} bytes, {kept} kept, {files:?}");
    }
    eprintln!("at most {most:.2} times the images that are kept and the VM's disks");
    session.firn(&["detach", "web"]).succeeds();
    assert_eq!(qemu.block_state(), before);
    let images = session.files("web-");
    for image in &images {
        session.firn(&["restore", image, "--name", "copy", "--wait"]).succeeds();
        let number: u8 = image["web-".len()..image.len() - ".firn".len()].parse().unwrap();
        let status = session.status("copy");
        for drive in 0..2 {
            let read = format!("read -P {number} 1M 2M");
            let wrong = qemu_io_by(Path::new(status["qmp"].as_str().unwrap()), drive, &read);
            assert_eq!(wrong, "", "{image}");
        }
        session.firn(&["stop", "copy", "--discard"]).succeeds();
    }
    let all: Vec<&str> =
        ["image", "rm"].into_iter().chain(images.iter().map(String::as_str)).collect();
    session.firn(&all).succeeds();
    assert_eq!(session.files("disk"), own.map(|(name, _)| name));
}

/// The names of the files that an image itself has of its disks, without what lies below.
fn kept_files(session: &Session, image: &str) -> Vec<String> {
    let facts = session.json(&["image", "inspect", image]);
    let drives = facts["meta"]["drives"].as_array().unwrap();
    let file = |drive: &Value| PathBuf::from(drive["file"].as_str().unwrap());
    let name = |drive| file(drive).file_name().unwrap().to_str().unwrap().to_owned();
    drives.iter().map(name).collect()
}

fn allocated_bytes(file: &Path) -> u64 {
    file.metadata().unwrap().blocks() * 512
}

#[test]
fn killed_while_disks_are_copied() {
    let (mut vm, qemu) = boot();
    drop(vm.control());
    let before = qemu.block_state();
    let files = vm.session.files("disk");
    for point in
        ["save.drives-ready", "save.drives-cut", "copies.begun", "copies.finished", "save.finished"]
    {
        vm.session.arm(Some(point));
        qemu.attach(&vm.session);
        vm.session.arm(None);
        let saved = vm.session.firn(&["checkpoint", "web", "-o", "new.firn"]);
        eventually("running again", PATIENCE, || vm.session.status("web")["state"] == "running");
        assert_eq!(vm.session.status("web")["recoveries"], 1, "{point}");
        assert!(qemu.is_running(), "{point}");
        vm.control().run_program(&["true"]).unwrap();
        match point {
            "save.finished" => assert_eq!(saved.succeeds().code, 0),
            _ => {
                saved.fails(8, "aborted");
                assert_eq!(qemu.block_state(), before, "{point}");
                assert_eq!(vm.session.files("disk"), files, "{point}");
            }
        }
        vm.session.firn(&["detach", "web"]).succeeds();
        assert_eq!(qemu.block_state(), before, "{point}");
    }
}

/// A directory on a small file system; unmounted when dropped.
pub struct SmallMount(tempfile::TempDir);

impl SmallMount {
    pub fn tmpfs(mib: u32) -> Option<Self> {
        Self::mount(&["-t", "tmpfs", "-o", &format!("size={mib}M"), "none"])
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Gives a tmpfs another size.
    pub fn resize(&self, mib: u32) {
        let options = format!("remount,size={mib}M");
        let resized = Command::new("mount").args(["-o", &options]).arg(self.path()).status();
        assert!(resized.unwrap().success());
    }

    /// A file system that can't reserve room.
    fn ext2() -> Option<Self> {
        let file = tempfile::NamedTempFile::new().ok()?;
        file.as_file().set_len(4 << 20).ok()?;
        let made = Command::new("mkfs.ext2").arg("-q").arg(file.path()).output().ok()?;
        made.status.success().then(|| Self::mount(&["-o", "loop", text(file.path())]))?
    }

    fn mount(args: &[&str]) -> Option<Self> {
        let dir = tempfile::tempdir().ok()?;
        let mounted = Command::new("mount").args(args).arg(dir.path()).output().ok()?;
        mounted.status.success().then_some(Self(dir))
    }

    /// Files of copies in it.
    fn copies(&self) -> usize {
        let names = std::fs::read_dir(self.0.path()).unwrap();
        let is_copy = |name: &std::ffi::OsString| name.to_string_lossy().starts_with("disk");
        names.filter(|entry| is_copy(&entry.as_ref().unwrap().file_name())).count()
    }
}

impl Drop for SmallMount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn a_copy_without_room_is_one_clear_error() {
    let vm = Vm::new();
    let session = &vm.session;
    std::fs::write(session.path("disk.raw"), vec![7; 16 << 20]).unwrap();
    let qemu = OwnQemu::bare(session, &["-drive", "file=disk.raw,format=raw,if=virtio"]);
    let before = qemu.block_state();
    qemu.attach(session);
    let mounts = [
        ("tmpfs", SmallMount::tmpfs(2), "cannot reserve"),
        ("ext2", SmallMount::ext2(), "No space left on device"),
    ];
    for (kind, mount, why) in &mounts {
        let Some(mount) = mount else {
            firn_skip::skip_test(format_args!("no {kind} can be mounted here (root)"));
            continue;
        };
        let dir = text(mount.0.path());
        let save = ["checkpoint", "web", "-o", "web.firn", "--disk-dir", dir];
        let refused = session.firn(&save).fails(1, why);
        assert!(refused.err.contains("--disk-dir"), "{}", refused.err);
        assert_eq!(mount.copies(), 0, "{kind}");
        assert_eq!(session.files("web.firn"), Vec::<String>::new());
        assert_eq!(qemu.block_state(), before, "{kind}");
        assert!(qemu.is_running(), "{kind}");
    }
    session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
}

#[test]
fn a_disk_copy_has_the_backing_file_of_the_disk() {
    let vm = Vm::new();
    let session = &vm.session;
    let (base, disk) = (session.path("base.qcow2"), session.path("disk.qcow2"));
    qemu_img(&["create", "-q", "-f", "qcow2", text(&base), "16M"]);
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", text(&base), text(&disk)]);
    let device = "virtio-blk-pci,drive=d0,iothread=io0";
    let drive = "file=disk.qcow2,format=qcow2,if=none,id=d0";
    let words = ["-object", "iothread,id=io0", "-drive", drive, "-device", device];
    let mut qemu = OwnQemu::bare(session, &words);
    let before = qemu.block_state();
    qemu.attach(session);
    // Another client's job: which files it changes is not known.
    let mut monitor = qemu.monitor();
    let target = json!({ "driver": "null-co", "node-name": "other", "size": 16 << 20 });
    monitor.qmp().execute("blockdev-add", target).unwrap();
    let job =
        json!({ "job-id": "other", "device": "d0", "target": "other", "sync": "full", "speed": 1 });
    monitor.qmp().execute("blockdev-backup", job).unwrap();
    let save = ["checkpoint", "web", "-o", "web.firn"];
    session.firn(&save).fails(5, "a block job is at work (backup, other)");
    monitor.qmp().execute("job-cancel", json!({ "id": "other" })).unwrap();
    eventually("no job", PATIENCE, || {
        monitor.qmp().query::<Vec<Value>>("query-jobs").unwrap().is_empty()
    });
    monitor.qmp().execute("blockdev-del", json!({ "node-name": "other" })).unwrap();
    drop(monitor);
    let first = session.json(&save);
    let later = session.json(&["checkpoint", "web", "-o", "later.firn", "--parent", "web.firn"]);
    assert_eq!((method(&first), method(&later)), ("copy".into(), "copy of changes".into()));
    let kept = |saved: &Value| saved["drives"][0]["kept"].as_str().unwrap().to_owned();
    assert_eq!(below(&kept(&first)), text(&base));
    assert_eq!(below(&kept(&later)), kept(&first));
    let facts = session.json(&["image", "inspect", "later.firn"]);
    let needed = facts["meta"]["disks"].to_string();
    assert!(needed.contains(&kept(&first)) && needed.contains(text(&base)), "{needed}");
    // Overlays only where they are asked for.
    let saved = session.json(&["checkpoint", "web", "-o", "o.firn", "--disks", "overlay"]);
    assert_eq!(method(&saved), "overlay");
    assert_ne!(without_bitmaps(qemu.block_state()), before);
    session.firn(&["detach", "web"]).succeeds();
    qemu.end();
    for image in ["web.firn", "later.firn"] {
        session.firn(&["restore", image, "--wait"]).succeeds();
        session.firn(&["stop", "web", "--discard"]).succeeds();
    }
    // What lies below a copy is as much a part of the image.
    let moved = session.path("moved");
    std::fs::rename(kept(&first), &moved).unwrap();
    session.firn(&["restore", "later.firn"]).fails(5, "is not there");
    std::fs::rename(&moved, kept(&first)).unwrap();
    session.firn(&["restore", "later.firn", "--wait"]).succeeds();
}

/// The file below a qcow2 file.
fn below(file: &str) -> String {
    let info = Command::new("qemu-img").args(["info", "--output=json", file]).output().unwrap();
    let info: Value = serde_json::from_slice(&info.stdout).unwrap();
    info["full-backing-filename"].as_str().unwrap().to_owned()
}
