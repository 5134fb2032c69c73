//! Real guests: whole sessions with them.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use firn_lab::guest::{GuestControl, GuestImage, JobState, QemuArgs, VirtioDisk, accel};
use firn_lab::prober::{Heartbeats, Prober};

use crate::machine::Machine;
use crate::pool::{self, Saved};
use crate::session::{Session, eventually, kill, text};

/// How long a guest may take to boot, or to answer, on a busy host.
const PATIENCE: Duration = Duration::from_secs(120);

/// What the writers of most guests do. A guest that writes less often needs its first missing page
/// in a device, so that no outage pauses it.
pub const LOAD: [&str; 4] = ["--mib", "48", "--rate", "2000"];

/// A session with a guest that checks its own memory all the time, as VM `web`.
pub struct Vm {
    pub session: Session,
    /// Its disks, with their formats; the guest writes to them and checks what it wrote.
    disks: Vec<(PathBuf, &'static str)>,
    /// A disk that the guest may have a file system on.
    file_system: Option<PathBuf>,
    /// More words for QEMU's command line.
    more: Vec<String>,
    /// More words for the guest kernel's command line.
    kernel_words: &'static str,
    memory_mib: u32,
    /// What another test finds in this session once this one is over.
    saved: Option<Saved>,
    _machine: Machine,
}

impl Drop for Vm {
    fn drop(&mut self) {
        let Some(saved) = self.saved.take() else { return };
        if !std::thread::panicking() {
            pool::put_back(std::mem::replace(&mut self.session, Session::new()), saved);
        }
    }
}

impl Vm {
    /// Boots a guest and lets it work.
    pub fn boot() -> Self {
        Self::new().booted(&LOAD)
    }

    /// Such a guest at work, restored: for tests to which it is the same how it began.
    pub fn resumed() -> Self {
        let vm = Self::with_base(false);
        vm.session
            .firn(&["restore", "base.firn", "--name", "web", "--mode", "eager", "--wait"])
            .succeeds();
        std::fs::remove_file(vm.image("base.firn.learned")).ok();
        vm
    }

    /// A guest with disks, or without, saved as `base.firn`.
    pub fn with_base(has_disks: bool) -> Self {
        let mut vm = Self::new();
        if let Some((session, saved, disks)) = pool::take(has_disks) {
            (vm.session, vm.saved, vm.disks) = (session, Some(saved), disks);
            return vm;
        }
        let vm = if has_disks { vm.booted_with_disks() } else { vm.booted(&LOAD) };
        let mut vm = crate::faults::saved(vm);
        vm.saved = Some(pool::note(&vm.session, &vm.disks));
        vm
    }

    /// Boots a guest that also writes to two disks, and checks them.
    pub fn boot_with_disks() -> Self {
        Self::new().booted_with_disks()
    }

    /// The same, beside a disk that QEMU reads past the page cache.
    pub fn boot_with_disks_past_the_page_cache() -> Self {
        Self::new().with_disks_past_the_page_cache()
    }

    /// Boots such a guest in a session that may have been prepared.
    pub fn with_disks_past_the_page_cache(self) -> Self {
        let vm = self;
        let past = vm.session.path("past.raw");
        std::fs::write(&past, vec![0; 1 << 20]).unwrap();
        let past = format!(
            "driver=file,node-name=past,filename={},read-only=on,cache.direct=on",
            text(&past)
        );
        vm.with(&["-blockdev", &past]).booted_with_disks()
    }

    fn booted_with_disks(self) -> Self {
        let mut vm = self;
        vm.create_disks("16M");
        let vm = vm.booted(&LOAD);
        vm.write_to_disks();
        vm
    }

    /// Makes disks for a guest that is booted later.
    pub fn create_disks(&mut self, size: &str) {
        for (name, format) in [("disk0.raw", "raw"), ("disk1.qcow2", "qcow2")] {
            let path = self.session.path(name);
            qemu_img(&["create", "-q", "-f", format, text(&path), size]);
            self.disks.push((path, format));
        }
    }

    /// Has a guest that runs write to its memory.
    pub fn with_load(self) -> Self {
        self.writing(&LOAD)
    }

