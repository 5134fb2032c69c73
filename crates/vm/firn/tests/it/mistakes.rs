//! Mistakes of a user: each gets an exit code of the table in `firn --help`, one error with its causes, and what to try.
//! Where root runs the tests, some commands run as the user nobody.

use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::{CWD, Mode, mkfifoat};
use serde_json::Value;

use crate::session::{Answer, Session, program};

/// A command line, and what its user gets.
struct Mistake {
    /// Words, separated by spaces.
    words: &'static str,
    code: i32,
    /// Part of the error or of a cause.
    message: &'static str,
    /// Part of what to try; nothing, where there may be no advice.
    hint: &'static str,
}

const fn mistake(
    words: &'static str,
    code: i32,
    message: &'static str,
    hint: &'static str,
) -> Mistake {
    Mistake { words, code, message, hint }
}

/// Where no VM runs.
const WITHOUT_VM: &[Mistake] = &[
    mistake("image inspect none.firn", 1, "No such file", "check the path"),
    mistake("image inspect dir", 6, "it is a directory", "firn checkpoint"),
    mistake("image verify fifo", 6, "it is a FIFO", "firn checkpoint"),
    mistake("image inspect disk.qcow2", 6, "this is no image", ""),
    mistake("image compare text.firn text.firn", 6, "too few for an image", ""),
    mistake("image rm none.firn", 2, "none.firn is not there", ""),
    mistake("image reorder text.firn --by size -o x.firn", 2, "possible values: learned", "--help"),
    mistake("image merge none.firn", 1, "No such file", "check the path"),
    mistake("restore none.firn", 1, "No such file", "check the path"),
    mistake("restore text.firn", 6, "too few for an image", ""),
    mistake("restore text.firn --mode lazily", 2, "possible values: auto", ""),
    mistake("restore text.firn --set x", 2, "NAME=VALUE", "--help"),
    mistake("status web", 3, "no VM called web", "firn ls"),
    mistake("stop web", 3, "no VM called web", "firn ls"),
    mistake("logs web", 3, "no VM called web", "firn ls"),
    mistake("status a/b", 2, "a VM name is a letter or digit", "--help"),
    mistake("run .web -- qemu-system-x86_64", 2, "a VM name is a letter or digit", "--help"),
    mistake("run web", 2, "not provided: <QEMU>", "run <NAME> -- <QEMU>"),
    mistake("run web -- no-such-qemu", 1, "no such program in PATH", "firn doctor"),
    mistake("run web -- ./text.firn", 1, "not executable", "firn doctor"),
    mistake("run web -- qemu-system-x86_64 -frobnicate", 8, "invalid option", ""),
    mistake("run web -- qemu-system-x86_64 -M nonsense", 8, "unsupported machine type", ""),
    mistake("run web --calls none.toml -- qemu-system-x86_64", 2, "cannot read none.toml", ""),
    mistake("run web --calls bad.toml -- qemu-system-x86_64", 2, "line 1", ""),
    mistake("run web --calls bad.json -- qemu-system-x86_64", 2, "line 1", ""),
    mistake(
        "checkpoint web",
        2,
        "not provided: --output <IMAGE>",
        "checkpoint --output <IMAGE> <NAME>",
    ),
    mistake("checkpoint web -o a.firn --codec brotli", 2, "there are none, lz4", "--help"),
    mistake("checkpoint web -o a.firn --codec zstd:99", 2, "from -7 to 19", "--help"),
    mistake("checkpoint web -o a.firn --strategy slow", 2, "possible values: trace", ""),
    mistake("checkpoint web -o a.firn --locality-block 3K", 2, "power of two", "--help"),
    mistake("checkpoint web -o a.firn --threads 0", 2, "a number from 1 to 256", "--help"),
    mistake("checkpoint web -o a.firn --every 0s", 2, "less than 100 ms apart", "--help"),
    mistake("checkpoint web -o a.firn --every soon", 2, "500ms, 30s, 5m or 2h", "--help"),
    mistake("checkpoint web -o a.firn --every 1s --keep 0", 2, "a number from 1 to 128", "--help"),
    mistake("checkpoint web -o dir", 2, "dir is a directory", ""),
    mistake("checkpoint web -o null", 2, "null is a character device", ""),
    mistake("checkpoint web -o -", 2, "standard output", "name a file"),
    mistake("checkpoint web -o none/a.firn", 2, "there is no directory none", "make it"),
    mistake("checkpoint web -o a.firn --parent none.firn", 2, "cannot read none.firn", ""),
    mistake(
        "checkpoint web -o a.firn --disk-dir text.firn",
        2,
        "is not a directory",
        "that exists",
    ),
    mistake("attach web", 2, "not a VM that Firn has detached from", "--pid PID --qmp SOCKET"),
    mistake("attach web --pid x --qmp none.sock", 2, "a number from 1", "--help"),
    mistake("attach web --pid 999999999 --qmp none.sock", 3, "no process 999999999", "process id"),
    mistake("attach web --pid 1 --qmp none.sock", 1, "cannot connect", "monitor socket"),
    mistake("protect web --to /run/x", 2, "give unix:PATH", "--help"),
    mistake("protect web --to unix:/x --interval 1s", 2, "give 50ms to 500ms", "--help"),
    mistake("protect web --backup b", 7, "no agent runs here", "firn-agent run FILE"),
    mistake("standby web --listen unix:/none/s", 1, "No such file", ""),
    mistake("standby web --listen unix:/none/s --uplink net0", 2, "give ID=PATH", "--help"),
    mistake("agent status", 7, "no agent runs here", "firn-agent run FILE"),
    mistake("cluster status", 7, "no agent runs here", "firn-agent run FILE"),
    mistake("report none.json", 3, "neither a file nor a run record", "firn status"),
    mistake("report bad.json", 2, "the JSON ends too early", ""),
    mistake("report text.firn", 2, "line 1, column 1 is not JSON", ""),
    mistake("report other.json", 2, "missing field", ""),
    mistake("report fifo", 2, "it is a FIFO", ""),
    mistake("doctor --kernel none", 2, "cannot read none", ""),
    mistake("stop web --powerdown=soon", 2, "give a number", "--help"),
    mistake("console web", 3, "there is no VM called web", "firn ls"),
    mistake("completions tcsh", 2, "possible values: bash", "zsh"),
    mistake("levitate", 2, "unrecognized subcommand", ""),
    mistake("ls --jsn", 2, "unexpected argument", "'--json'"),
];

