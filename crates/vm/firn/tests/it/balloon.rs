//! VMs with a memory balloon: an image is memory at the cut, whatever the guest gives back during the save.
//!
//! ```text
//!   garbage   the guest writes to memory and frees it: it still has contents, and the balloon takes it first
//!   inflate   the guest gives it back to QEMU, which removes it: zeros from then on
//! ```

use std::path::PathBuf;
use std::process::Child;
use std::time::Duration;

use firn_vmm::QemuVm;
use serde_json::{Value, json};

use crate::hypervisor_dies::{Stop, answer, start};
use crate::parts::part_of;
use crate::session::{Answer, eventually, text};
use crate::vm::{Vm, userfaultfds};

const PATIENCE: Duration = Duration::from_secs(120);

const MIB: u64 = 1 << 20;
/// RAM of the guest.
pub const RAM: u64 = 192 * MIB;
/// Free memory that the guest does not write to before it gives memory back.
const UNTOUCHED: u64 = 16 * MIB;
/// What an inflated balloon leaves.
pub const LITTLE: u64 = 152 * MIB;

/// The guest's writers: they leave it enough memory to give back.
const WRITERS: [&str; 4] = ["--mib", "24", "--rate", "2000"];

/// Debian's kernels clear each page that they allocate, also for the balloon: then a fault handler
/// copies the page before it is given back, and nothing can be lost.
const KERNEL_WORDS: &str = "init_on_alloc=0";

/// A VM with a balloon.
pub struct BalloonVm {
    pub vm: Vm,
    /// A monitor for the test.
    pub monitor: PathBuf,
    /// QEMU, if the test has started it.
    qemu: Option<Child>,
}

impl BalloonVm {
    /// Boots a guest with shared memory, whose saves stop at these points.
    fn shared(points: &[&str], device: &str) -> (Self, Stop) {
        let mut vm = Vm::new();
        let stop = Stop::arm_all(&mut vm, points);
        (Self::boot_shared(vm, device), stop)
    }

    /// The same in a session that may have been prepared.
    pub fn boot_shared(vm: Vm, device: &str) -> Self {
        let (vm, monitor) = Self::prepare(vm, device);
        let mut vm = vm.booted(&WRITERS);
        vm.session.arm(None);
        Self { vm, monitor, qemu: None }
    }

    /// The same with private memory, as QEMU has it by itself.
    fn private(points: &[&str], device: &str) -> (Self, Stop) {
        let mut vm = Vm::new();
        let stop = Stop::arm_all(&mut vm, points);
        (Self::boot_private(vm, device), stop)
    }

    /// The same in a session that may have been prepared.
    pub fn boot_private(vm: Vm, device: &str) -> Self {
        let (vm, monitor) = Self::prepare(vm, device);
        let qmp = vm.session.path("qmp");
        let mut args = vm.qemu_args();
        args.extend(["-qmp".to_owned(), format!("unix:{},server=on,wait=off", text(&qmp))]);
        let log = std::fs::File::create(vm.session.path("qemu.log")).unwrap();
        let qemu =
            std::process::Command::new(&args[0]).args(&args[1..]).stderr(log).spawn().unwrap();
        vm.control();
        let pid = qemu.id().to_string();
        vm.session.firn(&["attach", "web", "--pid", &pid, "--qmp", text(&qmp)]).succeeds();
        let mut vm = vm.writing(&WRITERS);
        vm.session.arm(None);
        Self { vm, monitor, qemu: Some(qemu) }
    }

    fn prepare(vm: Vm, device: &str) -> (Vm, PathBuf) {
        let monitor = vm.session.path("test-qmp");
        let qmp = format!("unix:{},server=on,wait=off", text(&monitor));
        let vm = vm.with_kernel_words(KERNEL_WORDS);
        (vm.with(&["-device", device, "-qmp", &qmp]), monitor)
    }

    /// Changes the balloon until the guest has this much memory.
    fn balloon(&self, bytes: u64) {
        let mut qemu = QemuVm::connect(&self.monitor).unwrap();
        qemu.qmp().execute("balloon", json!({ "value": bytes })).unwrap();
        let mut actual = 0;
        eventually("the balloon", PATIENCE, || {
            actual = qemu.balloon().unwrap().unwrap().actual_bytes;
            actual == bytes
        });
    }

    /// Deflates the balloon, and has the guest write to all free memory but [`UNTOUCHED`]: of more
    /// memory that it gives back, some has contents.
    fn make_garbage(&self) {
        self.balloon(RAM);
        self.vm.control().run_program(&["sh", "-c", &garbage_script()]).unwrap();
    }