    /// Has the guest write to the first 16 MiB of its disks, and check them.
    pub fn write_to_disks(&self) {
        let mut control = self.control();
        for (number, device) in ["/dev/vda", "/dev/vdb"].iter().enumerate() {
            let write = ["firn-guest", "disk-dma", "write", "--rate", "120", "--device", device];
            let job = format!("disk{number}");
            control.spawn_job(&job, &write).unwrap();
            control.wait_output(&job, "progress", PATIENCE).unwrap();
        }
    }

    /// Boots a guest that has a disk with an empty file system.
    pub fn boot_with_file_system() -> Self {
        let mut vm = Self::new();
        let path = vm.session.path("files.raw");
        let made = std::process::Command::new("mke2fs")
            .args(["-q", "-t", "ext4", text(&path), "96M"])
            .output();
        assert!(made.unwrap().status.success());
        vm.file_system = Some(path);
        vm.booted(&LOAD)
    }

    /// Boots a guest whose saves stay half done for a while, so that a test can look at them.
    pub fn boot_with_slow_saves() -> Self {
        let mut vm = Self::new();
        vm.session.arm(Some("save.tracing=HOLD"));
        let mut vm = vm.booted(&LOAD);
        vm.session.arm(None);
        vm
    }

    /// Boots a guest whose memory is scanned, as often as may be.
    pub fn boot_scanned() -> Self {
        let vm = Self::new();
        vm.run(&["--working-set", "access-bits", "--restore-speed", "2G"]);
        vm.writing(&LOAD)
    }

    /// Boots a guest in a session that may have been prepared, with options for `firn run`.
    pub fn booted_with(self, options: &[&str]) -> Self {
        self.run(options);
        self.writing(&LOAD)
    }

    /// Adds words to QEMU's command line, for a guest that is booted later.
    pub fn with(mut self, more: &[&str]) -> Self {
        self.more.extend(more.iter().map(|&word| word.to_owned()));
        self
    }

    /// Gives a guest that is booted later so much RAM.
    pub fn with_memory_mib(mut self, memory_mib: u32) -> Self {
        self.memory_mib = memory_mib;
        self
    }

    /// Boots the guest's kernel, later, with these words instead of the usual one.
    pub fn with_kernel_words(mut self, words: &'static str) -> Self {
        self.kernel_words = words;
        self
    }

    /// Boots a guest whose writers are given these words.
    pub fn booted(self, how: &[&str]) -> Self {
        self.run(&[]);
        self.writing(how)
    }

    fn run(&self, options: &[&str]) {
        let args = self.qemu_args();
        let command: Vec<&str> = args.iter().map(String::as_str).collect();
        let run = [&["run", "web", "--quiet"], options, &["--"], &command[..]].concat();
        self.session.firn(&run).succeeds();
    }

    /// Has a guest that runs write to its memory, by writers that are given these words.
    pub fn writing(self, how: &[&str]) -> Self {
        let vm = self;
        let mut control = vm.control();
        control.spawn_job("writers", &[&["firn-guest", "writers"], how].concat()).unwrap();
        eventually("writers", PATIENCE, || {
            control.run_program(&["firn-guest", "verify", "status"]).is_ok()
        });
        vm
    }

    /// A session without a guest.
    pub fn new() -> Self {
        Self::on(Machine::shared())
    }

    /// A session without a guest, for a test of several hosts: one at a time.
    pub fn one_of_hosts() -> Self {
        Self::on(Machine::hosts())
    }

    /// A session without a guest, beside which there is no other.
    pub fn alone() -> Self {
        Self::on(Machine::alone())
    }

    fn on(machine: Machine) -> Self {
        let (disks, file_system, more) = Default::default();
        let (session, kernel_words, saved) = (Session::new(), "", None);
        let memory_mib = 192;
        Self {
            session,
            disks,
            file_system,
            more,
            kernel_words,
            memory_mib,
            saved,
            _machine: machine,
        }
    }

