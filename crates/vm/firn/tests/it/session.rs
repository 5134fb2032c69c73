//! A user at a shell: a runtime directory of its own, and commands typed one after another.

use firn_cache::{CacheConnection, CacheDir, CacheReply, CacheReport, CacheRequest};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

/// Environment variable that names another `firn`.
const VARIABLE: &str = "FIRN";

/// A command that has not ended by then never will. It is killed, and its test fails.
const COMMAND_LIMIT: Duration = Duration::from_secs(400);

/// A session; all its VMs end with it.
pub struct Session {
    dir: TempDir,
    fault: Option<String>,
}

/// What a command answered.
pub struct Answer {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Session {
    pub fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("firn-it-").tempdir().unwrap();
        Self { dir, fault: None }
    }

    /// Another program, from where the command under test is.
    pub fn program_beside(name: &str) -> PathBuf {
        let path = Path::new(&program()).with_file_name(name);
        assert!(path.exists(), "{} has to be built first", path.display());
        path
    }

    /// A file of this session.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn runtime_dir(&self) -> PathBuf {
        self.path("run")
    }

    /// The directory of the key that marks its images.
    pub fn state_dir(&self) -> PathBuf {
        self.path("state")
    }

    /// Arms a fault point for the commands that follow, and the supervisors they start.
    pub fn arm(&mut self, fault: Option<&str>) {
        self.fault = fault.map(str::to_owned);
    }

    /// Ends all its VMs.
    pub fn end_vms(&self) {
        let vms = std::fs::read_dir(self.runtime_dir()).into_iter().flatten().flatten();
        for vm in vms {
            let name = vm.file_name().into_string().unwrap_or_default();
            let _ = self.command(&["stop", "--force", &name]).output();
            let _ = self.command(&["rm", &name]).output();
        }
    }

    /// The cache of objects.
    pub fn cache(&self) -> CacheDir {
        CacheDir::at(&self.path("cache"))
    }

    /// What the cache has, and its server has done; `None` if none runs.
    pub fn cache_report(&self) -> Option<CacheReport> {
        let mut connection = CacheConnection::to_running(&self.cache()).ok()?;
        // It may be ending.
        match connection.request(&CacheRequest::Report).ok()? {
            CacheReply::Report(report) => Some(report),
            reply => unreachable!("{reply:?}"),
        }
    }

    /// Ends the server of the cache by SIGKILL, if it runs.
    pub fn kill_cache(&self) {
        if let Some(report) = self.cache_report() {
            kill(i64::from(report.pid));
            eventually("it has ended", Duration::from_secs(30), || self.cache_report().is_none());
        }
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(program());
        command.args(args).current_dir(self.dir.path()).stdin(Stdio::null());
        command.env("FIRN_RUNTIME_DIR", self.runtime_dir()).env_remove("FIRN_FAULT");
        command.env("FIRN_STATE_DIR", self.state_dir());
        command.env(firn_cache::CACHE_DIR_VARIABLE, self.cache().path());
        // A hypervisor that the tests are to use may be restored too, wherever it is.
        command.env("FIRN_QEMU_ALLOW", firn_lab::guest::default_program());
        if let Some(fault) = &self.fault {
            command.env("FIRN_FAULT", fault);
        }
        command
    }

    pub fn firn(&self, args: &[&str]) -> Answer {
        let mut command = self.command(args);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let pid = i64::from(child.id());
        let (is_running, ended) = mpsc::channel::<()>();
        let watch = std::thread::spawn(move || {
            let is_late = ended.recv_timeout(COMMAND_LIMIT) == Err(RecvTimeoutError::Timeout);
            is_late.then(|| kill(pid)).is_some()
        });
        let output = child.wait_with_output().unwrap();
        drop(is_running);
        let is_killed = watch.join().unwrap();
        let answer = Answer::of(output);
        assert!(!is_killed, "firn {} did not end: {}{}", args.join(" "), answer.out, answer.err);
        answer
    }

    /// Runs a command that must succeed; returns the facts it prints.
    pub fn json(&self, args: &[&str]) -> Value {
        let args: Vec<&str> = ["--json"].iter().chain(args).copied().collect();
        let answer = self.firn(&args);
        assert_eq!(answer.code, 0, "firn {}: {}", args.join(" "), answer.err);
        serde_json::from_str(&answer.out).unwrap()
    }

    pub fn status(&self, name: &str) -> Value {
        self.json(&["status", name])
    }

    /// The names of all VMs with their states.
    pub fn ls(&self) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let vms = self.json(&["ls"]);
        vms.as_array().unwrap().iter().map(|vm| (text(&vm["name"]), text(&vm["state"]))).collect()
    }

    /// Files that begin so in the session's directory; not what restores of them left to learn from.
    pub fn files(&self, beginning: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.dir.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names
            .filter(|name| name.starts_with(beginning) && !name.ends_with(".learned"))
            .collect();
        names.sort_unstable();
        names
    }
}

/// The command under test: the one built with these tests, unless the environment names another.
pub fn program() -> OsString {
    std::env::var_os(VARIABLE).unwrap_or_else(|| env!("CARGO_BIN_EXE_firn").into())
}

impl Drop for Session {
    fn drop(&mut self) {
        self.fault = None;
        self.end_vms();
        self.kill_cache();
    }
}

impl Answer {
    pub fn of(output: Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// Asserts that the command failed with this code, said why exactly once, and printed no facts.
    #[track_caller]
    pub fn fails(self, code: i32, why: &str) -> Self {
        assert_eq!(self.code, code, "{}{}", self.out, self.err);
        assert!(self.err.contains(why), "{:?} does not say {why:?}", self.err);
        assert_eq!(self.err.matches(why).count(), 1, "said more than once: {}", self.err);
        self
    }

    #[track_caller]
    pub fn succeeds(self) -> Self {
        assert_eq!(self.code, 0, "{}{}", self.out, self.err);
        self
    }
}

/// Waits until something holds.
#[track_caller]
pub fn eventually(what: &str, limit: Duration, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < limit, "{what}: not within {limit:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Sends SIGKILL.
pub fn kill(pid: i64) {
    signal(pid, Signal::KILL);
}

pub fn signal(pid: i64, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
