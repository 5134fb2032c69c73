//! Disks go back with memory: each image has them as they were at its cut, and each VM writes to files of its own.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use crate::faults::base;
use crate::parts::part_of;
use crate::session::{Session, eventually, text};
use crate::vm::{Vm, qemu_img};

const PATIENCE: Duration = Duration::from_secs(60);

/// The files of drives in what a save says of them.
fn drives(saved: &Value, which: &str) -> Vec<PathBuf> {
    let drives = saved["drives"].as_array().unwrap();
    drives.iter().map(|drive| drive[which].as_str().unwrap().into()).collect()
}

fn contents(files: &[PathBuf]) -> Vec<Vec<u8>> {
    files.iter().map(|file| std::fs::read(file).unwrap()).collect()
}

/// Long enough for the guest to look at some hundred blocks of each disk.
fn let_it_work() {
    std::thread::sleep(Duration::from_secs(2));
}

#[test]
fn a_guest_never_finds_a_disk_that_is_older_or_newer_than_its_memory() {
    let vm = Vm::boot_with_disks();
    let session = &vm.session;
    let mut kept = Vec::new();
    for strategy in ["trace", "cow", "pre-copy", "stop"] {
        let image = format!("{strategy}.firn");
        let saved = session.json(&["checkpoint", "web", "-o", &image, "--strategy", strategy]);
        eprintln!("{strategy}: {}", saved["report"]["pause"]);
        let files = drives(&saved, "kept");
        assert_eq!(files.len(), 2, "{saved}");
        kept.push((image, contents(&files), files));
        let_it_work();
        vm.is_well();
    }
    session.firn(&["suspend", "web", "-o", "end.firn"]).succeeds();
    kept.push(("end.firn".to_owned(), Vec::new(), Vec::new()));
    // Back to any of them, also twice to the same.
    for (image, before, files) in kept.iter().chain(&kept[..1]) {
        session.firn(&["restore", image, "--name", "web", "--wait"]).succeeds();
        let_it_work();
        vm.is_well();
        let stopped = session.json(&["stop", "web", "--discard"]);
        assert_eq!(stopped["overlays"], serde_json::json!([]));
        assert!(*before == contents(files), "{image}: its disks were written to");
    }
}

#[test]
fn written_overlays_are_kept_or_discarded_as_the_option_states() {
    let vm = Vm::boot_with_disks();
    let session = &vm.session;
    session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
    let stopped = session.json(&["stop", "web"]);
    let left = stopped["overlays"].as_array().unwrap();
    assert_eq!(left.len(), 2, "{stopped}");
    left.iter().for_each(|path| assert!(Path::new(path.as_str().unwrap()).exists(), "{path}"));
    let before = session.files("disk");
    let restored = session.firn(&["restore", "web.firn", "--wait"]).succeeds();
    assert!(restored.out.contains("it writes to "), "{}", restored.out);
    assert_eq!(session.files("disk").len(), before.len() + 2);
    let status = session.status("web");
    assert_eq!(status["overlays"].as_array().unwrap().len(), 2, "{status}");
    session.firn(&["stop", "web", "--discard"]).succeeds();
    assert_eq!(session.files("disk"), before);
    // Elsewhere, and on the image's own.
    std::fs::create_dir(session.path("elsewhere")).unwrap();
    session.firn(&["restore", "web.firn", "--disk-dir", "elsewhere", "--wait"]).succeeds();
    assert_eq!(std::fs::read_dir(session.path("elsewhere")).unwrap().count(), 2);
    vm.is_well();
    session.firn(&["stop", "web", "--discard"]).succeeds();
    assert_eq!(std::fs::read_dir(session.path("elsewhere")).unwrap().count(), 0);
    session.firn(&["restore", "web.firn", "--disks", "in-place", "--wait"]).succeeds();
    let_it_work();
    vm.is_well();
    assert_eq!(session.files("disk"), before);
    session.firn(&["stop", "web"]).succeeds();
    session.firn(&["restore", "web.firn"]).fails(5, "disk0.raw has changed since the checkpoint");
}

