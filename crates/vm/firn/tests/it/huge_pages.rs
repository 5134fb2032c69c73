//! VMs whose RAM is in huge pages of hugetlbfs, as libvirt and OpenStack start them on request.
//!
//! A fault, and a write that is tracked, stands for 2 MiB. What must hold is the same as for other RAM: an image is
//! memory at the cut, and the guest finds in its memory what it wrote.

use std::process::Child;
use std::time::Duration;

use firn_skip::HugePages;
use rustix::fs::{FallocateFlags, fallocate};

use crate::doctor::{checks, commands_do_what_doctor_says};
use crate::hypervisor_dies::{Stop, answer, start};
use crate::own_qemu::OwnQemu;
use crate::session::{eventually, text};
use crate::vm::{Vm, userfaultfds};

const PATIENCE: Duration = Duration::from_secs(120);

/// Huge pages of a guest with 192 MiB.
const GUEST: u64 = 96;
/// Pages of a memory block, and of a huge page.
const BLOCK_PAGES: u64 = 2;
const HUGE_PAGE_PAGES: u64 = 512;

/// Huge pages for one guest.
fn reserve() -> Option<HugePages> {
    HugePages::reserve(GUEST)
}

/// The memory of such a guest.
fn backend(shared: bool) -> String {
    let share = if shared { "on" } else { "off" };
    format!("memory-backend-memfd,id=ram,size=192M,share={share},hugetlb=on,hugetlbsize=2M")
}

/// A guest at work whose RAM is in huge pages, and that Firn is attached to.
pub struct HugeVm {
    pub vm: Vm,
    pub qemu: Child,
}

impl HugeVm {
    pub fn boot(backend: &str) -> Self {
        Self::boot_in(Vm::new(), backend)
    }

    fn boot_in(vm: Vm, backend: &str) -> Self {
        let qmp = format!("unix:{},server=on,wait=off", text(&vm.session.path("qmp")));
        let machine = ["-machine", "memory-backend=ram", "-qmp", &qmp];
        let vm = vm.with(&["-object", backend]).with(&machine);
        let args = vm.qemu_args();
        let log = std::fs::File::create(vm.session.path("qemu.log")).unwrap();
        let qemu =
            std::process::Command::new(&args[0]).args(&args[1..]).stderr(log).spawn().unwrap();
        vm.control();
        let mut guest = Self { vm, qemu };
        guest.attach();
        guest.vm.control().spawn_job("writers", &WRITERS).unwrap();
        eventually("writers", PATIENCE, || {
            guest.vm.control().run_program(&["firn-guest", "verify", "status"]).is_ok()
        });
        guest
    }

    fn attach(&mut self) {
        let (pid, session) = (self.qemu.id().to_string(), &self.vm.session);
        let qmp = session.path("qmp");
        session.firn(&["attach", "web", "--pid", &pid, "--qmp", text(&qmp)]).succeeds();
    }

    /// Saves, and checks the image, the guest and that nothing of Firn is left in QEMU.
    #[track_caller]
    pub fn save_exact(&self, image: &str, options: &[&str]) -> serde_json::Value {
        let save = ["checkpoint", "web", "-o", image, "--reference", "web.ram"];
        let facts = self.vm.session.json(&[&save, options].concat());
        self.vm.session.firn(&["image", "compare", image, "web.ram"]).succeeds();
        self.vm.is_well();
        eprintln!("{image}, {options:?}: {}", facts["report"]);
        facts
    }

    fn end(&mut self) {
        self.qemu.kill().unwrap();
        self.qemu.wait().unwrap();
        let session = &self.vm.session;
        eventually("ended", PATIENCE, || session.status("web")["state"] == "ended");
    }
}

