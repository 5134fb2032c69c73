//! Device state, saved from one QEMU and loaded into another with the same RAM.

use std::os::fd::OwnedFd;
use std::time::Duration;

use firn_vmm::{DeviceStateError, QemuVm};

use crate::need_qemu;
use crate::qemu::{Qemu, backend, inherited_memfd, words};

const MIB: u64 = 1 << 20;
const INCOMING: &str = "-S -incoming defer -global migration.send-configuration=off";

fn args(file: &OwnedFd, more: &str) -> Vec<String> {
    let mut args = backend("ram", 256 * MIB, file);
    args.extend(words("-M q35,memory-backend=ram -m 256M"));
    args.extend(words(more));
    args
}

/// A stopped VM whose firmware has run for a moment, with its device state.
fn stopped(file: &OwnedFd) -> (Qemu, QemuVm, Vec<u8>) {
    let qemu = Qemu::start(&args(file, "-serial null"));
    let mut vm = qemu.vm();
    std::thread::sleep(Duration::from_secs(1));
    let state = vm.stop_and_save_device_state().unwrap();
    (qemu, vm, state)
}

#[test]
fn a_saved_vm_continues_in_another_qemu() {
    need_qemu!();
    let file = inherited_memfd(256 * MIB);
    let (qemu, mut vm, state) = stopped(&file);
    let before = vm.qmp().execute_hmp("info registers").unwrap();
    drop(vm);
    drop(qemu);

    let second = Qemu::start(&args(&file, &format!("-serial null {INCOMING}")));
    let mut vm = second.vm();
    assert_eq!(vm.status().unwrap().status, "inmigrate");
    vm.load_device_state(&state).unwrap();
    assert_eq!(vm.status().unwrap().status, "paused");
    assert_eq!(vm.qmp().execute_hmp("info registers").unwrap(), before);
    vm.cont().unwrap();
    assert!(vm.status().unwrap().running);
}

/// libvirt starts QEMU without `send-configuration=off`.
#[test]
fn a_qemu_that_expects_a_machine_type_gets_it_and_refuses_another() {
    need_qemu!();
    let file = inherited_memfd(256 * MIB);
    let (qemu, mut vm, state) = stopped(&file);
    let machine = vm.machine_type().unwrap();
    drop((vm, qemu));
    let load = |machine: &str| {
        let second = Qemu::start(&args(&file, "-serial null -S -incoming defer"));
        let mut vm = second.vm();
        vm.load_device_state_of(machine, &state).map(|()| vm.status().unwrap().status)
    };
    assert_eq!(load(&machine).unwrap(), "paused");
    load("pc-i440fx-2.1").unwrap_err();
}

#[test]
fn saves_can_be_repeated_and_leave_the_vm_as_it_was() {
    need_qemu!();
    let file = inherited_memfd(256 * MIB);
    let (_qemu, mut vm, first) = stopped(&file);
    assert!(!vm.status().unwrap().running);
    assert_eq!(vm.save_device_state().unwrap(), first, "nothing ran in between");
    vm.cont().unwrap();
    vm.finish_save().unwrap();
    let sets = vm.qmp().execute("query-fdsets", serde_json::Value::Null).unwrap();
    assert_eq!(sets, serde_json::json!([]), "QEMU closed its copy");
    assert_eq!(vm.stop_and_save_device_state().unwrap().len(), first.len());
}

#[test]
fn a_damaged_state_is_an_error_and_not_a_hang() {
    need_qemu!();
    let file = inherited_memfd(256 * MIB);
    let (_qemu, _vm, state) = stopped(&file);
    let second = Qemu::start(&args(&file, &format!("-serial null {INCOMING}")));
    let mut vm = second.vm();
    match vm.load_device_state(&state[..state.len() / 2]).unwrap_err() {
        DeviceStateError::Died { .. } => assert!(!vm.version().is_at_least(9, 1)),
        DeviceStateError::Refused { reason, .. } => {
            assert!(reason.contains("migration failed"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
}

/// A Firn process that died leaves a descriptor in QEMU if another monitor is connected. The
/// next one removes it.
#[test]
fn leftovers_of_a_dead_firn_are_removed() {
    need_qemu!();
    let file = inherited_memfd(256 * MIB);
    let dir = tempfile::tempdir().unwrap();
    let another = dir.path().join("another");
    let monitor = format!("-qmp unix:{},server=on,wait=off", another.display());
    let qemu = Qemu::start(&args(&file, &monitor));
    let mut witness = QemuVm::connect_started(&another, || true).unwrap();
    let mut sets = || witness.qmp().execute("query-fdsets", serde_json::Value::Null).unwrap();
    let mut first = qemu.vm();
    first.prepare_save().unwrap();
    drop(first);
    assert_eq!(sets().as_array().unwrap().len(), 1);
    let mut second = qemu.vm();
    second.prepare_save().unwrap();
    assert_eq!(sets().as_array().unwrap().len(), 1);
    second.finish_save().unwrap();
    assert_eq!(sets(), serde_json::json!([]));
}
