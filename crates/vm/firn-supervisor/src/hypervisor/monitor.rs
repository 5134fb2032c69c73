//! The connection to a VM's monitor, after a check that the socket belongs to the VM and is free.
//!
//! ```text
//!   connect --> is the peer the VM's process? -- no --> an error that names both; nothing was sent
//!                 | yes
//!               a greeting within 1.5 s? -- no --> is another process connected? -- yes --> an error that names it
//!                 | yes                              | no: QEMU is slow
//!               negotiate <--------------------------'
//! ```
//!
//! A path may come to lead to another QEMU: a QEMU that is started with the same command line
//! removes the socket file and creates its own. Commands for one VM must not reach another.
//!
//! The peer, by `SO_PEERCRED`, is the process that called listen(2) on the socket last. QEMU calls
//! it itself: after `-daemonize` has forked, and also on a descriptor that already listens when
//! QEMU receives it (`-chardev socket,fd=N`, as libvirt does; `socket_listen` in QEMU
//! `util/qemu-sockets.c`). A program in between, such as socat, is another process, and may lead to
//! any QEMU, so it is refused.
//!
//! The monitor of a domain of libvirt is reached in another way, with a check of its own (`libvirt`).

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use firn_vmm::{QemuVm, QmpClient, QmpError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::hypervisor::libvirt;
use crate::processes::process_names::{self, ProcessName};
use crate::processes::unix_sockets;
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::monitor_address::MonitorAddress;

/// The time after which a busy monitor is an error.
const BUSY_WAIT: Duration = Duration::from_millis(1500);

pub(crate) const CONNECTING: &str = "connecting to QEMU's monitor";

/// Connects to the monitor of the VM that this process runs. `timeout` limits this and, later, each
/// command.
pub(crate) fn connect_checked(
    process: i32,
    address: &MonitorAddress,
    timeout: Duration,
) -> Result<QemuVm, Failure> {
    let vm = match address {
        MonitorAddress::Socket(socket) => connect_socket(process, socket, timeout),
        MonitorAddress::Domain(domain) => libvirt::connect_domain(process, domain, timeout),
    };
    vm.map(|vm| vm.of_process(process))
}

fn connect_socket(process: i32, socket: &Path, timeout: Duration) -> Result<QemuVm, Failure> {
    let stream = open_socket(socket, timeout).map_err(|failure| failure.while_doing(CONNECTING))?;
    check_peer(&stream, process, socket)?;
    if !has_greeting(&stream, timeout).while_doing(CONNECTING)? {
        refuse_busy(socket).map_err(|failure| failure.while_doing(CONNECTING))?;
    }
    negotiate_qmp(stream, timeout).while_doing(CONNECTING).map_err(|failure| {
        failure.with_hint("a monitor serves one client at a time: is another one connected?")
    })
}

/// Connects to a monitor unless another process uses it. For answers that a command can do without:
/// nothing waits until the other process has left.
pub(crate) fn connect_if_free(
    process: i32,
    address: &MonitorAddress,
    timeout: Duration,
) -> Result<QemuVm, Failure> {
    if let MonitorAddress::Socket(socket) = address {
        refuse_busy(socket).map_err(|failure| failure.while_doing(CONNECTING))?;
    }
    connect_checked(process, address, timeout)
}

pub(crate) fn negotiate_qmp(stream: UnixStream, timeout: Duration) -> Result<QemuVm, QmpError> {
    QmpClient::negotiate(stream, timeout).and_then(QemuVm::with_qmp)
}

/// Opens the socket. A socket that accepts no more connections has clients that wait, and one that
/// is served.
fn open_socket(socket: &Path, timeout: Duration) -> Result<UnixStream, Failure> {
    let deadline = Instant::now() + timeout;
    match QmpClient::open_stream(socket, timeout.min(BUSY_WAIT)) {
        Err(error) if is_full(&error) => {
            refuse_busy(socket)?;
            QmpClient::open_stream(socket, deadline.saturating_duration_since(Instant::now()))
        }
        opened => opened,
    }
    .map_err(|error| {
        Failure::from_error(FailureKind::Other, &error).with_hint(
            "is that QEMU's monitor socket (-qmp unix:PATH,server=on,wait=off), and does QEMU run?",
        )
    })
}

fn is_full(error: &QmpError) -> bool {
    matches!(error, QmpError::Connect { source, .. } if source.kind() == io::ErrorKind::WouldBlock)
}

/// Refuses a socket on which another process listens.
pub(crate) fn check_peer(stream: &UnixStream, pid: i32, socket: &Path) -> Result<(), Failure> {
    let peer = rustix::net::sockopt::socket_peercred(stream).while_doing(CONNECTING)?;
    match peer.pid.as_raw_nonzero().get() {
        peer if peer == pid => Ok(()),
        peer => Err(wrong_peer(peer, pid, socket)),
    }
}

fn wrong_peer(peer: i32, pid: i32, socket: &Path) -> Failure {
    let socket = socket.display();
    let text =
        format!("{socket} is the monitor of {}, not of process {pid}", ProcessName::with_id(peer));
    let hint = format!(
        "nothing was sent to it. If you mean that process: `firn attach --pid {peer}`; if it replaced the socket of process {pid}, \
         end it, and give each QEMU a monitor socket of its own"
    );
    Failure::new(FailureKind::Usage, text).with_hint(hint)
}

fn has_greeting(stream: &UnixStream, timeout: Duration) -> io::Result<bool> {
    let wait = timeout.min(BUSY_WAIT);
    let wait = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() };
    let mut polled = [PollFd::new(stream, PollFlags::IN)];
    match poll(&mut polled, Some(&wait)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// Refuses a monitor that another process is connected to. A monitor that this process uses is free
/// soon.
fn refuse_busy(socket: &Path) -> Result<(), Failure> {
    let clients = match unix_sockets::find_users(socket) {
        Ok(users) => users.clients,
        Err(error) => {
            tracing::warn!("can't find the process that uses {}: {error}", socket.display());
            return Ok(());
        }
    };
    if clients.is_empty() {
        return Ok(());
    }
    let holder = match process_names::find_socket_user(&clients) {
        Some(pid) if pid == std::process::id() as i32 => return Ok(()),
        Some(pid) => ProcessName::with_id(pid).to_string(),
        None => "a process that this user cannot see".to_owned(),
    };
    let text = format!("{} is in use by {holder}", socket.display());
    let hint = "a monitor serves one client at a time: end that connection, or start QEMU with a second monitor for Firn \
        (-qmp unix:PATH,server=on,wait=off)";
    Err(Failure::new(FailureKind::Busy, text).with_hint(hint))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixListener;
    use std::thread;

    #[test]
    fn nothing_is_sent_to_the_monitor_of_another_process() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("qmp");
        let listener = UnixListener::bind(&socket).unwrap();
        let heard = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut all = Vec::new();
            stream.read_to_end(&mut all).unwrap();
            all
        });
        let refused = connect_socket(1, &socket, Duration::from_secs(5)).unwrap_err();
        let me = std::process::id();
        assert_eq!(refused.kind, FailureKind::Usage);
        let text = refused.to_string();
        assert!(text.contains(&format!("is the monitor of process {me} (")), "{text}");
        assert!(text.contains("not of process 1"), "{text}");
        assert_eq!(heard.join().unwrap(), b"");
    }

    /// Its backlog is full, and no other process uses it, so the client waits.
    #[test]
    fn a_slow_monitor_is_waited_for_until_the_time_is_over() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("qmp");
        let _listener = UnixListener::bind(&socket).unwrap();
        let refused = connect_socket(std::process::id() as i32, &socket, Duration::from_millis(50));
        assert_eq!(refused.unwrap_err().kind, FailureKind::Other);
        let none =
            connect_socket(1, &dir.path().join("none"), Duration::from_millis(50)).unwrap_err();
        assert!(none.hint.unwrap().contains("-qmp unix:PATH"));
    }
}
