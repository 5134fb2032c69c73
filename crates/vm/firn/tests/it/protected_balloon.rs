//! VMs with a memory balloon that are protected: the standby's memory is the primary's, whatever the guest gives back.
//!
//! A VM that its user has stopped does not change any more, and epochs continue: so both memories can be compared, byte by byte.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use firn_lab::guest::GuestControl;
use firn_vmm::QemuVm;
use serde_json::json;

use crate::balloon::{BALLOON, BalloonVm, LITTLE, RAM, REPORTING, garbage_script};
use crate::mirrored_disks::state;
use crate::protect::{committed_of, lose, protect, standby_called};
use crate::session::{eventually, kill};
use crate::vm::{Vm, userfaultfds, writes};

const PATIENCE: Duration = Duration::from_secs(120);
const PAGE: usize = 4096;
/// How often the balloon grows and shrinks. More by the environment.
const ROUNDS: &str = "FIRN_ROUNDS";
/// Allocates and frees memory all the time, less than what a guest leaves untouched.
const BUSY: &str =
    "while :; do yes garbage | head -c 8000000 > /tmp/busy; rm /tmp/busy; sleep 1; done";

/// A VM with a balloon. The standby's QEMU takes the names of its sockets, so they are open already.
struct Guest {
    monitor: QemuVm,
    control: GuestControl,
    balloon: BalloonVm,
}

impl Guest {
    fn shared(vm: Vm, device: &str) -> Self {
        Self::of(BalloonVm::boot_shared(vm, device))
    }

    fn private(vm: Vm, device: &str) -> Self {
        Self::of(BalloonVm::boot_private(vm, device))
    }

    fn of(balloon: BalloonVm) -> Self {
        let (monitor, control) = (QemuVm::connect(&balloon.monitor).unwrap(), balloon.vm.control());
        Self { monitor, control, balloon }
    }

    fn vm(&self) -> &Vm {
        &self.balloon.vm
    }

    fn protect(&self, standby: &str) {
        protect(self.vm(), "web", standby_called(self.vm(), standby), &["--interval", "50ms"]);
    }

    fn request_size(&mut self, bytes: u64) {
        self.monitor.qmp().execute("balloon", json!({ "value": bytes })).unwrap();
    }

    fn has_size(&mut self, bytes: u64) {
        let monitor = &mut self.monitor;
        let is_there = || monitor.balloon().unwrap().unwrap().actual_bytes == bytes;
        eventually("the balloon", PATIENCE, is_there);
    }

    fn resize(&mut self, bytes: u64) {
        self.request_size(bytes);
        self.has_size(bytes);
    }

    /// Memory that the guest gives back next has contents.
    fn make_garbage(&mut self) {
        self.control.run_program(&["sh", "-c", &garbage_script()]).unwrap();
    }

    #[track_caller]
    fn writes_on(&mut self) {
        let (before, control) = (writes(&mut self.control), &mut self.control);
        eventually("writers go on", PATIENCE, || writes(control) > before);
    }

    /// The number of pages that the standby has otherwise than the VM, which is stopped meanwhile.
    fn count_differences(&mut self) -> usize {
        self.monitor.stop().unwrap();
        let newest = committed_of(self.vm(), "twin");
        eventually("epochs", PATIENCE, || committed_of(self.vm(), "twin") >= newest + 3);
        let pid = |name: &str| self.vm().session.status(name)["pid"].as_i64().unwrap();
        let (mine, copied) = (ram_of(pid("web")), ram_of(pid("twin")));
        assert_eq!((mine.len(), copied.len()), (RAM as usize, RAM as usize));
        let pages = mine.chunks(PAGE).zip(copied.chunks(PAGE));
        let differing = pages.enumerate().filter(|(_, (mine, copied))| mine != copied);
        let differing: Vec<usize> = differing.map(|(page, _)| page).collect();
        let zeros = mine.chunks(PAGE).filter(|page| page.iter().all(|&byte| byte == 0)).count();
        eprintln!("{} pages differ; {zeros} are zeros", differing.len());
        self.monitor.cont().unwrap();
        differing.len()
    }
}

