//! A QEMU for one test: started with shared RAM and a monitor, ended with the test.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use firn_vmm::QemuVm;
use rustix::fs::MemfdFlags;
use rustix::io::FdFlags;

/// The QEMU to test with.
pub fn binary() -> String {
    std::env::var("FIRN_QEMU").unwrap_or_else(|_| "qemu-system-x86_64".into())
}

/// Skips a test where there is no QEMU, and prints that.
#[macro_export]
macro_rules! need_qemu {
    () => {
        if let Err(error) = std::process::Command::new($crate::qemu::binary())
            .arg("--version")
            .stdout(std::process::Stdio::null())
            .status()
        {
            firn_skip::skip_test(format_args!(
                "{} does not start: {error}",
                $crate::qemu::binary()
            ));
            return;
        }
    };
}

/// A memfd that a child process inherits.
pub fn inherited_memfd(bytes: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create("firn-test-ram", MemfdFlags::empty()).unwrap();
    rustix::fs::ftruncate(&file, bytes).unwrap();
    rustix::io::fcntl_setfd(&file, FdFlags::empty()).unwrap();
    file
}

/// `-object` for a backend over a memfd.
pub fn backend(id: &str, bytes: u64, file: &OwnedFd) -> Vec<String> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let object = format!("memory-backend-file,id={id},size={bytes},mem-path={path},share=on");
    vec!["-object".into(), object]
}

/// A QEMU under test.
pub struct Qemu {
    child: Child,
    dir: tempfile::TempDir,
}

impl Qemu {
    /// Starts QEMU without devices beside those of the machine type.
    pub fn start(args: &[String]) -> Self {
        let dir = tempfile::Builder::new().prefix("firn-vmm-").tempdir().unwrap();
        let monitor = format!("unix:{},server=on,wait=off", dir.path().join("qmp").display());
        let child = Command::new(binary())
            .args(["-display", "none", "-nodefaults", "-accel", "tcg", "-qmp", &monitor])
            .args(args)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Self { child, dir }
    }

    /// The path of its monitor socket.
    pub fn monitor(&self) -> PathBuf {
        self.dir.path().join("qmp")
    }

    /// Connects to its monitor.
    pub fn vm(&self) -> QemuVm {
        QemuVm::connect_started(&self.monitor(), || true).unwrap()
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Words of a command line.
pub fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}