    /// Saves, with a reference; calls `meanwhile` each time a try of the save stops at its point,
    /// with the number of the time.
    fn save(&self, stop: &Stop, image: &str, more: &[&str], meanwhile: &dyn Fn(u32)) -> Answer {
        let reference = format!("{image}.ram");
        let save = ["--json", "checkpoint", "web", "-o", image, "--reference", &reference];
        let mut saving = start(&self.vm, &[&save, more].concat());
        let mut number = 0;
        while stop.is_reached(&mut saving) {
            meanwhile(number);
            number += 1;
            stop.go_on();
        }
        answer(saving)
    }

    /// The same, for a save that must succeed and be exact. Returns its facts.
    #[track_caller]
    fn save_exact(
        &self,
        stop: &Stop,
        image: &str,
        more: &[&str],
        meanwhile: &dyn Fn(u32),
    ) -> Value {
        let saved = self.save(stop, image, more, meanwhile).succeeds();
        self.is_exact(image);
        let facts: Value = serde_json::from_str(&saved.out).unwrap();
        eprintln!("{image}, {more:?}: {} tries, {}", facts["tries"], facts["report"]);
        facts
    }

    #[track_caller]
    fn is_exact(&self, image: &str) {
        let reference = format!("{image}.ram");
        self.vm.session.firn(&["image", "compare", image, &reference]).succeeds();
    }

    /// Ends the VM and restores it.
    fn restore(&mut self, image: &str) {
        self.vm.session.firn(&["stop", "web", "--force"]).succeeds();
        if let Some(mut qemu) = self.qemu.take() {
            let _ = qemu.kill();
            qemu.wait().unwrap();
        }
        self.vm.session.firn(&["restore", image, "--name", "web", "--wait"]).succeeds();
        self.vm.is_well();
    }

    fn leaves_nothing(&self, image: &str) {
        assert_eq!(self.vm.session.files(image), [format!("{image}.ram")]);
        assert_eq!(self.vm.session.files(&format!(".{image}")), Vec::<String>::new());
        assert_eq!(userfaultfds(self.vm.pid()), 0);
    }
}

/// What is copied again and again: `yes` alone takes a guest without KVM ten times as long.
const GARBAGE_BLOCK: u64 = 2 * MIB;

/// Writes to all free memory but [`UNTOUCHED`], and frees it. A tmpfs has at most half of the guest's memory.
pub fn garbage_script() -> String {
    format!(
        "yes garbage | head -c {GARBAGE_BLOCK} > /tmp/block; \
         free=$(awk '/MemFree/ {{ print $2 * 1024 }}' /proc/meminfo); \
         blocks=$(((free - {UNTOUCHED}) / 2 / {GARBAGE_BLOCK})); \
         for file in /tmp/garbage /dev/shm/garbage; do \
         for _ in $(seq $blocks); do cat /tmp/block; done > $file; done; \
         rm /tmp/garbage /dev/shm/garbage /tmp/block"
    )
}

impl Drop for BalloonVm {
    fn drop(&mut self) {
        if let Some(mut qemu) = self.qemu.take() {
            let _ = qemu.kill();
            let _ = qemu.wait();
        }
    }
}

pub const BALLOON: &str = "virtio-balloon-pci";
pub const REPORTING: &str = "virtio-balloon-pci,free-page-reporting=on";

/// A point stops once, so each of these stops another save: its number is that of the try.
const AFTER_THE_CUT: &[&str] = &["save.tracing"];
const AFTER_TWO_CUTS: &[&str] = &["save.tracing", "save.resumed@2"];
const AFTER_THE_FIRST_AND_THIRD_CUT: &[&str] = &["save.tracing", "save.resumed@3"];
const IN_A_ROUND: &[&str] = &["pre-copy.round", "pre-copy.tracking@3"];

fn nothing(_: u32) {}

#[test]
fn a_balloon_that_stays_as_it_is_costs_no_try() {
    let (mut guest, stop) = BalloonVm::shared(AFTER_THE_CUT, BALLOON);
    guest.make_garbage();
    guest.balloon(LITTLE);
    // An increment needs the image that this strategy makes.
    let plain: Vec<&str> = part_of(["trace", "cow", "stop"]).chain(["pre-copy"]).collect();
    for strategy in &plain {
        let image = format!("{strategy}.firn");
        let facts = guest.save_exact(&stop, &image, &["--strategy", strategy], &nothing);
        assert_eq!(facts["tries"], 1, "{strategy}");
        guest.vm.is_well();
    }
    let facts = guest.save_exact(&stop, "next.firn", &["--parent", "pre-copy.firn"], &nothing);
    let of = |key: &str| facts["report"][key].as_f64().unwrap();
    assert!(of("blocks_inherited") > 0.5 * of("blocks_total"), "{facts}");
    assert_eq!(facts["tries"], 1);
    guest.vm.is_well();
    for image in [&format!("{}.firn", plain[0]), "next.firn"] {
        guest.restore(image);
    }
}

