//! A file system is split: some of it is on the disk, some in the guest's memory. Both are of one instant, or it breaks.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::session::text;
use crate::vm::{Vm, qemu_img};

const PATIENCE: Duration = Duration::from_secs(120);
/// Makes, moves and removes folders of files, as fast as it can, until told to end.
const CHURN: &str = "
    i=0
    while [ ! -e /tmp/enough ]; do
        i=$((i + 1)); new=/mnt/new; old=/mnt/$((i % 6))
        mkdir -p $new
        for file in 1 2 3 4 5 6 7 8; do
            head -c $((i * file * 977 % 40000)) /dev/urandom > $new/$file
        done
        rm -rf $old; mv $new $old
        [ $((i % 5)) = 0 ] && sync
        echo round $i
    done";
const SETTLE: Duration = Duration::from_secs(2);

#[test]
fn a_file_system_under_heavy_writes_is_clean_after_a_restore() {
    let vm = Vm::boot_with_file_system();
    let session = &vm.session;
    let mut control = vm.control();
    control.run_program(&["sh", "-c", "mkdir -p /mnt && mount -t ext4 /dev/vda /mnt"]).unwrap();
    control.spawn_job("churn", &["sh", "-c", CHURN]).unwrap();
    control.wait_output("churn", "round 20", PATIENCE).unwrap();
    drop(control);
    let images = ["trace", "cow", "pre-copy", "stop"].map(|strategy| {
        let image = format!("{strategy}.firn");
        session.firn(&["checkpoint", "web", "-o", &image, "--strategy", strategy]).succeeds();
        std::thread::sleep(SETTLE);
        image
    });
    session.firn(&["stop", "web", "--discard"]).succeeds();
    for image in images {
        session.firn(&["restore", &image, "--name", "web", "--wait"]).succeeds();
        std::thread::sleep(SETTLE);
        unmounts_without_complaint(&vm, &image);
        let stopped = session.json(&["stop", "web"]);
        let overlays = stopped["overlays"].as_array().unwrap();
        let [overlay] = &overlays[..] else { unreachable!("one disk: {stopped}") };
        is_clean(&vm, Path::new(overlay.as_str().unwrap()), &image);
    }
}

/// The guest's kernel found nothing wrong, neither when it went on nor when it let go.
#[track_caller]
fn unmounts_without_complaint(vm: &Vm, image: &str) {
    let mut control = vm.control();
    control.run_program(&["touch", "/tmp/enough"]).unwrap();
    assert_eq!(control.wait_job("churn", PATIENCE).unwrap().exit, 0, "{image}");
    control.run_program(&["umount", "/mnt"]).unwrap();
    let said = control.run_program(&["dmesg"]).unwrap();
    assert!(said.contains("EXT4-fs (vda): mounted"), "{image}: {said}");
    assert!(!said.contains("EXT4-fs error") && !said.contains("JBD2:"), "{image}: {said}");
}

/// Nothing is wrong on the disk either.
#[track_caller]
fn is_clean(vm: &Vm, overlay: &Path, image: &str) {
    let flat: PathBuf = vm.session.path("flat.raw");
    qemu_img(&["convert", "-O", "raw", text(overlay), text(&flat)]);
    let checked = Command::new("e2fsck").args(["-f", "-n", text(&flat)]).output().unwrap();
    let said = String::from_utf8_lossy(&checked.stdout);
    assert_eq!(checked.status.code(), Some(0), "{image}: {said}");
    eprintln!("{image}: {}", said.lines().last().unwrap_or_default());
}
