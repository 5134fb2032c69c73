//! Files of other kinds in place of those that the program reads, and of the directory that it writes to: one error at once.

#![cfg(test)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests may fail so")]

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustix::fs::{CWD, Mode, mkfifoat};

const PATIENCE: Duration = Duration::from_secs(60);
const KINDS: [&str; 6] = ["nothing", "fifo", "socket", "directory", "device", "file"];

fn write_identity(dir: &Path) {
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let names = vec!["127.0.0.1".to_owned()];
    let certificate = CertificateParams::new(names).unwrap().signed_by(&key, &authority).unwrap();
    fs::write(dir.join("certificate"), certificate.pem()).unwrap();
    fs::write(dir.join("key"), key.serialize_pem()).unwrap();
    fs::set_permissions(dir.join("key"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(dir.join("authority"), authority.pem()).unwrap();
}

/// The arguments; `replaced` is the one for which another path is given.
fn command(dir: &Path, replaced: &str, path: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_firn-app-backup"));
    command.args(["--listen", "127.0.0.1:0"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    for name in ["directory", "certificate", "key", "authority"] {
        let given = if name == replaced { path.to_owned() } else { dir.join(name) };
        command.arg(format!("--{name}")).arg(given);
    }
    command
}

/// The error of a command that must end at once.
fn error_of(mut command: Command, what: &str) -> String {
    let mut child = command.spawn().unwrap();
    let since = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if since.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("{what}: it waits, or serves");
        }
        thread::sleep(Duration::from_millis(2));
    }
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{what}: {error}");
    assert_eq!(output.stdout, b"", "{what}");
    assert_eq!(error.lines().count(), 1, "{what}: {error}");
    error
}

#[test]
fn other_files_are_refused_without_a_wait() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    write_identity(dir.path());
    fs::create_dir(path("directory")).unwrap();
    let hostile = tempfile::tempdir().unwrap();
    let at = |name: &str| hostile.path().join(name);
    mkfifoat(CWD, at("fifo"), Mode::RUSR | Mode::WUSR).unwrap();
    let _socket = UnixListener::bind(at("socket")).unwrap();
    fs::create_dir(at("directory")).unwrap();
    symlink("/dev/full", at("device")).unwrap();
    fs::write(at("file"), "not PEM").unwrap();
    for argument in ["directory", "certificate", "key", "authority"] {
        for kind in KINDS.iter().filter(|kind| **kind != argument) {
            let what = format!("{argument} with {kind}");
            let error = error_of(command(dir.path(), argument, &at(kind)), &what);
            assert!(error.contains(at(kind).to_str().unwrap()), "{what}: {error}");
        }
    }
    assert_eq!(fs::read_dir(at("directory")).unwrap().count(), 0);
    assert_eq!(fs::read(at("file")).unwrap(), b"not PEM");
}
