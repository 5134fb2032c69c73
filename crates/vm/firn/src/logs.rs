//! `firn logs`

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, FailureContext, FailureKind, VmDir, VmName};
use firn_types::make_printable_lines;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::json;

use crate::output::FactPrinter;

/// The number of bytes of each log that are printed at most: the last ones.
const TAIL_BYTES: u64 = 1 << 20;

/// The time between two searches for new lines.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(200);

/// Print the log of a VM's supervisor and the output of its QEMU.
///
/// The supervisor's log lists Firn's actions, and has no data of the guest. The output of QEMU has
/// its error messages, and the guest's console if QEMU was started with `-serial stdio`. The
/// command prints the last MiB of each. `firn status` shows the path of QEMU's output.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn logs web
  firn logs web --follow")]
pub struct LogsArgs {
    /// The VM.
    name: VmName,
    /// Continue to print new lines until the VM is stopped or forgotten.
    #[arg(long, short)]
    follow: bool,
}

impl LogsArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let vm = crate::hidden::runtime_dir()?.vm_dir(&self.name);
        check_exists(&vm)?;
        let mut logs = [VmLog::new("supervisor", vm.log_file()), VmLog::new("qemu", vm.qemu_log())];
        match self.follow {
            true => follow_logs(&mut logs, &vm, out),
            false => print_logs(&mut logs, out),
        }
    }
}

/// Checks that there is a VM. Its supervisor need not answer.
fn check_exists(vm: &VmDir) -> Result<(), Failure> {
    match std::fs::metadata(vm.path()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let text = format!("there is no VM called {}", vm.name());
            Err(Failure::new(FailureKind::NoSuchVm, text).with_hint("`firn ls` lists the VMs"))
        }
        found => found.map(drop).while_doing(format!("cannot read the logs of {}", vm.name())),
    }
}

fn print_logs(logs: &mut [VmLog], out: FactPrinter) -> Result<(), Failure> {
    let (mut facts, mut text) = (Vec::new(), String::new());
    for log in logs {
        let added = log.read_added(false)?;
        text += &format!("==> {} <==\n{added}", log.path.display());
        if !text.ends_with('\n') {
            text.push('\n');
        }
        facts.push(json!({ "source": log.source, "path": log.path, "text": added }));
    }
    out.print_facts(&json!({ "logs": facts }), || text)
}

fn follow_logs(logs: &mut [VmLog], vm: &VmDir, out: FactPrinter) -> Result<(), Failure> {
    loop {
        let is_last = !vm.exists();
        for log in logs.iter_mut() {
            let added = log.read_added(true)?;
            if !added.is_empty() {
                let facts = json!({ "source": log.source, "path": log.path, "text": added });
                out.print_line(&facts, || added.clone())?;
            }
        }
        if is_last || is_reader_gone() {
            return Ok(());
        }
        std::thread::sleep(FOLLOW_INTERVAL);
    }
}

/// Whether the process that reads this one's output has closed it.
fn is_reader_gone() -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let stdout = io::stdout();
    let mut polled = [PollFd::new(&stdout, PollFlags::empty())];
    poll(&mut polled, Some(&now)).is_ok() && polled[0].revents().contains(PollFlags::ERR)
}

/// A log, and how far it is read.
struct VmLog {
    source: &'static str,
    path: PathBuf,
    offset: u64,
}

impl VmLog {
    fn new(source: &'static str, path: PathBuf) -> Self {
        Self { source, path, offset: 0 }
    }

    /// Reads what was added since the last time, up to the end of the last whole line if
    /// `whole_lines`. A log that does not exist is empty.
    fn read_added(&mut self, whole_lines: bool) -> Result<String, Failure> {
        let read = match firn_files::open_input(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(String::new()),
            opened => opened.and_then(|file| self.read_tail(file)),
        };
        let mut bytes = read.while_doing(format!("cannot read {}", self.path.display()))?;
        if whole_lines {
            bytes.truncate(bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1));
        }
        self.offset += bytes.len() as u64;
        // A serial console ends its lines with both.
        let text = String::from_utf8_lossy(&bytes).replace("\r\n", "\n");
        Ok(make_printable_lines(&text).into_owned())
    }

    fn read_tail(&mut self, mut file: File) -> io::Result<Vec<u8>> {
        let length = file.metadata()?.len();
        let is_replaced = length < self.offset;
        let unread = if is_replaced { 0 } else { self.offset };
        self.offset = unread.max(length.saturating_sub(TAIL_BYTES));
        file.seek(SeekFrom::Start(self.offset))?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn only_new_lines_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut log = VmLog::new("qemu", path.clone());
        assert_eq!(log.read_added(true).unwrap(), "");
        let mut file = File::create(&path).unwrap();
        file.write_all(b"one\r\ntw").unwrap();
        assert_eq!(log.read_added(true).unwrap(), "one\n");
        assert_eq!(log.read_added(true).unwrap(), "");
        file.write_all(b"o\x1b\n").unwrap();
        assert_eq!(log.read_added(true).unwrap(), "two\\u{1b}\n");
        std::fs::write(&path, "x").unwrap();
        assert_eq!(log.read_added(false).unwrap(), "x");
    }

    #[test]
    fn of_a_long_log_the_end_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        std::fs::write(&path, "a".repeat(TAIL_BYTES as usize) + "end").unwrap();
        let text = VmLog::new("qemu", path).read_added(false).unwrap();
        assert!(text.len() as u64 == TAIL_BYTES && text.ends_with("aend"));
    }
}
