//! A QEMU that a user has started, with little in it: for what Firn does about a QEMU, and not about its guest.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::net::sockopt::socket_peercred;

use crate::session::{Session, eventually, text};

/// How long it may take to start or to end, on a busy host.
const PATIENCE: Duration = Duration::from_secs(120);

/// A QEMU; killed when dropped.
pub struct OwnQemu {
    child: Child,
    /// Its process, which is not the child if that has started it in another namespace.
    process: u32,
    /// Its monitor.
    pub qmp: PathBuf,
    more: Vec<String>,
}

impl OwnQemu {
    /// Starts one with a monitor at `qmp` of the session, and with these words.
    pub fn start(session: &Session, more: &[&str]) -> Self {
        Self::named("qemu-system-x86_64", session, more)
    }

    /// The same, by another name: the first word of its command line.
    pub fn named(name: &str, session: &Session, more: &[&str]) -> Self {
        Self::of_program((Path::new(&firn_lab::guest::default_program()), ""), name, session, more)
    }

    /// The same, of a program that may be a copy, with the directory of QEMU's modules.
    pub fn of_program(
        (program, modules): (&Path, &str),
        name: &str,
        session: &Session,
        more: &[&str],
    ) -> Self {
        let qmp = session.path("qmp");
        let log = std::fs::File::create(session.path("own-qemu.log")).unwrap();
        let monitor = format!("unix:{},server=on,wait=off", text(&qmp));
        let machine = ["-M", "pc", "-m", "64", "-accel", "tcg", "-nodefaults", "-display", "none"];
        let mut command = Command::new(program);
        command.arg0(name).args(machine).args(["-qmp", &monitor]).args(more);
        if !modules.is_empty() {
            command.env("QEMU_MODULE_DIR", modules);
        }
        let child =
            command.current_dir(session.path("")).stdin(Stdio::null()).stderr(log).spawn().unwrap();
        let more = more.iter().map(|&word| word.to_owned()).collect();
        let qemu = Self { process: child.id(), child, qmp, more };
        // Another one may have been there before.
        eventually("its monitor", PATIENCE, || listener(&qemu.qmp) == Some(qemu.pid()));
        qemu
    }

    /// Starts one in a PID namespace and a mount namespace of its own, as in a container. `None` if
    /// that is not allowed here.
    pub fn in_container(session: &Session) -> Option<Self> {
        let qmp = session.path("qmp");
        let monitor = format!("unix:{},server=on,wait=off", text(&qmp));
        let mut command = Command::new("unshare");
        command.args(["--pid", "--mount-proc", "--fork", "--kill-child"]);
        command.arg(firn_lab::guest::default_program());
        command.args(["-M", "pc", "-m", "64", "-accel", "tcg", "-nodefaults", "-display", "none"]);
        command.args(["-smp", "2", "-qmp", &monitor]).current_dir(session.path(""));
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().ok()?;
        let mut process = None;
        eventually("its monitor, or its end", PATIENCE, || {
            process = listener(&qmp);
            process.is_some() || child.try_wait().unwrap().is_some()
        });
        let process = process?.parse().unwrap();
        Some(Self { child, process, qmp, more: Vec::new() })
    }

    /// The same command line again, after this one has ended.
    pub fn again(session: &Session, ended: &Self) -> Self {
        let more: Vec<&str> = ended.more.iter().map(String::as_str).collect();
        Self::start(session, &more)
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// The process that listens at its monitor's socket.
    pub fn listener(&self) -> String {
        listener(&self.qmp).unwrap()
    }

    pub fn pid(&self) -> String {
        self.process.to_string()
    }

    /// Attaches Firn to it.
    #[track_caller]
    pub fn attach(&self, session: &Session, name: &str) {
        self.try_attach(session, name).succeeds();
    }

    pub fn try_attach(&self, session: &Session, name: &str) -> crate::session::Answer {
        session.firn(&["attach", name, "--pid", &self.pid(), "--qmp", text(&self.qmp)])
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// How it ended, once it has.
    pub fn ended(&mut self) -> ExitStatus {
        eventually("the end of a QEMU", PATIENCE, || !self.is_running());
        self.child.wait().unwrap()
    }
}

/// How many descriptors of each kind, mappings of each file, and threads a process has.
pub fn resources_of(pid: u32) -> BTreeMap<String, usize> {
    let proc = PathBuf::from(format!("/proc/{pid}"));
    let descriptors = std::fs::read_dir(proc.join("fd")).unwrap();
    let descriptors = descriptors.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
    let descriptors = descriptors.map(|it| it.display().to_string());
    // A socket has a number: `socket:[4711]`.
    let kinds =
        descriptors.map(|it| it.split_once(":[").map_or(it.clone(), |(kind, _)| kind.into()));
    let maps = std::fs::read_to_string(proc.join("maps")).unwrap();
    let mapped = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    let mapped = mapped.filter(|it| !it.starts_with('[')).map(|it| format!("mapped {it}"));
    let mut counts = BTreeMap::new();
    kinds.chain(mapped).for_each(|name| *counts.entry(name).or_default() += 1);
    counts.insert("threads".into(), std::fs::read_dir(proc.join("task")).unwrap().count());
    counts
}

fn listener(socket: &Path) -> Option<String> {
    let stream = UnixStream::connect(socket).ok()?;
    Some(socket_peercred(&stream).unwrap().pid.as_raw_nonzero().to_string())
}

impl Drop for OwnQemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
