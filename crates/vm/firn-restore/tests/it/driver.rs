//! The test's end of the guest process.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use firn_memory::{GuestMemory, PageFaults, Process, RegionLocation, TraceMode, Tracee};
use firn_types::{HostVirt, RegionMap, ThreadId};

use crate::guest::{THREADS, VARIABLE};

/// Longer than anything in these tests takes.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// The guest process. Killed when dropped.
pub struct Guest {
    child: std::process::Child,
    stdin: ChildStdin,
    results: Vec<Receiver<String>>,
    pub process: Arc<Process>,
    pub memory: Arc<GuestMemory>,
    pub tids: Vec<ThreadId>,
    pub hvas: Vec<u64>,
}

impl Guest {
    /// A guest with the memory of the map, in this executable, run with these arguments.
    pub fn spawn(map: &RegionMap, arguments: &[&str]) -> Self {
        let sizes: Vec<_> = map.regions().iter().map(|region| region.pages.to_string()).collect();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(arguments)
            .env(VARIABLE, sizes.join(","))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let (ready, results) = listen(child.stdout.take().unwrap());
        let ready = ready.recv_timeout(PATIENCE).unwrap();
        let numbers: Vec<u64> = ready.split(' ').map(|word| word.parse().unwrap()).collect();
        let (tids, hvas) = numbers.split_at(THREADS);
        let process = Arc::new(Process::open(child.id() as i32).unwrap());
        let memory = Arc::new(open(&process, map, hvas));
        let tids = tids.iter().map(|&tid| ThreadId(tid as i32)).collect();
        Self { child, stdin, results, process, memory, tids, hvas: hvas.to_vec() }
    }

    /// Sends a command to a thread, and does not wait.
    pub fn send(&mut self, thread: usize, command: &str) {
        writeln!(self.stdin, "{thread} {command}").unwrap();
    }

    /// Waits for the result of a command.
    pub fn result(&self, thread: usize) -> String {
        self.results[thread].recv_timeout(PATIENCE).unwrap()
    }

    /// Sends a command and waits for its result, a number.
    pub fn ask(&mut self, thread: usize, command: &str) -> u64 {
        self.send(thread, command);
        self.result(thread).parse().unwrap()
    }

    /// The result of a command, if it arrives soon.
    pub fn result_within(&self, thread: usize, time: Duration) -> Option<String> {
        self.results[thread].recv_timeout(time).ok()
    }

    /// Attaches to it, as a restore does.
    pub fn attach(&self) -> PageFaults {
        let mut tracee = Tracee::seize(&self.process, &self.tids).unwrap();
        PageFaults::create(&mut tracee, self.memory.clone(), TraceMode::Restore).unwrap()
    }

    /// Closes the remaining descriptor of a restore in it.
    pub fn detach(&self, faults: PageFaults) {
        faults.close(&mut Tracee::seize(&self.process, &self.tids).unwrap()).unwrap();
    }

    /// The files behind its memory, in the order of its regions.
    pub fn files(&self) -> Vec<std::fs::File> {
        let fds = format!("/proc/{}/fd", self.process.pid());
        let entries = std::fs::read_dir(fds).unwrap().map(|entry| entry.unwrap().path());
        let is_ram = |path: &std::path::PathBuf| {
            std::fs::read_link(path).is_ok_and(|to| to.to_string_lossy().starts_with("/memfd:ram"))
        };
        let mut paths: Vec<_> = entries.filter(is_ram).collect();
        paths.sort_by_key(|path| {
            path.file_name().unwrap().to_str().unwrap().parse::<u32>().unwrap()
        });
        let open = |path| std::fs::File::options().read(true).write(true).open(path).unwrap();
        paths.into_iter().map(open).collect()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Whether any mapping of it is registered with a userfaultfd for missing pages (VmFlags `um`).
    pub fn is_registered(&self) -> bool {
        let text = std::fs::read_to_string(format!("/proc/{}/smaps", self.process.pid())).unwrap();
        let mut flags = text.lines().filter_map(|line| line.strip_prefix("VmFlags:"));
        flags.any(|flags| flags.split(' ').any(|flag| flag == "um"))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Opens the memory of a guest whose regions lie at these addresses.
pub fn open(process: &Arc<Process>, map: &RegionMap, hvas: &[u64]) -> GuestMemory {
    let regions = map.regions().iter().cloned();
    let locations: Vec<_> = regions
        .zip(hvas)
        .map(|(region, &hva)| RegionLocation { region, hva: HostVirt(hva) })
        .collect();
    GuestMemory::open(process.clone(), map.clone(), &locations).unwrap()
}

/// Sorts the guest's lines: its first one, and those of each thread. Lines of a test harness are
/// left out.
fn listen(
    stdout: impl std::io::Read + Send + 'static,
) -> (Receiver<String>, Vec<Receiver<String>>) {
    let (ready, is_ready) = channel();
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| channel()).unzip();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines() {
            let Ok(line) = line else { return };
            let Some((name, result)) = line.split_once(' ') else { continue };
            let sender = match name {
                "ready" => &ready,
                _ => match name.parse::<usize>().ok().and_then(|thread| senders.get(thread)) {
                    Some(sender) => sender,
                    None => continue,
                },
            };
            let _ = sender.send(result.to_owned());
        }
    });
    (is_ready, receivers)
}
