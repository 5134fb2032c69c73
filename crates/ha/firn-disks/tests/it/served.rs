//! A disk's file, served by this process or by a child that can be killed.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;

use firn_disks::LoggedDisk;
use firn_disks::nbd::{NbdExports, NbdServer};
use tempfile::TempDir;

/// The environment variable that names the disk that a child serves.
const CHILD: &str = "FIRN_DISKS_CHILD";

/// A directory with a file, and the socket that its disk is served on.
pub struct Place {
    pub dir: TempDir,
    size: Option<u64>,
}

impl Place {
    /// With a raw file of `length` bytes, all a hole.
    pub fn raw(length: u64) -> Self {
        let place = Self { dir: tempfile::tempdir().unwrap(), size: None };
        std::fs::File::create(place.file()).unwrap().set_len(length).unwrap();
        place
    }

    /// With a qcow2 file whose disk has `size` bytes at most.
    pub fn qcow2(bytes: u64, size: u64) -> Self {
        let place = Self { dir: tempfile::tempdir().unwrap(), size: Some(size) };
        let file = place.file();
        ok(
            "qemu-img",
            &["create", "-q", "-f", "qcow2", file.to_str().unwrap(), &bytes.to_string()],
        );
        place
    }

    pub fn file(&self) -> PathBuf {
        self.dir.path().join("disk")
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("nbd")
    }

    pub fn disk(&self) -> Arc<LoggedDisk> {
        Arc::new(LoggedDisk::open(&self.file(), self.size).unwrap())
    }

    /// By this process.
    pub fn serve(&self, disk: &Arc<LoggedDisk>) -> NbdServer {
        let exports: NbdExports = [("vda".to_owned(), Arc::clone(disk))].into_iter().collect();
        NbdServer::start(&self.socket(), exports).unwrap()
    }

    /// By a child, with a fault armed.
    pub fn child(&self, fault: Option<&str>) -> Served {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "served::child", "--nocapture", "--test-threads=1"]);
        command.env(CHILD, self.dir.path()).stdout(Stdio::piped());
        command.env_remove(firn_fault::VARIABLE);
        if let Some(fault) = fault {
            command.env(firn_fault::VARIABLE, fault);
        }
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().ends_with("serving")), "the child can't serve");
        // The child must not block or die when it prints more lines.
        std::thread::spawn(move || lines.for_each(drop));
        Served(child)
    }

    /// QEMU's description of the disk, opened as `format`.
    pub fn options(&self, format: &str) -> String {
        let socket = self.socket();
        format!(
            "driver={format},file.driver=nbd,file.server.type=unix,file.server.path={},file.export=vda,file.reconnect-delay=60",
            socket.display()
        )
    }

    /// Runs commands of qemu-io on the disk.
    pub fn io(&self, format: &str, commands: &[&str]) -> Output {
        let mut command = Command::new("qemu-io");
        command.args(["-t", "writeback", "--image-opts", &self.options(format)]);
        for it in commands {
            command.args(["-c", it]);
        }
        command.output().unwrap()
    }

    /// The same, and it must succeed.
    pub fn io_ok(&self, format: &str, commands: &[&str]) -> String {
        let output = self.io(format, commands);
        let words = words(&output);
        assert!(output.status.success() && !words.contains("failed"), "{commands:?}: {words}");
        words
    }

    pub fn bytes(&self) -> Vec<u8> {
        std::fs::read(self.file()).unwrap()
    }
}

/// A child that serves until it is killed.
pub struct Served(Child);

impl Served {
    /// Kills it with SIGKILL; does nothing to one that has killed itself.
    pub fn kill(&mut self) {
        let _ = self.0.kill();
        self.0.wait().unwrap();
    }

    /// The memory that it uses.
    pub fn memory_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// Waits until it has killed itself.
    pub fn wait(&mut self) {
        self.0.wait().unwrap();
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The child. Without its variable it is an empty test.
#[test]
fn child() {
    let Some(dir) = std::env::var_os(CHILD) else { return };
    let dir = Path::new(&dir);
    let disk = Arc::new(LoggedDisk::open(&dir.join("disk"), None).unwrap());
    let exports: NbdExports = [("vda".to_owned(), disk)].into_iter().collect();
    let _server = NbdServer::start(&dir.join("nbd"), exports).unwrap();
    println!("\nserving");
    loop {
        std::thread::park();
    }
}

/// Runs a program that has to succeed.
pub fn ok(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let words = words(&output);
    assert!(output.status.success(), "{program} {arguments:?}: {words}");
    words
}

pub fn words(output: &Output) -> String {
    let (out, err) = (&output.stdout, &output.stderr);
    format!("{}{}", String::from_utf8_lossy(out), String::from_utf8_lossy(err))
}
