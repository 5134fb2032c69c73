//! Checkpoints of what changed: chains of images, and what follows the guest's writes in between.

use firn_image::Image;
use serde_json::Value;

use crate::faults::{DRAINED, base, base_past_the_page_cache, points};
use crate::parts::part_of;
use crate::session::{Session, kill, text};
use crate::vm::{LOAD, Vm, userfaultfds};

/// Saves, and compares the image with memory as it was at the cut.
#[track_caller]
fn save(session: &Session, image: &str, how: &[&str]) -> Value {
    let reference = format!("{image}.ram");
    let save = [&["checkpoint", "web", "-o", image, "--reference", &reference], how].concat();
    let saved = session.json(&save);
    is_exact(session, image);
    saved
}

#[track_caller]
fn is_exact(session: &Session, image: &str) {
    let reference = format!("{image}.ram");
    session.firn(&["image", "compare", image, &reference]).succeeds();
    session.firn(&["image", "verify", image]).succeeds();
}

#[track_caller]
fn inherited(saved: &Value) -> f64 {
    let of = |key: &str| saved["report"][key].as_f64().unwrap();
    of("blocks_inherited") / of("blocks_total")
}

/// Writers that write all the time, 48 MiB of a guest of 192.
#[test]
fn each_image_of_a_chain_has_the_memory_at_its_cut() {
    let vm = Vm::resumed();
    let session = &vm.session;
    save(session, "d0.firn", &["--strategy", "pre-copy"]);
    for n in 1..=4 {
        let parent = format!("d{}.firn", n - 1);
        let saved = save(session, &format!("d{n}.firn"), &["--parent", &parent]);
        eprintln!("{}", saved["report"]);
        assert!(inherited(&saved) > 0.5, "{saved}");
        vm.is_well();
        assert_eq!(userfaultfds(vm.pid()), 1, "writes are followed");
    }
    (0..=4).for_each(|n| is_exact(session, &format!("d{n}.firn")));
    let chain = session.json(&["image", "chain", "d4.firn"]);
    assert_eq!(chain["depth"], 5, "{chain}");
    session.firn(&["stop", "web"]).succeeds();
    for (image, mode) in
        [("d4", "lazy"), ("d4", "locality"), ("d4", "auto"), ("d4", "eager"), ("d2", "auto")]
    {
        let image = format!("{image}.firn");
        session.firn(&["restore", &image, "--name", "web", "--mode", mode, "--wait"]).succeeds();
        vm.is_well();
        assert_eq!(userfaultfds(vm.pid()), 0);
        session.firn(&["stop", "web"]).succeeds();
    }
}

#[test]
fn a_chain_becomes_one_image_or_a_shorter_chain() {
    let vm = Vm::resumed();
    let session = &vm.session;
    save(session, "d0.firn", &["--strategy", "pre-copy"]);
    save(session, "d1.firn", &["--parent", "d0.firn"]);
    save(session, "d2.firn", &["--parent", "d1.firn"]);
    session.firn(&["stop", "web"]).succeeds();
    session.firn(&["image", "merge", "d2.firn", "-o", "whole.firn"]).succeeds();
    session.firn(&["image", "compare", "whole.firn", "d2.firn.ram"]).succeeds();
    session
        .firn(&["image", "rebase", "d2.firn", "--parent", "d0.firn", "-o", "short.firn"])
        .succeeds();
    session.firn(&["image", "compare", "short.firn", "d2.firn.ram"]).succeeds();
    assert_eq!(session.json(&["image", "chain", "short.firn"])["depth"], 2);
    // In its place, as the oldest of a chain is when it gets too long: what builds on it does not notice.
    session.firn(&["image", "merge", "d1.firn"]).succeeds();
    std::fs::remove_file(vm.image("d0.firn")).unwrap();
    is_exact(session, "d1.firn");
    is_exact(session, "d2.firn");
    session.firn(&["restore", "d2.firn", "--name", "web", "--wait"]).succeeds();
    vm.is_well();
    session.firn(&["stop", "web"]).succeeds();
    let failed =
        session.firn(&["restore", "short.firn", "--name", "web"]).fails(6, "short.firn has only");
    assert!(failed.err.contains("d0.firn"), "{}", failed.err);
    // Moved away, it is found where one says it is, and another image is not taken for it.
    std::fs::create_dir(vm.image("archive")).unwrap();
    std::fs::rename(vm.image("d1.firn"), vm.image("archive/old.firn")).unwrap();
    session.firn(&["image", "verify", "d2.firn"]).fails(6, "d2.firn has only");
    session.firn(&["image", "rebase", "d2.firn", "--moved", "whole.firn"]).fails(6, "identity");
    session.firn(&["image", "rebase", "d2.firn", "--moved", "archive/old.firn"]).succeeds();
    is_exact(session, "d2.firn");
}

