//! Restoring what is damaged: an error that says where, no VM that hangs or goes wrong, nothing left.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use firn_image::{HEADER_BYTES, Image};
use firn_types::Block;
use rustix::fs::{CWD, Mode as Permissions, mkfifoat};

use crate::faults::base;
use crate::session::{Answer, eventually};
use crate::vm::Vm;

const MODES: [&str; 4] = ["eager", "lazy", "locality", "working-set"];
const FOOTER_BYTES: u64 = 1024;
const PATIENCE: Duration = Duration::from_secs(60);

/// A copy of the image, in which the byte at an offset is another one.
fn flipped(vm: &Vm, at: u64) {
    let bad = copied(vm);
    let mut byte = [0];
    bad.read_exact_at(&mut byte, at).unwrap();
    bad.write_all_at(&[!byte[0]], at).unwrap();
}

fn copied(vm: &Vm) -> File {
    std::fs::copy(vm.image("base.firn"), vm.image("bad.firn")).unwrap();
    File::options().read(true).write(true).open(vm.image("bad.firn")).unwrap()
}

fn restore(vm: &Vm, mode: &str) -> Answer {
    vm.session.firn(&["restore", "bad.firn", "--mode", mode, "--wait", "--on-error", "kill"])
}

/// A stored memory block that the guest touched early, and where its bytes are.
fn early_block(image: &Image) -> (Block, u64) {
    let stored = |block: &Block| {
        let (id, entry) = image.entry_of(*block)?;
        Some((*block, image.geometry().offset_of(id) + u64::from(entry.offset)))
    };
    image.working_set().iter().find_map(stored).unwrap()
}

/// The bytes of the image's parts: an offset in each.
fn parts(image: &Path) -> [(&'static str, u64); 4] {
    let len = std::fs::metadata(image).unwrap().len();
    let image = Image::open(image).unwrap();
    let sections = image.geometry().offset_of(firn_image::LocalityBlockId(image.locality_blocks()));
    [
        ("header", HEADER_BYTES / 2),
        ("section", sections + 8),
        ("index", len - FOOTER_BYTES - 16),
        ("footer", len - FOOTER_BYTES / 2),
    ]
}

/// No VM and no process of one; what there is to be said of one that had begun to run can be seen, and goes.
#[track_caller]
fn nothing_runs(vm: &Vm, why: &str) {
    if let [(_, state)] = &vm.session.ls()[..] {
        assert_eq!(state, "ended");
        let last = vm.session.status("web")["last"]["text"].to_string();
        assert!(last.contains(why), "{last} does not say {why:?}");
        vm.session.firn(&["rm", "web"]).succeeds();
    }
    assert_eq!(vm.session.ls(), []);
    eventually("no directory left", PATIENCE, || {
        let entries = std::fs::read_dir(vm.session.runtime_dir()).unwrap();
        // What storage is like is kept.
        entries.flatten().all(|entry| entry.file_name() == ".storage")
    });
}

#[test]
fn a_flipped_byte_of_memory_is_named_in_each_mode() {
    let vm = base();
    let image = Image::open(&vm.image("base.firn")).unwrap();
    let (block, at) = early_block(&image);
    flipped(&vm, at + 1);
    let why = format!("memory block {}", block.0);
    vm.session.firn(&["image", "verify", "bad.firn"]).fails(6, "is damaged");
    for mode in MODES {
        let restored = restore(&vm, mode);
        eprintln!("{mode}: exit {}: {}", restored.code, restored.err.trim());
        let restored = restored.fails(6, &why);
        for part in [format!("at byte {at}"), "bad.firn".to_owned()] {
            assert!(restored.err.contains(&part), "{mode}: {} lacks {part}", restored.err);
        }
        nothing_runs(&vm, &why);
    }
    // What earlier restores have learned would be there: it is neither read nor replaced, and nothing waits for it.
    let learned = vm.image("base.firn.learned");
    let _ = std::fs::remove_file(&learned);
    mkfifoat(CWD, &learned, Permissions::RUSR | Permissions::WUSR).unwrap();
    vm.session.firn(&["restore", "base.firn", "--wait"]).succeeds();
    vm.is_well();
    vm.session.firn(&["stop", "web"]).succeeds();
    assert!(std::fs::metadata(&learned).unwrap().file_type().is_fifo());
}

#[test]
fn a_flipped_byte_of_anything_else_is_found_before_a_vm_is_started() {
    let vm = base();
    for (part, at) in parts(&vm.image("base.firn")) {
        flipped(&vm, at);
        for mode in MODES {
            let restored = restore(&vm, mode);
            assert_eq!(restored.code, 6, "{part}, {mode}: {}", restored.err);
            assert!(restored.err.contains(part), "{part}, {mode}: {}", restored.err);
            nothing_runs(&vm, part);
        }
    }
}

#[test]
fn a_truncated_image_is_refused() {
    let vm = base();
    let whole = std::fs::metadata(vm.image("base.firn")).unwrap().len();
    let mut lengths = vec![0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1];
    lengths.extend(parts(&vm.image("base.firn")).map(|(_, at)| at));
    lengths.extend([whole / 2, whole - FOOTER_BYTES, whole - 1]);
    for (number, len) in lengths.into_iter().enumerate() {
        copied(&vm).set_len(len).unwrap();
        let mode = MODES[number % MODES.len()];
        let restored = restore(&vm, mode);
        eprintln!("{len} of {whole} bytes: {}", restored.err.trim());
        assert_eq!(restored.code, 6, "{len} bytes, {mode}: {}", restored.err);
        assert!(restored.err.contains("bad.firn: "), "{len} bytes, {mode}: {}", restored.err);
        nothing_runs(&vm, "bad.firn");
    }
}

/// The file shrinks while its VM runs from it, which is to end by that: it does, and it is known why.
#[test]
fn an_image_that_is_truncated_while_it_is_restored() {
    let mut vm = base();
    for mode in ["lazy", "locality"] {
        let file = copied(&vm);
        let stop = vm.session.path("stop");
        vm.session.arm(Some(&format!("restore.resumed=WAIT:{}", stop.display())));
        let restore = ["restore", "bad.firn", "--mode", mode, "--wait", "--on-error", "kill"];
        let mut restore = vm.session.command(&restore);
        vm.session.arm(None);
        let restore = restore.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        eventually("the guest runs", PATIENCE, || stop.exists());
        file.set_len(HEADER_BYTES).unwrap();
        std::fs::remove_file(&stop).unwrap();
        let restored = Answer::of(restore.wait_with_output().unwrap());
        eprintln!("{mode}: exit {}: {}", restored.code, restored.err.trim());
        assert!([1, 6].contains(&restored.code), "{mode}: {}", restored.err);
        assert!(restored.err.contains("bad.firn"), "{mode}: {}", restored.err);
        nothing_runs(&vm, "bad.firn");
    }
}
