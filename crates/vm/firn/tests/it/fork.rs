//! Clones: VMs of one image that share the memory that none of them has written.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_lab::guest::GuestControl;
use firn_memory::{Process, Tracee, process_memory};
use firn_types::{HostVirt, ThreadId};
use nix::libc;
use serde_json::Value;

use crate::session::{Answer, Session, eventually, kill, text};
use crate::tiny_guest::TinyGuest;
use crate::vm::{Vm, userfaultfds, writes};

const PATIENCE: Duration = Duration::from_secs(120);

/// Guest RAM of the tiny guest, and the part of it that the test fills and the guest never touches.
const RAM_BYTES: usize = 32 << 20;
pub const QUIET: std::ops::Range<usize> = (8 << 20)..(24 << 20);
pub const PAGE: usize = 4096;

/// A saved VM: `web.firn`.
struct Origin {
    session: Session,
    /// The quiet part of its memory.
    memory: Vec<u8>,
}

impl Origin {
    /// Every page of the quiet part has other contents, except for a hole of zeros.
    fn save() -> Self {
        let session = Session::new();
        let mut guest = TinyGuest::run(&session, &[]);
        let pid = session.status("web")["pid"].as_i64().unwrap();
        let memory: Vec<u8> = QUIET.step_by(PAGE).flat_map(|at| page_with(at as u64)).collect();
        write_ram(pid, QUIET.start, &memory);
        guest.answers();
        session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
        session.firn(&["stop", "web"]).succeeds();
        Self { session, memory }
    }

    /// Starts clones, and waits for all of their memory.
    fn start_clones(&self, count: usize) -> Value {
        let count = count.to_string();
        self.session.json(&["restore", "web.firn", "--count", &count, "--wait"])
    }

    fn pid(&self, number: usize) -> i64 {
        self.session.status(&format!("web-{number}"))["pid"].as_i64().unwrap()
    }

    /// The memory of a clone is that of the image, and its guest runs.
    #[track_caller]
    fn is_exact(&self, number: usize) {
        let found = read_ram(self.pid(number), QUIET.start, QUIET.len());
        let wrong = (0..QUIET.len())
            .step_by(PAGE)
            .find(|&at| found[at..at + PAGE] != self.memory[at..at + PAGE]);
        assert_eq!(wrong, None, "clone {number}: a page at this offset is wrong");
        self.answers(number);
    }

    /// After a start that failed: a clone that had started before runs on, and the error names it.
    #[track_caller]
    fn those_that_run_are_named(&self, started: &Answer, what: &str) {
        for (name, state) in self.session.ls() {
            let text = &started.err;
            assert!(text.contains(&format!("these run: {name}")), "{what}: {name} {state}: {text}");
            let number = name.strip_prefix("web-").unwrap().parse().unwrap();
            self.wait(number);
            self.is_exact(number);
        }
    }

    #[track_caller]
    fn answers(&self, number: usize) {
        let port = self.session.path(&format!("run/web-{number}/user-serial"));
        let mut port = UnixStream::connect(&port).unwrap();
        port.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        eventually("the clone answers", PATIENCE, || {
            port.write_all(b"e").unwrap();
            port.read(&mut [0; 64]).is_ok_and(|bytes| bytes > 0)
        });
    }

    fn wait(&self, number: usize) {
        self.session.firn(&["status", &format!("web-{number}"), "--watch"]).succeeds();
    }
}

/// A page of words that no other page has; zeros for every eighth run of 64 pages.
pub fn page_with(at: u64) -> Vec<u8> {
    if at / PAGE as u64 / 64 % 8 == 7 {
        return vec![0; PAGE];
    }
    let word = |index: u64| (at + index).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    (0..PAGE as u64 / 8).flat_map(word).collect()
}

