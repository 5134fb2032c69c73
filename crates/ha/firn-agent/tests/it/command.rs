//! The program: its reports on configurations, and that it ends on a signal.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, Mode, mkfifoat};
use rustix::process::{Pid, Signal, kill_process};

use crate::host::{Authority, PATIENCE, free_address, write_config};

pub fn agent(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_firn-agent"));
    command.args(args).env_remove("FIRN_RUNTIME_DIR").env_remove("XDG_RUNTIME_DIR");
    command
}

fn check(file: &Path) -> Output {
    agent(&["check", file.to_str().unwrap()]).output().unwrap()
}

#[test]
fn a_configuration_is_checked_with_its_certificates() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let write = |who: &str| {
        let identity = authority.issue(&["a"], |_| ());
        write_config(dir.path(), &authority.pem(), identity, who, free_address(), &[])
    };
    let good = check(&write("a"));
    assert!(good.status.success(), "{}", String::from_utf8_lossy(&good.stderr));
    let bad = check(&write("b"));
    let said = String::from_utf8_lossy(&bad.stderr).into_owned();
    assert_eq!(bad.status.code(), Some(2), "{said}");
    assert!(said.contains("for the name b") && said.lines().count() == 2, "{said}");
    let none = check(Path::new("/none"));
    assert_eq!(none.status.code(), Some(2));
}

/// A wrong command line ends as all failures do: one reason, and what to try.
#[test]
fn a_wrong_command_line_is_one_failure() {
    for (words, reason, hint) in [
        (&["run"][..], "required arguments were not provided: <FILE>", "firn-agent run <FILE>"),
        (&["cheque", "x"], "unrecognized subcommand 'cheque'", "check"),
        (&["check", "x", "--fast"], "unexpected argument '--fast'", "firn-agent check <FILE>"),
    ] {
        let output = agent(words).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.starts_with("firn-agent: ") && said.contains(reason), "{said}");
        assert!(said.lines().nth(1).is_some_and(|line| line.contains(hint)), "{said}");
        assert_eq!(said.lines().count(), 2, "{said}");
    }
    let help = agent(&["--help"]).output().unwrap();
    assert!(help.status.success() && !help.stdout.is_empty());
}

/// Files that are no regular ones, and what an error calls them.
fn hostile_files() -> [(&'static str, &'static str); 4] {
    [
        ("fifo", "a FIFO"),
        ("socket", "a socket"),
        ("directory", "a directory"),
        ("device", "a character device"),
    ]
}

fn place_hostile_file(kind: &str, path: &Path) {
    match kind {
        "fifo" => mkfifoat(CWD, path, Mode::RUSR | Mode::WUSR).unwrap(),
        "socket" => drop(UnixListener::bind(path).unwrap()),
        "directory" => std::fs::create_dir(path).unwrap(),
        _ => symlink("/dev/full", path).unwrap(),
    }
}

