//! VMs that are saved to object storage: the object is whole or not there, and no VM ends without one.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use crate::faults::base;
use crate::object_server::ObjectServer;
use crate::session::{Answer, Session, eventually, kill, text};
use crate::vm::Vm;

const PATIENCE: Duration = Duration::from_secs(120);
const WEB: &str = "s3://vms/web.firn";

/// The files that are about to be uploaded.
pub fn spooled(session: &Session) -> Vec<PathBuf> {
    let entries = |path: PathBuf| fs::read_dir(path).into_iter().flatten().flatten();
    let directories = entries(session.state_dir().join("spool"));
    directories.flat_map(|it| entries(it.path())).map(|it| it.path()).collect()
}

pub fn has_spool_directory(session: &Session) -> bool {
    fs::read_dir(session.state_dir().join("spool")).is_ok_and(|mut it| it.next().is_some())
}

/// A VM without disks that was restored with this fault in its supervisor.
pub fn restored_with(vm: &Vm, fault: &str) {
    let mut command = vm.session.command(&["restore", "base.firn", "--mode", "eager", "--wait"]);
    Answer::of(command.env("FIRN_FAULT", fault).output().unwrap()).succeeds();
}

/// Whether no VM runs.
fn has_ended(vm: &Vm) -> bool {
    vm.session.ls().iter().all(|(_, state)| state.starts_with("ended"))
}

fn stop(vm: &Vm) {
    vm.session.firn(&["stop", "web", "--discard"]).succeeds();
}

/// Restores the guest of the object, and checks its memory.
fn is_restored_well(vm: &Vm, server: &ObjectServer<'_>, options: &[&str]) {
    server.firn(&[&["restore", WEB, "--wait"], options].concat()).succeeds();
    vm.is_well();
    stop(vm);
}

/// Removes the object, and what its restore left.
fn forget_object(server: &ObjectServer<'_>) {
    server.firn(&["image", "rm", WEB]).succeeds();
    assert_eq!(server.leftovers(), Vec::<String>::new());
}

#[test]
fn a_vm_is_saved_to_the_store_and_restored_from_it() {
    let vm = Vm::resumed();
    let Some(server) = ObjectServer::start(&vm.session) else { return };
    let facts = server.json(&["checkpoint", "web", "-o", WEB]);
    assert_eq!(facts["image"], WEB);
    let object = fs::metadata(server.object("web.firn")).unwrap().len();
    assert_eq!(facts["upload"]["bytes"], object);
    assert!(!has_spool_directory(&vm.session));
    assert_eq!(vm.session.status("web")["last"]["text"], format!("checkpoint {WEB} is whole"));
    // Nothing has another image's name.
    server.firn(&["checkpoint", "web", "-o", WEB]).fails(4, "another name");
    assert!(!has_spool_directory(&vm.session));
    vm.is_well();
    stop(&vm);
    is_restored_well(&vm, &server, &[]);
    // The cache has all of it, and the VM does not need the object any more.
    server.firn(&["restore", WEB, "--wait"]).succeeds();
    forget_object(&server);
    let facts = server.json(&["suspend", "web", "-o", WEB]);
    assert_eq!(facts["image"], WEB);
    assert!(has_ended(&vm));
    assert!(!has_spool_directory(&vm.session));
    is_restored_well(&vm, &server, &[]);
}

#[test]
fn a_sealed_image_is_saved_to_the_store() {
    let vm = Vm::resumed();
    let Some(server) = ObjectServer::start(&vm.session) else { return };
    fs::write(vm.session.path("one.key"), "7".repeat(64)).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    fs::set_permissions(vm.session.path("one.key"), mode).unwrap();
    let key = ["--key-file", "one.key"];
    server.firn(&[&["checkpoint", "web", "-o", WEB], &key[..]].concat()).succeeds();
    assert!(!has_spool_directory(&vm.session));
    stop(&vm);
    assert_ne!(server.firn(&["restore", WEB]).code, 0);
    is_restored_well(&vm, &server, &key);
}

