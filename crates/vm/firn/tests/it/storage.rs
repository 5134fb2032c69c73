//! Storage that fails under a running restore: no VM ends by that. It waits, says why, and continues by itself.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Duration;

use firn_image::{HEADER_BYTES, Image};
use serde_json::Value;

use crate::faults::base;
use crate::session::{eventually, kill, text};
use crate::vm::Vm;

const PATIENCE: Duration = Duration::from_secs(120);

/// How a restore loses its storage, and how that is repaired.
#[derive(Clone, Copy, Debug)]
enum Outage {
    /// Reads of the image fail.
    ReadError,
    /// The host has no memory for the guest's pages.
    NoMemory,
    /// The file is cut short, and written anew.
    CutShort,
    /// The file is cut short and taken away; the same image is put in its place.
    TakenAway,
    /// All memory blocks are damaged, and repaired.
    Damaged,
}

const OUTAGES: [Outage; 5] =
    [Outage::ReadError, Outage::NoMemory, Outage::CutShort, Outage::TakenAway, Outage::Damaged];

impl Outage {
    /// Fault points armed for the restore: it waits once the guest may run, and storage fails from then on.
    fn faults(self, begun: &Path, stop: &Path) -> String {
        let wait = format!("restore.resumed=WAIT:{}", text(begun));
        let stop = text(stop);
        match self {
            Self::ReadError => format!("{wait},image.read=EIO:{stop}"),
            Self::NoMemory => format!("{wait},restore.copy=ENOSPC:{stop}"),
            _ => wait,
        }
    }

    /// What the error says.
    fn why(self) -> &'static str {
        match self {
            Self::ReadError => "Input/output error",
            Self::NoMemory => "no memory left for them",
            Self::CutShort | Self::TakenAway => "cannot read",
            Self::Damaged => "is damaged",
        }
    }

    fn begin(self, vm: &Vm) {
        let image = vm.image("bad.firn");
        let file = File::options().write(true).open(&image).unwrap();
        match self {
            Self::ReadError | Self::NoMemory => {
                std::fs::write(vm.session.path("stop"), "").unwrap()
            }
            Self::CutShort => file.set_len(HEADER_BYTES).unwrap(),
            Self::TakenAway => {
                std::fs::rename(&image, vm.image("away.firn")).unwrap();
                file.set_len(HEADER_BYTES).unwrap();
            }
            Self::Damaged => {
                let (from, to) = blocks(&vm.image("base.firn"));
                file.write_all_at(&vec![0x55; (to - from) as usize], from).unwrap();
            }
        }
    }

    fn end(self, vm: &Vm) {
        let whole = std::fs::read(vm.image("base.firn")).unwrap();
        match self {
            Self::ReadError | Self::NoMemory => {}
            Self::TakenAway => std::fs::write(vm.image("bad.firn"), whole).unwrap(),
            Self::CutShort | Self::Damaged => {
                let mut file = File::options().write(true).open(vm.image("bad.firn")).unwrap();
                file.write_all(&whole).unwrap();
            }
        }
    }
}

/// Where in the file its memory blocks are.
fn blocks(image: &Path) -> (u64, u64) {
    let image = Image::open(image).unwrap();
    let end = firn_image::LocalityBlockId(image.locality_blocks());
    (HEADER_BYTES, image.geometry().offset_of(end))
}

/// Restores a copy of the image, which loses its storage as soon as the guest runs. Returns the file that keeps faults on.
fn restore(vm: &mut Vm, outage: Outage) -> std::path::PathBuf {
    std::fs::copy(vm.image("base.firn"), vm.image("bad.firn")).unwrap();
    let (begun, stop) = (vm.session.path("begun"), vm.session.path("stop"));
    // A restore before this one may have left it.
    let _ = std::fs::remove_file(&stop);
    vm.session.arm(Some(&outage.faults(&begun, &stop)));
    let restore = ["restore", "bad.firn", "--name", "web", "--mode", "lazy"];
    let mut restoring = vm.session.command(&restore).spawn().unwrap();
    vm.session.arm(None);
    eventually("the guest runs", PATIENCE, || begun.exists());
    outage.begin(vm);
    std::fs::remove_file(&begun).unwrap();
    assert!(restoring.wait().unwrap().success(), "{outage:?}");
    stop
}