/// What the tests here go by: without the cut, this guest does find out.
#[test]
fn a_disk_that_went_on_alone_is_noticed() {
    let vm = Vm::boot_with_disks();
    let session = &vm.session;
    session.firn(&["checkpoint", "web", "-o", "web.firn", "--disks", "reference"]).succeeds();
    let_it_work();
    session.firn(&["stop", "web"]).succeeds();
    session.firn(&["restore", "web.firn"]).fails(5, "disk0.raw has changed since the checkpoint");
    session.firn(&["restore", "web.firn", "--force"]).succeeds();
    let_it_work();
    let wrong = |number| vm.disk_report(number)["wrong"].as_u64().unwrap();
    assert!(wrong(0) > 0 && wrong(1) > 0, "{} {}", wrong(0), wrong(1));
}

/// A VM without a guest, whose disk is given in these words.
fn bare(session: &Session, disk: &[&str]) {
    let args = ["-M", "pc", "-m", "64", "-nodefaults", "-display", "none"];
    let run = [&["run", "web", "--", "qemu-system-x86_64"], &args[..], disk].concat();
    session.firn(&run).succeeds();
}

#[test]
fn a_disk_may_be_given_in_any_form() {
    let vm = Vm::new();
    let session = &vm.session;
    let forms: [&[&str]; 4] = [
        &["-drive", "file=disk.img,format=raw,if=virtio"],
        &["-hda", "disk.img"],
        &[
            "-blockdev",
            "driver=file,node-name=f0,filename=disk.img",
            "-blockdev",
            "driver=raw,node-name=d0,file=f0",
            "-device",
            "virtio-blk-pci,drive=d0",
        ],
        &[
            "-blockdev",
            r#"{"driver":"raw","node-name":"d0","file":{"driver":"file","filename":"disk.img"}}"#,
            "-device",
            "virtio-blk-pci,drive=d0,id=first",
        ],
    ];
    for disk in forms {
        // What the last one left is another disk's.
        session
            .files("")
            .iter()
            .filter(|it| it.starts_with("disk.img") || it.starts_with(".firn"))
            .for_each(|name| std::fs::remove_file(session.path(name)).unwrap());
        std::fs::write(session.path("disk.img"), vec![0; 1 << 20]).unwrap();
        bare(session, disk);
        let saved = session.json(&["checkpoint", "web", "-o", "web.firn"]);
        assert_eq!(drives(&saved, "kept"), [session.path("disk.img")], "{saved}");
        let first = drives(&saved, "goes_on_with");
        let saved = session.json(&["checkpoint", "web", "-o", "later.firn"]);
        assert_eq!(drives(&saved, "kept"), first, "{saved}");
        session.firn(&["stop", "web", "--discard"]).succeeds();
        for image in ["web.firn", "later.firn", "web.firn"] {
            session.firn(&["restore", image, "--wait"]).succeeds();
            session.firn(&["checkpoint", "web", "-o", "again.firn"]).succeeds();
            session.firn(&["stop", "web", "--discard"]).succeeds();
            session.firn(&["restore", "again.firn", "--wait"]).succeeds();
            session.firn(&["stop", "web", "--discard"]).succeeds();
        }
    }
}

/// QEMU names what lies below by all that it consists of once it takes it for something else than the file says.
#[test]
fn many_layers_are_as_good_as_one_up_to_a_limit() {
    let vm = Vm::new();
    let session = &vm.session;
    std::fs::write(session.path("disk.img"), vec![0; 1 << 20]).unwrap();
    bare(session, &["-drive", "file=disk.img,format=raw,if=virtio"]);
    let save = |image: &str| session.firn(&["checkpoint", "web", "-o", image, "--strategy", "cow"]);
    // An image that takes the place of another one frees its layer.
    for _ in 1..40 {
        save("web.firn").succeeds();
    }
    let layers = session.files("disk").len();
    assert!(layers <= 17, "{layers}");
    let mut number = 0;
    let refused = loop {
        let saved = save(&format!("{number}.firn"));
        if saved.code != 0 {
            break saved.fails(5, "64 layers lie on each other already");
        }
        number += 1;
        assert!(number < 64, "no limit");
    };
    assert!(refused.err.contains("firn image rm"), "{}", refused.err);
    assert_eq!(session.status("web")["state"], "running");
    session.firn(&["image", "rm", "20.firn", "21.firn", "40.firn"]).succeeds();
    save("more.firn").succeeds();
    session.firn(&["suspend", "web", "-o", "end.firn"]).succeeds();
    for image in ["end.firn", "web.firn", "22.firn", "41.firn", "more.firn"] {
        session.firn(&["restore", image, "--name", "web", "--wait"]).succeeds();
        session.firn(&["stop", "web", "--discard"]).succeeds();
    }
}

