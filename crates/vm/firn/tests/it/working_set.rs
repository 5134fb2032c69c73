//! What a guest used before it was saved, and what comes of it.

use std::collections::BTreeSet;
use std::time::Duration;

use firn_image::{BlockOrganization, Image, ListedWorkingSet, ReorderOptions, reorder_image};
use serde_json::Value;

use crate::faults::base;
use crate::session::{Session, eventually, kill};
use crate::vm::{Vm, userfaultfds};

const PATIENCE: Duration = Duration::from_secs(60);

/// Restores an image in the default mode, and looks whether it brought in what was expected to be used, and only that.
#[track_caller]
fn is_brought_in(vm: &Vm, image: &str) {
    let session = &vm.session;
    session.firn(&["restore", image, "--name", "web", "--wait"]).succeeds();
    vm.is_well();
    let record = std::fs::read(session.path("run/web/restore.json")).unwrap();
    let record: Value = serde_json::from_slice(&record).unwrap();
    let runs = record["prefetched"].as_array().unwrap();
    let prefetched: u64 = runs.iter().map(|run| run[1].as_u64().unwrap()).sum();
    let stored = record["stored_pages"].as_u64().unwrap();
    eprintln!("{image}: {prefetched} of {stored} pages were expected to be used");
    // The writers write 2000 pages a second, where a host is not too busy.
    assert!(prefetched > 256, "{prefetched}");
    assert!(prefetched < stored, "{prefetched} of {stored}");
}

/// What the guest uses is in locality blocks that have hardly anything else, however early the sweep
/// copied it.
#[test]
fn the_working_set_is_contiguous_in_the_image() {
    let vm = Vm::resumed();
    // The sweep is over before the guest has touched much.
    let save = ["checkpoint", "web", "-o", "web.firn", "--reference", "web.ram"];
    vm.session.firn(&save).succeeds();
    vm.session.firn(&["image", "compare", "web.firn", "web.ram"]).succeeds();
    let image = Image::open(&vm.image("web.firn")).unwrap();
    let entries: Vec<_> =
        image.working_set().iter().filter_map(|&block| image.entry_of(block)).collect();
    let needed: u64 = entries.iter().map(|(_, entry)| u64::from(entry.stored_len)).sum();
    let ids: BTreeSet<_> = entries.iter().map(|(id, _)| *id).collect();
    let read: u64 = ids.iter().map(|id| image.used_bytes(*id) as u64).sum();
    assert!(entries.len() > 200, "{}", entries.len());
    assert!(read < needed * 3 / 2, "{read} bytes are read for {needed}");
    vm.session.firn(&["stop", "web", "--force"]).succeeds();
    is_brought_in(&vm, "web.firn");
}

/// A golden image: what a restore has learned is in front, so that no later restore waits for it.
#[test]
fn what_a_restore_has_learned_is_stored_together() {
    let vm = Vm::resumed();
    vm.session.firn(&["checkpoint", "web", "-o", "web.firn", "--reference", "web.ram"]).succeeds();
    vm.session.firn(&["stop", "web", "--force"]).succeeds();
    let reorder = ["image", "reorder", "web.firn", "--by", "learned", "-o", "golden.firn"];
    vm.session.firn(&reorder).fails(5, "no restore has learned anything");
    assert!(!vm.image("golden.firn").exists());
    let learn = ["restore", "web.firn", "--name", "web", "--fill", "after-learning"];
    vm.session.firn(&learn).succeeds();
    vm.is_well();
    eventually("it has learned", PATIENCE, || vm.image("web.firn.learned").exists());
    vm.session.firn(&["stop", "web", "--force"]).succeeds();
    vm.session.firn(&reorder).succeeds();
    vm.session.firn(&["image", "compare", "golden.firn", "web.ram"]).succeeds();
    vm.session.firn(&["image", "verify", "golden.firn"]).succeeds();
    let (before, image) =
        (Image::open(&vm.image("web.firn")), Image::open(&vm.image("golden.firn")));
    let (before, image) = (before.unwrap(), image.unwrap());
    let needed = image.working_set();
    assert!(needed.len() > before.working_set().len(), "{}", needed.len());
    let ids: BTreeSet<_> =
        needed.iter().filter_map(|&block| image.entry_of(block)).map(|(id, _)| id.0).collect();
    assert_eq!(ids.last().map(|last| *last as usize + 1), Some(ids.len()), "in front");
    is_brought_in(&vm, "golden.firn");
}

fn recoveries(session: &Session) -> u64 {
    session.status("web")["recoveries"].as_u64().unwrap()
}

#[test]
fn a_suspend_watches_the_guest_first() {
    let vm = Vm::resumed();
    vm.session.firn(&["suspend", "web", "-o", "web.firn"]).succeeds();
    is_brought_in(&vm, "web.firn");
    assert_eq!(userfaultfds(vm.pid()), 0);
}