/// After a save of another strategy nothing is known of the guest's writes.
#[test]
fn without_a_tracker_memory_is_compared() {
    let vm = Vm::resumed();
    let session = &vm.session;
    save(session, "d0.firn", &[]);
    for (n, strategy) in ["trace", "cow", "stop", "pre-copy", "pre-copy"].iter().enumerate() {
        let (image, parent) = (format!("d{}.firn", n + 1), format!("d{n}.firn"));
        let saved = save(session, &image, &["--parent", &parent, "--strategy", strategy]);
        eprintln!("{strategy}: {}", saved["report"]);
        assert!(inherited(&saved) > 0.5, "{strategy}: {saved}");
        vm.is_well();
    }
    // From one run to the next: the chain goes on where a restored VM came from.
    session.firn(&["suspend", "web", "-o", "d6.firn", "--parent", "d5.firn"]).succeeds();
    session.firn(&["restore", "d6.firn", "--name", "web", "--wait"]).succeeds();
    vm.is_well();
    let saved = save(session, "d7.firn", &["--parent", "d6.firn"]);
    assert!(inherited(&saved) > 0.5, "{saved}");
    assert_eq!(session.json(&["image", "chain", "d7.firn"])["depth"], 8);
}

#[test]
fn an_unsuitable_parent_is_refused() {
    let vm = base();
    let session = &vm.session;
    session.firn(&["restore", "base.firn", "--name", "web", "--wait"]).succeeds();
    let save = |parent: &str, more: &[&str]| {
        session.firn(&[&["checkpoint", "web", "-o", "new.firn", "--parent", parent], more].concat())
    };
    save("nowhere.firn", &[]).fails(2, "nowhere.firn");
    std::fs::write(vm.image("text"), "no image").unwrap();
    save("text", &[]).fails(6, "too few");
    save("base.firn", &["--block-pages", "4"]).fails(2, "block sizes differ");
    let own = ["checkpoint", "web", "-o", "base.firn", "--parent", "base.firn"];
    session.firn(&own).fails(6, "take the place");
    assert_eq!(session.files("new.firn"), Vec::<String>::new());
    vm.is_well();
    session.firn(&["image", "verify", "base.firn"]).succeeds();
}

/// A successor knows nothing of the guest's writes, and lets go of its memory.
#[test]
fn a_dead_supervisor_costs_a_comparison() {
    let vm = Vm::resumed();
    let session = &vm.session;
    save(session, "d0.firn", &["--strategy", "pre-copy"]);
    kill(session.status("web")["supervisor_pid"].as_i64().unwrap());
    vm.is_well();
    session.firn(&["status", "web"]).succeeds();
    assert_eq!(session.status("web")["recoveries"], 1);
    assert_eq!(userfaultfds(vm.pid()), 0);
    let saved = save(session, "d1.firn", &["--parent", "d0.firn"]);
    assert!(inherited(&saved) > 0.5, "{saved}");
    // Nothing of it stays in a VM that is let go of. That one does not end with the session.
    let pid = vm.pid();
    session.firn(&["detach", "web"]).succeeds();
    let left = userfaultfds(pid);
    kill(pid);
    assert_eq!(left, 0);
}