/// The mappings of guest RAM: of its own file, or of a template.
fn ram_address(pid: i64) -> u64 {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let is_ram = |line: &&str| {
        (line.contains("rw-p") && line.contains("memfd:firn-template"))
            || (line.contains("rw-s") && line.contains("memfd:firn-ram"))
    };
    let line = maps.lines().find(is_ram).unwrap();
    let (start, rest) = line.split_once('-').unwrap();
    let (end, _) = rest.split_once(' ').unwrap();
    let [start, end] = [start, end].map(|hex| u64::from_str_radix(hex, 16).unwrap());
    assert_eq!(end - start, RAM_BYTES as u64, "{line}");
    start
}

pub fn read_ram(pid: i64, offset: usize, len: usize) -> Vec<u8> {
    let process = Process::open(pid as i32).unwrap();
    let mut bytes = vec![0; len];
    let at = HostVirt(ram_address(pid) + offset as u64);
    process_memory::read_memory(&process, at, &mut bytes).unwrap();
    bytes
}

/// Writes as a guest does: through QEMU's own mapping.
pub fn write_ram(pid: i64, offset: usize, bytes: &[u8]) {
    let process = Process::open(pid as i32).unwrap();
    let at = HostVirt(ram_address(pid) + offset as u64);
    process_memory::write_memory(&process, at, bytes).unwrap();
}

