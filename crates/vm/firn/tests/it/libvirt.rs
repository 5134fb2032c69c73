//! Domains of a libvirt of the test's own.

mod counting_guest;
mod own_libvirt;
mod restore;

use std::time::Duration;

use crate::libvirt::own_libvirt::OwnLibvirt;
use crate::session::{Session, eventually};

/// How long QEMU may take to end, on a busy host.
const PATIENCE: Duration = Duration::from_secs(120);

/// Environment variable with the number of checkpoints of a long run.
const RUNS: &str = "FIRN_RUNS";

fn run_count(few: usize) -> usize {
    std::env::var(RUNS).ok().and_then(|runs| runs.parse().ok()).unwrap_or(few)
}

#[test]
fn a_domain_is_saved_while_it_runs_and_libvirt_notices_nothing() {
    let session = Session::new();
    let Some(libvirt) = OwnLibvirt::start(&session) else { return };
    libvirt.start_domain("web");
    let (shown, before) = (libvirt.shown("web"), libvirt.monitor_state("web"));
    let doctor = session.json(&["doctor", "--libvirt", "web", "--connect", &libvirt.uri()]);
    session.firn(&["attach", "--libvirt", "web", "--connect", &libvirt.uri()]).succeeds();
    assert_eq!(session.ls(), [("web".to_owned(), "running".to_owned())]);
    let status = session.status("web");
    assert_eq!(status["qmp"]["domain"], "web");
    assert_eq!(status["launched"], false);
    assert_eq!(session.json(&["doctor", "web"]), doctor);
    for run in 0..run_count(2) {
        let image = format!("full-{run}.firn");
        session.firn(&["checkpoint", "web", "-o", &image]).succeeds();
        assert_eq!(libvirt.shown("web"), shown, "after checkpoint {run}");
    }
    let mut parent = "full-0.firn".to_owned();
    for run in 0..run_count(2).div_ceil(2) {
        let image = format!("next-{run}.firn");
        session.firn(&["checkpoint", "web", "-o", &image, "--parent", &parent]).succeeds();
        assert_eq!(libvirt.shown("web"), shown, "after incremental checkpoint {run}");
        session.firn(&["image", "verify", &image]).succeeds();
        parent = image;
    }
    libvirt.virsh(&["reboot", "web"]);
    libvirt.virsh(&["suspend", "web"]);
    assert_eq!(session.status("web")["state"], "paused");
    libvirt.virsh(&["resume", "web"]);
    session.firn(&["detach", "web"]).succeeds();
    assert_eq!(libvirt.shown("web"), shown);
    assert_eq!(libvirt.monitor_state("web"), before);
    let inspected = session.json(&["image", "inspect", &parent]);
    let xml = inspected["meta"]["domain_xml"].as_str().unwrap();
    assert!(xml.contains("<name>web</name>"), "{xml}");
    session.firn(&["restore", &parent, "--name", "copy"]).succeeds();
    eventually("the restore", PATIENCE, || session.status("copy")["state"] == "running");
    a_domain_that_does_not_run_is_no_vm(&libvirt);
}

/// As KubeVirt has it: libvirt and QEMU are in a pod, Firn is on the node.
#[test]
fn a_domain_in_a_container_is_saved_from_outside() {
    let session = Session::new();
    let Some(libvirt) = OwnLibvirt::start_in_container(&session) else { return };
    libvirt.start_domain("pod");
    let before = libvirt.ask_guest("pod");
    session.firn(&["attach", "--libvirt", "pod", "--connect", &libvirt.uri()]).succeeds();
    let pid = session.status("pod")["pid"].to_string();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let inner = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap();
    assert_eq!(inner.split_whitespace().count(), 2, "{status}");
    let shown = libvirt.shown("pod");
    session.firn(&["checkpoint", "pod", "-o", "full.firn"]).succeeds();
    session.firn(&["checkpoint", "pod", "-o", "next.firn", "--parent", "full.firn"]).succeeds();
    assert_eq!(libvirt.shown("pod"), shown);
    assert_eq!(libvirt.ask_guest("pod").seed, before.seed);
    session.firn(&["image", "verify", "next.firn"]).succeeds();
    session.firn(&["restore", "next.firn", "--name", "copy"]).succeeds();
    eventually("the restore", PATIENCE, || session.status("copy")["state"] == "running");
    session.firn(&["detach", "pod"]).succeeds();
    assert_eq!(libvirt.shown("pod"), shown);
}

fn a_domain_that_does_not_run_is_no_vm(libvirt: &OwnLibvirt) {
    let session = Session::new();
    let uri = libvirt.uri();
    let attach = |name: &str, domain: &str| {
        session.firn(&["attach", name, "--libvirt", domain, "--connect", &uri])
    };
    attach("none", "none").fails(3, "no domain with matching name 'none'");
    libvirt.define_domain("idle");
    attach("off", "idle").fails(3, "domain idle does not run");
    session
        .firn(&["doctor", "--libvirt", "idle", "--connect", &uri])
        .fails(3, "domain idle does not run");
    libvirt.virsh(&["start", "idle"]);
    attach("first", "idle").succeeds();
    attach("second", "idle").fails(4, "is VM first already");
    session.firn(&["detach", "first"]).succeeds();
    attach("second", &libvirt.virsh(&["domuuid", "idle"])).succeeds();
    libvirt.virsh(&["destroy", "idle"]);
    eventually("the end", PATIENCE, || session.status("second")["state"] == "ended");
    attach("third", "idle").fails(3, "domain idle does not run");
}

#[test]
fn a_libvirt_that_is_not_there_is_named() {
    let session = Session::new();
    let attach = |uri: &str| session.firn(&["attach", "--libvirt", "web", "--connect", uri]);
    attach("xen:///").fails(2, "xen:/// is not a libvirt of this host");
    attach("qemu+unix:///system?socket=/nowhere").fails(7, "cannot connect to libvirt at /nowhere");
    session
        .firn(&["attach", "web", "--connect", "qemu:///system"])
        .fails(2, "were not provided: --libvirt");
    assert!(session.ls().is_empty());
}
