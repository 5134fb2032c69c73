//! Standbys that a real agent starts, by real supervisors, for a peer that is only a connection:
//! until a primary introduces itself they live as long as that connection.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use firn_control::HostHealth;
use firn_control::client::read_status;
use firn_supervisor::RuntimeDir;

use crate::command::agent;
use crate::door::{Stream, greet};
use crate::host::{Authority, eventually, free_address, write_config};

/// The host `b` as a process, with `a` for a peer.
struct Backup {
    authority: Authority,
    dir: tempfile::TempDir,
    listen: SocketAddr,
    child: Child,
}

impl Backup {
    fn start() -> Self {
        Self::with(|_| None)
    }

    /// Starts one whose supervisors have a fault point armed, by a text that may name files of a
    /// directory.
    fn with(fault: impl FnOnce(&Path) -> Option<String>) -> Self {
        let authority = Authority::new();
        let dir = tempfile::Builder::new().prefix("firn-agent-").tempdir().unwrap();
        let identity = authority.issue(&["b"], |_| ());
        let (listen, peers) = (free_address(), [("a", free_address())]);
        let file = write_config(dir.path(), &authority.pem(), identity, "b", listen, &peers);
        let mut command = agent(&["run", file.to_str().unwrap()]);
        command.envs(fault(dir.path()).map(|fault| ("FIRN_FAULT", fault)));
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("listens at"), "{line}");
        Self { authority, dir, listen, child }
    }

    fn asks(&self) -> (Stream, String) {
        let identity = self.authority.issue(&["a"], |_| ());
        let mut stream = greet(self.listen, &self.authority, Some(identity));
        let head = "POST /v1/standbys/web HTTP/1.1\r\nhost: b\r\nconnection: upgrade\r\nupgrade: firn-epochs\r\n\r\n";
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            answer.push(byte[0]);
        }
        (stream, String::from_utf8(answer).unwrap())
    }

    /// A connection of the kind that carries epochs.
    fn stream(&self) -> Stream {
        let (stream, answer) = self.asks();
        assert!(answer.starts_with("HTTP/1.1 101"), "{answer}");
        assert!(self.vm().exists());
        stream
    }

    fn vm(&self) -> PathBuf {
        self.dir.path().join("run/web")
    }

    /// Waits until `a` counts as lost, for it has no agent. That does not end a standby that begins
    /// afterwards.
    fn has_lost_its_peer(&self) {
        let base = RuntimeDir::from_path(self.dir.path().join("run"));
        let is_lost = || read_status(&base).is_ok_and(|it| it.peers[0].health == HostHealth::Lost);
        eventually("its peer is lost", is_lost);
    }

    fn is_gone(&self) {
        eventually("the standby is gone", || !self.vm().exists());
    }
}

impl Drop for Backup {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_standby_without_a_primary_goes_with_the_connection() {
    let backup = Backup::start();
    for _ in 0..3 {
        drop(backup.stream());
        backup.is_gone();
    }
    let mut stream = backup.stream();
    stream.write_all(&[7; 1000]).unwrap();
    // It sends the wire's refusal, or nothing: then it ends.
    let _ = stream.read_to_end(&mut Vec::new());
    backup.is_gone();
}

#[test]
fn there_is_one_standby_of_a_name() {
    let backup = Backup::start();
    backup.has_lost_its_peer();
    let _stream = backup.stream();
    let (_, answer) = backup.asks();
    assert!(answer.starts_with("HTTP/1.1 409"), "{answer}");
}

#[test]
fn a_standby_without_a_primary_goes_with_the_agent() {
    let mut backup = Backup::start();
    let _stream = backup.stream();
    backup.child.kill().unwrap();
    backup.child.wait().unwrap();
    backup.is_gone();
}

/// A host so slow that a standby does not listen in time: the agent ends it, and its name is free
/// as soon as that is noticed.
#[test]
fn a_standby_that_does_not_listen_in_time_is_given_up() {
    let backup =
        Backup::with(|dir| Some(format!("standby.listen=WAIT:{}", dir.join("wait").display())));
    let wait = backup.dir.path().join("wait");
    let (_, answer) = backup.asks();
    assert!(answer.starts_with("HTTP/1.1 500"), "{answer}");
    assert!(wait.exists());
    std::fs::remove_file(&wait).unwrap();
    backup.is_gone();
    let goes_on = std::thread::spawn(move || {
        eventually("it waits", || wait.exists());
        std::fs::remove_file(&wait).unwrap();
    });
    let _stream = backup.stream();
    goes_on.join().unwrap();
}