/// Twelve checkpoints of which four are kept, and then any of those.
#[test]
fn a_series_continues_and_old_images_are_removed() {
    let vm = Vm::resumed();
    let session = &vm.session;
    let every = ["checkpoint", "web", "-o", "web.firn", "--every", "200ms", "--keep", "4"];
    let said = session.firn(&[&["--json"], &every[..], &["--times", "12"]].concat()).succeeds();
    let facts: Vec<Value> =
        said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(facts.len(), 12);
    assert!(facts[1..].iter().all(|facts| inherited(facts) > 0.5), "{facts:?}");
    let mut files = session.files("web-");
    files.sort_unstable();
    let expected: Vec<String> = (8..=12).map(|number| format!("web-{number:06}.firn")).collect();
    assert!(files == expected || files == expected[1..], "{files:?}");
    assert_eq!(session.json(&["image", "chain", "web-000012.firn"])["depth"], files.len());
    // Where it was left, even by another run.
    session.firn(&[&every[..], &["--times", "1"]].concat()).succeeds();
    session.firn(&["stop", "web"]).succeeds();
    for number in [9, 11, 13] {
        let image = format!("web-{number:06}.firn");
        session.firn(&["image", "verify", &image]).succeeds();
        session.firn(&["restore", &image, "--name", "web", "--wait"]).succeeds();
        vm.is_well();
        session.firn(&["stop", "web"]).succeeds();
    }
    let ended = session.firn(&[&every[..], &["--times", "3"]].concat());
    ended.fails(3, "no checkpoint of web");
    session
        .firn(&["checkpoint", "web", "-o", "x", "--every", "1 day"])
        .fails(2, "is not a duration");
}

#[test]
fn killed_anywhere_in_a_pre_copy() {
    let of = ["pre-copy.", "save.stopped", "save.resumed", "image.write", "save.sections"];
    let mut points = points(&of);
    points.sort_by_key(|&point| point == DRAINED);
    let mut vm = base();
    for point in part_of(points) {
        if point == DRAINED {
            vm = base_past_the_page_cache();
        }
        vm.session.arm(Some(point));
        vm.session.firn(&["restore", "base.firn", "--name", "web", "--wait"]).succeeds();
        vm.session.arm(None);
        let how = ["checkpoint", "web", "-o", "new.firn", "--parent", "base.firn"];
        let saved = vm.session.firn(&how);
        let status = vm.session.status("web");
        eprintln!("{point}: exit {}, {status}", saved.code);
        assert_eq!((&status["state"], &status["recoveries"]), (&"running".into(), &1.into()));
        vm.is_well();
        saved.fails(8, "aborted");
        assert_eq!(vm.session.files("new.firn"), Vec::<String>::new());
        assert_eq!(vm.session.files(".new.firn"), Vec::<String>::new());
        save(&vm.session, "after.firn", &["--parent", "base.firn"]);
        std::fs::remove_file(vm.image("after.firn")).unwrap();
        vm.session.firn(&["stop", "web"]).succeeds();
    }
    assert_eq!(Image::open(&vm.image("base.firn")).unwrap().chain_paths().len(), 1);
}

/// The image cannot get its name: the next one still has all that was written.
#[test]
fn writes_are_not_forgotten_with_a_save_that_failed() {
    let mut vm = Vm::new();
    let stop = vm.session.path("stop");
    vm.session.arm(Some(&format!("image.rename=EIO:{}", text(&stop))));
    let mut vm = vm.booted(&LOAD);
    vm.session.arm(None);
    let session = &vm.session;
    save(session, "d0.firn", &["--strategy", "pre-copy"]);
    vm.is_well();
    std::fs::write(&stop, "").unwrap();
    let failing = ["checkpoint", "web", "-o", "taken", "--parent", "d0.firn"];
    session.firn(&failing).fails(1, "Input/output error");
    std::fs::remove_file(&stop).unwrap();
    assert_eq!(session.files("taken"), Vec::<String>::new());
    assert_eq!(session.files(".taken"), Vec::<String>::new());
    vm.is_well();
    let saved = save(session, "d1.firn", &["--parent", "d0.firn"]);
    assert!(inherited(&saved) > 0.5, "{saved}");
    assert_eq!(userfaultfds(vm.pid()), 1);
}