#[test]
fn an_upload_that_fails_leaves_the_image_and_its_push() {
    let vm = Vm::with_base(false);
    let Some(server) = ObjectServer::start(&vm.session) else { return };
    let (bucket, away) = (vm.session.path("objects/vms"), vm.session.path("objects/away"));
    let begun = vm.session.path("begun");
    let wait = format!("upload.begin=WAIT:{}", text(&begun));
    // The bucket is gone; the program dies before, in and after its last request.
    for fault in [&wait, "store.begun", "store.complete", "store.completed"] {
        restored_with(&vm, fault);
        let saving = server.command(&["checkpoint", "web", "-o", WEB]);
        let is_away = fault == wait;
        let saved = match is_away {
            true => while_waiting(saving, &begun, || fs::rename(&bucket, &away).unwrap()),
            false => Answer::of({ saving }.output().unwrap()),
        };
        vm.is_well();
        let [image] = &spooled(&vm.session)[..] else { unreachable!("{fault}: {}", saved.err) };
        let push = format!("firn image push {} {WEB}", text(image));
        let saved = saved.fails(1, &push);
        assert!(saved.err.contains("and not at"), "{}", saved.err);
        if is_away {
            fs::rename(&away, &bucket).unwrap();
        }
        let has_object = server.object("web.firn").exists();
        assert_eq!(has_object, fault == "store.completed", "{fault}");
        let words: Vec<&str> = push.split(' ').skip(1).collect();
        server.firn(&words).succeeds();
        stop(&vm);
        is_restored_well(&vm, &server, &[]);
        forget_object(&server);
        fs::remove_file(image).unwrap();
        fs::remove_dir(image.parent().unwrap()).unwrap();
    }
}

/// Runs a command, and does something while a fault point waits.
fn while_waiting(
    mut command: std::process::Command,
    begun: &std::path::Path,
    then: impl FnOnce(),
) -> Answer {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    eventually("it waits", PATIENCE, || begun.exists());
    then();
    fs::remove_file(begun).unwrap();
    Answer::of(child.wait_with_output().unwrap())
}

#[test]
fn a_supervisor_killed_anywhere_in_an_upload() {
    let vm = Vm::with_base(false);
    let Some(server) = ObjectServer::start(&vm.session) else { return };
    for (point, has_object) in
        [("upload.begin", false), ("upload.pushed", true), ("upload.recorded", true)]
    {
        restored_with(&vm, point);
        let saved = server.firn(&["checkpoint", "web", "-o", WEB]);
        match point {
            "upload.recorded" => drop(saved.succeeds()),
            _ => drop(saved.fails(8, "and not at")),
        }
        assert_eq!(vm.session.status("web")["recoveries"], 1, "{point}");
        vm.is_well();
        assert_eq!(server.object("web.firn").exists(), has_object, "{point}");
        let [image] = &spooled(&vm.session)[..] else { unreachable!("{point}") };
        server.firn(&["image", "push", text(image), WEB]).succeeds();
        stop(&vm);
        is_restored_well(&vm, &server, &[]);
        forget_object(&server);
        fs::remove_file(image).unwrap();
        fs::remove_dir(image.parent().unwrap()).unwrap();
    }
}

#[test]
fn a_vm_ends_only_if_its_image_is_in_the_store() {
    let vm = Vm::with_base(false);
    let Some(server) = ObjectServer::start(&vm.session) else { return };
    for (point, has_object, ends) in [
        ("upload.begin", false, false),
        ("upload.pushed", true, false),
        ("upload.recorded", true, true),
        // The program dies.
        ("store.begun", false, false),
        ("store.complete", false, false),
    ] {
        restored_with(&vm, point);
        let saved = server.firn(&["suspend", "web", "-o", WEB]);
        assert_eq!(saved.code == 0, ends, "{point}: {}{}", saved.out, saved.err);
        assert_eq!(server.object("web.firn").exists(), has_object, "{point}");
        assert!(!has_spool_directory(&vm.session), "{point}: {:?}", spooled(&vm.session));
        match ends {
            true => assert!(has_ended(&vm)),
            false => {
                vm.is_well();
                stop(&vm);
            }
        }
        // Where there is none, the next upload removes what is left of this one.
        if has_object {
            is_restored_well(&vm, &server, &[]);
            forget_object(&server);
        }
    }
}

