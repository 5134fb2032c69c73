//! The test's side of the process under test.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use firn_memory::{
    GuestMemory, MemoryError, MemoryEvent, PageFaults, Process, RegionLocation, TraceMode, Tracee,
};
use firn_types::{HostVirt, Page, RegionMap, ThreadId};
use nix::libc;

use rustix::process::{Pid, Signal, kill_process};

use crate::child::VARIABLE;

/// No operation in these tests takes that long.
const PATIENCE: Duration = Duration::from_secs(120);

/// The process under test. Killed when dropped.
pub struct Child {
    child: std::process::Child,
    stdin: ChildStdin,
    results: [Receiver<String>; 3],
    pub process: Arc<Process>,
    pub memory: Arc<GuestMemory>,
    pub tids: [ThreadId; 2],
    pub hvas: Vec<HostVirt>,
}

/// A thread of the child.
#[derive(Clone, Copy)]
pub enum Who {
    First = 0,
    Second = 1,
    Main = 2,
}

impl Who {
    fn name(self) -> &'static str {
        ["0", "1", "m"][self as usize]
    }
}

impl Child {
    /// A child with memfds of these many pages.
    pub fn spawn(sizes: &[u64]) -> Self {
        Self::spawn_with("", sizes, |_| ())
    }

    /// A child that runs as the user nobody.
    pub fn spawn_as_nobody(sizes: &[u64]) -> Self {
        use std::os::unix::process::CommandExt;
        Self::spawn_with("", sizes, |command| {
            command.uid(65534).gid(65534);
        })
    }

    /// A child with private memory of these many pages.
    pub fn spawn_private(sizes: &[u64]) -> Self {
        Self::spawn_with("p", sizes, |_| ())
    }

    /// A child with memory of several kinds: `h1024` are 1024 pages in huge pages.
    pub fn spawn_mixed(memfds: &[&str]) -> Self {
        let size = |memfd: &&str| memfd.trim_start_matches(['h', 'g']).parse().unwrap();
        let sizes: Vec<u64> = memfds.iter().map(size).collect();
        Self::spawn_list(&memfds.join(","), &sizes, |_| ())
    }

    fn spawn_with(kind: &str, sizes: &[u64], how: impl FnOnce(&mut Command)) -> Self {
        let list = sizes.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
        Self::spawn_list(&format!("{kind}{list}"), sizes, how)
    }

    fn spawn_list(list: &str, sizes: &[u64], how: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        how(&mut command);
        let mut child = command
            .args(["--exact", "child::child_process", "--nocapture", "--test-threads=1"])
            .env(VARIABLE, list)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let results = listen(child.stdout.take().unwrap());
        let ready = results[Who::Main as usize].recv_timeout(PATIENCE).unwrap();
        let mut words =
            ready.strip_prefix("ready ").unwrap().split(' ').map(|n| n.parse::<u64>().unwrap());
        let tids = [0, 1].map(|_| ThreadId(words.next().unwrap() as i32));
        let hvas: Vec<_> = words.map(HostVirt).collect();
        let process = Arc::new(Process::open(child.id() as i32).unwrap());
        let memory = Arc::new(open_with(GuestMemory::open_any, &process, sizes, &hvas).unwrap());
        Self { child, stdin, results, process, memory, tids, hvas }
    }

    /// Gives a command to a thread, and does not wait.
    pub fn send(&mut self, who: Who, command: &str) {
        writeln!(self.stdin, "{} {command}", who.name()).unwrap();
    }

    /// Waits for the result of a command.
    pub fn result(&self, who: Who) -> u64 {
        self.results[who as usize].recv_timeout(PATIENCE).unwrap().parse().unwrap()
    }

    /// Whether a result is there already.
    pub fn has_result(&self, who: Who, within: Duration) -> Option<u64> {
        self.results[who as usize].recv_timeout(within).ok().map(|result| result.parse().unwrap())
    }

    /// Gives a command and waits for its result.
    pub fn ask(&mut self, who: Who, command: &str) -> u64 {
        self.send(who, command);
        self.result(who)
    }