/// As of a guest that has gone on to something else since: it must cost no more than time.
#[test]
fn a_wrong_working_set_does_no_harm() {
    let vm = base();
    let image = Image::open(&vm.image("base.firn")).unwrap();
    let how = ReorderOptions {
        working_set: ListedWorkingSet::Wrong,
        ..ReorderOptions::for_organization(BlockOrganization::Access)
    };
    reorder_image(&image, &how, &vm.image("wrong.firn"), &|_, _| ()).unwrap();
    let wrong = Image::open(&vm.image("wrong.firn")).unwrap();
    assert!(!wrong.working_set().is_empty());
    assert!(!wrong.working_set().iter().any(|block| image.working_set().contains(block)));
    for mode in ["auto", "working-set"] {
        let how = ["restore", "wrong.firn", "--mode", mode, "--wait", "--no-learn"];
        vm.session.firn(&how).succeeds();
        vm.is_well();
        vm.session.firn(&["stop", "web"]).succeeds();
    }
    assert!(!vm.image("wrong.firn.learned").exists());
}

/// Pages that a restore of an image asked for are brought in by the next.
#[test]
fn a_restore_learns_from_those_before_it() {
    let vm = base();
    let image = Image::open(&vm.image("base.firn")).unwrap();
    let none = ListedWorkingSet::Dropped(100);
    let how = ReorderOptions {
        working_set: none,
        ..ReorderOptions::for_organization(BlockOrganization::Access)
    };
    reorder_image(&image, &how, &vm.image("none.firn"), &|_, _| ()).unwrap();
    let ahead_pages = || {
        vm.session.firn(&["restore", "none.firn", "--mode", "working-set", "--wait"]).succeeds();
        vm.is_well();
        let record = std::fs::read(vm.session.path("run/web/restore.json")).unwrap();
        let record: Value = serde_json::from_slice(&record).unwrap();
        vm.session.firn(&["stop", "web"]).succeeds();
        record["counts"]["ahead_pages"].as_u64().unwrap()
    };
    assert_eq!(ahead_pages(), 0);
    let learned = std::fs::read(vm.image("none.firn.learned")).unwrap();
    let learned: Value = serde_json::from_slice(&learned).unwrap();
    let blocks = learned["blocks"].as_array().unwrap().len() as u64;
    assert!(blocks > 0);
    let ahead = ahead_pages();
    assert!(ahead >= blocks, "{ahead} pages were read ahead, {blocks} blocks were learned");
    // Of another image under the same name nothing is known.
    let other = ReorderOptions { seed: 2, ..how };
    reorder_image(&image, &other, &vm.image("none.firn"), &|_, _| ()).unwrap();
    assert_eq!(ahead_pages(), 0);
}

#[test]
fn a_scanned_guest_can_be_saved_detached_and_attached() {
    let vm = Vm::boot_scanned();
    let session = &vm.session;
    eventually("a scan", PATIENCE, || userfaultfds(vm.pid()) == 1);
    vm.is_well();
    session.firn(&["checkpoint", "web", "-o", "trace.firn", "--reference", "web.ram"]).succeeds();
    session.firn(&["image", "compare", "trace.firn", "web.ram"]).succeeds();
    eventually("a scan again", PATIENCE, || userfaultfds(vm.pid()) == 1);
    // A round or two.
    std::thread::sleep(Duration::from_secs(2));
    let by_bits = ["checkpoint", "web", "-o", "bits.firn", "--working-set", "access-bits"];
    session.firn(&by_bits).succeeds();
    vm.is_well();
    session.firn(&["detach", "web"]).succeeds();
    assert_eq!(userfaultfds(vm.pid()), 0);
    session.firn(&["attach", "web", "--working-set", "access-bits"]).succeeds();
    eventually("a scan of the attached VM", PATIENCE, || userfaultfds(vm.pid()) == 1);
    vm.is_well();
    session.firn(&["stop", "web"]).succeeds();
    for image in ["trace.firn", "bits.firn"] {
        is_brought_in(&vm, image);
        session.firn(&["stop", "web"]).succeeds();
    }
}

#[test]
fn a_supervisor_killed_during_a_scan_is_succeeded() {
    let vm = Vm::boot_scanned();
    let session = &vm.session;
    for delay_ms in [0, 30, 70] {
        eventually("a scan", PATIENCE, || userfaultfds(vm.pid()) == 1);
        std::thread::sleep(Duration::from_millis(delay_ms));
        let before = recoveries(session);
        kill(session.status("web")["supervisor_pid"].as_i64().unwrap());
        eventually("another supervisor", PATIENCE, || recoveries(session) > before);
        vm.is_well();
        session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
        vm.is_well();
    }
    session.firn(&["suspend", "web", "-o", "web.firn"]).succeeds();
    is_brought_in(&vm, "web.firn");
}

#[test]
fn killed_while_it_watches_before_a_suspend() {
    let mut vm = base();
    for point in ["single-scan.begun", "single-scan.unmapped"] {
        vm.session.arm(Some(point));
        vm.session.firn(&["restore", "base.firn", "--mode", "eager", "--wait"]).succeeds();
        vm.session.arm(None);
        vm.session.firn(&["suspend", "web", "-o", "new.firn"]).fails(8, "aborted");
        assert_eq!(recoveries(&vm.session), 1, "{point}");
        vm.is_well();
        assert_eq!(userfaultfds(vm.pid()), 0, "{point}");
        assert!(vm.session.files("new.firn").is_empty(), "{point}");
        vm.session.firn(&["suspend", "web", "-o", "new.firn"]).succeeds();
        vm.session.firn(&["restore", "new.firn", "--wait"]).succeeds();
        vm.is_well();
        vm.session.firn(&["stop", "web"]).succeeds();
        std::fs::remove_file(vm.image("new.firn")).unwrap();
    }
}