#[test]
fn a_checkpoint_continues_without_its_command() {
    let vm = Vm::with_base(false);
    let Some(server) = ObjectServer::start(&vm.session) else { return };
    let begun = vm.session.path("begun");
    restored_with(&vm, &format!("upload.begin=WAIT:{}", text(&begun)));
    let killed = |command: &[&str]| {
        let mut saving = server.command(command);
        let mut saving = saving.stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        eventually("it waits", PATIENCE, || begun.exists());
        kill(i64::from(saving.id()));
        saving.wait().unwrap();
        // The supervisor notices that the client is gone.
        std::thread::sleep(Duration::from_millis(200));
        fs::remove_file(&begun).unwrap();
    };
    killed(&["checkpoint", "web", "-o", WEB]);
    let is_whole = || !has_spool_directory(&vm.session);
    eventually("it is uploaded", PATIENCE, is_whole);
    vm.is_well();
    // Unless the user wants it to end with the command. Then nothing is left.
    restart_with(&vm, &begun);
    killed(&["checkpoint", "web", "-o", "s3://vms/second.firn", "--cancel"]);
    eventually("it is removed", PATIENCE, || !has_spool_directory(&vm.session));
    assert!(!server.object("second.firn").exists());
    vm.is_well();
    stop(&vm);
    is_restored_well(&vm, &server, &[]);
}

/// The same VM, whose supervisor passes the fault point for the first time.
fn restart_with(vm: &Vm, begun: &std::path::Path) {
    stop(vm);
    restored_with(vm, &format!("upload.begin=WAIT:{}", text(begun)));
}

#[test]
fn what_a_store_cannot_have_is_refused_before_the_vm_is_saved() {
    let vm = base();
    let Some(server) = ObjectServer::start(&vm.session) else { return };
    vm.session.firn(&["restore", "base.firn", "--mode", "eager", "--wait"]).succeeds();
    let refused = |options: &[&str], code: i32, why: &str| {
        server.firn(&[&["checkpoint", "web"], options].concat()).fails(code, why);
        assert!(!has_spool_directory(&vm.session), "{options:?}");
    };
    refused(&["-o", WEB, "--parent", "base.firn"], 2, "without a parent");
    refused(&["-o", "new.firn", "--parent", WEB], 2, "firn image pull");
    refused(&["-o", WEB, "--every", "1s"], 2, "--every makes images");
    refused(&["-o", "new.firn", "--spool", "."], 2, "--spool is for images");
    refused(&["-o", WEB, "--spool", "missing"], 2, "missing");
    refused(&["-o", "s3://vms/"], 2, "add the name of the image");
    refused(&["-o", "https://host.invalid/web.firn"], 2, "can only be read");
    refused(&["-o", WEB], 5, "snapshots of the VM's disks");
    assert_eq!(vm.session.files("new"), Vec::<String>::new());
    assert!(!server.object("web.firn").exists());
    let spool = vm.session.path("own");
    fs::create_dir(&spool).unwrap();
    let facts = ["checkpoint", "web", "-o", WEB, "--disks", "reference", "--spool", "own"];
    server.firn(&facts).succeeds();
    assert_eq!(fs::read_dir(&spool).unwrap().count(), 0);
    vm.is_well();
    let mut denied = server.command(&["checkpoint", "web", "-o", "s3://vms/b.firn"]);
    denied.env("AWS_SECRET_ACCESS_KEY", "hush-wrong");
    let denied = Answer::of(denied.output().unwrap()).fails(7, "denied access");
    assert!(!denied.err.contains("hush"), "{}", denied.err);
}
