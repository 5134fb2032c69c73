//! Images of domains that are given back to libvirt.

use std::path::Path;

use super::own_libvirt::OwnLibvirt;
use super::{PATIENCE, run_count};
use crate::session::{Answer, Session, eventually};

/// The points at which Firn is killed before the guest runs.
const BEFORE_START: &[&str] = &[
    "restore.drives",
    "libvirt.created",
    "restore.journaled",
    "restore.attached",
    "restore.device-state",
];

/// A domain with an image `web.firn` of it.
struct SavedDomain {
    session: Session,
    libvirt: OwnLibvirt,
}

impl SavedDomain {
    fn save() -> Option<Self> {
        let session = Session::new();
        let libvirt = OwnLibvirt::start(&session)?;
        libvirt.start_domain("web");
        libvirt.ask_guest("web");
        session.firn(&["attach", "--libvirt", "web", "--connect", &libvirt.uri()]).succeeds();
        session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
        Some(Self { session, libvirt })
    }

    fn restore(&self, more: &[&str]) -> Answer {
        let uri = self.libvirt.uri();
        let args = ["restore", "web.firn", "--libvirt", "--connect", &uri];
        self.session.firn(&[&args[..], more].concat())
    }

    /// The file of the only disk of a domain; `inactive` after its next start.
    fn disk(&self, name: &str, inactive: bool) -> String {
        let more: &[&str] = if inactive { &["--inactive"] } else { &[] };
        let list = self.libvirt.virsh(&[&["domblklist", name], more].concat());
        list.split_whitespace().last().unwrap().to_owned()
    }

    /// The count of files of disks that a VM of this name has made, beside images and disks.
    fn overlays(&self, vm: &str) -> usize {
        let dirs = [self.session.path(""), self.libvirt.dir.join("disks")];
        let files = dirs.iter().flat_map(|dir| std::fs::read_dir(dir).unwrap());
        let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.contains(&format!(".{vm}-"))).count()
    }
}

#[test]
fn a_domain_is_given_back_to_libvirt() {
    let Some(saved) = SavedDomain::save() else { return };
    let SavedDomain { session, libvirt } = &saved;
    let before = libvirt.ask_guest("web");
    saved.restore(&["--name", "copy"]).succeeds();
    continues_as_a_domain(&saved, "copy", before.seed);
    let copied = libvirt.ask_guest("copy");
    assert_eq!(copied.seed, before.seed);
    assert_ne!(libvirt.virsh(&["domuuid", "copy"]), libvirt.virsh(&["domuuid", "web"]));
    libvirt.virsh(&["destroy", "copy"]);
    libvirt.virsh(&["undefine", "copy"]);
    nothing_is_left_of_a_failure(&saved);
    libvirt.virsh(&["destroy", "web"]);
    eventually("the end", PATIENCE, || session.status("web")["state"] == "ended");
    nothing_is_left_when_firn_is_killed(&saved);
    for _ in 0..run_count(1) {
        let mode = ["--mode", "eager", "--wait"];
        saved.restore(&mode).succeeds();
        let restored = libvirt.ask_guest("web");
        assert_eq!(restored.seed, before.seed, "the guest has started again");
        assert!(restored.count <= before.count, "it was asked after the checkpoint: {restored:?}");
        libvirt.virsh(&["destroy", "web"]);
        eventually("the end", PATIENCE, || session.status("web")["state"] == "ended");
    }
    firn_is_killed_after_the_start(&saved);
    ends_as_any_domain(&saved);
}

/// The guest runs and remembers, libvirt and Firn manage it.
fn continues_as_a_domain(saved: &SavedDomain, name: &str, seed: u32) {
    let SavedDomain { session, libvirt } = saved;
    assert_eq!(libvirt.virsh(&["domstate", name]), "running");
    let first = libvirt.ask_guest(name);
    assert_eq!(first.seed, seed, "the guest has started again");
    let status = session.status(name);
    assert_eq!(status["qmp"]["domain"], name);
    assert_eq!(status["launched"], false);
    session.firn(&["status", name, "--watch"]).succeeds();
    let (full, next) = (format!("{name}-full.firn"), format!("{name}-next.firn"));
    session.firn(&["checkpoint", name, "-o", &full]).succeeds();
    session.firn(&["checkpoint", name, "-o", &next, "--parent", &full]).succeeds();
    session.firn(&["image", "verify", &next]).succeeds();
    assert!(libvirt.ask_guest(name).count > first.count);
    let disk = saved.disk(name, false);
    assert!(Path::new(&disk).exists() && disk.contains(&format!(".{name}-")), "{disk}");
    assert_eq!(saved.disk(name, true), disk, "its next start");
    let definition = libvirt.virsh(&["dumpxml", "--inactive", name]);
    for word in ["incoming", "memfd", "firn"] {
        assert!(!definition.replace(&disk, "").contains(word), "{word}: {definition}");
    }
}

