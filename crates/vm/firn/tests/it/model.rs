//! Random sequences of commands on two QEMUs of the user's with disks, and on one VM without, against a model of what must be true.
//!
//! ```text
//!   a QEMU of the user's        write to its disks, attach, detach, power cycle by its own command line
//!   a VM of Firn's              checkpoint by any strategy, whole or incremental; stop
//!   an image                    restore beside the running VMs under a name of its own; remove
//!   a VM without disks          protect; release; lose it, and fail over; fail over while it runs: refused
//! ```
//!
//! After each command: the VMs that `firn ls` shows are those of the model, no process has ended that was not named, and
//! each disk has what was last written to it, or what it had when the image was made that the VM was restored from. In
//! the end every image restores. A sequence follows from its number: `FIRN_SEED=N` begins with that one, `FIRN_RUNS=N`
//! runs as many.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use crate::disk_layers::qemu_io_by;
use crate::own_qemu::OwnQemu;
use crate::parts::part_of;
use crate::session::{Session, eventually, kill, text};
use crate::vm::qemu_img;

const STEPS: usize = 16;
const RUNS: u64 = 3;
/// VMs of Firn's at once, so that a sequence does not take more memory than it needs.
const VMS_MAX: usize = 5;
const PATIENCE: Duration = Duration::from_secs(120);

const STRATEGIES: [&str; 4] = ["trace", "cow", "pre-copy", "stop"];

/// A generator of numbers (xorshift64*); enough to choose commands.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % end
    }
}

/// One of the user's QEMUs, with a directory of its own for its disks, its monitors and its log.
struct Original {
    place: Session,
    qemu: OwnQemu,
    /// The name of the VM while Firn is attached to it.
    attached: Option<String>,
    /// What was last written to its disks.
    content: u8,
}

impl Original {
    fn start() -> Self {
        let place = Session::new();
        for (name, format) in [("disk0.qcow2", "qcow2"), ("disk1.raw", "raw")] {
            qemu_img(&["create", "-q", "-f", format, text(&place.path(name)), "16M"]);
        }
        let drive = |name: &str, format: &str| {
            format!("file={},format={format},if=virtio", text(&place.path(name)))
        };
        let (first, second) = (drive("disk0.qcow2", "qcow2"), drive("disk1.raw", "raw"));
        // The user's own second monitor, through which the test reads and writes.
        let monitor = format!("unix:{},server=on,wait=off", text(&place.path("user.qmp")));
        let qemu = OwnQemu::start(
            &place,
            &[
                "-pidfile",
                "own.pid",
                "-serial",
                "file:serial",
                "-drive",
                &first,
                "-drive",
                &second,
                "-qmp",
                &monitor,
            ],
        );
        let original = Self { place, qemu, attached: None, content: 0 };
        original.wait_for_monitor();
        original
    }

    fn monitor(&self) -> PathBuf {
        self.place.path("user.qmp")
    }

    fn power_cycle(&mut self) {
        self.qemu = OwnQemu::again(&self.place, &self.qemu);
        self.wait_for_monitor();
    }

    fn wait_for_monitor(&self) {
        let monitor = self.monitor();
        let answers = || std::os::unix::net::UnixStream::connect(&monitor).is_ok();
        eventually("the user's monitor", PATIENCE, answers);
    }
}

/// What an image must have.
struct Saved {
    parent: Option<String>,
    /// What was on the disks; `None` for a VM without.
    content: Option<u8>,
    /// Whether a VM was restored from it: that one's disks stand on the image's, and stay when it is stopped.
    is_restored: bool,
}

/// A VM that Firn manages.
struct Managed {
    pid: i64,
    content: Option<u8>,
    /// Whether its RAM is private memory of QEMU, of which only writes can be traced.
    is_private: bool,
    /// Its newest image, the parent of the next incremental one.
    newest: Option<String>,
    /// The standby that receives its epochs.
    standby: Option<String>,
}

struct Sequence {
    numbers: Numbers,
    session: Session,
    originals: Vec<Original>,
    vms: BTreeMap<String, Managed>,
    images: BTreeMap<String, Saved>,
    names: usize,
    done: Vec<String>,
}

fn write(monitor: &std::path::Path, pattern: u8) {
    for drive in 0..2 {
        assert_eq!(qemu_io_by(monitor, drive, &format!("write -P {pattern} 64k 256k")), "");
    }
}