#[test]
fn a_disk_that_cannot_be_kept_is_named_before_anything_is_done() {
    let vm = Vm::new();
    let session = &vm.session;
    std::fs::write(session.path("disk.img"), vec![0; 1 << 20]).unwrap();
    bare(session, &["-snapshot", "-drive", "file=disk.img,format=raw,if=virtio"]);
    let before = session.files("");
    let refused = session.firn(&["checkpoint", "web", "-o", "web.firn"]);
    let refused = refused.fails(5, "virtio0: ");
    assert!(refused.err.contains("--disks reference"), "{}", refused.err);
    assert_eq!(session.files(""), before);
    assert_eq!(session.status("web")["state"], "running");
    // What the guest wrote is in a file without a name: a restore would not have it.
    for how in [
        &["checkpoint", "web", "-o", "web.firn", "--disks", "reference"][..],
        &["suspend", "web", "-o", "web.firn"],
    ] {
        session.firn(how).fails(5, "other disks than it has");
        assert_eq!(session.status("web")["state"], "running");
    }
    assert_eq!(session.files(""), before);
    session.firn(&["stop", "web"]).succeeds();
    // A directory that is not there.
    bare(session, &["-drive", "file=disk.img,format=raw,if=virtio"]);
    let refused = session.firn(&["checkpoint", "web", "-o", "web.firn", "--disk-dir", "nowhere"]);
    refused.fails(2, "cannot use nowhere");
    session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
    session.firn(&["stop", "web"]).succeeds();
    let refused = session.firn(&["restore", "web.firn", "--disk-dir", "nowhere"]);
    refused.fails(2, "cannot use nowhere");
    assert_eq!(session.ls(), []);
}

/// What failed saves have put on a drive belongs to the next image, too.
#[test]
fn disk_files_that_an_image_refers_to_are_not_removed() {
    let mut vm = base();
    vm.session.arm(Some("save.sections"));
    vm.session.firn(&["restore", "base.firn", "--name", "web", "--wait"]).succeeds();
    vm.session.arm(None);
    vm.session.firn(&["checkpoint", "web", "-o", "lost.firn"]).fails(8, "aborted");
    let overlays = vm.session.status("web")["overlays"].as_array().unwrap().len();
    assert_eq!(overlays, 4, "two of the restore, and two of the save that came to nothing");
    let_it_work();
    vm.session.firn(&["checkpoint", "web", "-o", "whole.firn"]).succeeds();
    vm.session.firn(&["suspend", "web", "-o", "end.firn"]).succeeds();
    assert_eq!(vm.session.ls(), []);
    for image in ["whole.firn", "end.firn"] {
        vm.session.firn(&["restore", image, "--name", "web", "--wait"]).succeeds();
        let_it_work();
        vm.is_well();
        vm.session.firn(&["stop", "web", "--discard"]).succeeds();
    }
    // A VM on an overlay that is only referred to has it again, and nobody writes to it.
    vm.session.firn(&["restore", "base.firn", "--name", "web", "--wait"]).succeeds();
    let_it_work();
    vm.session.firn(&["suspend", "web", "-o", "named.firn", "--disks", "reference"]).succeeds();
    vm.session.firn(&["restore", "named.firn", "--name", "web", "--wait"]).succeeds();
    let_it_work();
    vm.is_well();
    vm.session.firn(&["stop", "web", "--discard"]).succeeds();
    vm.session.firn(&["restore", "base.firn", "--name", "web", "--wait"]).succeeds();
    let_it_work();
    vm.is_well();
}

