//! Bad input: one clear error, an exit code that says of which kind, and nothing left behind.

use crate::session::Session;

/// Nothing is left in the runtime directory, and no image half written.
#[track_caller]
fn nothing_left(session: &Session) {
    assert_eq!(session.ls(), []);
    let left: Vec<_> = std::fs::read_dir(session.runtime_dir())
        .into_iter()
        .flatten()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(session.files(".").is_empty());
}

#[test]
fn names_that_are_none() {
    let session = Session::new();
    for name in ["../etc", ".hidden", "a b", "", "-"] {
        let answer = session.firn(&["run", "--", name]);
        assert_eq!(answer.code, 2, "{name:?}: {}", answer.err);
    }
    session.firn(&["status", "a/b"]).fails(2, "a VM name is a letter or digit");
    session.firn(&["ls", "--jsn"]).fails(2, "--jsn");
    session.firn(&["levitate"]).fails(2, "levitate");
    nothing_left(&session);
}

#[test]
fn vms_that_are_not_there() {
    let session = Session::new();
    for verb in ["status", "stop", "detach", "rm"] {
        session.firn(&[verb, "web"]).fails(3, "there is no VM called web");
    }
    session.firn(&["checkpoint", "web", "-o", "a.firn"]).fails(3, "there is no VM called web");
    session.firn(&["suspend", "web", "-o", "a.firn"]).fails(3, "there is no VM called web");
    session.firn(&["attach", "web"]).fails(2, "is not a VM that Firn has detached from");
    assert!(session.files("a.firn").is_empty());
    nothing_left(&session);
}

#[test]
fn sizes_and_codecs_that_are_none() {
    let session = Session::new();
    let bad = [
        ("--codec", "brotli", "no codec"),
        ("--codec", "zstd:99", "no codec"),
        ("--block-pages", "3", "1, 2, 4, 8 or 16"),
        ("--locality-block", "65", "power of two from 16K to 1M"),
        ("--locality-block", "2M", "power of two from 16K to 1M"),
        ("--locality-block", "lots", "is not a size"),
        ("--threads", "0", "give a number from 1 to 256"),
    ];
    for (option, value, why) in bad {
        let answer = session.firn(&["checkpoint", "web", "-o", "a.firn", option, value]);
        assert_eq!(answer.code, 2, "{option} {value}: {}", answer.err);
        assert!(
            answer.err.contains(why) || answer.err.contains("begin with a number"),
            "{}",
            answer.err
        );
    }
    session.firn(&["restore", "a.firn", "--mode", "lazily"]).fails(2, "possible values: auto");
    nothing_left(&session);
}

#[test]
fn command_lines_that_firn_can_not_work_with() {
    let session = Session::new();
    session.firn(&["run", "web"]).fails(2, "required arguments were not provided");
    session.firn(&["run", "web", "--", "no-such-qemu"]).fails(1, "no-such-qemu: no such program");
    let hugepages = ["run", "web", "--", "qemu-system-x86_64", "-mem-path", "/dev/hugepages"];
    session.firn(&hugepages).fails(2, "leave -mem-path out");
    let waits = ["run", "web", "--", "qemu-system-x86_64", "-incoming", "defer"];
    session.firn(&waits).fails(2, "start it without -incoming");
    nothing_left(&session);
}

#[test]
fn a_qemu_that_does_not_start_is_an_error_with_its_output() {
    let session = Session::new();
    let answer = session.firn(&["run", "web", "--", "qemu-system-x86_64", "-frobnicate"]);
    answer.fails(8, "-frobnicate: invalid option");
    let answer = session.firn(&["run", "web", "--", "false"]);
    answer.fails(8, "QEMU ended");
    nothing_left(&session);
}

#[test]
fn files_that_are_no_images() {
    let session = Session::new();
    std::fs::write(session.path("empty.firn"), "").unwrap();
    std::fs::write(session.path("text.firn"), "hello ".repeat(10_000)).unwrap();
    for verb in ["inspect", "verify"] {
        session.firn(&["image", verb, "none.firn"]).fails(1, "No such file");
        session.firn(&["image", verb, "empty.firn"]).fails(6, "opening empty.firn");
        session.firn(&["image", verb, "text.firn"]).fails(6, "opening text.firn");
    }
    session.firn(&["restore", "none.firn"]).fails(1, "No such file");
    session.firn(&["restore", "text.firn"]).fails(6, "can't restore text.firn");
    session.firn(&["restore", "text.firn", "--name", "web"]).fails(6, "can't restore text.firn");
    let reorder = ["image", "reorder", "text.firn", "--by", "physical", "-o", "out.firn"];
    session.firn(&reorder).fails(6, "opening text.firn");
    assert!(session.files("out").is_empty());
    nothing_left(&session);
}

#[test]
fn processes_that_are_no_vms() {
    let session = Session::new();
    let attach =
        |pid: &str, qmp: &str| session.firn(&["attach", "web", "--pid", pid, "--qmp", qmp]);
    attach("999999999", "/nonexistent").fails(3, "there is no process 999999999");
    session.firn(&["attach", "web", "--pid", "1"]).fails(2, "required arguments were not");
    attach("x", "/nonexistent").fails(2, "invalid value 'x'");
    nothing_left(&session);
}

#[test]
fn a_runtime_directory_that_others_can_enter() {
    use std::os::unix::fs::PermissionsExt;
    let session = Session::new();
    std::fs::create_dir(session.runtime_dir()).unwrap();
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(session.runtime_dir(), open).unwrap();
    let answer = session.firn(&["run", "web", "--", "qemu-system-x86_64"]);
    answer.fails(7, "must be yours with mode 0700");
    session.firn(&["ls"]).fails(1, "must be yours with mode 0700");
}

#[test]
fn a_reader_that_has_seen_enough() {
    use std::process::Stdio;
    let session = Session::new();
    let mut command = session.command(&["completions", "bash"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty());
}

#[test]
fn unknown_hosts_are_refused() {
    let session = Session::new();
    let protect = |how: &[&str]| session.firn(&[&["protect", "web"], how].concat());
    protect(&[]).fails(2, "required arguments were not provided");
    protect(&["--backup", "b", "--to", "unix:/x"]).fails(2, "cannot be used with");
    protect(&["--backup", "B b"]).fails(2, "no name of a host");
    protect(&["--backup", "b"]).fails(7, "no agent runs here");
    session.firn(&["agent", "status"]).fails(7, "no agent runs here");
    session.firn(&["agent"]).fails(2, "Usage: firn agent");
    nothing_left(&session);
}