    pub fn tracee(&self) -> Tracee<'_> {
        Tracee::seize(&self.process, &self.tids).unwrap()
    }

    /// Traces all of its memory.
    pub fn trace(&self, trace: TraceMode) -> PageFaults {
        let faults = PageFaults::create(&mut self.tracee(), self.memory.clone(), trace).unwrap();
        faults.register_all().unwrap();
        faults
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends SIGUSR1 to one of its threads.
    pub fn signal(&self, tid: ThreadId) {
        // SAFETY: tgkill takes three numbers.
        let sent =
            unsafe { libc::syscall(libc::SYS_tgkill, self.process.pid(), tid.0, libc::SIGUSR1) };
        assert_eq!(sent, 0);
    }

    /// Kills it without waiting for its end, which a tracer may delay.
    pub fn kill_traced(&mut self) {
        self.child.kill().unwrap();
    }

    /// The userfaultfds in its table.
    pub fn userfaultfds(&self) -> usize {
        let directory = format!("/proc/{}/fd", self.process.pid());
        let targets = std::fs::read_dir(directory).unwrap();
        let targets = targets.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
        targets.filter(|target| target.to_str() == Some("anon_inode:[userfaultfd]")).count()
    }

    /// Whether any mapping of it is registered with a userfaultfd (VmFlags `um`, `uw`, `ui`).
    pub fn is_registered(&self) -> bool {
        let text = std::fs::read_to_string(format!("/proc/{}/smaps", self.process.pid())).unwrap();
        let mut flags = text.lines().filter_map(|line| line.strip_prefix("VmFlags:"));
        flags.any(|flags| flags.split(' ').any(|flag| ["um", "uw", "ui"].contains(&flag)))
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

type Opened = Result<GuestMemory, MemoryError>;

/// Opens guest memory of these many pages per region at these addresses.
pub fn open(process: &Arc<Process>, sizes: &[u64], hvas: &[HostVirt]) -> Opened {
    open_with(GuestMemory::open, process, sizes, hvas)
}

fn open_with(
    open: fn(Arc<Process>, RegionMap, &[RegionLocation]) -> Opened,
    process: &Arc<Process>,
    sizes: &[u64],
    hvas: &[HostVirt],
) -> Opened {
    let names: Vec<String> = (0..sizes.len()).map(|region| format!("ram{region}")).collect();
    let regions = names.iter().zip(sizes).map(|(name, pages)| (name.as_str(), pages * 4096));
    let map = RegionMap::lay_out(regions).unwrap();
    let regions = map.regions().to_vec().into_iter();
    let locations: Vec<_> =
        regions.zip(hvas).map(|(region, &hva)| RegionLocation { region, hva }).collect();
    open(process.clone(), map, &locations)
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_raw(child.process.pid()).unwrap(), signal).unwrap();
}

/// Stops the child; no thread of it runs afterwards.
pub fn pause(child: &Child) {
    signal(child, Signal::STOP);
    let is_stopped = |tid: &ThreadId| {
        let stat = format!("/proc/{}/task/{}/stat", child.process.pid(), tid.0);
        let stat = std::fs::read_to_string(stat).unwrap();
        stat.rsplit_once(") ").unwrap().1.starts_with('T')
    };
    let start = Instant::now();
    while !child.process.list_threads().unwrap().iter().all(is_stopped) {
        assert!(start.elapsed() < PATIENCE, "the child does not stop");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Lets the child continue.
pub fn resume(child: &Child) {
    signal(child, Signal::CONT);
}

/// Sorts the child's lines by thread. Lines of the test harness are left out.
fn listen(stdout: impl std::io::Read + Send + 'static) -> [Receiver<String>; 3] {
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..3).map(|_| channel()).unzip();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines() {
            let Ok(line) = line else { return };
            let sender = match line.split_once(' ') {
                Some(("0", result)) => (0, result),
                Some(("1", result)) => (1, result),
                Some(("m", result)) => (2, result),
                _ => continue,
            };
            let _ = senders[sender.0].send(sender.1.to_owned());
        }
    });
    receivers.try_into().unwrap()
}

/// Waits for the next event; panics if there is none.
pub fn next(faults: &PageFaults) -> MemoryEvent {
    let mut events = Vec::new();
    let start = Instant::now();
    while events.is_empty() {
        assert!(start.elapsed() < PATIENCE, "no event");
        faults.wait_for_events(&mut events, Duration::from_secs(1)).unwrap();
    }
    assert_eq!(events.len(), 1, "{events:?}");
    events.remove(0)
}

/// Whether nothing happens for a while.
pub fn is_quiet(faults: &PageFaults) -> bool {
    let mut events = Vec::new();
    faults.wait_for_events(&mut events, Duration::from_millis(50)).unwrap();
    events.is_empty()
}

/// The pages of a range.
pub fn pages(range: std::ops::Range<u32>) -> std::ops::Range<Page> {
    Page(range.start)..Page(range.end)
}