    pub fn qemu_args(&self) -> Vec<String> {
        let args = QemuArgs::new(image(), accel::choose_accel().accel)
            .memory_mib(self.memory_mib)
            .append_kernel_arg("no_timer_check")
            // It boots in half the time without what these tests don't need.
            .append_kernel_arg("mitigations=off nokaslr firn.bare")
            .append_kernel_arg(self.kernel_words)
            .with_agent_socket(&self.session.path("agent"))
            .with_heartbeat_socket(&self.session.path("heart"));
        let file_system = self.file_system.iter().map(|file| (file, "raw"));
        let disks = self.disks.iter().map(|(file, format)| (file, *format)).chain(file_system);
        let args = disks.fold(args, |args, (file, format)| {
            args.add_disk(VirtioDisk { file: file.clone(), format, read_only: false })
        });
        let program = args.program_name().to_str().unwrap().to_owned();
        [vec![program], args.args(), self.more.clone()].concat()
    }

    /// Panics with what the host can see of a guest that does not answer.
    #[track_caller]
    pub fn control(&self) -> GuestControl {
        GuestControl::connect(&self.session.path("agent"), PATIENCE).unwrap_or_else(|error| {
            let status = self.session.firn(&["status", "web", "--json"]).out;
            let threads = threads_of(self.session.status("web")["pid"].as_i64());
            unreachable!("{error:?}\nstatus: {status}\nthreads of QEMU:\n{threads}")
        })
    }

    /// Every page of the guest's writers is what they wrote last, and they go on writing.
    #[track_caller]
    pub fn is_well(&self) {
        let mut control = self.control();
        let before = writes_so_far(&mut control);
        eventually("writers go on", PATIENCE, || writes_so_far(&mut control) > before);
        // What was wrong at first is wrong now, or was found when it was overwritten.
        writes(&mut control);
        // One at a time can talk to the guest.
        drop(control);
        for number in 0..self.disks.len() {
            let report = self.disk_report(number);
            assert_eq!(report["wrong"], 0, "disk{number}: {report}");
        }
    }

    /// What the guest says of a disk: blocks that are not what it wrote last, of those it has looked at.
    #[track_caller]
    pub fn disk_report(&self, number: usize) -> serde_json::Value {
        let state = self.control().poll_job(&format!("disk{number}")).unwrap();
        let JobState::Running { stdout, .. } = state else {
            unreachable!("it goes on for ever: {state:?}")
        };
        let last = stdout.lines().rfind(|line| line.contains("progress")).unwrap();
        serde_json::from_str(last).unwrap()
    }

    pub fn image(&self, name: &str) -> PathBuf {
        self.session.path(name)
    }

    pub fn pid(&self) -> i64 {
        self.session.status("web")["pid"].as_i64().unwrap()
    }
}

/// Runs QEMU's tool for image files.
#[track_caller]
pub fn qemu_img(args: &[&str]) {
    let done = std::process::Command::new("qemu-img").args(args).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// Pages written so far, after all of them are checked; fails if any is wrong.
#[track_caller]
pub fn writes(control: &mut GuestControl) -> u64 {
    ask_writers(control, "verify")
}

/// Pages written so far; fails if one was wrong when it was overwritten.
#[track_caller]
/// Each thread's name, state, system call and processor time, twice, a second apart.
fn threads_of(pid: Option<i64>) -> String {
    let Some(pid) = pid else { return "no process".to_owned() };
    let read = |task: &Path, file: &str| {
        std::fs::read_to_string(task.join(file)).unwrap_or_else(|error| error.to_string())
    };
    let describe = || {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        tasks.map(|task| task.path()).map(|task| {
            format!("{}{}{}", read(&task, "stat"), read(&task, "syscall"), read(&task, "wchan"))
        })
    };
    let before: Vec<String> = describe().collect();
    std::thread::sleep(Duration::from_secs(1));
    before.into_iter().chain(describe()).collect::<Vec<_>>().join("\n")
}

fn writes_so_far(control: &mut GuestControl) -> u64 {
    ask_writers(control, "status")
}

#[track_caller]
fn ask_writers(control: &mut GuestControl, question: &str) -> u64 {
    let report = control.run_program(&["firn-guest", "verify", question]).unwrap();
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["wrong"], 0, "{report}");
    report["writes"].as_u64().unwrap()
}

pub fn image() -> &'static GuestImage {
    static IMAGE: OnceLock<GuestImage> = OnceLock::new();
    IMAGE.get_or_init(|| GuestImage::small().unwrap())
}

/// Descriptors of a process that are a userfaultfd.
pub fn userfaultfds(pid: i64) -> usize {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let targets = fds.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
    targets.filter(|target| target.to_string_lossy().contains("userfaultfd")).count()
}

