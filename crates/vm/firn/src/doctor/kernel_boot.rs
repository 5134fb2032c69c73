//! A check whether KVM boots a kernel: the host's own, until it writes its first line.
//!
//! A kernel needs more of KVM than the smallest firmware does, and on some hosts only the firmware
//! runs. The kernel's first line goes to a serial console (`earlyprintk`). The code before it,
//! which runs in 16-bit mode, may write there too, so the content of the line is checked. A kernel
//! that writes no line under TCG either has no such console, and proves nothing.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// The beginning of a kernel's first line.
const FIRST_LINE: &str = "Linux version";

/// The options that make a kernel write it at once.
const APPEND: &str = "console=ttyS0 earlyprintk=serial,ttyS0,115200 panic=-1";

/// The time that a kernel may take under KVM. It takes less than a second.
const KVM_WAIT: Duration = Duration::from_secs(10);

/// The time that it may take under TCG, on a busy host.
const TCG_WAIT: Duration = Duration::from_secs(60);

/// The result of booting a kernel under KVM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelBoot {
    /// The kernel writes its first line.
    Boots(PathBuf),
    /// It does so under TCG only.
    Fails(PathBuf),
    /// The check was not possible, for this reason.
    NotChecked(String),
}

/// Boots `kernel`, or the host's own.
pub fn probe_boot(qemu: &str, kernel: Option<&Path>) -> KernelBoot {
    let Some(kernel) = kernel.map(Path::to_owned).or_else(host_kernel) else {
        return KernelBoot::NotChecked("no kernel in /boot can be read".to_owned());
    };
    match boot_kernel(qemu, &kernel) {
        Ok(boot) => boot,
        Err(error) => KernelBoot::NotChecked(format!("{}: {error}", kernel.display())),
    }
}

fn boot_kernel(qemu: &str, kernel: &Path) -> io::Result<KernelBoot> {
    if writes_first_line(qemu, "kvm", kernel, KVM_WAIT)? {
        return Ok(KernelBoot::Boots(kernel.to_owned()));
    }
    if writes_first_line(qemu, "tcg", kernel, TCG_WAIT)? {
        return Ok(KernelBoot::Fails(kernel.to_owned()));
    }
    let text = format!("{} writes nothing to a serial console under TCG either", kernel.display());
    Ok(KernelBoot::NotChecked(text))
}

/// The running kernel, or any other of this host that can be read.
fn host_kernel() -> Option<PathBuf> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let release = release.trim();
    let own = [format!("/boot/vmlinuz-{release}"), format!("/lib/modules/{release}/vmlinuz")];
    let own = own.map(PathBuf::from).into_iter();
    let others = fs::read_dir("/boot").into_iter().flatten().flatten().map(|entry| entry.path());
    let is_kernel = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz"))
    };
    own.chain(others.filter(is_kernel)).find(|path| File::open(path).is_ok())
}

/// Boots a kernel and waits for its first line.
fn writes_first_line(qemu: &str, accel: &str, kernel: &Path, wait: Duration) -> io::Result<bool> {
    File::open(kernel)?;
    let mut command = Command::new(qemu);
    command.args(["-accel", accel, "-M", "pc", "-m", "256", "-nodefaults", "-no-user-config"]);
    command.args(["-display", "none", "-no-reboot", "-serial", "stdio", "-append", APPEND]);
    command.arg("-kernel").arg(kernel);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = KilledChild(command.spawn()?);
    let output = child.0.stdout.take().map(forward_output);
    Ok(output.is_some_and(|output| has_first_line(&output, wait)))
}

/// A process that is killed on drop.
struct KilledChild(Child);

impl Drop for KilledChild {
    fn drop(&mut self) {
        // A process that has ended by itself needs only the wait.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Reads the output in a thread of its own, which ends with the output.
fn forward_output(mut output: ChildStdout) -> Receiver<Vec<u8>> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut buffer = [0; 1024];
        while let Ok(bytes @ 1..) = output.read(&mut buffer) {
            if sender.send(buffer[..bytes].to_vec()).is_err() {
                break;
            }
        }
    });
    receiver
}

fn has_first_line(output: &Receiver<Vec<u8>>, wait: Duration) -> bool {
    let deadline = Instant::now() + wait;
    let mut text = String::new();
    while !text.contains(FIRST_LINE) {
        match output.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(bytes) => text.push_str(&String::from_utf8_lossy(&bytes)),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_kernels_own_line_counts() {
        let (sender, receiver) = channel();
        sender
            .send(b"Probing EDD (edd=off to disable)... ok\n[    0.000000] Linux ver".to_vec())
            .unwrap();
        sender.send(b"sion 6.1.0".to_vec()).unwrap();
        assert!(has_first_line(&receiver, Duration::from_secs(9)));
        let (sender, receiver) = channel();
        sender.send(b"Probing EDD (edd=off to disable)... ok\n".to_vec()).unwrap();
        drop(sender);
        assert!(!has_first_line(&receiver, Duration::from_secs(9)));
    }

    #[test]
    fn a_kernel_that_is_not_there_is_not_checked() {
        let boot = probe_boot("qemu-system-x86_64", Some(Path::new("/no/such/kernel")));
        assert!(matches!(boot, KernelBoot::NotChecked(_)), "{boot:?}");
    }
}