/// Firn killed while it works on the disks: what the VM does not write to goes, what it writes to stays.
#[test]
fn killed_with_overlays_half_made() {
    let mut vm = base();
    let clean = vm.session.files("disk");
    for point in part_of([
        "save.disks",
        "save.drives-ready",
        "save.stopped",
        "save.drives-cut",
        "save.sections",
        "save.finished",
    ]) {
        vm.session.arm(Some(point));
        vm.session.firn(&["restore", "base.firn", "--name", "web", "--wait"]).succeeds();
        vm.session.arm(None);
        let saved = vm.session.firn(&["checkpoint", "web", "-o", "new.firn"]);
        eventually("running again", PATIENCE, || vm.session.status("web")["state"] == "running");
        let_it_work();
        vm.is_well();
        let status = vm.session.status("web");
        assert_eq!(status["recoveries"], 1, "{point}");
        let overlays = status["overlays"].as_array().unwrap().len();
        eprintln!("{point}: exit {}, {overlays} overlays", saved.code);
        if saved.code == 0 {
            assert_eq!(overlays, 2, "{point}: those below belong to the image");
            vm.session.firn(&["stop", "web", "--discard"]).succeeds();
            vm.session.firn(&["restore", "new.firn", "--name", "web", "--wait"]).succeeds();
            let_it_work();
            vm.is_well();
        }
        vm.session.firn(&["stop", "web", "--discard"]).succeeds();
        match saved.code {
            0 => {
                let kept = clean.len() + 2;
                assert_eq!(vm.session.files("disk").len(), kept, "{point}");
                forget(&vm, "new.firn");
            }
            _ => assert_eq!(vm.session.files("disk"), clean, "{point}"),
        }
        assert_eq!(vm.session.files("disk"), clean, "{point}");
    }
    for point in ["restore.drives", "restore.spawned", "restore.device-state"] {
        vm.session.arm(Some(point));
        vm.session.firn(&["restore", "base.firn", "--name", "web"]).fails(8, "nothing is left");
        vm.session.arm(None);
        eventually("nothing left", PATIENCE, || vm.session.ls().is_empty());
        assert_eq!(vm.session.files("disk"), clean, "{point}");
    }
}

/// Removes an image and the files that it has kept.
fn forget(vm: &Vm, image: &str) {
    let facts = vm.session.json(&["image", "inspect", image]);
    for drive in facts["meta"]["drives"].as_array().unwrap() {
        std::fs::remove_file(drive["file"].as_str().unwrap()).unwrap();
    }
    std::fs::remove_file(vm.image(image)).unwrap();
}

/// A file system that can share blocks: the VM goes on with its own files, and no overlays pile up.
#[test]
fn files_are_cloned_where_that_can_be_done() {
    let Some(mount) = Btrfs::mount() else {
        firn_skip::skip_test("no btrfs can be made and mounted here (mkfs.btrfs, root)");
        return;
    };
    let vm = Vm::new();
    let session = &vm.session;
    let disk = mount.0.path().join("disk.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", text(&disk), "16M"]);
    let drive = format!("file={},format=qcow2,if=virtio", text(&disk));
    bare(session, &["-drive", &drive]);
    for image in ["a.firn", "b.firn"] {
        let saved = session.json(&["checkpoint", "web", "-o", image]);
        assert_eq!(drives(&saved, "goes_on_with"), std::slice::from_ref(&disk), "{saved}");
        assert_ne!(drives(&saved, "kept"), std::slice::from_ref(&disk), "{saved}");
    }
    let names = std::fs::read_dir(mount.0.path()).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(names.filter(|name| name.starts_with("disk")).count(), 3);
    session.firn(&["stop", "web"]).succeeds();
    session.firn(&["restore", "a.firn", "--wait"]).succeeds();
    session.firn(&["checkpoint", "web", "-o", "c.firn"]).succeeds();
    session.firn(&["stop", "web", "--discard"]).succeeds();
    session.firn(&["restore", "c.firn", "--wait"]).succeeds();
    session.firn(&["stop", "web", "--discard"]).succeeds();
}

/// A small btrfs in a file, mounted; unmounted when dropped. The file, which has no name by then, goes with it.
pub struct Btrfs(pub tempfile::TempDir);

impl Btrfs {
    pub fn mount() -> Option<Self> {
        let file = tempfile::NamedTempFile::new().ok()?;
        file.as_file().set_len(256 << 20).ok()?;
        let dir = tempfile::tempdir().ok()?;
        let run = |program: &str, args: &[&str]| {
            let done = std::process::Command::new(program).args(args).output();
            done.is_ok_and(|done| done.status.success())
        };
        let is_mounted = run("mkfs.btrfs", &["-q", text(file.path())])
            && run("mount", &["-o", "loop", text(file.path()), text(dir.path())]);
        is_mounted.then(|| Self(dir))
    }
}

impl Drop for Btrfs {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(self.0.path()).status();
    }
}