#[track_caller]
fn has(monitor: &std::path::Path, pattern: u8, what: &str) {
    for drive in 0..2 {
        let wrong = qemu_io_by(monitor, drive, &format!("read -P {pattern} 64k 256k"));
        assert_eq!(wrong, "", "{what}, drive {drive}: not {pattern}");
    }
}

impl Sequence {
    fn new(seed: u64) -> Self {
        let originals = (0..2).map(|_| Original::start()).collect();
        let numbers = Numbers(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let (vms, images, done) = Default::default();
        Self { numbers, session: Session::new(), originals, vms, images, names: 0, done }
    }

    fn name(&mut self, of: &str) -> String {
        self.names += 1;
        format!("{of}{}", self.names)
    }

    fn pick(&mut self, names: Vec<String>) -> Option<String> {
        (!names.is_empty()).then(|| names[self.numbers.below(names.len())].clone())
    }

    fn any_vm(&mut self) -> Option<String> {
        self.pick(self.vms.keys().cloned().collect())
    }

    fn any_image(&mut self) -> Option<String> {
        self.pick(self.images.keys().cloned().collect())
    }

    fn step(&mut self) {
        let which = self.numbers.below(self.originals.len());
        match self.numbers.below(11) {
            0 | 1 => self.attach(which),
            2 | 3 => self.checkpoint(),
            4 => self.restore(),
            5 => self.stop(),
            6 => self.detach(which),
            7 => self.power_cycle(which),
            8 => self.remove_image(),
            9 => self.fail_over(),
            _ => self.write(),
        }
        self.check();
    }

    fn attach(&mut self, which: usize) {
        let name = self.name("vm");
        self.done.push(format!("attach {which} as {name}"));
        let original = &mut self.originals[which];
        let answer = original.qemu.try_attach(&self.session, &name);
        if original.attached.is_some() {
            answer.fails(4, "already");
            return;
        }
        answer.succeeds();
        original.attached = Some(name.clone());
        let pid = original.qemu.pid().parse().unwrap();
        let content = Some(original.content);
        let vm = Managed { pid, content, is_private: true, newest: None, standby: None };
        self.vms.insert(name, vm);
    }

    fn checkpoint(&mut self) {
        let Some(name) = self.any_vm() else { return };
        let image = format!("{}.firn", self.name("image"));
        let strategy = STRATEGIES[self.numbers.below(STRATEGIES.len())];
        let is_incremental = self.numbers.below(2) == 0;
        let vm = &self.vms[&name];
        let there = |image: &String| self.images.contains_key(image);
        let parent = vm.newest.clone().filter(|image| is_incremental && there(image));
        self.done.push(format!("checkpoint {name} to {image} by {strategy}, parent {parent:?}"));
        let mut words = vec!["checkpoint", &name, "-o", &image, "--strategy", strategy];
        words.extend(parent.iter().flat_map(|parent| ["--parent", parent.as_str()]));
        let answer = self.session.firn(&words);
        if vm.standby.is_some() {
            answer.fails(4, "being protected");
            return;
        }
        if vm.is_private && strategy == "trace" {
            answer.fails(5, "private memory");
            assert_eq!(self.session.files(&image), [""; 0]);
            return;
        }
        answer.succeeds();
        self.images
            .insert(image.clone(), Saved { parent, content: vm.content, is_restored: false });
        self.vms.get_mut(&name).unwrap().newest = Some(image);
    }

    fn restore(&mut self) {
        if self.vms.len() >= VMS_MAX {
            return;
        }
        let Some(image) = self.any_image() else { return };
        self.restore_as(&image);
    }

    fn restore_as(&mut self, image: &str) -> String {
        let name = self.name("copy");
        self.done.push(format!("restore {image} as {name}"));
        let restored = self.session.json(&["restore", image, "--name", &name, "--wait"]);
        let saved = self.images.get_mut(image).unwrap();
        saved.is_restored = true;
        let (pid, content) = (restored["pid"].as_i64().unwrap(), saved.content);
        let vm = Managed { pid, content, is_private: false, newest: None, standby: None };
        self.vms.insert(name.clone(), vm);
        name
    }

    fn stop(&mut self) {
        let Some(name) = self.any_vm() else { return };
        self.done.push(format!("stop {name}"));
        self.session.firn(&["stop", &name]).succeeds();
        if let Some(standby) = self.vms.remove(&name).unwrap().standby {
            // It learns that its primary was stopped, and does not run what has been stopped.
            let session = &self.session;
            let knows = || session.status(&standby)["standby"]["ended"].is_string();
            eventually("the standby knows", PATIENCE, || !listed(session, &standby) || knows());
            if listed(session, &standby) {
                session.firn(&["stop", &standby]).succeeds();
            }
        }
        let of_it = |original: &&mut Original| original.attached.as_ref() == Some(&name);
        if let Some(original) = self.originals.iter_mut().find(of_it) {
            assert_eq!(original.qemu.ended().code(), Some(0), "it was killed");
            original.power_cycle();
            original.attached = None;
        }
    }

    fn detach(&mut self, which: usize) {
        let Some(name) = self.originals[which].attached.take() else { return };
        self.done.push(format!("detach {name}"));
        self.session.firn(&["detach", &name]).succeeds();
        self.vms.remove(&name);
    }

    /// The user ends a QEMU, and starts the same command line. What Firn had of the first has ended.
    fn power_cycle(&mut self, which: usize) {
        self.done.push(format!("power cycle {which}"));
        let original = &mut self.originals[which];
        original.qemu.kill();
        original.power_cycle();
        let Some(name) = original.attached.take() else { return };
        let session = &self.session;
        eventually("its end", PATIENCE, || session.status(&name)["state"] == "ended");
        session.firn(&["rm", &name]).succeeds();
        self.vms.remove(&name);
    }

    /// An image goes, unless another builds on it or a VM's disks stand on its disks: then nothing of it goes.
    fn remove_image(&mut self) {
        let Some(image) = self.any_image() else { return };
        self.done.push(format!("remove {image}"));
        let answer = self.session.firn(&["image", "rm", &image]);
        let is_parent = self.images.values().any(|saved| saved.parent.as_ref() == Some(&image));
        let saved = &self.images[&image];
        let is_below_a_vm = saved.is_restored && saved.content.is_some();
        if !is_parent && !is_below_a_vm {
            answer.succeeds();
            assert_eq!(self.session.files(&image), [""; 0]);
            self.images.remove(&image);
            return;
        }
        answer.fails(5, &image);
        self.session.firn(&["image", "verify", &image]).succeeds();
    }

    /// Protects the VM without disks (started where there is none), or makes it fail over.
    fn fail_over(&mut self) {
        let without_disks = |vm: &&String| self.vms[*vm].content.is_none();
        let Some(name) = self.vms.keys().find(without_disks).cloned() else {
            return self.run_without_disks();
        };
        match self.vms[&name].standby.clone() {
            None => self.protect(&name),
            Some(standby) => match self.numbers.below(3) {
                0 => self.release(&name, &standby),
                1 => self.refuse_failover(&name, &standby),
                _ => self.lose(&name, &standby),
            },
        }
    }

    fn run_without_disks(&mut self) {
        let name = self.name("bare");
        self.done.push(format!("run {name}"));
        let qemu = "qemu-system-x86_64 -M pc -m 64 -accel tcg -nodefaults -display none";
        let words = ["run", &name, "--"].into_iter().chain(qemu.split(' ')).collect::<Vec<_>>();
        let pid = self.session.json(&words)["pid"].as_i64().unwrap();
        self.vms.insert(
            name,
            Managed { pid, content: None, is_private: false, newest: None, standby: None },
        );
    }

    fn protect(&mut self, name: &str) {
        let standby = self.name("standby");
        self.done.push(format!("protect {name} by {standby}"));
        let socket = self.session.path(&format!("{standby}.sock"));
        let address = format!("unix:{}", text(&socket));
        let listen = ["standby", &standby, "--listen", &address];
        let mut listening = self.session.command(&listen).spawn().unwrap();
        eventually("the standby listens", PATIENCE, || socket.exists());
        self.session.firn(&["protect", name, "--to", &address]).succeeds();
        assert!(listening.wait().unwrap().success());
        self.vms.get_mut(name).unwrap().standby = Some(standby);
    }

    /// A VM that runs is not failed over, and stays protected.
    fn refuse_failover(&mut self, name: &str, standby: &str) {
        self.done.push(format!("fail over to {standby} while {name} runs"));
        let session = &self.session;
        let committed = || session.status(standby)["standby"]["committed"].as_u64().unwrap();
        eventually("epochs", PATIENCE, || committed() >= 3);
        session.firn(&["failover", standby]).fails(5, "its primary runs");
        assert_eq!(session.status(name)["state"], "protected");
    }

    /// The protection ends, and the VM runs on without a standby.
    fn release(&mut self, name: &str, standby: &str) {
        self.done.push(format!("release {name}"));
        self.session.firn(&["release", name]).succeeds();
        self.vms.get_mut(name).unwrap().standby = None;
        self.session.firn(&["stop", standby]).succeeds();
    }

    fn lose(&mut self, name: &str, standby: &str) {
        self.done.push(format!("kill {name}, fail over to {standby}"));
        kill(self.vms[name].pid);
        let session = &self.session;
        let knows = || session.status(standby)["standby"]["ended"].is_string();
        eventually("the end", PATIENCE, knows);
        session.firn(&["failover", standby]).succeeds();
        session.firn(&["rm", name]).succeeds();
        self.vms.remove(name);
        let pid = self.session.status(standby)["pid"].as_i64().unwrap();
        let vm = Managed { pid, content: None, is_private: false, newest: None, standby: None };
        self.vms.insert(standby.to_owned(), vm);
    }

    /// Another pattern to the disks of one of the VMs, or of one of the user's QEMUs.
    fn write(&mut self) {
        let pattern = 1 + self.numbers.below(250) as u8;
        let which = self.numbers.below(self.originals.len() + 1);
        if let Some(original) = self.originals.get_mut(which) {
            self.done.push(format!("write {pattern} to {which}"));
            write(&original.monitor(), pattern);
            original.content = pattern;
            if let Some(name) = &original.attached {
                self.vms.get_mut(name).unwrap().content = Some(pattern);
            }
            return;
        }
        let copies = self.vms.keys().filter(|name| name.starts_with("copy")).cloned().collect();
        let Some(name) = self.pick(copies) else { return };
        let vm = self.vms.get_mut(&name).unwrap();
        if vm.content.is_some() {
            self.done.push(format!("write {pattern} to {name}"));
            vm.content = Some(pattern);
            write(&monitor_of(&self.session, &name), pattern);
        }
    }

    /// What must be true after each command.
    fn check(&mut self) {
        let mut listed: Vec<String> = self.session.ls().into_iter().map(|(name, _)| name).collect();
        listed.sort();
        let standbys = self.vms.values().filter_map(|vm| vm.standby.clone());
        let mut expected: Vec<String> = self.vms.keys().cloned().chain(standbys).collect();
        expected.sort();
        assert_eq!(listed, expected);
        for (name, vm) in &self.vms {
            let status = self.session.status(name);
            let state = if vm.standby.is_some() { "protected" } else { "running" };
            assert_eq!(status["state"], state, "{status}");
            assert_eq!(status["pid"].as_i64(), Some(vm.pid), "{status}");
            if let Some(content) = vm.content.filter(|_| name.starts_with("copy")) {
                has(&monitor_of(&self.session, name), content, name);
            }
        }
        for (which, original) in self.originals.iter_mut().enumerate() {
            assert!(original.qemu.is_running(), "one of the user's QEMUs has ended");
            assert_eq!(original.qemu.listener(), original.qemu.pid(), "its socket is another's");
            has(&original.monitor(), original.content, &format!("the user's QEMU {which}"));
        }
    }

    /// Every image that is there restores, with the disks of then.
    fn restore_all(&mut self) {
        for image in self.images.keys().cloned().collect::<Vec<_>>() {
            let name = self.restore_as(&image);
            self.check();
            self.session.firn(&["stop", &name]).succeeds();
            self.vms.remove(&name);
        }
    }
}

fn listed(session: &Session, name: &str) -> bool {
    session.ls().iter().any(|(listed, _)| listed == name)
}

/// The monitor of a VM that Firn has started.
fn monitor_of(session: &Session, name: &str) -> PathBuf {
    session.status(name)["qmp"].as_str().unwrap().into()
}

/// Prints the commands of a sequence that failed.
impl Drop for Sequence {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("after: {}", self.done.join("; "));
        }
    }
}

#[test]
fn no_vm_but_the_named_one_ends() {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let runs = number("FIRN_RUNS").unwrap_or(RUNS);
    let first = number("FIRN_SEED").unwrap_or(1);
    let runs =
        if number("FIRN_SEED").is_some() && number("FIRN_RUNS").is_none() { 1 } else { runs };
    // A number of runs that was chosen is run whole.
    let seeds: Vec<u64> = match number("FIRN_RUNS") {
        Some(_) => (first..first + runs).collect(),
        None => part_of(first..first + runs).collect(),
    };
    for seed in seeds {
        let mut sequence = Sequence::new(seed);
        (0..STEPS).for_each(|_| sequence.step());
        sequence.restore_all();
        eprintln!("FIRN_SEED={seed}: {}", sequence.done.join("; "));
    }
}