#[test]
fn from_run_to_restore_in_each_mode() {
    let vm = Vm::boot();
    let session = &vm.session;
    assert_eq!(session.ls(), [("web".to_owned(), "running".to_owned())]);
    let save = ["checkpoint", "web", "-o", "web.firn", "--reference", "web.ram"];
    let saved = session.json(&save);
    assert!(saved["report"]["pause"]["downtime_ms"].as_f64().unwrap() > 0.0, "{saved}");
    vm.is_well();
    assert_eq!(userfaultfds(vm.pid()), 0);
    session.firn(&["image", "verify", "web.firn"]).succeeds();
    session.firn(&["image", "compare", "web.firn", "web.ram"]).succeeds();
    let facts = session.json(&["image", "inspect", "web.firn"]);
    assert_eq!(facts["meta"]["name"], "web");
    session.firn(&["stop", "web"]).succeeds();
    assert_eq!(session.ls(), []);
    for mode in ["eager", "lazy", "locality", "working-set", "auto"] {
        let restored = session.json(&["restore", "web.firn", "--mode", mode]);
        eprintln!("{mode}: {}", restored["timings_ms"]);
        for step in ["spawn", "qmp", "image_open", "attach", "device_state", "cont", "total"] {
            assert!(restored["timings_ms"][step].as_f64().is_some(), "{step} in {restored}");
        }
        vm.is_well();
        session.firn(&["status", "web", "--watch"]).succeeds();
        assert_eq!(session.status("web")["state"], "running");
        assert_eq!(userfaultfds(vm.pid()), 0, "{mode}");
        vm.is_well();
        is_reported(session, mode);
        session.firn(&["stop", "web"]).succeeds();
    }
}