impl Drop for HugeVm {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

const WRITERS: [&str; 6] = ["firn-guest", "writers", "--mib", "48", "--rate", "2000"];

#[test]
fn shared_huge_pages_are_saved_by_every_strategy() {
    let Some(pages) = reserve() else { return };
    let mut guest = HugeVm::boot(&backend(true));
    assert_eq!(guest.vm.session.status("web")["state"], "running");
    for round in 0..3 {
        for strategy in ["trace", "cow", "stop", "pre-copy"] {
            let image = format!("{strategy}.firn");
            let facts = guest.save_exact(&image, &["--strategy", strategy]);
            let report = &facts["report"];
            if strategy == "trace" {
                // A fault counts for all blocks of its huge page.
                let touched = report["blocks_touched"].as_u64().unwrap();
                let of_one = HUGE_PAGE_PAGES / BLOCK_PAGES;
                assert!(touched > 0 && touched % of_one == 0, "round {round}: {report}");
            }
            if strategy != "pre-copy" {
                assert_eq!(userfaultfds(guest.qemu.id().into()), 0, "{strategy}");
            }
        }
    }
    let facts = guest.save_exact("next.firn", &["--parent", "pre-copy.firn"]);
    let of = |key: &str| facts["report"][key].as_f64().unwrap();
    assert!(of("blocks_inherited") > 0.2 * of("blocks_total"), "{facts}");
    guest.end();
    // A restore needs no huge page.
    drop(pages);
    let modes = [("trace.firn", "lazy"), ("cow.firn", "auto"), ("next.firn", "eager")];
    for (image, mode) in modes {
        let restore = ["restore", image, "--name", "web", "--mode", mode, "--wait"];
        guest.vm.session.firn(&restore).succeeds();
        guest.vm.is_well();
        guest.save_exact("again.firn", &[]);
        guest.vm.session.firn(&["stop", "web", "--force"]).succeeds();
    }
}

/// As libvirt starts a VM with `<memoryBacking><hugepages/>`.
#[test]
fn private_huge_pages_are_saved_by_all_strategies_but_trace() {
    let Some(pages) = reserve() else { return };
    let json = r#"{"qom-type":"memory-backend-memfd","id":"ram","hugetlb":true,"hugetlbsize":2097152,
        "prealloc":true,"size":201326592,"share":false}"#;
    let mut guest = HugeVm::boot(json);
    let trace = ["checkpoint", "web", "-o", "web.firn", "--strategy", "trace"];
    guest.vm.session.firn(&trace).fails(5, "private");
    for _ in 0..3 {
        for strategy in ["cow", "stop", "pre-copy"] {
            guest.save_exact(&format!("{strategy}.firn"), &["--strategy", strategy]);
        }
    }
    guest.save_exact("next.firn", &["--parent", "pre-copy.firn"]);
    guest.end();
    drop(pages);
    guest.vm.session.firn(&["restore", "next.firn", "--name", "web", "--wait"]).succeeds();
    guest.vm.is_well();
}

#[test]
fn a_vm_with_huge_pages_is_suspended() {
    let Some(_pages) = reserve() else { return };
    let mut guest = HugeVm::boot(&backend(true));
    let session = &guest.vm.session;
    session.firn(&["suspend", "web", "-o", "web.firn"]).succeeds();
    guest.qemu.wait().unwrap();
    session.firn(&["restore", "web.firn", "--name", "web", "--wait"]).succeeds();
    guest.vm.is_well();
}

/// The successor of a supervisor resumes all threads that wait for the answer to a fault.
#[test]
fn killed_in_a_save_of_huge_pages() {
    let Some(_pages) = reserve() else { return };
    let mut guest = HugeVm::boot(&backend(true));
    for (point, strategy) in [
        ("save.registered", "trace"),
        ("save.protected", "trace"),
        ("save.resumed", "cow"),
        ("save.tracing", "trace"),
        ("save.fault", "trace"),
        ("save.fault@9", "cow"),
        ("save.sweep", "trace"),
        ("pre-copy.round", "pre-copy"),
        ("pre-copy.copied", "pre-copy"),
    ] {
        guest.vm.session.firn(&["detach", "web"]).succeeds();
        guest.vm.session.arm(Some(point));
        guest.attach();
        guest.vm.session.arm(None);
        let save = ["checkpoint", "web", "-o", "new.firn", "--strategy", strategy];
        guest.vm.session.firn(&save).fails(8, "aborted");
        assert_eq!(guest.vm.session.status("web")["state"], "running", "{point}");
        guest.vm.is_well();
        assert_eq!(guest.vm.session.files("new.firn"), Vec::<String>::new(), "{point}");
        guest.save_exact("after.firn", &["--strategy", "cow"]);
    }
}