/// Sums of the kernel about a process's mappings of its template, in bytes.
fn template_use(pid: i64, key: &str) -> u64 {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let (_, rest) = smaps.split_once("memfd:firn-template").unwrap();
    let line = rest.lines().find(|line| line.starts_with(key)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// The processes that hold templates in this session.
pub fn holders(session: &Session) -> Vec<i64> {
    let runtime = format!("FIRN_RUNTIME_DIR={}", text(&session.runtime_dir()));
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let is_holder = |path: &PathBuf| {
        let read = |name: &str| std::fs::read(path.join(name)).unwrap_or_default();
        let line = String::from_utf8_lossy(&read("cmdline")).into_owned();
        line.contains("__hold-template")
            && String::from_utf8_lossy(&read("environ")).split('\0').any(|it| it == runtime)
    };
    let paths = processes.map(|entry| entry.path()).filter(is_holder);
    paths.filter_map(|path| path.file_name()?.to_str()?.parse().ok()).collect()
}

#[test]
fn clones_have_the_memory_of_the_image_and_writes_of_their_own() {
    let origin = Origin::save();
    let facts = origin.start_clones(4);
    assert_eq!(facts["clones"].as_array().unwrap().len(), 4, "{facts}");
    (1..=4).for_each(|number| origin.is_exact(number));
    let (full, zero) = (QUIET.start + 5 * PAGE, QUIET.start + 7 * 64 * PAGE);
    for number in 1..=4 {
        let byte = [number as u8; 8];
        for offset in [full, zero, QUIET.start + (100 + number) * PAGE] {
            write_ram(origin.pid(number), offset, &byte);
        }
    }
    for number in 1..=4 {
        let mut expected = origin.memory.clone();
        for offset in [full, zero, QUIET.start + (100 + number) * PAGE] {
            let at = offset - QUIET.start;
            expected[at..at + 8].fill(number as u8);
        }
        let found = read_ram(origin.pid(number), QUIET.start, QUIET.len());
        assert!(found == expected, "clone {number} has a write of another clone, or not its own");
        origin.answers(number);
    }
    let pss: u64 = (1..=4).map(|number| template_use(origin.pid(number), "Pss:")).sum();
    let own: u64 = (1..=4).map(|number| template_use(origin.pid(number), "Anonymous:")).sum();
    eprintln!("4 clones of 32 MiB: {} KiB in all, {} KiB of it written", pss >> 10, own >> 10);
    assert!(own >= 4 * 3 * PAGE as u64 && own < 8 << 20, "{own}");
    assert!(pss <= RAM_BYTES as u64 + own * 11 / 10, "{pss}, written {own}");
    let listed = origin.session.firn(&["ls"]).succeeds().out;
    assert!(listed.contains("web.firn: web-1, web-2, web-3, web-4"), "{listed}");
    for number in 1..=4 {
        assert_eq!(userfaultfds(origin.pid(number)), 0);
        let status = origin.session.status(&format!("web-{number}"));
        assert_eq!(status["family"]["id"], facts["family"], "{status}");
        let bytes = |key: &str| status["memory_use"][key].as_u64().unwrap();
        let pid = origin.pid(number);
        assert_eq!(bytes("private_bytes"), template_use(pid, "Anonymous:"), "{status}");
        assert!(bytes("shared_bytes") > 8 << 20 && bytes("pss_bytes") > 2 << 20, "{status}");
    }
    eventually("the holder ends", PATIENCE, || holders(&origin.session).is_empty());
    (1..=4).for_each(|number| origin.answers(number));
}

/// The descriptor by which a QEMU has its template.
fn template_descriptor(pid: i64) -> PathBuf {
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let mut paths = descriptors.map(|entry| entry.unwrap().path());
    let is_template = |path: &PathBuf| {
        std::fs::read_link(path).is_ok_and(|link| text(&link).contains("firn-template"))
    };
    paths.find(is_template).unwrap()
}

/// What a QEMU that has been taken over could try.
#[test]
fn no_clone_can_change_the_template() {
    let origin = Origin::save();
    origin.start_clones(2);
    let pid = origin.pid(1);
    let path = template_descriptor(pid);
    let file = File::options().read(true).write(true).open(path).unwrap();
    let denied = Some(rustix::io::Errno::PERM.raw_os_error());
    assert_eq!(file.write_at(b"x", 0).unwrap_err().raw_os_error(), denied);
    assert_eq!(file.set_len(PAGE as u64).unwrap_err().raw_os_error(), denied);
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    let punched = rustix::fs::fallocate(&file, flags, 0, PAGE as u64);
    assert_eq!(punched, Err(rustix::io::Errno::PERM));
    origin.is_exact(2);
}

/// A QEMU that its guest has taken over.
pub struct HostileQemu {
    pub process: Process,
    /// Its vCPUs.
    vcpus: Vec<ThreadId>,
    /// Its descriptor of the template.
    template: u64,
    pub ram: u64,
}

impl HostileQemu {
    pub fn new(pid: i64) -> Self {
        let process = Process::open(pid as i32).unwrap();
        let is_vcpu = |tid: &ThreadId| {
            let name = std::fs::read_to_string(format!("/proc/{pid}/task/{}/comm", tid.0));
            name.is_ok_and(|name| name.starts_with("CPU "))
        };
        let vcpus = process.list_threads().unwrap().into_iter().filter(is_vcpu).collect();
        let descriptor = template_descriptor(pid);
        let number = descriptor.file_name().and_then(|name| name.to_str()?.parse().ok());
        Self { template: number.unwrap(), ram: ram_address(pid), process, vcpus }
    }

    fn syscall(&self, number: i64, arguments: [u64; 6]) -> u64 {
        let mut tracee = Tracee::seize(&self.process, &self.vcpus).unwrap();
        tracee.syscall(number, arguments).unwrap()
    }

    /// Maps pages of the template privately, without a userfaultfd: at this address, or anywhere.
    pub fn map_template(&self, at: Option<u64>, part: std::ops::Range<usize>) -> u64 {
        let fixed = at.map_or(0, |_| libc::MAP_FIXED);
        let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        let (flags, len) = ((libc::MAP_PRIVATE | fixed) as u64, part.len() as u64);
        let arguments = [at.unwrap_or(0), len, protection, flags, self.template, part.start as u64];
        self.syscall(libc::SYS_mmap, arguments)
    }

    /// Moves pages of its RAM to another address: they leave their userfaultfd.
    pub fn move_ram(&self, part: std::ops::Range<usize>, to: u64) {
        let (from, len) = (self.ram + part.start as u64, part.len() as u64);
        let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
        self.syscall(libc::SYS_mremap, [from, len, len, flags, to, 0]);
    }

    pub fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        process_memory::read_memory(&self.process, HostVirt(at), &mut bytes).unwrap();
        bytes
    }
}

/// It touches pages that are not filled yet, where no fault is handled.
#[test]
fn no_clone_can_spoil_pages_that_are_not_filled_yet() {
    let mut origin = Origin::save();
    let filling = origin.session.path("filling");
    origin.session.arm(Some(&format!("template.fill@2=WAIT:{}", text(&filling))));
    origin.session.json(&["restore", "web.firn", "--count", "3", "--mode", "lazy"]);
    origin.session.arm(None);
    assert!(filling.exists(), "the fill does not wait");
    let hostile = HostileQemu::new(origin.pid(1));
    let again = hostile.map_template(None, QUIET);
    let found = hostile.read(again, QUIET.len());
    let is_spoiled = |&at: &usize| {
        found[at..at + PAGE] == [0; PAGE] && origin.memory[at..at + PAGE] != [0; PAGE]
    };
    let spoiled = (0..QUIET.len()).step_by(PAGE).filter(is_spoiled).count();
    eprintln!("{spoiled} pages that are not filled were touched");
    assert!(spoiled > 2000, "there is nothing to spoil");
    let (first, second) = (QUIET.start..QUIET.start + (1 << 20), QUIET.end - (1 << 20)..QUIET.end);
    let replaced = hostile.map_template(Some(hostile.ram + first.start as u64), first.clone());
    process_memory::write_memory(&hostile.process, HostVirt(replaced), &vec![1; first.len()])
        .unwrap();
    hostile.move_ram(second.clone(), again);
    hostile.read(again, second.len());
    std::fs::remove_file(&filling).unwrap();
    for number in [2, 3] {
        origin.wait(number);
        origin.is_exact(number);
        let own = template_use(origin.pid(number), "Anonymous:");
        assert!(own < 4 << 20, "clone {number} has {own} bytes of its own");
    }
}

/// While the template is being filled, one process after the other is killed; the other VMs continue exactly.
#[test]
fn processes_of_a_family_are_killed_while_it_fills() {
    let mut origin = Origin::save();
    let filling = origin.session.path("filling");
    origin.session.arm(Some(&format!("template.fill@4=WAIT:{}", text(&filling))));
    let start = ["restore", "web.firn", "--count", "4", "--mode", "lazy"];
    origin.session.json(&start);
    origin.session.arm(None);
    assert!(filling.exists(), "the fill does not wait");
    let states: Vec<_> = origin.session.ls().into_iter().map(|(_, state)| state).collect();
    eprintln!("while the fill waits: {states:?}");
    let supervisor = origin.session.status("web-1")["supervisor_pid"].as_i64().unwrap();
    kill(supervisor);
    kill(origin.pid(2));
    eventually("a successor", PATIENCE, || origin.session.status("web-1")["recoveries"] == 1);
    let [holder] = holders(&origin.session)[..] else { panic!("there is one holder") };
    kill(holder);
    for number in [1, 3, 4] {
        origin.wait(number);
        origin.is_exact(number);
        assert_eq!(userfaultfds(origin.pid(number)), 0, "clone {number}");
    }
    assert_eq!(origin.session.status("web-3")["recoveries"], 0);
    let _ = std::fs::remove_file(&filling);
}

/// All processes that pass the point are killed there.
#[test]
fn killed_at_each_step_of_a_clone() {
    let mut origin = Origin::save();
    let points = [
        "template.sealed",
        "template.listening",
        "template.fill@3",
        "restore.journaled",
        "restore.mapped",
        "restore.attached",
        "restore.registered",
        "restore.punched",
        "restore.device-state",
        "restore.resumed",
        "restore.fault@2",
        "restore.filled",
        "restore.unregistered",
        "restore.finished",
    ];
    for point in points {
        origin.session.arm(Some(point));
        let start = ["restore", "web.firn", "--count", "2", "--mode", "lazy"];
        let started = Answer::of(origin.session.command(&start).output().unwrap());
        origin.session.arm(None);
        eprintln!("{point}: exit {}, {:?}", started.code, started.err.lines().next());
        if started.code == 0 {
            (1..=2).for_each(|number| origin.wait(number));
            (1..=2).for_each(|number| origin.is_exact(number));
        } else {
            assert_eq!(started.code, 8, "{point}: {}", started.err);
            origin.those_that_run_are_named(&started, point);
        }
        origin.session.end_vms();
    }
}

#[test]
fn clones_are_saved_and_cloned_again() {
    let origin = Origin::save();
    origin.start_clones(2);
    write_ram(origin.pid(1), QUIET.start + 3 * PAGE, b"of clone one");
    for strategy in ["cow", "pre-copy", "stop"] {
        let (image, reference) = (format!("{strategy}.firn"), format!("{strategy}.ram"));
        let save = ["checkpoint", "web-1", "-o", &image, "--strategy", strategy];
        origin.session.firn(&[&save[..], &["--reference", &reference]].concat()).succeeds();
        origin.session.firn(&["image", "compare", &image, &reference]).succeeds();
        origin.session.firn(&["image", "verify", &image]).succeeds();
        let saved = std::fs::read(origin.session.path(&reference)).unwrap();
        let mut expected = origin.memory.clone();
        expected[3 * PAGE..3 * PAGE + 12].copy_from_slice(b"of clone one");
        assert!(saved[QUIET] == expected[..], "{strategy}");
    }
    let trace = ["checkpoint", "web-1", "-o", "trace.firn", "--strategy", "trace"];
    origin.session.firn(&trace).fails(5, "private memory of the hypervisor");
    origin.session.firn(&["checkpoint", "web-1", "-o", "plain.firn"]).succeeds();
    origin
        .session
        .firn(&["restore", "plain.firn", "--count", "2", "--name", "again{}", "--wait"])
        .succeeds();
    for name in ["again1", "again2"] {
        let pid = origin.session.status(name)["pid"].as_i64().unwrap();
        assert_eq!(read_ram(pid, QUIET.start + 3 * PAGE, 12), b"of clone one");
        assert_eq!(
            read_ram(pid, QUIET.start + 9 * PAGE, PAGE),
            page_with((QUIET.start + 9 * PAGE) as u64)
        );
    }
    origin.is_exact(2);
}

/// The source is a running VM; it continues to run, and no clone sees what it writes later.
#[test]
fn a_running_vm_is_forked() {
    let session = Session::new();
    let mut guest = TinyGuest::run(&session, &[]);
    let source = session.status("web")["pid"].as_i64().unwrap();
    let at = QUIET.start;
    write_ram(source, at, &page_with(at as u64));
    let facts = session.json(&["fork", "web", "--count", "2", "--wait"]);
    assert!(facts["checkpoint"]["report"]["pause"]["downtime_ms"].is_number(), "{facts}");
    write_ram(source, at, b"later");
    guest.answers();
    let pid = |name: &str| session.status(name)["pid"].as_i64().unwrap();
    for name in ["web-1", "web-2"] {
        assert_eq!(read_ram(pid(name), at, PAGE), page_with(at as u64), "{name}");
    }
    write_ram(pid("web-1"), at, b"first");
    session
        .firn(&["fork", "web-1", "--count", "1", "--name", "deep", "-o", "deep.firn", "--wait"])
        .succeeds();
    assert_eq!(&read_ram(pid("deep"), at, 5), b"first");
    session.firn(&["fork", "web", "--count", "2", "-o", "no.firn"]).fails(4, "web-1, web-2");
    assert_eq!(session.files("no.firn"), Vec::<String>::new());
    session.firn(&["fork", "none", "--count", "2"]).fails(3, "no VM called none");
    guest.answers();
}

/// Guests with a kernel that write all the time, and check what they have written.
#[test]
fn busy_clones_lose_their_holder() {
    let mut vm = Vm::with_base(false);
    let filling = vm.session.path("filling");
    vm.session.arm(Some(&format!("template.fill@6=WAIT:{}", text(&filling))));
    vm.session.json(&["restore", "base.firn", "--count", "3"]);
    vm.session.arm(None);
    let [holder] = holders(&vm.session)[..] else { panic!("there is one holder") };
    kill(holder);
    let agent = |number: u32| vm.session.path(&format!("run/web-{number}/user-agent"));
    for number in 1..=3 {
        is_well(&agent(number));
        vm.session.firn(&["status", &format!("web-{number}"), "--watch"]).succeeds();
    }
    let save = ["checkpoint", "web-2", "-o", "busy.firn", "--reference", "busy.ram"];
    vm.session.firn(&save).succeeds();
    vm.session.firn(&["image", "compare", "busy.firn", "busy.ram"]).succeeds();
    (1..=3).for_each(|number| is_well(&agent(number)));
    vm.session.firn(&["restore", "busy.firn", "--name", "later", "--count", "1"]).succeeds();
    is_well(&vm.session.path("run/later/user-agent"));
}

/// The guest that answers at this socket continues to write.
#[track_caller]
pub fn is_well(agent: &Path) {
    let mut control = GuestControl::connect(agent, PATIENCE).unwrap();
    let before = writes(&mut control);
    eventually("writers go on", PATIENCE, || writes(&mut control) > before);
}

#[test]
fn mistakes_with_clones() {
    let session = Session::new();
    let ports = ["-netdev", "user,id=n,hostfwd=tcp:127.0.0.1:0-:22", "-device", "e1000,netdev=n"];
    let _guest = TinyGuest::run(&session, &ports);
    session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
    let start = |words: &[&str]| session.firn(&[&["restore", "web.firn"], words].concat());
    start(&["--count", "0"]).fails(2, "give a number from 1 to 1000");
    start(&["--count", "1001"]).fails(2, "give a number from 1 to 1000");
    start(&["--count", "2", "--name", "one"]).fails(2, "can't all have the name");
    start(&["--name", "web-{}"]).fails(2, "is a pattern");
    start(&["--count", "2", "--libvirt"]).fails(2, "cannot be used with");
    start(&["--count", "2", "--watch"]).fails(2, "cannot be used with");
    start(&["--count", "2", "--disks", "in-place"]).fails(2, "the same disks");
    let port = "n=user,hostfwd=tcp:127.0.0.1:4701-:22";
    let answer =
        start(&["--count", "2", "--netdev", port]).fails(4, "both listen on TCP port 4701");
    assert!(answer.err.contains("{}"), "{}", answer.err);
    let balloon = start(&["--count", "2", "--qemu-arg=-device", "--qemu-arg=virtio-balloon-pci"]);
    balloon.fails(5, "a VM with a balloon");
    assert_eq!(session.ls(), [("web".to_owned(), "running".to_owned())]);
    // The name of one clone is taken: none is started.
    start(&["--count", "1", "--name", "other-2"]).succeeds();
    start(&["--count", "3", "--name", "other-{}"]).fails(4, "these names are taken: other-2");
    assert_eq!(session.ls().len(), 2);
    // The second one can't start: the error names it, and the one that runs.
    let gone = session.path("link-2");
    let set = ["--set", "drive.boot.file=link-{}"];
    std::os::unix::fs::symlink(session.path("boot.raw"), session.path("link-1")).unwrap();
    let failed = start(&[&["--count", "2", "--name", "part-{}"], &set[..]].concat());
    assert_ne!(failed.code, 0, "{}", failed.out);
    assert!(failed.err.contains("the clone part-2 did not start"), "{}", failed.err);
    assert!(!session.path("run/part-2").exists() && !gone.exists(), "{}", failed.err);
}