/// The run record of the restore, the numbers about it and the page agree.
#[track_caller]
fn is_reported(session: &Session, mode: &str) {
    let report = session.json(&["report", "web", "-o", "report.html"]);
    let run = &report["runs"][0];
    let kept = std::fs::read(session.path("run/web/restore.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&kept).unwrap();
    assert_eq!((&run["name"], &run["mode"]), (&"web".into(), &mode.into()), "{report}");
    assert_eq!(run["faults"], record["counts"]["faults"]);
    let seconds = |us: &str| record[us].as_u64().unwrap() as f64 / 1e6;
    assert_eq!(run["running_s"], seconds("resumed_us"));
    assert_eq!(run["complete_s"], seconds("finished_us"));
    let expects = mode != "lazy" && mode != "locality";
    assert_eq!(!record["prefetched"].as_array().unwrap().is_empty(), expects, "{mode}");
    let page = std::fs::read_to_string(session.path("report.html")).unwrap();
    let (_, facts) = page.split_once("type=\"application/json\">").unwrap();
    let (facts, _) = facts.split_once("</script>").unwrap();
    assert_eq!(serde_json::from_str::<serde_json::Value>(facts).unwrap(), report["runs"]);
}

#[test]
fn a_reordered_image_is_the_same_checkpoint() {
    let vm = Vm::resumed();
    let session = &vm.session;
    session.firn(&["checkpoint", "web", "-o", "web.firn", "--reference", "web.ram"]).succeeds();
    session.firn(&["stop", "web"]).succeeds();
    for by in ["physical", "random"] {
        let out = format!("{by}.firn");
        session.firn(&["image", "reorder", "web.firn", "--by", by, "-o", &out]).succeeds();
        session.firn(&["image", "compare", &out, "web.ram"]).succeeds();
        session.firn(&["restore", &out, "--wait"]).succeeds();
        vm.is_well();
        session.firn(&["stop", "web"]).succeeds();
    }
}

#[test]
fn a_suspended_vm_is_gone_until_it_is_restored() {
    let vm = Vm::boot();
    let session = &vm.session;
    session.firn(&["suspend", "web", "-o", "web.firn"]).succeeds();
    assert_eq!(session.ls(), []);
    let restored = session.json(&["restore", "web.firn", "--name", "again", "--watch"]);
    let run = &restored["run"];
    assert_eq!((&run["name"], &run["mode"]), (&"again".into(), &"auto".into()), "{restored}");
    let seconds = |value: &serde_json::Value| value.as_f64().unwrap();
    assert!(seconds(&run["ttr_s"]["1"]["0.9"]) <= seconds(&run["complete_s"]), "{restored}");
    assert_eq!(session.ls(), [("again".to_owned(), "running".to_owned())]);
    vm.is_well();
    session.firn(&["checkpoint", "again", "-o", "again.firn"]).succeeds();
    vm.is_well();
}

#[test]
fn a_vm_that_ran_before_firn_came() {
    let vm = Vm::new();
    let session = &vm.session;
    let qmp = session.path("qmp");
    let monitor = format!("unix:{},server=on,wait=off", text(&qmp));
    let ram = "memory-backend-memfd,id=ram,size=192M,share=on";
    let mut args = vm.qemu_args();
    let added = ["-object", ram, "-machine", "memory-backend=ram", "-qmp", &monitor];
    args.extend(added.map(str::to_owned));
    let log = std::fs::File::create(session.path("qemu.log")).unwrap();
    let mut qemu =
        std::process::Command::new(&args[0]).args(&args[1..]).stderr(log).spawn().unwrap();
    let mut control = vm.control();
    let pid = qemu.id().to_string();
    session
        .firn(&["attach", "old", "--pid", "1", "--qmp", text(&qmp)])
        .fails(2, "not of process 1");
    session.firn(&["attach", "old", "--pid", &pid, "--qmp", text(&qmp)]).succeeds();
    session.firn(&["checkpoint", "old", "-o", "old.firn", "--reference", "old.ram"]).succeeds();
    session.firn(&["image", "compare", "old.firn", "old.ram"]).succeeds();
    session.firn(&["detach", "old"]).succeeds();
    assert_eq!(session.ls(), []);
    assert_eq!(userfaultfds(qemu.id().into()), 0);
    control.run_program(&["true"]).unwrap();
    qemu.kill().unwrap();
    qemu.wait().unwrap();
    session.firn(&["restore", "old.firn", "--wait"]).succeeds();
    vm.control().run_program(&["true"]).unwrap();
}

/// As most VMs are: memory is private to QEMU.
#[test]
fn a_vm_with_private_memory() {
    let vm = Vm::new();
    let session = &vm.session;
    let qmp = session.path("qmp");
    let monitor = format!("unix:{},server=on,wait=off", text(&qmp));
    let mut args = vm.qemu_args();
    args.extend(["-qmp", &monitor].map(str::to_owned));
    let log = std::fs::File::create(session.path("qemu.log")).unwrap();
    let mut qemu =
        std::process::Command::new(&args[0]).args(&args[1..]).stderr(log).spawn().unwrap();
    let pid = qemu.id().to_string();
    vm.control();
    let vm = {
        session.firn(&["attach", "web", "--pid", &pid, "--qmp", text(&qmp)]).succeeds();
        vm.writing(&LOAD)
    };
    let session = &vm.session;
    let trace = session.firn(&["checkpoint", "web", "-o", "web.firn", "--strategy", "trace"]);
    trace.fails(5, "private");
    assert!(session.files("web.firn").is_empty() && session.files(".web").is_empty());
    for round in 0..3 {
        session.firn(&["checkpoint", "web", "-o", "web.firn", "--reference", "web.ram"]).succeeds();
        session.firn(&["image", "compare", "web.firn", "web.ram"]).succeeds();
        assert_eq!(userfaultfds(qemu.id().into()), 0, "round {round}");
        vm.is_well();
    }
    qemu.kill().unwrap();
    qemu.wait().unwrap();
    eventually("ended", PATIENCE, || session.status("web")["state"] == "ended");
    session.firn(&["restore", "web.firn", "--wait"]).succeeds();
    vm.is_well();
    session.firn(&["checkpoint", "web", "-o", "again.firn"]).succeeds();
    vm.is_well();
}

#[test]
fn copy_on_write_is_exact() {
    let vm = Vm::resumed();
    let session = &vm.session;
    let cow =
        ["checkpoint", "web", "-o", "cow.firn", "--strategy", "cow", "--reference", "web.ram"];
    for _ in 0..3 {
        let saved = session.json(&cow);
        session.firn(&["image", "compare", "cow.firn", "web.ram"]).succeeds();
        assert!(saved["report"]["blocks_touched"].as_u64().unwrap() > 0, "{saved}");
        vm.is_well();
    }
    session.firn(&["stop", "web"]).succeeds();
    session.firn(&["restore", "cow.firn", "--name", "web", "--wait"]).succeeds();
    vm.is_well();
}

/// Another process writes to the guest's memory without any page fault of the hypervisor's.
#[test]
fn memory_that_another_process_maps_is_refused() {
    let vm = Vm::resumed();
    let session = &vm.session;
    let ram = mapped_ram(vm.pid());
    let other = OtherUser::map(&ram);
    let said = format!("process {} (python3)", other.0.id());
    for strategy in ["trace", "cow"] {
        let save = ["checkpoint", "web", "-o", "web.firn", "--strategy", strategy];
        session.firn(&save).fails(1, &said);
        assert!(session.files("web.firn").is_empty(), "{strategy}");
    }
    session.firn(&["checkpoint", "web", "-o", "web.firn", "--strategy", "stop"]).succeeds();
    drop(other);
    session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
    vm.is_well();
}

/// The descriptor of a hypervisor's RAM file, as a path.
fn mapped_ram(pid: i64) -> PathBuf {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let mut paths = fds.map(|fd| fd.unwrap().path());
    let is_ram = |path: &PathBuf| {
        std::fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("firn-ram"))
    };
    paths.find(is_ram).unwrap()
}

/// A process that has mapped a file; ends when dropped.
struct OtherUser(std::process::Child);

impl OtherUser {
    fn map(file: &std::path::Path) -> Self {
        use std::io::BufRead as _;
        let script = "import mmap, sys, time\n\
            file = open(sys.argv[1], 'r+b')\n\
            it = mmap.mmap(file.fileno(), 4096)\n\
            print('mapped', flush=True)\n\
            time.sleep(1000)";
        let mut child = std::process::Command::new("python3")
            .args(["-c", script, text(file)])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "mapped\n");
        Self(child)
    }
}

