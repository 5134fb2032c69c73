//! A pause that QEMU begins and ends by itself.

use std::io::BufRead as _;
use std::os::fd::OwnedFd;
use std::time::Duration;

use firn_vmm::{DeviceStateError, QemuVm};
use serde_json::{Value, json};

use crate::need_qemu;
use crate::qemu::{Qemu, backend, inherited_memfd, words};

const MIB: u64 = 1 << 20;
/// The length of the pause: longer than QEMU takes by itself.
const HOLD: Duration = Duration::from_millis(200);
/// The variable that gives the child of a test the VM to pause.
const MONITOR: &str = "FIRN_TEST_MONITOR";
/// The child's output when it has paused the VM.
const HELD: &str = "the VM is held";
const INCOMING: &str = "-S -incoming defer -global migration.send-configuration=off";

fn start(file: &OwnedFd, more: &str) -> (Qemu, QemuVm) {
    let mut args = backend("ram", 256 * MIB, file);
    args.extend(words("-M q35,memory-backend=ram -m 256M -serial null"));
    args.extend(words(more));
    let qemu = Qemu::start(&args);
    let vm = qemu.vm();
    (qemu, vm)
}

/// A VM that runs its firmware.
fn running(file: &OwnedFd) -> (Qemu, QemuVm) {
    let (qemu, vm) = start(file, "");
    std::thread::sleep(Duration::from_secs(1));
    (qemu, vm)
}

fn fdsets(vm: &mut QemuVm) -> Value {
    vm.qmp().execute("query-fdsets", Value::Null).unwrap()
}

#[test]
fn a_vm_is_paused_until_it_is_released() {
    need_qemu!();
    let file = inherited_memfd(256 * MIB);
    let (_qemu, mut vm) = running(&file);
    for _ in 0..3 {
        vm.prepare_pause().unwrap();
        let held = vm.begin_pause().unwrap().expect("this QEMU can open its own descriptors");
        std::thread::sleep(HOLD);
        let released = held.resume_vm().unwrap();
        assert!(released.device_state.len() > 4096);
        assert!(released.paused_for.unwrap() >= HOLD + released.took.unwrap(), "{released:?}");
        assert!(vm.status().unwrap().running);
        assert_eq!(fdsets(&mut vm).as_array().unwrap().len(), 1, "QEMU keeps it for the next time");
    }
    vm.finish_save().unwrap();
    assert_eq!(fdsets(&mut vm), json!([]), "QEMU has nothing of it left");
}

#[test]
fn a_vm_that_is_held_again_is_held_as_long_as_it_has_to_be() {
    need_qemu!();
    let file = inherited_memfd(256 * MIB);
    let (_qemu, mut vm) = start(&file, "-smp 8");
    std::thread::sleep(Duration::from_secs(1));
    for late in [false, true, false, true] {
        let known = vm.begin_pause().unwrap().unwrap().resume_vm().unwrap().device_state.len();
        vm.prepare_late_pause(if late { known } else { 0 }).unwrap();
        let held = vm.begin_pause().unwrap().unwrap();
        std::thread::sleep(HOLD);
        let released = held.resume_vm().unwrap();
        assert_eq!(released.device_state.len(), known);
        assert!(released.paused_for.unwrap() >= HOLD, "{released:?}");
    }
    vm.prepare_pause().unwrap();
    vm.finish_save().unwrap();
    assert_eq!(fdsets(&mut vm), json!([]), "QEMU has nothing of it left");
}

#[test]
fn a_vm_whose_devices_are_known_is_held_when_most_are_saved() {
    need_qemu!();
    let file = inherited_memfd(256 * MIB);
    let (_qemu, mut vm) = start(&file, "-smp 8");
    std::thread::sleep(Duration::from_secs(1));
    let known = vm.begin_pause().unwrap().unwrap().resume_vm().unwrap().device_state.len();
    assert!(known > 40 << 10, "{known} bytes are too few for this test");
    vm.prepare_late_pause(known).unwrap();
    let held = vm.begin_pause().unwrap().unwrap();
    std::thread::sleep(HOLD);
    let released = held.resume_vm().unwrap();
    assert_eq!(released.device_state.len(), known);
    assert!(released.paused_for.unwrap() >= HOLD, "{released:?}");
    assert!(vm.status().unwrap().running);
}