#[test]
fn doctor_reports_what_huge_pages_permit() {
    let Some(_pages) = HugePages::reserve(32) else { return };
    let vm = Vm::new();
    let session = &vm.session;
    let backend = "memory-backend-memfd,id=ram,size=64M,share=on,hugetlb=on,hugetlbsize=2M";
    let ram = ["-object", backend, "-machine", "memory-backend=ram"];
    let rows = |name: &str| checks(&session.firn(&["--json", "doctor", name]));
    let row = |name: &str, operation: &str| {
        rows(name).into_iter().find(|row| row.0 == operation).unwrap()
    };
    for (more, refused) in [
        (&[][..], &[][..]),
        (&["-device", "virtio-balloon-pci"], &["checkpoint --strategy pre-copy"]),
    ] {
        let mut qemu = OwnQemu::start(session, &[&ram, more].concat());
        qemu.attach(session, "web");
        assert_eq!(commands_do_what_doctor_says(session, "web"), refused);
        let restore = row("web", "restore");
        assert!(restore.1 == "limited" && restore.2.contains("ordinary pages"), "{restore:?}");
        let protect = row("web", "protect");
        assert!(protect.1 == "refused" && protect.2.contains("huge pages"), "{protect:?}");
        session.firn(&["stop", "web"]).succeeds();
        qemu.ended();
        session.firn(&["rm", "web"]);
    }
    let run = [&["run", "web", "--", "qemu-system-x86_64"], &ram[..]].concat();
    session.firn(&run).fails(2, "start QEMU with huge pages by yourself");
}

/// A balloon gives back a page after the cut that is not copied: QEMU punches a hole into its file. The firmware does
/// not use that page, so the guest is not harmed.
#[test]
fn a_huge_page_that_is_given_back_after_the_cut_costs_a_try() {
    let Some(_pages) = HugePages::reserve(32) else { return };
    for (share, strategy) in [("on", "trace"), ("on", "cow"), ("off", "cow")] {
        let tries = [true, false].map(|gives_back| {
            let backend = format!(
                "memory-backend-memfd,id=ram,size=64M,share={share},hugetlb=on,hugetlbsize=2M,prealloc=on"
            );
            let machine = ["-machine", "memory-backend=ram", "-device", "virtio-balloon-pci"];
            let mut vm = Vm::new();
            let stop = Stop::arm(&mut vm, "save.tracing");
            let qemu = OwnQemu::start(&vm.session, &[&["-object", &backend], &machine[..]].concat());
            qemu.attach(&vm.session, "web");
            vm.session.arm(None);
            let save = ["--json", "checkpoint", "web", "-o", "web.firn", "--reference", "web.ram"];
            let mut saving = start(&vm, &[&save[..], &["--strategy", strategy]].concat());
            assert!(stop.is_reached(&mut saving), "{}", answer(saving).err);
            if gives_back {
                punch_huge_page(&qemu.pid(), 32 << 20);
            }
            stop.go_on();
            let saved = answer(saving).succeeds();
            vm.session.firn(&["image", "compare", "web.firn", "web.ram"]).succeeds();
            let facts: serde_json::Value = serde_json::from_str(&saved.out).unwrap();
            facts["tries"].as_u64().unwrap()
        });
        assert_eq!(tries, [2, 1], "share={share}, {strategy}");
    }
}

/// Gives a huge page of a QEMU's RAM back to the host.
fn punch_huge_page(pid: &str, offset: u64) {
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let is_ram = |path: &std::path::PathBuf| {
        std::fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("memfd:"))
    };
    let ram = descriptors.map(|it| it.unwrap().path()).find(is_ram).unwrap();
    let ram = std::fs::File::options().read(true).write(true).open(ram).unwrap();
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(ram, flags, offset, 2 << 20).unwrap();
}