/// Where a VM called web runs, which has no guest.
const WITH_VM: &[Mistake] = &[
    mistake("standby web --listen unix:/none/s", 4, "a VM called web already", "another name"),
    mistake("restore none.firn --name web", 4, "a VM called web already", "another name"),
    mistake("checkpoint web -o a.firn --parent text.firn", 6, "too few for an image", ""),
    mistake("release web", 2, "not being protected", "firn protect"),
    mistake("failover web", 2, "no standby", "firn standby"),
    mistake("protect web --to unix:/none.sock", 1, "No such file", "firn standby"),
    mistake("attach web", 2, "not a VM that Firn has detached from", "--pid PID --qmp SOCKET"),
    mistake("console web", 2, "no serial port of the VM", "-serial chardev:tty"),
    mistake("report web", 3, "neither a file nor a run record", "--watch"),
    mistake("rm web", 4, "VM web runs", "firn stop web"),
];

/// As a user who may read nothing of the session's.
const AS_NOBODY: &[Mistake] = &[
    mistake("image inspect text.firn", 7, "Permission denied", "check the path"),
    mistake("run web -- qemu-system-x86_64", 7, "Permission denied", ""),
    mistake("logs web", 7, "Permission denied", ""),
    mistake("ls", 7, "Permission denied", ""),
];

/// Of `firn-agent`.
const OF_AGENT: &[Mistake] = &[
    mistake("run none.toml", 2, "No such file", ""),
    mistake("check none.toml", 2, "No such file", ""),
    mistake("check dir", 2, "it is a directory", ""),
    mistake("check agent.toml", 2, "agent.toml, line 1", ""),
];

/// Forms in which Rust and its libraries report errors.
const RUST: [&str; 7] =
    ["..=", "Os {", "os error", "Error(", "invalid digit", "expected value at", "EOF while"];

fn session() -> Session {
    let session = Session::new();
    let write = |name: &str, text: &str| std::fs::write(session.path(name), text).unwrap();
    write("text.firn", "hello");
    write("bad.toml", "x =\n");
    write("bad.json", "{\n");
    // Others may not read a policy, which has keys.
    for name in ["bad.toml", "bad.json"] {
        std::fs::set_permissions(session.path(name), Permissions::from_mode(0o600)).unwrap();
    }
    write("other.json", "{}");
    write("agent.toml", "name = 1\n");
    std::fs::create_dir(session.path("dir")).unwrap();
    mkfifoat(CWD, session.path("fifo"), Mode::RUSR | Mode::WUSR).unwrap();
    symlink("/dev/null", session.path("null")).unwrap();
    let mut disk = Command::new("qemu-img");
    disk.args(["create", "-q", "-f", "qcow2"]).arg(session.path("disk.qcow2")).arg("1M");
    assert!(disk.status().unwrap().success());
    session
}

/// The error, its causes, and what to try.
struct ReadError {
    messages: Vec<String>,
    hint: String,
}

/// Reads an error as people do.
fn read_lines(program: &str, text: &str) -> ReadError {
    let mut lines = text.lines();
    let lead = format!("{program}: ");
    let first = lines.next().and_then(|line| line.strip_prefix(&lead)).unwrap_or_default();
    let mut error = ReadError { messages: vec![first.to_owned()], hint: String::new() };
    for line in lines {
        match (line.strip_prefix("  because: "), line.strip_prefix("  try: ")) {
            (Some(cause), _) => error.messages.push(cause.to_owned()),
            (_, Some(hint)) => error.hint = hint.to_owned(),
            _ => unreachable!("{line:?} is of another form in:\n{text}"),
        }
    }
    error
}

