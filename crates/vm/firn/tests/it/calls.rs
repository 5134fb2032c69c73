//! Applications in a guest that call Firn on the host, around the guest's kernel.

use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use firn_lab::guest::accel::Accel;
use firn_lab::guest::{GuestControl, accel};
use serde_json::Value;

use crate::session::{eventually, kill, text};
use crate::vm::Vm;

const PATIENCE: Duration = Duration::from_secs(500);
const KEY: &str = "8f0f6a9d3c0e4b7a5d2c1f9e8b7a6c5d4e3f2a1b0c9d8e7f6a5b4c3d2e1f0a9b";

/// A guest whose application `ledger` may call, for up to so many pages.
fn vm_with(pages: u32, how: &[&str]) -> Vm {
    boot_with(Vm::new(), pages, how)
}

fn boot_with(vm: Vm, pages: u32, how: &[&str]) -> Vm {
    let policy = vm.session.path("policy.toml");
    let entry = format!("[applications.ledger]\nkey = \"{KEY}\"\npages = {pages}\n");
    firn_files::replace_private(&policy, entry.as_bytes()).unwrap();
    vm.booted_with(&[&["--calls", text(&policy)], how].concat())
}

fn vm() -> Vm {
    vm_with(100, &[])
}

fn ledger(control: &mut GuestControl, how: &[&str]) -> Result<Value, String> {
    let key: &[&str] = if how.contains(&"--key") { &[] } else { &["--key", KEY] };
    let words = [&["firn-guest", "ledger"], key, how].concat();
    let ended = control.run_within(&words, "", PATIENCE).unwrap();
    match ended.exit {
        0 => Ok(serde_json::from_str(ended.stdout.lines().last().unwrap()).unwrap()),
        _ => Err(ended.stdout + &ended.stderr),
    }
}

#[test]
fn an_application_receives_its_writes_from_the_host() {
    let vm = vm();
    let mut control = vm.control();
    for how in [&["--pages", "80"][..], &["--pages", "1"], &["--pages", "64", "--whole-pages"]] {
        let done = ledger(&mut control, &[how, &["--transactions", "3000"]].concat()).unwrap();
        eprintln!("{how:?} {done}");
        assert_eq!((done["wrong"].as_u64(), done["blind"].as_u64()), (Some(0), Some(0)), "{done}");
    }
    // Several at a time.
    let jobs = ["one", "two", "three"];
    for (seed, job) in jobs.iter().enumerate() {
        let seed = seed.to_string();
        let words =
            ["firn-guest", "ledger", "--key", KEY, "--transactions", "2000", "--seed", &seed];
        control.spawn_job(job, &words).unwrap();
    }
    for job in jobs {
        let ended = control.wait_job(job, PATIENCE).unwrap();
        assert_eq!(ended.exit, 0, "{job}: {} {}", ended.stdout, ended.stderr);
        assert!(ended.stdout.contains("\"wrong\":0"), "{}", ended.stdout);
    }
}

/// Guest calls, a balloon, and a disk that Firn serves work together. What does not is refused with its reason.
#[test]
fn calls_beside_a_balloon_and_a_served_disk() {
    let vm = Vm::new().with(&["-device", "virtio-balloon-pci,free-page-reporting=on"]);
    let vm = boot_with(vm, 100, &[]);
    let exact = |image: &str, more: &[&str]| {
        let reference = format!("{image}.ram");
        let save = ["checkpoint", "web", "-o", image, "--reference", &reference];
        let pre_copy = ["--strategy", "pre-copy"];
        vm.session.firn(&[&save[..], &pre_copy, more].concat()).succeeds();
        vm.session.firn(&["image", "compare", image, &reference]).succeeds();
    };
    let mut control = vm.control();
    ledger(&mut control, &["--transactions", "500"]).unwrap();
    exact("a.firn", &[]);
    exact("b.firn", &["--parent", "a.firn"]);
    ledger(&mut control, &["--transactions", "500"]).unwrap();
    drop((control, vm));

    let vm = Vm::new();
    let disk = vm.session.path("served.raw");
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let drive = format!("file={},format=raw,if=none,id=d0,firn=on", text(&disk));
    let served = ["-drive", &drive, "-device", "virtio-blk-pci,drive=d0"];
    let vm = vm.with(&["-device", "virtio-balloon-pci"]).with(&served);
    let vm = boot_with(vm, 100, &[]);
    ledger(&mut vm.control(), &["--transactions", "500"]).unwrap();
    let save = ["checkpoint", "web", "-o", "web.firn"];
    vm.session.firn(&save).fails(5, "is served by Firn (firn=on)");
    let address = format!("unix:{}", text(&vm.session.path("standby")));
    vm.session.firn(&["protect", "web", "--to", &address]).fails(5, "(--calls)");
    ledger(&mut vm.control(), &["--transactions", "500"]).unwrap();
}

