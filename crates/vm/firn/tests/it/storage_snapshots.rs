//! `--disk-snapshot`: a command of the user's makes snapshots of the disks in the pause. The command of these tests copies.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::attached_disks::{OwnQemu, boot, has_word, let_it_work, write_word};
use crate::session::{Session, eventually, text};
use crate::vm::Vm;

const PATIENCE: Duration = Duration::from_secs(120);

/// Logs each call. The snapshot of a file is a file; that of `disk0.raw` a device, if there is a word `device`: it gets its
/// name after the pause, as those of LVM do.
const SCRIPT: &str = r#"
echo "$2 $FIRN_VM $FIRN_SNAPSHOT" >> calls
test ! -e "fail-$2" || { echo "no room in the pool" >&2; exit 5; }
copy=$FIRN_DISK.$FIRN_SNAPSHOT
case $1$2 in
*path) echo "$copy.snapshot" ;;
*create) cp --sparse=always "$FIRN_DISK" "$copy" ;;
devicefinish) ln -s "$(losetup --find --show --read-only "$copy")" "$FIRN_SNAPSHOT_PATH" ;;
filefinish) ln "$copy" "$FIRN_SNAPSHOT_PATH" ;;
deviceremove) losetup --detach "$(readlink "$FIRN_SNAPSHOT_PATH")"; rm -f "$copy" "$FIRN_SNAPSHOT_PATH" ;;
fileremove) rm -f "$copy" "$FIRN_SNAPSHOT_PATH" ;;
esac
"#;

/// A directory with the script. The command runs where the user is.
fn command(session: &Session, kind: &str) -> String {
    std::fs::write(session.path("snapshot"), SCRIPT).unwrap();
    format!("sh snapshot {kind}")
}

/// The actions, oldest first, without those of before.
fn calls(session: &Session) -> Vec<String> {
    let path = session.path("calls");
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let _ = std::fs::remove_file(path);
    text.lines().map(|line| line.split(' ').next().unwrap().to_owned()).collect()
}

fn can_make_devices() -> bool {
    Command::new("losetup").arg("--find").output().is_ok_and(|it| it.status.success())
}

/// Devices are detached when the test ends, however it does.
struct Devices<'a>(&'a Session);

impl Drop for Devices<'_> {
    fn drop(&mut self) {
        for name in self.0.files("disk") {
            if let Ok(device) = std::fs::read_link(self.0.path(&name)) {
                let _ = Command::new("losetup").arg("--detach").arg(device).status();
            }
        }
    }
}

#[test]
fn the_storage_of_disks_makes_their_snapshots() {
    let (vm, mut qemu) = boot();
    drop(vm.control());
    qemu.attach(&vm.session);
    let vm = vm.with_load();
    vm.write_to_disks();
    let session = &vm.session;
    let _devices = Devices(session);
    let mut saves = vec![("file", "files.firn")];
    match can_make_devices() {
        true => saves.push(("device", "devices.firn")),
        false => firn_skip::skip_test("no loop devices here (root)"),
    }
    for (kind, image) in &saves {
        write_word(&vm, image);
        let save = ["checkpoint", "web", "-o", image, "--disk-snapshot", &command(session, kind)];
        let saved = session.json(&save);
        for drive in saved["drives"].as_array().unwrap() {
            assert_eq!(drive["how"], "storage snapshot", "{saved}");
        }
        assert_eq!(calls(session), ["path", "path", "create", "create", "finish", "finish"]);
        let_it_work();
        vm.is_well();
    }
    session.firn(&["detach", "web"]).succeeds();
    write_word(&vm, "newest");
    qemu.power_cycle();
    has_word(&vm, "newest");
    qemu.end();
    for (_, image) in &saves {
        session.firn(&["restore", image, "--name", "web", "--wait"]).succeeds();
        let_it_work();
        vm.is_well();
        has_word(&vm, image);
        session.firn(&["stop", "web", "--discard"]).succeeds();
        session.firn(&["image", "rm", image]).succeeds();
    }
    let left = session.files("disk");
    let is_left = |name: &String| name.ends_with(".snapshot");
    assert_eq!(left.iter().filter(|it| is_left(it)).count(), 2 * saves.len(), "{left:?}");
}