/// The exit code and the error of a command, which must not wait.
fn ends(args: &[&str]) -> (Option<i32>, String) {
    let mut command = agent(args);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let since = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if since.elapsed() > PATIENCE {
            child.kill().unwrap();
            unreachable!("firn-agent {args:?} waits");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let output = child.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

/// Each file of a host, in place of which something else is, by each verb that reads it.
#[test]
fn other_files_in_place_of_a_hosts_files_are_refused_without_a_wait() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let identity = authority.issue(&["a"], |_| ());
    let (listen, peers) = (free_address(), ["b", "c"].map(|host| (host, free_address())));
    let config = write_config(dir.path(), &authority.pem(), identity, "a", listen, &peers);
    let text = std::fs::read_to_string(&config).unwrap();
    let membership = "[membership]\nservers = [\"a\", \"b\", \"c\"]\nstate-dir = \"state\"\n";
    std::fs::write(&config, format!("{text}{membership}")).unwrap();
    let file = config.to_str().unwrap();
    let entries = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
    let files: Vec<_> = entries.filter(|path| path.is_file()).collect();
    assert!(files.len() >= 4, "{files:?}");
    for path in files {
        let kept = path.with_extension("kept");
        std::fs::rename(&path, &kept).unwrap();
        for (kind, called) in hostile_files() {
            place_hostile_file(kind, &path);
            let verbs = ["check", "run", "found"];
            let reads = |verb: &&&str| **verb != "found" || path == config;
            for verb in verbs.iter().filter(reads) {
                let (code, said) = ends(&[verb, file]);
                let what = format!("{verb} with {kind} as {}: {said}", path.display());
                assert_eq!(code, Some(2), "{what}");
                assert!(said.contains(&format!("it is {called}, not a regular file")), "{what}");
                assert!(said.contains(path.to_str().unwrap()), "{what}");
                assert_eq!(said.matches("firn-agent: ").count(), 1, "{what}");
            }
            match kind {
                "directory" => std::fs::remove_dir(&path).unwrap(),
                _ => std::fs::remove_file(&path).unwrap(),
            }
        }
        std::fs::rename(&kept, &path).unwrap();
    }
    assert_eq!(ends(&["check", file]).0, Some(0));
    state_directories_are_refused(dir.path(), file);
}

/// In place of the directory of a server's state, by the verb that makes it and by the one that uses it.
fn state_directories_are_refused(dir: &Path, config: &str) {
    let state = dir.join("state");
    for (kind, _) in hostile_files().iter().filter(|(kind, _)| *kind != "directory") {
        place_hostile_file(kind, &state);
        for verb in ["found", "run"] {
            let (code, said) = ends(&[verb, config]);
            let what = format!("{verb} with {kind} as its state: {said}");
            assert!(code.is_some_and(|code| code != 0), "{what}");
            assert!(said.contains(state.to_str().unwrap()), "{what}");
            assert_eq!(said.matches("firn-agent: ").count(), 1, "{what}");
        }
        std::fs::remove_file(&state).unwrap();
    }
    assert_eq!(ends(&["found", config]).0, Some(0), "a directory that is not there is made");
    assert!(state.is_dir());
}

/// Certificates that are made as the documentation describes.
#[test]
fn documented_certificates_are_good_ones() {
    let dir = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../scripts/certificates");
    let make = |names: &[&str]| {
        let made = Command::new(&script).arg(dir.path()).args(names).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    };
    make(&["a", "b.example"]);
    make(&["a", "c"]);
    for name in ["a", "b.example", "c"] {
        let text = format!(
            "name = \"{name}\"\nlisten = \"127.0.0.1:0\"\ncertificate = \"{name}.pem\"\n\
             key = \"{name}.key\"\nauthority = \"ca.pem\"\n"
        );
        let file = dir.path().join("agent.toml");
        std::fs::write(&file, text).unwrap();
        let said = check(&file);
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    }
}

/// Where the authority's key is missing or invalid, no file is left that the next run would take
/// for a certificate.
#[test]
fn certificates_that_cannot_be_made_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../scripts/certificates");
    let make = |name: &str| Command::new(&script).arg(dir.path()).arg(name).output().unwrap();
    let files = || {
        let entries = std::fs::read_dir(dir.path()).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert!(make("a").status.success());
    let (key, hidden) = (dir.path().join("ca.key"), dir.path().join("kept"));
    std::fs::rename(&key, &hidden).unwrap();
    let before = files();
    let missing = make("b");
    let said = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert!(!missing.status.success() && said.contains("ca.key is not there"), "{said}");
    assert_eq!(files(), before);
    std::fs::write(&key, "no key").unwrap();
    let broken = make("b");
    assert!(!broken.status.success() && !broken.stderr.is_empty());
    std::fs::remove_file(&key).unwrap();
    assert_eq!(files(), before);
    std::fs::rename(&hidden, &key).unwrap();
    assert!(make("b").status.success());
    assert!(dir.path().join("b.pem").metadata().unwrap().len() > 0);
}

#[test]
fn an_agent_ends_at_sigterm_and_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let identity = authority.issue(&["a"], |_| ());
    let listen = "127.0.0.1:0".parse().unwrap();
    let file = write_config(dir.path(), &authority.pem(), identity, "a", listen, &[]);
    let metrics = free_address();
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, format!("metrics = \"{metrics}\"\n{text}")).unwrap();
    let mut command = agent(&["run", file.to_str().unwrap()]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("host a listens at 127.0.0.1:"), "{line}");
    let second = agent(&["run", file.to_str().unwrap()]).output().unwrap();
    assert_eq!(second.status.code(), Some(4));
    assert!(String::from_utf8_lossy(&second.stderr).contains("another agent runs here"));
    let told = |path: &str| {
        let mut stream = TcpStream::connect(metrics).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
        let mut told = String::new();
        stream.read_to_string(&mut told).unwrap();
        told
    };
    assert!(told("/metrics").contains("application/openmetrics-text"));
    assert!(told("/metrics").ends_with("# EOF\n"));
    assert!(told("/v1/status").starts_with("HTTP/1.1 400"), "for metrics alone");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{said}");
    assert!(!dir.path().join("run/.agent/agent.sock").exists());
}

/// A host without peers needs no certificate, and has metrics and a page.
#[test]
fn an_agent_alone_serves_metrics_of_its_vms() {
    let (dir, metrics) = (tempfile::tempdir().unwrap(), free_address());
    let file = dir.path().join("agent.toml");
    let text = format!("name = \"a\"\nmetrics = \"{metrics}\"\nruntime-dir = \"run\"\n");
    std::fs::write(&file, text).unwrap();
    assert!(check(&file).status.success());
    let mut command = agent(&["run", file.to_str().unwrap()]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "host a runs alone\n");
    let journal = r#"{ "version": 2, "name": "ci", "phase": { "phase": "detached" }, "recoveries": 3,
        "checkpoints": { "saved": 4, "failed": 1, "newest": [
          { "at": 1, "image": "/i/4.firn", "image_bytes": 4096 } ] } }"#;
    let vm = dir.path().join("run/ci");
    std::fs::create_dir(&vm).unwrap();
    std::fs::write(vm.join("journal.json"), journal).unwrap();
    let told = |path: &str| {
        let mut stream = TcpStream::connect(metrics).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            .unwrap();
        let mut told = String::new();
        stream.read_to_string(&mut told).unwrap();
        told
    };
    let text = told("/metrics");
    for line in [
        "firn_vm_state{vm=\"ci\",state=\"detached\"} 1.0",
        "firn_checkpoints_total{vm=\"ci\"} 4",
        "firn_checkpoint_failures_total{vm=\"ci\"} 1",
        "firn_checkpoint_size_bytes{vm=\"ci\"} 4096.0",
        "firn_supervisor_restarts_total{vm=\"ci\"} 3",
    ] {
        assert!(text.lines().any(|it| it == line), "{line} is not in {text}");
    }
    assert!(told("/").contains("/i/4.firn"));
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn every_shell_gets_a_script() {
    for shell in ["bash", "zsh", "fish"] {
        let script = agent(&["completions", shell]).output().unwrap();
        assert!(String::from_utf8_lossy(&script.stdout).contains("check"), "{shell}");
    }
}