#[test]
fn a_vm_whose_devices_took_less_than_was_known_was_not_held() {
    need_qemu!();
    let file = inherited_memfd(256 * MIB);
    let (_qemu, mut vm) = running(&file);
    vm.prepare_late_pause(usize::MAX).unwrap();
    let held = vm.begin_pause().unwrap().unwrap();
    std::thread::sleep(HOLD);
    let error = held.resume_vm().unwrap_err();
    assert!(matches!(error, DeviceStateError::NotHeld { bytes } if bytes > 4096), "{error:?}");
    assert!(vm.status().unwrap().running);
    vm.finish_save().unwrap();
    assert_eq!(fdsets(&mut vm), json!([]), "QEMU has nothing of it left");
}

#[test]
fn a_pause_fails_if_another_process_opened_the_pipe() {
    need_qemu!();
    let file = inherited_memfd(256 * MIB);
    let (qemu, mut vm) = running(&file);
    vm.prepare_pause().unwrap();
    let fd = fdsets(&mut vm)[0]["fds"][0]["fd"].as_u64().unwrap();
    let open = || {
        let path = format!("/proc/{}/fd/{fd}", qemu.pid());
        drop(std::fs::File::options().write(true).open(path).unwrap());
    };
    open();
    vm.begin_pause().unwrap().unwrap().resume_vm().expect("that was before it");
    let held = vm.begin_pause().unwrap().unwrap();
    open();
    let error = held.resume_vm().unwrap_err();
    assert!(matches!(error, DeviceStateError::OpenedTwice), "{error:?}");
    assert!(vm.status().unwrap().running);
    vm.finish_save().unwrap();
    assert_eq!(fdsets(&mut vm), json!([]), "QEMU has nothing of it left");
}

#[test]
fn the_saved_state_continues_in_another_qemu() {
    need_qemu!();
    let file = inherited_memfd(256 * MIB);
    let (qemu, mut vm) = running(&file);
    vm.stop().unwrap();
    let by_hand = vm.save_device_state().unwrap();
    let before = vm.qmp().execute_hmp("info registers").unwrap();
    let held = vm.begin_pause().unwrap().unwrap();
    assert_eq!(held.resume_vm().unwrap().device_state, by_hand);
    assert!(!vm.status().unwrap().running, "its user had stopped it");
    vm.cont().unwrap();
    let state = vm.begin_pause().unwrap().unwrap().resume_vm().unwrap().device_state;
    drop((vm, qemu));
    for (state, registers) in [(by_hand, Some(before)), (state, None)] {
        let (_second, mut vm) = start(&file, INCOMING);
        vm.load_device_state(&state).unwrap();
        if let Some(registers) = registers {
            assert_eq!(vm.qmp().execute_hmp("info registers").unwrap(), registers);
        }
        vm.cont().unwrap();
        assert!(vm.status().unwrap().running);
    }
}

#[test]
fn an_abandoned_pause_ends() {
    need_qemu!();
    let file = inherited_memfd(256 * MIB);
    let (qemu, mut vm) = running(&file);
    let open = || std::fs::read_dir(format!("/proc/{}/fd", qemu.pid())).unwrap().count();
    let before = open();
    drop(vm.begin_pause().unwrap().unwrap());
    assert!(vm.status().unwrap().running);
    vm.finish_save().unwrap();
    assert_eq!(open(), before, "QEMU has closed its end");
    // No descriptor of the pipe is left, and the next pause works.
    let state = vm.begin_pause().unwrap().unwrap().resume_vm().unwrap().device_state;
    assert!(state.len() > 4096);
    vm.finish_save().unwrap();
    assert_eq!(fdsets(&mut vm), json!([]));
}

/// The child of the next test.
#[test]
#[ignore = "holds a VM until it is killed"]
fn hold_until_killed() {
    let monitor = std::env::var_os(MONITOR).expect("a monitor");
    let mut vm = QemuVm::connect(monitor.as_ref()).unwrap();
    let _held = vm.begin_pause().unwrap().unwrap();
    println!("{HELD}");
    std::thread::sleep(Duration::from_secs(600));
}

#[test]
fn a_pause_ends_when_its_process_is_killed() {
    need_qemu!();
    let file = inherited_memfd(256 * MIB);
    let dir = tempfile::tempdir().unwrap();
    let another = dir.path().join("another");
    let (_qemu, mut vm) =
        start(&file, &format!("-qmp unix:{},server=on,wait=off", another.display()));
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "hold::hold_until_killed", "--ignored", "--nocapture"])
        .env(MONITOR, &another)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let said = std::io::BufReader::new(child.stdout.take().unwrap());
    assert!(said.lines().any(|line| line.unwrap().contains(HELD)));
    vm.qmp().set_timeout(HOLD);
    assert!(vm.status().is_err(), "QEMU waits");
    child.kill().unwrap();
    child.wait().unwrap();
    vm.qmp().set_timeout(Duration::from_secs(10));
    assert!(vm.status().unwrap().running, "nobody has told it to go on");
}