#[test]
fn a_caller_that_the_policy_lacks_is_refused() {
    let vm = vm();
    let mut control = vm.control();
    let mut refused = |how: &[&str]| ledger(&mut control, how).unwrap_err();
    assert!(refused(&["--name", "intruder"]).contains("no application of this name"));
    let wrong = refused(&["--key", &KEY.replace('8', "7")]);
    assert!(wrong.contains("not the host's"), "{wrong}");
    assert!(refused(&["--pages", "101"]).contains("more than the 100 pages"));
    let log = std::fs::read_to_string(vm.session.runtime_dir().join("web/log")).unwrap();
    assert!(log.contains("refused a call of"), "{log}");
    assert!(!log.contains(KEY), "keys do not get into logs");
    ledger(&mut control, &["--transactions", "500"]).unwrap();
}

/// A save follows the guest's memory by itself, and a supervisor that died knows nothing of calls: what was written meanwhile
/// may be anything, and nothing is missed.
#[test]
fn calls_continue_during_saves_and_after_the_supervisors_death() {
    let vm = vm();
    let mut control = vm.control();
    let words = ["firn-guest", "ledger", "--key", KEY, "--transactions", "0"];
    control.spawn_job("ledger", &words).unwrap();
    let last = |control: &mut GuestControl| -> Value {
        let said = control.wait_output("ledger", "progress", PATIENCE).unwrap();
        serde_json::from_str(said.lines().rfind(|line| line.contains("progress")).unwrap()).unwrap()
    };
    let mut seen = 0;
    let mut goes_on = |control: &mut GuestControl| {
        let more = seen + 200;
        eventually("transactions", PATIENCE, || last(control)["progress"].as_u64() > Some(more));
        let now = last(control);
        seen = now["progress"].as_u64().unwrap();
        assert_eq!(now["wrong"], 0, "{now}");
        now["blind"].as_u64().unwrap()
    };
    assert_eq!(goes_on(&mut control), 0);
    vm.session.firn(&["checkpoint", "web", "-o", "a.firn"]).succeeds();
    let after_trace = goes_on(&mut control);
    assert!(after_trace > 0, "the host can't tell while it saves");
    vm.session.firn(&["checkpoint", "web", "-o", "b.firn", "--strategy", "pre-copy"]).succeeds();
    goes_on(&mut control);
    vm.session.firn(&["checkpoint", "web", "-o", "c.firn", "--parent", "b.firn"]).succeeds();
    goes_on(&mut control);
    kill(vm.session.status("web")["supervisor_pid"].as_i64().unwrap());
    eventually("a successor", PATIENCE, || vm.session.status("web")["recoveries"] == 1);
    goes_on(&mut control);
    // Calls that were under way when it came are blind, and may be told late.
    eventually("the host tells again", PATIENCE, || {
        let before = goes_on(&mut control);
        goes_on(&mut control) == before
    });
    // One at a time can talk to the guest.
    drop(control);
    vm.is_well();
    vm.session.firn(&["stop", "web"]).succeeds();

    // A restored guest finds nobody at first, then a host that does not know it.
    let policy = vm.session.path("policy.toml");
    for image in ["a.firn", "c.firn"] {
        vm.session.firn(&["image", "verify", image]).succeeds();
        let restore = ["restore", image, "--name", "web", "--calls", text(&policy), "--wait"];
        vm.session.firn(&restore).succeeds();
        seen_again(&vm);
        vm.session.firn(&["stop", "web"]).succeeds();
    }
}

fn seen_again(vm: &Vm) {
    let mut control = vm.control();
    let blind = |control: &mut GuestControl| {
        let said = control.wait_output("ledger", "progress", PATIENCE).unwrap();
        let line = said.lines().rfind(|line| line.contains("progress")).unwrap().to_owned();
        let line: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(line["wrong"], 0, "{line}");
        (line["progress"].as_u64().unwrap(), line["blind"].as_u64().unwrap())
    };
    eventually("the host tells again", PATIENCE, || {
        let (before, was_blind) = blind(&mut control);
        eventually("transactions", PATIENCE, || blind(&mut control).0 > before + 200);
        blind(&mut control).1 == was_blind
    });
    drop(control);
    vm.is_well();
}

#[test]
fn a_policy_that_is_none_is_named() {
    let vm = Vm::new();
    let policy = vm.session.path("policy.toml");
    let run = ["run", "web", "--calls", text(&policy), "--", "qemu-system-x86_64"];
    vm.session.firn(&run).fails(2, "policy.toml");
    let write = |text: &str| firn_files::replace_private(&policy, text.as_bytes()).unwrap();
    write("\n[applications.ledger]\nkey = \"abc\"\n");
    vm.session.firn(&run).fails(2, "a key is 64 hexadecimal digits");
    write("\n[applications.ledger]\nkeys = \"abc\"\n");
    vm.session.firn(&run).fails(2, "line 3");
    // It has keys: others must not read it.
    std::fs::set_permissions(&policy, std::fs::Permissions::from_mode(0o640)).unwrap();
    vm.session.firn(&run).fails(2, "has mode 0640: `chmod 600");
}