/// Reads an error as programs do.
fn read_json(text: &str, code: i32) -> ReadError {
    let document: Value = serde_json::from_str(text).unwrap();
    let error = &document["error"];
    assert_eq!((&document["schema"], &error["exit_code"]), (&1.into(), &code.into()), "{text}");
    assert!(error["kind"].is_string(), "{text}");
    let of = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let causes = error["causes"].as_array().unwrap().iter().map(of);
    let messages = std::iter::once(of(&error["message"])).chain(causes).collect();
    ReadError { messages, hint: of(&error["hint"]) }
}

#[track_caller]
fn assert_explained(error: &ReadError, mistake: &Mistake, text: &str) {
    let Mistake { words, message, hint, .. } = mistake;
    assert!(
        error.messages.iter().any(|it| it.contains(message)),
        "{words}: not {message:?}: {text}"
    );
    assert!(error.hint.contains(hint), "{words}: not {hint:?}: {text}");
    for (at, inner) in error.messages.iter().enumerate() {
        let repeated = error.messages[..at].iter().any(|outer| outer.contains(inner.as_str()));
        assert!(
            !repeated && !inner.is_empty(),
            "{words}: {inner:?} is no reason of its own: {text}"
        );
    }
    for form in RUST {
        assert!(!text.contains(form), "{words}: {form:?} is for programmers: {text}");
    }
}

/// One error of a program, for people, with the right code.
#[track_caller]
fn assert_answered(answer: &Answer, program: &str, mistake: &Mistake) {
    let (words, text) = (mistake.words, &answer.err);
    assert_eq!(answer.code, mistake.code, "{words}: {text}");
    assert_eq!(answer.out, "", "{words}");
    let lead = format!("{program}: ");
    assert_eq!(text.lines().filter(|line| line.starts_with(&lead)).count(), 1, "{words}: {text}");
    assert_explained(&read_lines(program, text), mistake, text);
}

/// The same error, for programs.
#[track_caller]
fn assert_answered_as_json(answer: &Answer, mistake: &Mistake) {
    let (words, text) = (mistake.words, &answer.err);
    assert_eq!(answer.code, mistake.code, "{words}: {text}");
    assert_eq!((answer.out.as_str(), text.lines().count()), ("", 1), "{words}: {text}");
    assert_explained(&read_json(text, mistake.code), mistake, text);
}

fn try_all(session: &Session, mistakes: &[Mistake]) {
    for mistake in mistakes {
        let words: Vec<&str> = mistake.words.split(' ').collect();
        assert_answered(&session.firn(&words), "firn", mistake);
        let with_json = [&["--json"], &words[..]].concat();
        assert_answered_as_json(&session.firn(&with_json), mistake);
    }
}

#[test]
fn mistakes_without_a_vm() {
    let session = session();
    try_all(&session, WITHOUT_VM);
    assert_eq!(session.ls(), []);
}

#[test]
fn mistakes_with_a_vm() {
    let session = session();
    let qemu = firn_lab::guest::default_program();
    let machine = ["-M", "pc", "-m", "64", "-nodefaults", "-display", "none", "-accel", "tcg"];
    let run = ["run", "web", "--", qemu.to_str().unwrap()];
    session.firn(&[&run[..], &machine].concat()).succeeds();
    let again = [&run[..], &machine].concat().join(" ");
    let taken = mistake(again.leak(), 4, "a VM called web already", "another name");
    try_all(&session, &[taken]);
    try_all(&session, WITH_VM);
    assert_eq!(session.ls(), [("web".to_owned(), "running".to_owned())]);
    session.firn(&["stop", "web"]).succeeds();
}

#[test]
fn mistakes_of_a_user_without_permissions() {
    if !rustix::process::geteuid().is_root() {
        firn_skip::skip_test("only root can run a program as another user");
        return;
    }
    let session = session();
    let set_mode = |name: &str, mode| {
        std::fs::set_permissions(session.path(name), Permissions::from_mode(mode)).unwrap();
    };
    std::fs::copy(program(), session.path("firn")).unwrap();
    for (name, mode) in [("", 0o755), ("firn", 0o755), ("text.firn", 0o600)] {
        set_mode(name, mode);
    }
    for mistake in AS_NOBODY {
        // The last ones look into the directory of another user.
        if mistake.words.starts_with("logs") {
            std::fs::create_dir_all(session.runtime_dir().join("web")).unwrap();
            set_mode("run", 0o700);
        }
        let mut command = Command::new(session.path("firn"));
        command.args(mistake.words.split(' ')).current_dir(session.path("")).stdin(Stdio::null());
        command.env("FIRN_RUNTIME_DIR", session.runtime_dir()).uid(65534).gid(65534);
        assert_answered(&Answer::of(command.output().unwrap()), "firn", mistake);
    }
    std::fs::remove_dir(session.runtime_dir().join("web")).unwrap();
}

#[test]
fn mistakes_in_a_configuration_of_the_agent() {
    let session = session();
    let agent = Session::program_beside("firn-agent");
    for mistake in OF_AGENT {
        let mut command = Command::new(Path::new(&agent));
        command.args(mistake.words.split(' ')).current_dir(session.path("")).stdin(Stdio::null());
        assert_answered(&Answer::of(command.output().unwrap()), "firn-agent", mistake);
    }
}
