//! The limits that a user sets for a save or a restore: how much it writes or reads in a second, and how
//! long it takes.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::session::{eventually, kill};
use crate::vm::Vm;

const PATIENCE: Duration = Duration::from_secs(120);
const MIB: f64 = (1 << 20) as f64;
/// What a save may hold in buffers when it begins, and what the guest's own writes add.
const BURST: f64 = 4.0 * MIB;

fn boot() -> Vm {
    Vm::new().booted(&["--mib", "48", "--rate", "500"])
}

/// The bytes of an image, and the seconds that its save took.
fn bytes_and_seconds(saved: &Value) -> (f64, f64) {
    let of = |key: &str| saved["report"][key].as_f64().unwrap();
    (of("image_bytes"), of("total_ms") / 1000.0)
}

#[test]
fn a_save_writes_no_faster_than_it_may() {
    let vm = boot();
    let session = &vm.session;
    for strategy in ["trace", "cow", "pre-copy"] {
        let save = ["checkpoint", "web", "-o", "web.firn", "--strategy", strategy];
        let free = bytes_and_seconds(&session.json(&save));
        let saved = session.json(&[&save[..], &["--bandwidth", "12M"]].concat());
        let (bytes, seconds) = bytes_and_seconds(&saved);
        eprintln!("{strategy}: {:.1} MiB in {seconds:.2} s; without limit {free:?}", bytes / MIB);
        assert!(bytes > 30.0 * MIB, "too little to see a limit: {saved}");
        assert!(bytes - BURST <= 12.0 * MIB * seconds, "{strategy}: {saved}");
        session.firn(&["image", "verify", "web.firn"]).succeeds();
        vm.is_well();
    }
}

/// A limit holds no one up who wants to end the save.
#[test]
fn a_limited_save_can_be_cancelled_and_others_be_refused() {
    let vm = boot();
    let session = &vm.session;
    let slow = ["checkpoint", "web", "-o", "slow.firn", "--bandwidth", "64K", "--cancel"];
    let mut saving = crate::hypervisor_dies::start(&vm, &slow);
    eventually("the save", PATIENCE, || session.status("web")["state"] == "saving");
    saving.kill().unwrap();
    saving.wait().unwrap();
    eventually("its end", PATIENCE, || session.status("web")["state"] == "running");
    assert!(!session.path("slow.firn").exists());
    let refused = |options: &[&str], why: &str| {
        let save = ["checkpoint", "web", "-o", "no.firn"];
        session.firn(&[&save[..], options].concat()).fails(2, why);
    };
    refused(&["--bandwidth", "12M", "--strategy", "stop"], "--bandwidth does not apply");
    refused(&["--finish-within", "1m", "--strategy", "pre-copy"], "--finish-within does not apply");
    refused(&["--bandwidth", "1K"], "64K per second at least");
    refused(&["--finish-within", "0s"], "a time above 0");
    let within = ["checkpoint", "web", "-o", "in-time.firn", "--finish-within", "100ms"];
    session.firn(&within).succeeds();
    session.firn(&["image", "verify", "in-time.firn"]).succeeds();
    vm.is_well();
}

/// A guest that is paused requests nothing: all that is read is the background fill. Its limit holds
/// for the next supervisor too.
#[test]
fn a_restore_reads_no_faster_than_it_may() {
    let vm = Vm::resumed();
    let session = &vm.session;
    let qmp = session.runtime_dir().join("web/qmp.sock");
    crate::restorable::execute(&qmp, &[("stop", Value::Null)]);
    session.firn(&["checkpoint", "web", "-o", "web.firn", "--codec", "none"]).succeeds();
    session.firn(&["stop", "web"]).succeeds();
    let bytes = std::fs::metadata(session.path("web.firn")).unwrap().len() as f64;
    assert!(bytes > 40.0 * MIB, "too little to see a limit: {bytes}");
    let eager = ["restore", "web.firn", "--mode", "eager", "--bandwidth", "8M"];
    session.firn(&eager).fails(2, "--mode eager has none");
    let began = Instant::now();
    let restore = ["restore", "web.firn", "--mode", "locality", "--bandwidth", "8M"];
    assert_eq!(session.json(&restore)["bandwidth"], 8 << 20);
    kill(session.status("web")["supervisor_pid"].as_i64().unwrap());
    eventually("the memory", PATIENCE, || session.status("web")["progress"].is_null());
    let seconds = began.elapsed().as_secs_f64();
    eprintln!("{:.1} MiB in {seconds:.1} s", bytes / MIB);
    assert_eq!(session.status("web")["recoveries"], 1);
    assert!(bytes - 2.0 * BURST <= 8.0 * MIB * seconds, "{bytes} bytes in {seconds} s");
    crate::restorable::execute(&qmp, &[("cont", Value::Null)]);
    vm.is_well();
}
