//! One QEMU has one owner over all users of a host: the Firn of root, and that of another user.

use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::fs::{Gid, Uid};

use crate::session::{Answer, Session, eventually, program, text};

/// The user id of the user without rights.
const OTHER: u32 = 65534;
const PATIENCE: Duration = Duration::from_secs(60);

/// A session of another user, with a QEMU that the user has started.
struct OtherUser {
    session: Session,
    qemu: Child,
}

impl OtherUser {
    fn start() -> Self {
        let session = Session::new();
        let (user, group) = (Uid::from_raw(OTHER), Gid::from_raw(OTHER));
        rustix::fs::chown(session.path(""), Some(user), Some(group)).unwrap();
        // The program may be in a directory that the user can't reach.
        std::fs::copy(program(), session.path("firn")).unwrap();
        let monitor = format!("unix:{},server=on,wait=off", text(&session.path("qmp")));
        let mut qemu = Command::new(firn_lab::guest::default_program());
        qemu.args(["-M", "pc", "-m", "16", "-accel", "tcg", "-nodefaults", "-display", "none"]);
        qemu.args(["-qmp", &monitor]).current_dir(session.path("")).stdin(Stdio::null());
        let qemu = qemu.uid(OTHER).gid(OTHER).spawn().unwrap();
        eventually("its monitor", PATIENCE, || session.path("qmp").exists());
        Self { session, qemu }
    }

    /// Runs a command of Firn's as that user.
    fn firn(&self, args: &[&str]) -> Answer {
        Answer::of(self.command(args).output().unwrap())
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.session.path("firn"));
        command.args(args).current_dir(self.session.path("")).stdin(Stdio::null());
        command.env("FIRN_RUNTIME_DIR", self.session.runtime_dir()).uid(OTHER).gid(OTHER);
        command
    }

    fn attach<'a>(&self, name: &'a str, pid: &'a str, socket: &'a str) -> Vec<&'a str> {
        vec!["attach", name, "--pid", pid, "--qmp", socket]
    }
}

impl Drop for OtherUser {
    fn drop(&mut self) {
        let _ = self.command(&["detach", "yours"]).output();
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

#[test]
fn a_qemu_has_one_owner_over_all_users() {
    if !rustix::process::geteuid().is_root() {
        return firn_skip::skip_test("only root can be two users");
    }
    let (root, other) = (Session::new(), OtherUser::start());
    let (pid, socket) = (other.qemu.id().to_string(), other.session.path("qmp"));
    let attach = |name| other.attach(name, &pid, text(&socket));
    other.firn(&attach("yours")).succeeds();
    let said = format!("process {pid} is VM yours of user {OTHER} already");
    let refused = root.firn(&attach("mine")).fails(4, &said);
    let hint = format!("`firn detach yours`, as a command of user {OTHER}, releases it");
    assert!(refused.err.contains(&hint), "{}", refused.err);
    assert_eq!(root.ls(), []);
    let listed = other.firn(&["ls"]).succeeds().out;
    assert!(listed.contains("yours") && listed.contains("running"), "{listed}");
    // And the other way round.
    other.firn(&["detach", "yours"]).succeeds();
    root.firn(&attach("mine")).succeeds();
    other.firn(&attach("yours")).fails(4, &format!("process {pid} is VM mine of user 0 already"));
    assert_eq!(root.ls(), [("mine".to_owned(), "running".to_owned())]);
    root.firn(&["detach", "mine"]).succeeds();
    other.firn(&attach("yours")).succeeds();
}
