//! `firn console`

use std::io::{self, IsTerminal as _, Read as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;

use clap::Args as ClapArgs;
use firn_supervisor::{
    Failure, FailureContext, FailureKind, GuestConsole, VmName, find_vm_consoles,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};

use crate::output::{FactPrinter, printable_path};

/// Ctrl and `]`, as telnet(1) and `virsh console` have it.
const ESCAPE: u8 = 0x1d;

/// How long the guest must print nothing after the end of an input that is no terminal.
const SILENCE_S: i64 = 1;

/// The state of a connected socket in /proc/net/unix (`SS_CONNECTED`, linux/net.h).
const CONNECTED: &str = "03";

/// Connect this terminal to a guest's serial console.
///
/// Ctrl-] ends the connection; the VM continues to run. QEMU must have a serial port or a virtual
/// console that is connected to a Unix socket on which QEMU listens. A restored VM has the same
/// console.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn run web -- qemu-system-x86_64 ... \\
    -chardev socket,id=tty,path=web.tty,server=on,wait=off \\
    -serial chardev:tty
  firn console web
  # one command, and what the guest prints until it is silent
  echo uptime | firn console web")]
pub struct ConsoleArgs {
    /// The VM.
    name: VmName,
    /// The console, if the guest has several: the id of its character device, or serial0, serial1.
    #[arg(long)]
    device: Option<String>,
}

impl ConsoleArgs {
    /// Runs the verb. With --json it prints where the console is, and does not connect.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let console = self
            .find_console()
            .map_err(|failure| failure.while_doing(format!("no console of {}", self.name)))?;
        if out.is_json() {
            let facts = serde_json::json!({
                "name": self.name, "device": console.id, "socket": console.socket,
            });
            return out.print_facts(&facts, String::new);
        }
        self.connect(&console.socket)
    }

    fn find_console(&self) -> Result<GuestConsole, Failure> {
        self.choose(find_vm_consoles(&crate::hidden::runtime_dir()?, &self.name)?)
    }

    fn choose(&self, consoles: Vec<GuestConsole>) -> Result<GuestConsole, Failure> {
        let ids: Vec<&str> = consoles.iter().map(|console| console.id.as_str()).collect();
        let (text, hint) = match (&self.device, &ids[..]) {
            (_, []) => (
                "no serial port of the VM is on a socket that QEMU listens on".to_owned(),
                "start QEMU with -chardev socket,id=tty,path=PATH,server=on,wait=off -serial \
                 chardev:tty; what -serial stdio prints is in `firn logs`"
                    .to_owned(),
            ),
            (None, [_]) => return Ok(consoles[0].clone()),
            (None, _) => (
                format!("the VM has {} consoles", ids.len()),
                format!("choose one by --device: {}", ids.join(", ")),
            ),
            (Some(device), _) => match consoles.iter().find(|console| console.id == *device) {
                Some(console) => return Ok(console.clone()),
                None => (
                    format!("the VM has no console called {device}"),
                    format!("its consoles: {}", ids.join(", ")),
                ),
            },
        };
        Err(Failure::new(FailureKind::Usage, text).with_hint(hint))
    }

    fn connect(&self, socket: &Path) -> Result<(), Failure> {
        let shown = printable_path(socket);
        // QEMU serves one client, and lets a second one wait in silence.
        if is_connected(socket).while_doing("reading /proc/net/unix")? {
            let text = format!("another program is connected to the console at {shown}");
            return Err(
                Failure::new(FailureKind::Busy, text).with_hint("end that connection first")
            );
        }
        let stream = UnixStream::connect(socket)
            .while_doing(format!("cannot connect to the console at {shown}"))?;
        let raw = RawTerminal::enter().while_doing("cannot change the terminal's mode")?;
        if raw.is_some() {
            eprint!("connected to {}; Ctrl-] ends the connection\r\n", self.name);
        }
        let is_closed = forward(&stream, raw.is_some()).while_doing("using the console")?;
        drop(raw);
        if is_closed {
            eprintln!("the console of {} is closed: the VM has ended", self.name);
        }
        Ok(())
    }
}

/// Whether a client is connected to a listening socket: accepted sockets have its path.
fn is_connected(socket: &Path) -> io::Result<bool> {
    let table = std::fs::read("/proc/net/unix")?;
    let name = socket.as_os_str().as_bytes();
    Ok(table.split(|&byte| byte == b'\n').any(|line| has_state(line, name, CONNECTED)))
}

/// Whether a line of /proc/net/unix is of this path and in this state (unix(7) and proc(5): `Num
/// RefCount Protocol Flags Type St Inode Path`). A path may have spaces.
fn has_state(line: &[u8], path: &[u8], state: &str) -> bool {
    let (mut rest, mut fields) = (line, Vec::new());
    for _ in 0..7 {
        rest = rest.trim_ascii_start();
        let end = rest.iter().position(|&byte| byte == b' ').unwrap_or(rest.len());
        let (field, after) = rest.split_at(end);
        fields.push(field);
        rest = after;
    }
    fields[5] == state.as_bytes() && rest.strip_prefix(b" ") == Some(path)
}

/// Copies input to the guest and its output to standard output, until the user or the guest ends.
/// True if the guest has closed the connection.
fn forward(mut stream: &UnixStream, is_terminal: bool) -> io::Result<bool> {
    let (stdin, mut stdout) = (io::stdin(), io::stdout());
    let mut has_input = true;
    let mut buffer = [0; 4096];
    loop {
        let mut polled = vec![PollFd::new(&stream, PollFlags::IN)];
        if has_input {
            polled.push(PollFd::new(&stdin, PollFlags::IN));
        }
        let silence = Timespec { tv_sec: SILENCE_S, tv_nsec: 0 };
        if poll(&mut polled, (!has_input).then_some(&silence))? == 0 {
            return Ok(false);
        }
        let is_ready = |at: usize| polled.get(at).is_some_and(|it| !it.revents().is_empty());
        let (from_guest, from_user) = (is_ready(0), is_ready(1));
        if from_guest {
            match stream.read(&mut buffer)? {
                0 => return Ok(true),
                read => stdout.write_all(&buffer[..read]).and_then(|()| stdout.flush())?,
            }
        }
        if from_user {
            let read = rustix::io::read(&stdin, &mut buffer)?;
            let typed = &buffer[..read];
            let end = typed.iter().position(|&byte| is_terminal && byte == ESCAPE);
            stream.write_all(&typed[..end.unwrap_or(read)])?;
            if end.is_some() {
                return Ok(false);
            }
            has_input = read > 0;
        }
    }
}

/// A terminal that passes every key to the guest, until this value is dropped.
struct RawTerminal(Termios);

impl RawTerminal {
    /// `None` if standard input is no terminal.
    fn enter() -> io::Result<Option<Self>> {
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(&stdin)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&stdin, OptionalActions::Now, &raw)?;
        Ok(Some(Self(before)))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // A terminal that is gone needs no mode.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connected_and_listening_sockets_are_distinguished() {
        let listens = b"0000000000000000: 00000002 00000000 00010000 0001 01 28115 /run/a b";
        let accepted = b"0000000000000000: 00000003 00000000 00000000 0001 03 28116 /run/a b";
        assert!(!has_state(listens, b"/run/a b", CONNECTED));
        assert!(has_state(accepted, b"/run/a b", CONNECTED));
        for other in [&b"/run/a"[..], b"b", b"un/a b"] {
            assert!(!has_state(accepted, other, CONNECTED), "{other:?}");
        }
    }
}