#[test]
fn a_command_that_fails_leaves_no_snapshot() {
    let (mut vm, qemu) = boot();
    drop(vm.control());
    qemu.attach(&vm.session);
    let before = vm.session.files("disk");
    let command = command(&vm.session, "file");
    let save = ["checkpoint", "web", "-o", "new.firn", "--disk-snapshot", &command];
    let cases: [(&str, i32, &[&str]); 3] = [
        ("path", 5, &["path"]),
        ("create", 1, &["path", "path", "create", "remove", "remove"]),
        ("finish", 1, &["path", "path", "create", "create", "finish", "remove", "remove"]),
    ];
    for (action, code, expected) in cases {
        let fault = vm.session.path(&format!("fail-{action}"));
        std::fs::write(&fault, "").unwrap();
        vm.session.firn(&save).fails(code, "no room in the pool");
        std::fs::remove_file(&fault).unwrap();
        assert_eq!(calls(&vm.session), expected, "{action}");
        is_unharmed(&mut vm, &before, action);
    }
    let words = ["checkpoint", "web", "-o", "new.firn", "--disk-snapshot", "echo /dev/null #"];
    vm.session.firn(&words).fails(5, "/dev/null, which is there already");
    vm.session.firn(&[&save[..], &["--disks", "copy"]].concat()).fails(2, "cannot be used with");
}

#[track_caller]
fn is_unharmed(vm: &mut Vm, files: &[String], what: &str) {
    assert_eq!(vm.session.status("web")["state"], "running", "{what}");
    vm.control().run_program(&["true"]).unwrap();
    assert_eq!(vm.session.files("disk"), files, "{what}");
    assert_eq!(vm.session.files("new.firn"), Vec::<String>::new(), "{what}");
}

#[test]
fn killed_while_the_storage_makes_snapshots() {
    let (mut vm, qemu) = boot();
    drop(vm.control());
    let files = vm.session.files("disk");
    for point in ["save.drives-ready", "save.drives-cut", "save.reprotected", "save.tracing"] {
        vm.session.arm(Some(point));
        qemu.attach(&vm.session);
        vm.session.arm(None);
        let command = command(&vm.session, "file");
        let save = ["checkpoint", "web", "-o", "new.firn", "--strategy", "trace"];
        let saved = vm.session.firn(&[&save[..], &["--disk-snapshot", &command]].concat());
        saved.fails(8, "aborted");
        let is_running = || vm.session.status("web")["state"] == "running";
        eventually("running again", PATIENCE, is_running);
        assert_eq!(calls(&vm.session).last().unwrap(), "remove", "{point}");
        is_unharmed(&mut vm, &files, point);
        vm.session.firn(&["detach", "web"]).succeeds();
    }
}

/// A snapshot of the topmost file is not the disk.
#[test]
fn a_disk_of_several_files_is_refused() {
    let vm = Vm::new();
    let session = &vm.session;
    let (base, top) = (session.path("base.raw"), session.path("top.qcow2"));
    std::fs::write(&base, vec![0; 1 << 20]).unwrap();
    let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", text(&base), text(&top)];
    crate::vm::qemu_img(&create);
    let drive = format!("file={},format=qcow2,if=virtio", text(&top));
    let qemu = OwnQemu::bare(session, &["-accel", "tcg", "-drive", &drive]);
    qemu.attach(session);
    let command = command(session, "file");
    let save = ["checkpoint", "web", "-o", "new.firn", "--disk-snapshot", &command];
    session.firn(&save).fails(5, "has 1 backing files");
    assert_eq!(calls(session), Vec::<String>::new());
    assert!(Path::new(&top).exists());
}