/// Waits until the guest waits, and returns the status.
fn waits(vm: &Vm) -> Value {
    let mut status = Value::Null;
    eventually("the guest waits", PATIENCE, || {
        status = vm.session.status("web");
        assert_ne!(status["state"], "ended", "{status}");
        status["state"] == "waiting"
    });
    status
}

#[test]
fn a_vm_waits_for_storage_and_continues() {
    let mut vm = base();
    let count = std::env::var("FIRN_RUNS").ok().and_then(|runs| runs.parse().ok());
    for outage in OUTAGES.into_iter().cycle().take(count.unwrap_or(OUTAGES.len())) {
        let stop = restore(&mut vm, outage);
        let pid = vm.pid();
        let status = waits(&vm);
        let error = status["waiting"]["error"].as_str().unwrap();
        assert!(error.contains(outage.why()), "{outage:?}: {error}");
        assert!(status["waiting"]["path"].as_str().unwrap().ends_with("bad.firn"), "{status}");
        assert!(status["waiting"]["address"].as_str().unwrap().starts_with("0x"), "{status}");
        let ls = vm.session.firn(&["ls"]).succeeds().out;
        assert!(ls.contains("waiting for storage") && ls.contains(outage.why()), "{ls}");
        outage.end(&vm);
        let _ = std::fs::remove_file(&stop);
        vm.is_well();
        vm.session.firn(&["status", "web", "--watch"]).succeeds();
        let status = vm.session.status("web");
        assert_eq!((&status["state"], status["pid"].as_i64()), (&"running".into(), Some(pid)));
        assert_eq!(status["recoveries"], 0, "{outage:?}");
        vm.is_well();
        eprintln!("{outage:?}: {error}");
        vm.session.firn(&["stop", "web"]).succeeds();
    }
}

fn kill_each(status: &Value, roles: &[&str]) {
    roles.iter().for_each(|role| kill(status[*role].as_i64().unwrap()));
}

/// The image has no name any more, and its supervisor dies: the next one has the file from a guard.
#[test]
fn an_image_that_is_deleted_while_its_supervisor_dies() {
    let mut vm = base();
    restore(&mut vm, Outage::NoMemory);
    std::fs::remove_file(vm.image("bad.firn")).unwrap();
    let status = waits(&vm);
    kill_each(&status, &["supervisor_pid"]);
    // The successor is not armed: with the file that the guard has kept, all memory comes.
    vm.is_well();
    vm.session.firn(&["status", "web", "--watch"]).succeeds();
    assert_eq!(vm.session.status("web")["state"], "running");
    vm.session.firn(&["stop", "web"]).succeeds();
}

/// When all processes that had the image are dead, the VM waits for the file, and continues when it is put back.
#[test]
fn an_image_that_no_process_has_is_waited_for() {
    let mut vm = base();
    restore(&mut vm, Outage::NoMemory);
    std::fs::rename(vm.image("bad.firn"), vm.image("away.firn")).unwrap();
    let status = waits(&vm);
    kill_each(&status, &["guard_pid", "watcher_pid", "supervisor_pid"]);
    let error = waits(&vm)["waiting"]["error"].as_str().unwrap().to_owned();
    assert!(error.contains("bad.firn"), "{error}");
    std::fs::rename(vm.image("away.firn"), vm.image("bad.firn")).unwrap();
    vm.is_well();
    vm.session.firn(&["status", "web", "--watch"]).succeeds();
    vm.session.firn(&["stop", "web"]).succeeds();
}