#[test]
fn shared_memory_that_is_given_back_after_the_cut_costs_a_try() {
    let (guest, stop) = BalloonVm::shared(AFTER_THE_FIRST_AND_THIRD_CUT, BALLOON);
    for strategy in part_of(["trace", "cow"]) {
        guest.make_garbage();
        let inflate = |_| guest.balloon(LITTLE);
        let image = format!("{strategy}.firn");
        let facts = guest.save_exact(&stop, &image, &["--strategy", strategy], &inflate);
        assert_eq!(facts["tries"], 2, "{strategy}: memory was given back in the first");
        guest.vm.is_well();
    }
}

#[test]
fn memory_that_is_given_back_in_two_tries_costs_both() {
    let (guest, stop) = BalloonVm::shared(AFTER_TWO_CUTS, BALLOON);
    guest.make_garbage();
    let inflate = |number| guest.balloon(RAM - 24 * MIB * u64::from(number + 1));
    let facts = guest.save_exact(&stop, "web.firn", &[], &inflate);
    assert_eq!(facts["tries"], 3, "memory was given back in the first and in the second");
    guest.vm.is_well();
}

#[test]
fn shared_memory_that_is_given_back_before_the_cut_is_zeros() {
    let (mut guest, stop) = BalloonVm::shared(IN_A_ROUND, BALLOON);
    guest.make_garbage();
    let inflate = |number| {
        if number == 0 {
            guest.balloon(LITTLE)
        }
    };
    let facts = guest.save_exact(&stop, "d0.firn", &["--strategy", "pre-copy"], &inflate);
    assert_eq!(facts["tries"], 1);
    assert_eq!(userfaultfds(guest.vm.pid()), 0, "a guest must not wait for Firn between saves");
    guest.vm.is_well();
    // Given back between two checkpoints, partly touched again, and given back in the second one.
    guest.make_garbage();
    guest.save_exact(&stop, "d1.firn", &["--parent", "d0.firn"], &nothing);
    guest.balloon(LITTLE);
    guest.balloon(RAM);
    let again = |number| {
        if number == 0 {
            guest.balloon(LITTLE);
            guest.balloon(LITTLE + 16 * MIB);
        }
    };
    let facts = guest.save_exact(&stop, "d2.firn", &["--parent", "d1.firn"], &again);
    assert_eq!(facts["tries"], 1);
    guest.restore("d2.firn");
}

#[test]
fn private_memory_that_is_given_back() {
    let (mut guest, stop) = BalloonVm::private(AFTER_THE_CUT, BALLOON);
    guest.make_garbage();
    let inflate = |number| {
        if number == 0 {
            guest.balloon(LITTLE)
        }
    };
    guest.save_exact(&stop, "cow.firn", &["--strategy", "cow"], &inflate);
    assert_eq!(userfaultfds(guest.vm.pid()), 0);
    guest.vm.is_well();
    // The kernel reports what was given back between two checkpoints.
    guest.make_garbage();
    guest.save_exact(&stop, "d0.firn", &["--strategy", "pre-copy"], &nothing);
    guest.balloon(LITTLE);
    guest.save_exact(&stop, "d1.firn", &["--parent", "d0.firn"], &nothing);
    guest.balloon(RAM);
    let facts = guest.save_exact(&stop, "d2.firn", &["--parent", "d1.firn"], &nothing);
    assert_eq!(facts["tries"], 1);
    assert_eq!(userfaultfds(guest.vm.pid()), 1, "writes are followed");
    guest.vm.is_well();
    guest.restore("d2.firn");
}

/// A guest that allocates and frees memory all the time, and reports what is free every two seconds.
#[test]
fn free_pages_that_are_reported() {
    let (guest, stop) = BalloonVm::shared(AFTER_THE_CUT, REPORTING);
    let busy =
        "while :; do yes garbage | head -c 25000000 > /tmp/busy; rm /tmp/busy; sleep 1; done";
    guest.vm.control().spawn_job("busy", &["sh", "-c", busy]).unwrap();
    let count = std::env::var("FIRN_RUNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(1);
    let strategies: Vec<&str> = part_of(["pre-copy", "trace", "cow"]).collect();
    for strategy in strategies.iter().cycle().take(strategies.len() * count) {
        // Long enough for a report in most of the tries.
        let wait = |number| std::thread::sleep(Duration::from_millis(500 * u64::from(2 - number)));
        let saved = guest.save(&stop, "web.firn", &["--strategy", strategy], &wait);
        eprintln!("{strategy}: exit {}, {}{}", saved.code, saved.out, saved.err);
        match saved.code {
            0 => guest.is_exact("web.firn"),
            _ => {
                assert_ne!(*strategy, "pre-copy", "nothing can be lost");
                saved.fails(1, "3 tries failed");
                guest.leaves_nothing("web.firn");
            }
        }
        for file in guest.vm.session.files("web.firn") {
            std::fs::remove_file(guest.vm.session.path(&file)).unwrap();
        }
        guest.vm.is_well();
    }
}