impl Drop for OtherUser {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn a_detached_vm_can_be_attached_again() {
    let vm = Vm::resumed();
    let session = &vm.session;
    session.firn(&["detach", "web"]).succeeds();
    assert_eq!(session.ls(), [("web".to_owned(), "detached".to_owned())]);
    session.firn(&["checkpoint", "web", "-o", "web.firn"]).fails(3, "Firn is detached from it");
    session.firn(&["run", "web", "--", "qemu-system-x86_64"]).fails(4, "a VM called web already");
    session.firn(&["attach", "web"]).succeeds();
    session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
    vm.is_well();
}

#[test]
fn a_vm_that_dies_is_shown_with_how_it_died() {
    let vm = Vm::boot();
    let session = &vm.session;
    kill(vm.pid());
    eventually("ended", PATIENCE, || session.status("web")["state"] == "ended");
    let ls = session.firn(&["ls"]).succeeds().out;
    assert!(ls.contains("ended: killed by signal 9"), "{ls}");
    session.firn(&["checkpoint", "web", "-o", "web.firn"]).fails(3, "killed by signal 9");
    session.firn(&["rm", "web"]).succeeds();
    assert_eq!(session.ls(), []);
}

#[test]
fn supervisor_and_guard_replace_each_other() {
    let vm = Vm::resumed();
    let session = &vm.session;
    let pids = || {
        let status = session.status("web");
        (status["supervisor_pid"].as_i64(), status["guard_pid"].as_i64())
    };
    let replaced = |now: Option<i64>, before| now.is_some() && now != before;
    let (supervisor, guard) = pids();
    kill(supervisor.unwrap());
    eventually("another supervisor", PATIENCE, || replaced(pids().0, supervisor));
    kill(guard.unwrap());
    eventually("another guard", PATIENCE, || replaced(pids().1, guard));
    let (supervisor, guard) = pids();
    kill(guard.unwrap());
    kill(supervisor.unwrap());
    assert_eq!(session.ls(), [("web".to_owned(), "running".to_owned())]);
    assert!(session.status("web")["recoveries"].as_u64().unwrap() >= 2);
    vm.is_well();
}

#[test]
fn a_terminated_supervisor_detaches() {
    let vm = Vm::resumed();
    let session = &vm.session;
    let supervisor = session.status("web")["supervisor_pid"].as_i64().unwrap();
    let pid = rustix::process::Pid::from_raw(supervisor as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    eventually("detached", PATIENCE, || session.status("web")["state"] == "detached");
    vm.is_well();
    session.firn(&["attach", "web"]).succeeds();
}

#[test]
fn an_unsuitable_host_is_refused_unless_forced() {
    let vm = Vm::new();
    let session = &vm.session;
    let disk = session.path("disk.raw");
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let drive = format!("file={},format=raw,if=virtio", text(&disk));
    let args = ["-M", "pc", "-m", "64", "-nodefaults", "-display", "none", "-drive", &drive];
    let run = [&["run", "web", "--", "qemu-system-x86_64"], &args[..]].concat();
    session.firn(&run).succeeds();
    session.firn(&["suspend", "web", "-o", "web.firn"]).succeeds();
    session.firn(&["restore", "web.firn", "--wait"]).succeeds();
    session.firn(&["restore", "web.firn"]).fails(4, "a VM called web already");
    session.firn(&["stop", "web"]).succeeds();
    std::fs::write(&disk, vec![1; 1 << 20]).unwrap();
    let refused = session.firn(&["restore", "web.firn"]);
    let refused = refused.fails(5, "disk.raw has changed since the checkpoint");
    assert!(refused.err.contains("--force"), "{}", refused.err);
    assert_eq!(session.ls(), []);
    let forced = session.firn(&["restore", "web.firn", "--force"]).succeeds();
    assert!(forced.out.contains("forced: disk"), "{}", forced.out);
    session.firn(&["stop", "web"]).succeeds();
    std::fs::remove_file(&disk).unwrap();
    session.firn(&["restore", "web.firn"]).fails(5, "disk.raw is not there");
}

#[test]
fn the_guest_hardly_notices_a_checkpoint() {
    let vm = Vm::alone().booted_with(&[]);
    vm.control().spawn_job("heartbeat", &["firn-guest", "heartbeat"]).unwrap();
    let prober = Prober::start(Heartbeats::new(&vm.session.path("heart")), 0.0);
    eventually("a heartbeat", PATIENCE, || !prober.timeline().replies().is_empty());
    let begun = prober.now();
    vm.session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
    let ended = prober.now();
    let gap = prober.finish().longest_gap(begun..ended);
    eprintln!("longest gap between heartbeats during a checkpoint: {gap:?}");
    assert!(gap < Duration::from_secs(2), "{gap:?}");
}

#[test]
fn a_checkpoint_is_given_up_only_on_request() {
    let vm = Vm::boot_with_slow_saves();
    let session = &vm.session;
    let interrupted = |args: &[&str]| {
        let save = [&["checkpoint", "web", "-o", "web.firn"], args].concat();
        let mut child = session.command(&save).spawn().unwrap();
        eventually("saving", PATIENCE, || session.status("web")["state"] == "saving");
        child.kill().unwrap();
        child.wait().unwrap();
        eventually("over", PATIENCE, || session.status("web")["state"] == "running");
    };
    interrupted(&["--cancel"]);
    assert!(session.files("web.firn").is_empty() && session.files(".web").is_empty());
    let last = session.status("web")["last"]["text"].to_string();
    assert!(last.contains("the save was cancelled"), "{last}");
    vm.is_well();
    interrupted(&[]);
    session.firn(&["image", "verify", "web.firn"]).succeeds();
    vm.is_well();
}

#[test]
fn a_vm_can_be_ended_in_the_middle_of_a_checkpoint() {
    let vm = Vm::boot_with_slow_saves();
    let session = &vm.session;
    let mut save = session.command(&["checkpoint", "web", "-o", "web.firn"]);
    let save = save.stderr(std::process::Stdio::piped()).spawn().unwrap();
    eventually("saving", PATIENCE, || session.status("web")["state"] == "saving");
    session.firn(&["stop", "web"]).fails(4, "a checkpoint is being written");
    session.firn(&["checkpoint", "web", "-o", "b.firn"]).fails(4, "a checkpoint is being written");
    session.firn(&["detach", "web"]).fails(4, "a checkpoint is being written");
    session.firn(&["stop", "web", "--force"]).succeeds();
    assert_ne!(save.wait_with_output().unwrap().status.code(), Some(0));
    assert_eq!(session.ls(), []);
    assert!(session.files("web.firn").is_empty() && session.files(".web").is_empty());
}