fn nothing_is_left_of_a_failure(saved: &SavedDomain) {
    let SavedDomain { session, libvirt } = saved;
    let domains = libvirt.domains();
    let pid = session.status("web")["pid"].clone();
    let images = session.json(&["image", "inspect", "web.firn"]);
    assert!(images["meta"]["domain_definition"].is_string());
    // The name of a VM of Firn's, of a domain that runs, and of one that does not run.
    saved.restore(&[]).fails(4, "there is a VM called web already");
    session.firn(&["detach", "web"]).succeeds();
    saved.restore(&[]).fails(4, "libvirt runs a domain web already");
    libvirt.define_domain("other");
    saved.restore(&["--name", "other"]).fails(4, "another domain that is called other");
    libvirt.virsh(&["undefine", "other"]);
    session
        .firn(&["restore", "web.firn", "--name", "x", "--libvirt", "--set", "vnc=:5"])
        .fails(2, "cannot be used with");
    let kept = images["meta"]["drives"][0]["file"].as_str().unwrap();
    let moved = format!("{kept}.moved");
    std::fs::rename(kept, &moved).unwrap();
    saved.restore(&["--name", "x"]).fails(5, "is not there");
    std::fs::rename(&moved, kept).unwrap();
    let nowhere = ["--connect", "qemu+unix:///system?socket=/nowhere"];
    let args = ["restore", "web.firn", "--name", "x", "--libvirt"];
    session.firn(&[&args[..], &nowhere].concat()).fails(7, "cannot connect to libvirt");
    assert_eq!(libvirt.domains(), domains);
    assert_eq!(saved.overlays("x") + saved.overlays("other"), 0);
    session.firn(&["attach", "--libvirt", "web", "--connect", &libvirt.uri()]).succeeds();
    assert_eq!(session.status("web")["pid"], pid, "the domain that runs is left alone");
}

/// Before the guest runs, a restore leaves nothing, and the definition stays.
fn nothing_is_left_when_firn_is_killed(saved: &SavedDomain) {
    let (libvirt, uri) = (&saved.libvirt, saved.libvirt.uri());
    let definition = libvirt.virsh(&["dumpxml", "web"]);
    for point in BEFORE_START {
        let mut command = saved.session.command(&["restore", "web.firn", "--libvirt"]);
        command.args(["--connect", &uri]).env("FIRN_FAULT", point);
        Answer::of(command.output().unwrap()).fails(8, "nothing is left of it");
        let is_listed = || saved.session.ls().iter().any(|(name, _)| name == "web");
        eventually("no VM", PATIENCE, || !is_listed());
        eventually("no domain", PATIENCE, || libvirt.virsh(&["list", "--name"]).is_empty());
        assert_eq!(libvirt.virsh(&["dumpxml", "web"]), definition, "{point}");
        assert_eq!(saved.overlays("web"), 1, "{point}: only the image has a copy");
    }
}

/// Once the guest runs, another supervisor completes the restore.
fn firn_is_killed_after_the_start(saved: &SavedDomain) {
    let (libvirt, uri) = (&saved.libvirt, saved.libvirt.uri());
    let mut command = saved.session.command(&["restore", "web.firn", "--libvirt"]);
    command.args(["--connect", &uri]).env("FIRN_FAULT", "restore.resumed");
    let killed = Answer::of(command.output().unwrap());
    eventually("a successor", PATIENCE, || saved.session.status("web")["recoveries"] == 1);
    eventually("the restore", PATIENCE, || saved.session.status("web")["state"] == "running");
    assert_eq!(libvirt.virsh(&["domstate", "web"]), "running", "{}", killed.err);
    let disk = saved.disk("web", false);
    eventually("the definition", PATIENCE, || saved.disk("web", true) == disk);
    libvirt.ask_guest("web");
}

/// What libvirt does with any domain, it does with this one.
fn ends_as_any_domain(saved: &SavedDomain) {
    let SavedDomain { session, libvirt } = saved;
    let seed = libvirt.ask_guest("web").seed;
    let disk = saved.disk("web", false);
    libvirt.virsh(&["snapshot-create-as", "web", "s", "--disk-only", "--no-metadata"]);
    assert_ne!(saved.disk("web", false), disk);
    libvirt.virsh(&["blockcommit", "web", "vda", "--shallow", "--active", "--pivot", "--wait"]);
    assert_eq!(saved.disk("web", false), disk);
    libvirt.virsh(&["reset", "web"]);
    eventually("another start", PATIENCE, || libvirt.ask_guest("web").seed != seed);
    libvirt.virsh(&["reboot", "web"]);
    libvirt.virsh(&["destroy", "web"]);
    eventually("the end", PATIENCE, || session.status("web")["state"] == "ended");
    libvirt.virsh(&["start", "web"]);
    assert_eq!(saved.disk("web", false), disk);
    libvirt.ask_guest("web");
    libvirt.virsh(&["destroy", "web"]);
    libvirt.virsh(&["undefine", "web"]);
    assert_eq!(libvirt.domains(), Vec::<String>::new());
    saved.restore(&[]).succeeds();
    assert!(libvirt.virsh(&["dumpxml", "web"]).contains("firn:restored"));
    libvirt.ask_guest("web");
}