/// Random programs in the guest, compared there with the same on plain memory.
fn programs(control: &mut GuestControl, tracker: &str) {
    let words = ["firn-guest", "programs", "--tracker", tracker, "--key", KEY];
    let ended = control.run_within(&words, "", Duration::from_secs(500)).unwrap();
    assert_eq!(ended.exit, 0, "{tracker}: {} {}", ended.stdout, ended.stderr);
    let done: Value = serde_json::from_str(ended.stdout.lines().last().unwrap()).unwrap();
    assert!(done["transactions"].as_u64() >= Some(10_000), "{done}");
}

#[test]
fn the_host_reports_exactly_the_pages_of_random_programs() {
    programs(&mut vm_with(4096, &[]).control(), "pt_host");
}

#[test]
fn recorded_stores_are_exactly_those_of_random_programs() {
    if accel::choose_accel().accel != Accel::Tcg {
        return firn_skip::skip_test("stores are noted where QEMU emulates");
    }
    let vm = vm_with(4096, &["--stores"]);
    programs(&mut vm.control(), "emul_host");
}

/// Whatever happens to the VM or to Firn, what is noted is what was written, or a call tells.
#[test]
fn stores_are_recorded_during_saves_and_after_the_supervisors_death() {
    if accel::choose_accel().accel != Accel::Tcg {
        return firn_skip::skip_test("stores are noted where QEMU emulates");
    }
    let vm = vm_with(100, &["--stores"]);
    let mut control = vm.control();
    let noting: &[&str] = &["--tracker", "emul_host", "--no-undo"];
    let done = ledger(&mut control, &[noting, &["--transactions", "3000"]].concat()).unwrap();
    eprintln!("{done}");
    assert_eq!((done["wrong"].as_u64(), done["blind"].as_u64()), (Some(0), Some(0)), "{done}");
    assert!(done["called"].as_u64() < Some(10), "noted, but for the first: {done}");

    let words = ["firn-guest", "ledger", "--key", KEY, "--transactions", "0"];
    control.spawn_job("ledger", &[&words, &["--tracker", "emul_host"][..]].concat()).unwrap();
    let last = |control: &mut GuestControl| -> Value {
        let said = control.wait_output("ledger", "progress", PATIENCE).unwrap();
        serde_json::from_str(said.lines().rfind(|line| line.contains("progress")).unwrap()).unwrap()
    };
    // Noted again: two hundred transactions and no call.
    let noted = |control: &mut GuestControl| {
        eventually("notes", PATIENCE, || {
            let before = last(control);
            let wanted = before["progress"].as_u64().map(|count| count + 200);
            eventually("transactions", PATIENCE, || last(control)["progress"].as_u64() > wanted);
            let after = last(control);
            assert_eq!(after["wrong"], 0, "{after}");
            after["called"] == before["called"]
        });
    };
    noted(&mut control);
    vm.session.firn(&["checkpoint", "web", "-o", "a.firn"]).succeeds();
    noted(&mut control);
    vm.session.firn(&["checkpoint", "web", "-o", "b.firn", "--strategy", "pre-copy"]).succeeds();
    noted(&mut control);
    kill(vm.session.status("web")["supervisor_pid"].as_i64().unwrap());
    eventually("a successor", PATIENCE, || vm.session.status("web")["recoveries"] == 1);
    noted(&mut control);
    drop(control);
    vm.is_well();
    vm.session.firn(&["stop", "web"]).succeeds();

    // Restored with the plugin and without: who is not told asks, and who can't ask compares.
    let policy = vm.session.path("policy.toml");
    let calls = ["--calls", text(&policy)];
    for (how, noted_there) in
        [(&[&calls[..], &["--stores"]].concat(), true), (&calls.to_vec(), false)]
    {
        let restore = [&["restore", "a.firn", "--name", "web", "--wait"], &how[..]].concat();
        vm.session.firn(&restore).succeeds();
        match noted_there {
            true => noted(&mut vm.control()),
            false => seen_again(&vm),
        }
        vm.is_well();
        vm.session.firn(&["stop", "web"]).succeeds();
    }
}

#[test]
fn a_plugin_that_is_none_is_named() {
    let vm = Vm::new();
    let policy = vm.session.path("policy.toml");
    firn_files::replace_private(&policy, b"").unwrap();
    let run = |stores| ["run", "web", "--calls", text(&policy), stores, "--", "qemu-system-x86_64"];
    vm.session.firn(&run("--stores=/none.so")).fails(2, "there is no plugin /none.so");
    vm.session.firn(&["run", "web", "--stores", "--", "qemu-system-x86_64"]).fails(2, "required");
}