/// All RAM of a QEMU: of the file that Firn gave to it, or else of its mapping of that size.
fn ram_of(pid: i64) -> Vec<u8> {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let is_ram = |path: &std::path::PathBuf| {
        std::fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("firn-ram"))
    };
    let mut bytes = Vec::new();
    if let Some(ram) = fds.map(|fd| fd.unwrap().path()).find(is_ram) {
        File::open(ram).unwrap().read_to_end(&mut bytes).unwrap();
        return bytes;
    }
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let spans = maps.lines().filter_map(|line| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        Some((number(start)?, number(end)?))
    });
    let (start, _) = spans.into_iter().find(|(start, end)| end - start == RAM).unwrap();
    bytes.resize(RAM as usize, 0);
    File::open(format!("/proc/{pid}/mem")).unwrap().read_exact_at(&mut bytes, start).unwrap();
    bytes
}

/// The balloon grows and shrinks, and free pages are reported, while the guest works. Then its QEMU is killed.
fn a_standby_follows(mut guest: Guest) {
    let rounds = std::env::var(ROUNDS).map_or(2, |rounds| rounds.parse().unwrap());
    // Given back before there are epochs, and during the seed.
    guest.make_garbage();
    guest.request_size(LITTLE);
    guest.protect("twin");
    guest.has_size(LITTLE);
    assert_eq!(guest.count_differences(), 0, "after the seed");
    guest.control.spawn_job("busy", &["sh", "-c", BUSY]).unwrap();
    for round in 0..rounds {
        guest.resize(RAM);
        guest.make_garbage();
        assert_eq!(guest.count_differences(), 0, "round {round}: without a balloon");
        guest.resize(LITTLE);
        assert_eq!(guest.count_differences(), 0, "round {round}: it has grown");
        guest.writes_on();
    }
    guest.request_size(RAM);
    let Guest { control, balloon: guest, .. } = guest;
    drop(control);
    eprintln!("{}", guest.vm.session.status("web")["protection"]);
    lose(&guest.vm, "web", "twin");
    guest.vm.session.firn(&["failover", "twin"]).succeeds();
    guest.vm.is_well();
}

#[test]
fn a_standby_follows_shared_memory_that_is_given_back() {
    a_standby_follows(Guest::shared(Vm::new(), REPORTING));
}

#[test]
fn a_standby_follows_private_memory_that_is_given_back() {
    a_standby_follows(Guest::private(Vm::new(), REPORTING));
}

/// The comparison above fails if Firn does not search for what was given back.
#[test]
fn a_standby_without_the_search_has_other_memory() {
    let mut vm = Vm::new();
    vm.session.arm(Some("holes.search=EIO"));
    let mut guest = Guest::shared(vm, BALLOON);
    guest.make_garbage();
    guest.protect("twin");
    guest.resize(LITTLE);
    assert_ne!(guest.count_differences(), 0);
}

/// A guest that touches memory that it gave back waits for the supervisor. When that is killed, its successor resumes the guest.
#[test]
fn a_supervisor_that_dies_while_the_balloon_changes() {
    let mut guest = Guest::shared(Vm::new(), REPORTING);
    for number in 0..2 {
        let standby = format!("twin{number}");
        guest.resize(LITTLE);
        guest.protect(&standby);
        guest.resize(RAM);
        // It touches what it gave back, or gives it back again. Both at once would be too much for its memory.
        if number == 0 {
            guest.control.spawn_job("touch", &["sh", "-c", &garbage_script()]).unwrap();
            std::thread::sleep(Duration::from_millis(300));
        } else {
            guest.request_size(LITTLE);
        }
        kill(guest.vm().session.status("web")["supervisor_pid"].as_i64().unwrap());
        let is_running = || guest.vm().session.status("web")["state"] == "running";
        eventually("a successor", PATIENCE, is_running);
        assert_eq!(userfaultfds(guest.vm().pid()), 0);
        if number == 0 {
            guest.control.wait_job("touch", PATIENCE).unwrap();
        }
        guest.resize(LITTLE);
        guest.writes_on();
        guest.vm().session.firn(&["stop", &standby]).succeeds();
    }
}

/// A release while the balloon is large leaves QEMU as it was, and the guest uses the memory again.
#[test]
fn a_vm_with_a_large_balloon_is_released() {
    let mut guest = Guest::shared(Vm::new(), BALLOON);
    guest.make_garbage();
    guest.resize(LITTLE);
    let before = state(&mut guest.monitor);
    guest.protect("twin");
    guest.make_garbage();
    assert_eq!(guest.count_differences(), 0);
    guest.vm().session.firn(&["release", "web"]).succeeds();
    assert_eq!(state(&mut guest.monitor), before);
    assert_eq!(userfaultfds(guest.vm().pid()), 0);
    guest.vm().session.firn(&["stop", "twin"]).succeeds();
    guest.resize(RAM);
    guest.make_garbage();
    guest.writes_on();
    guest.vm().session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
}
