//! A VM from its owner's command line: started, saved, and continued in another QEMU.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use firn_types::{GuestPhys, Page};
use firn_vmm::command_line::{AddedPaths, AugmentedCommand, CommandPlan, plan_command};
use firn_vmm::{FileIdentity, LaunchedProcess, QemuVm, launch_hypervisor, read_log_tail};

use crate::qemu::{binary, words};
use crate::{guest, need_qemu};

/// A folder with a guest's disk, and the RAM files of its VM.
struct Home {
    dir: tempfile::TempDir,
    disk: PathBuf,
    plan: CommandPlan,
    ram: Vec<OwnedFd>,
}

/// A running QEMU that ends with the test.
struct Running {
    qemu: LaunchedProcess,
    vm: QemuVm,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
    }
}

impl Home {
    fn new(more: &str) -> Self {
        let dir = tempfile::Builder::new().prefix("firn-vmm-").tempdir().unwrap();
        let disk = guest::disk(dir.path());
        let mut command = vec![binary()];
        command.extend(words("-display none -nodefaults -accel tcg -M pc"));
        command.extend(words(&format!("-drive file={},format=raw,if=ide", disk.display())));
        command.extend(words(more));
        let plan = plan_command(&command).unwrap();
        let ram = plan.ram().iter().map(|ram| ram_file(ram.bytes)).collect();
        Self { dir, disk, plan, ram }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn paths(&self, name: &str) -> AddedPaths {
        let path = |file: &OwnedFd| format!("/proc/self/fd/{}", file.as_raw_fd()).into();
        let ram = self.ram.iter().map(path).collect();
        AddedPaths {
            qmp: self.path(&format!("{name},qmp")),
            ram,
            calls: self.path("calls"),
            stores: None,
            cards: Vec::new(),
        }
    }

    /// Starts a command line of this plan, with its serial port and its monitor named after `name`.
    fn start(&self, name: &str, line: &AugmentedCommand) -> Running {
        let mut args = line.args.clone();
        args.extend(words(&format!("-serial file:{}", self.path(name).display())));
        let inherit: Vec<_> = self.ram.iter().map(AsFd::as_fd).collect();
        let log = self.path(&format!("{name}.log"));
        let mut qemu = launch_hypervisor(&args, &inherit, &log).unwrap();
        let alive = || qemu.try_wait().unwrap().is_none();
        let vm = QemuVm::connect_started(&self.paths(name).qmp, alive);
        let vm =
            vm.unwrap_or_else(|error| panic!("{error}: {}", read_log_tail(&log, 4096).unwrap()));
        Running { qemu, vm }
    }

    fn run(&self) -> Running {
        self.start("first", &self.plan.augment(&self.paths("first")).unwrap())
    }

    fn restore(&self) -> Running {
        self.start("second", &self.plan.for_restore(&self.paths("second")).unwrap())
    }
}

fn ram_file(bytes: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create("firn-test-ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, bytes).unwrap();
    file
}

/// Lets the guest count, moves it to another QEMU, and checks that it continues to count.
fn counts_on(more: &str) {
    let home = Home::new(more);
    let mut first = home.run();
    guest::counted(&home.path("first"), 5);
    let state = first.vm.stop_and_save_device_state().unwrap();
    let before = guest::counted(&home.path("first"), 5);
    drop(first);

    let mut second = home.restore();
    second.vm.load_device_state(&state).unwrap();
    second.vm.cont().unwrap();
    let after = guest::counted(&home.path("second"), 5);
    let all: Vec<u8> = before.iter().chain(&after).copied().collect();
    let expected: Vec<u8> = (1..=255).chain(0..=255).cycle().take(all.len()).collect();
    assert_eq!(all, expected, "{} before", before.len());
}

#[test]
fn a_guest_counts_on_in_another_qemu() {
    need_qemu!();
    counts_on("-m 64M");
}

#[test]
fn a_guest_counts_on_without_the_right_to_start_programs() {
    need_qemu!();
    counts_on(
        "-m 64M -sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
    );
}

#[test]
fn a_guest_with_numa_nodes_and_more_counts_on() {
    need_qemu!();
    counts_on(
        "-m size=96M,slots=2,maxmem=1G -smp 2 -object memory-backend-ram,id=a,size=64M \
         -object {\"qom-type\":\"memory-backend-memfd\",\"id\":\"b\",\"size\":33554432,\"host-nodes\":[0],\"policy\":\"preferred\"} \
         -object memory-backend-ram,id=d,size=128M -device pc-dimm,memdev=d \
         -numa node,memdev=a -numa node,memdev=b -vga std -device virtio-net-pci -device e1000",
    );
}

#[test]
fn regions_are_those_of_the_plan() {
    need_qemu!();
    let home = Home::new(
        "-m 96M,slots=1,maxmem=1G -object memory-backend-ram,id=d,size=128M -device pc-dimm,memdev=d",
    );
    let mut running = home.run();
    let layout = running.vm.layout().unwrap();
    let regions = layout.map.regions().iter().map(|region| (region.id.as_str(), region.byte_len()));
    let planned = home.plan.ram().iter().map(|ram| (ram.id.as_str(), ram.bytes));
    assert!(regions.eq(planned), "{:?}", layout.map);
    assert!(layout.locations.iter().all(|location| location.shared));
    assert_eq!(layout.map.page_at(GuestPhys(4 << 30)), Some(Page(96 << 8)), "memory devices");
    assert_eq!(running.vm.pid().unwrap(), Some(running.qemu.pid()));
}

#[test]
fn ram_is_in_the_files_of_its_owner() {
    need_qemu!();
    let home = Home::new("-m 64M");
    let mut running = home.run();
    let counted = guest::counted(&home.path("first"), 3);
    running.vm.stop().unwrap();
    let mut byte = [0];
    rustix::io::pread(&home.ram[0], &mut byte, 0x600).unwrap();
    assert!(byte[0] >= counted[counted.len() - 1]);
}

#[test]
fn disks_are_known_by_their_files() {
    need_qemu!();
    let home = Home::new("-m 64M -snapshot");
    let disks = home.run().vm.disks().unwrap();
    let base = disks.iter().find(|disk| Path::new(&disk.file) == home.disk).unwrap();
    assert!(base.read_only, "below a snapshot");
    assert_eq!((base.size, base.format.as_str()), (1 << 20, "raw"));
    assert_eq!(base.identity, Some(FileIdentity::from_path(&home.disk).unwrap()));
    let overlay = disks.iter().find(|disk| disk.format == "qcow2").unwrap();
    assert_eq!(overlay.identity, None, "QEMU has removed its file: {overlay:?}");
}

#[test]
fn facts_about_a_vm() {
    need_qemu!();
    let home = Home::new("-m 64M -smp 3 -device virtio-balloon-pci");
    let mut running = home.run();
    let vm = &mut running.vm;
    let vcpus = vm.vcpus().unwrap();
    assert_eq!(vcpus.iter().map(|vcpu| vcpu.id.0).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(vm.machine_type().unwrap().starts_with("pc-i440fx-"));
    assert_eq!(vm.accel().unwrap(), firn_vmm::AcceleratorKind::Tcg);
    assert_eq!(vm.balloon().unwrap().unwrap().actual_bytes, 64 << 20);
    assert_eq!(vm.migration_blockers().unwrap(), [""; 0]);
    assert_eq!(vm.page_table_roots().unwrap(), [], "not in long mode");
    assert!(vm.version().is_at_least(7, 2));
    vm.quit().unwrap();
    assert!(running.qemu.wait().unwrap().success());
}

#[test]
fn devices_that_cannot_migrate_are_named() {
    need_qemu!();
    let home = Home::new(
        "-m 64M -object memory-backend-ram,id=iv,size=1M,share=on -device ivshmem-plain,memdev=iv",
    );
    let blockers = home.run().vm.migration_blockers().unwrap();
    assert!(blockers[0].contains("ivshmem"), "{blockers:?}");
    let layout = home.run().vm.layout().unwrap();
    assert_eq!(layout.map.regions().len(), 1, "a device's memory is not guest RAM");
}
