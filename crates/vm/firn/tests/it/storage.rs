//! Storage that fails under a running restore: no VM ends by that. It waits, says why, and continues by itself.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use firn_image::{HEADER_BYTES, Image};
use firn_memory::{Process, process_memory};
use serde_json::Value;

use crate::faults::base;
use crate::pause::ram;
use crate::session::{eventually, kill, text};
use crate::vm::Vm;

const PATIENCE: Duration = Duration::from_secs(120);

/// How a restore loses its storage, and how that is repaired.
#[derive(Clone, Copy, Debug)]
pub enum Outage {
    /// Reads of the image fail.
    ReadError,
    /// The host has no memory for the guest's pages.
    NoMemory,
    /// The file is cut short, and written anew.
    CutShort,
    /// The file is cut short and taken away; the same image is put in its place.
    TakenAway,
    /// All memory blocks are damaged, and repaired.
    Damaged,
}

const OUTAGES: [Outage; 5] =
    [Outage::ReadError, Outage::NoMemory, Outage::CutShort, Outage::TakenAway, Outage::Damaged];

impl Outage {
    /// Fault points armed for the restore: it waits once the guest may run, and storage fails from then on.
    fn faults(self, begun: &Path, stop: &Path) -> String {
        let wait = format!("restore.resumed=WAIT:{}", text(begun));
        let stop = text(stop);
        match self {
            Self::ReadError => format!("{wait},image.read=EIO:{stop}"),
            Self::NoMemory => format!("{wait},restore.copy=ENOSPC:{stop}"),
            _ => wait,
        }
    }

    /// What the error says.
    fn why(self) -> &'static str {
        match self {
            Self::ReadError => "Input/output error",
            Self::NoMemory => "no memory left for them",
            Self::CutShort | Self::TakenAway => "cannot read",
            Self::Damaged => "is damaged",
        }
    }

    fn begin(self, vm: &Vm) {
        let image = vm.image("bad.firn");
        let file = File::options().write(true).open(&image).unwrap();
        match self {
            Self::ReadError | Self::NoMemory => {
                std::fs::write(vm.session.path("stop"), "").unwrap()
            }
            Self::CutShort => file.set_len(HEADER_BYTES).unwrap(),
            Self::TakenAway => {
                std::fs::rename(&image, vm.image("away.firn")).unwrap();
                file.set_len(HEADER_BYTES).unwrap();
            }
            Self::Damaged => {
                let (from, to) = blocks(&vm.image("base.firn"));
                file.write_all_at(&vec![0x55; (to - from) as usize], from).unwrap();
            }
        }
    }

    fn end(self, vm: &Vm) {
        let whole = std::fs::read(vm.image("base.firn")).unwrap();
        match self {
            Self::ReadError | Self::NoMemory => {}
            Self::TakenAway => std::fs::write(vm.image("bad.firn"), whole).unwrap(),
            Self::CutShort | Self::Damaged => {
                let mut file = File::options().write(true).open(vm.image("bad.firn")).unwrap();
                file.write_all(&whole).unwrap();
            }
        }
    }
}

/// Where in the file its memory blocks are.
fn blocks(image: &Path) -> (u64, u64) {
    let image = Image::open(image).unwrap();
    let end = firn_image::LocalityBlockId(image.locality_blocks());
    (HEADER_BYTES, image.geometry().offset_of(end))
}

/// Restores a copy of the image, which loses its storage as soon as the guest runs. Returns the file that keeps faults on.
pub fn restore(vm: &mut Vm, outage: Outage) -> PathBuf {
    restore_with(vm, outage, &[], |_| ())
}

/// The same with more options, and with a step between the guest's first instruction and the outage.
fn restore_with(vm: &mut Vm, outage: Outage, more: &[&str], before: impl FnOnce(&Vm)) -> PathBuf {
    std::fs::copy(vm.image("base.firn"), vm.image("bad.firn")).unwrap();
    let (begun, stop) = (vm.session.path("begun"), vm.session.path("stop"));
    // A restore before this one may have left it.
    let _ = std::fs::remove_file(&stop);
    vm.session.arm(Some(&outage.faults(&begun, &stop)));
    let restore = ["restore", "bad.firn", "--name", "web", "--mode", "lazy"];
    let mut restoring = vm.session.command(&[&restore, more].concat()).spawn().unwrap();
    vm.session.arm(None);
    eventually("the guest runs", PATIENCE, || begun.exists());
    before(vm);
    outage.begin(vm);
    std::fs::remove_file(&begun).unwrap();
    assert!(restoring.wait().unwrap().success(), "{outage:?}");
    stop
}

/// Waits until the guest waits, and returns the status.
pub fn waits(vm: &Vm) -> Value {
    let mut status = Value::Null;
    eventually("the guest waits", PATIENCE, || {
        status = vm.session.status("web");
        assert_ne!(status["state"], "ended", "{status}");
        status["state"] == "waiting"
    });
    status
}

#[test]
fn a_vm_waits_for_storage_and_continues() {
    let mut vm = base();
    let count = std::env::var("FIRN_RUNS").ok().and_then(|runs| runs.parse().ok());
    for outage in OUTAGES.into_iter().cycle().take(count.unwrap_or(OUTAGES.len())) {
        let stop = restore(&mut vm, outage);
        let pid = vm.pid();
        let status = waits(&vm);
        let error = status["waiting"]["error"].as_str().unwrap();
        assert!(error.contains(outage.why()), "{outage:?}: {error}");
        assert!(status["waiting"]["path"].as_str().unwrap().ends_with("bad.firn"), "{status}");
        assert!(status["waiting"]["address"].as_str().unwrap().starts_with("0x"), "{status}");
        let ls = vm.session.firn(&["ls"]).succeeds().out;
        assert!(ls.contains("waiting for storage") && ls.contains(outage.why()), "{ls}");
        outage.end(&vm);
        let _ = std::fs::remove_file(&stop);
        vm.is_well();
        vm.session.firn(&["status", "web", "--watch"]).succeeds();
        let status = vm.session.status("web");
        assert_eq!((&status["state"], status["pid"].as_i64()), (&"running".into(), Some(pid)));
        assert_eq!(status["recoveries"], 0, "{outage:?}");
        vm.is_well();
        eprintln!("{outage:?}: {error}");
        vm.session.firn(&["stop", "web"]).succeeds();
    }
}

fn kill_each(status: &Value, roles: &[&str]) {
    roles.iter().for_each(|role| kill(status[*role].as_i64().unwrap()));
}

/// The image has no name any more, and its supervisor dies: the next one has the file from a guard.
#[test]
fn an_image_that_is_deleted_while_its_supervisor_dies() {
    let mut vm = base();
    restore(&mut vm, Outage::NoMemory);
    std::fs::remove_file(vm.image("bad.firn")).unwrap();
    let status = waits(&vm);
    kill_each(&status, &["supervisor_pid"]);
    // The successor is not armed: with the file that the guard has kept, all memory comes.
    vm.is_well();
    vm.session.firn(&["status", "web", "--watch"]).succeeds();
    assert_eq!(vm.session.status("web")["state"], "running");
    vm.session.firn(&["stop", "web"]).succeeds();
}

/// When all processes that had the image are dead, the VM waits for the file, and continues when it is put back.
#[test]
fn an_image_that_no_process_has_is_waited_for() {
    let mut vm = base();
    restore(&mut vm, Outage::NoMemory);
    std::fs::rename(vm.image("bad.firn"), vm.image("away.firn")).unwrap();
    let status = waits(&vm);
    kill_each(&status, &["guard_pid", "watcher_pid", "supervisor_pid"]);
    let error = waits(&vm)["waiting"]["error"].as_str().unwrap().to_owned();
    assert!(error.contains("bad.firn"), "{error}");
    std::fs::rename(vm.image("away.firn"), vm.image("bad.firn")).unwrap();
    vm.is_well();
    vm.session.firn(&["status", "web", "--watch"]).succeeds();
    vm.session.firn(&["stop", "web"]).succeeds();
}

/// Events of a QEMU from a monitor that only the test uses.
pub struct Events(BufReader<UnixStream>);

impl Events {
    pub fn connect(monitor: &Path) -> Self {
        let mut stream = UnixStream::connect(monitor).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut events = Self(BufReader::new(stream.try_clone().unwrap()));
        writeln!(stream, r#"{{"execute":"qmp_capabilities"}}"#).unwrap();
        while !events.next().contains("\"return\"") {}
        events
    }

    fn next(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "QEMU has ended");
        line
    }

    /// How long the VM was paused each time until now, in milliseconds.
    pub fn pauses_ms(&mut self) -> Vec<f64> {
        writeln!(self.0.get_mut(), r#"{{"execute":"query-status"}}"#).unwrap();
        let (mut pauses, mut stopped) = (Vec::new(), None);
        loop {
            let line: Value = serde_json::from_str(&self.next()).unwrap();
            let part = |name: &str| line["timestamp"][name].as_f64();
            let at_ms = part("seconds").zip(part("microseconds")).map(|(s, us)| s * 1e3 + us / 1e3);
            match line["event"].as_str() {
                Some("STOP") => stopped = at_ms,
                Some("RESUME") => pauses.push(at_ms.unwrap() - stopped.take().unwrap()),
                _ if line["return"].is_object() => return pauses,
                _ => {}
            }
        }
    }

    /// Waits for this event, and fails at the other one.
    #[track_caller]
    fn next_is(&mut self, wanted: &str, other: &str) {
        loop {
            let line = self.next();
            assert!(!line.contains(&format!("\"{other}\"")), "{line}");
            if line.contains(&format!("\"{wanted}\"")) {
                return;
            }
        }
    }
}

fn phase(vm: &Vm) -> Value {
    let journal = std::fs::read(vm.session.runtime_dir().join("web/journal.json")).unwrap();
    serde_json::from_slice::<Value>(&journal).unwrap()["phase"].clone()
}

/// A restore whose storage has failed, and whose VM is paused for that.
struct PausedByOutage {
    events: Events,
    status: Value,
    faults: PathBuf,
}

/// Restores until an outage pauses the VM. A vCPU of an emulated guest that meets the missing page in a device blocks QEMU's
/// monitor too, so that its VM can't be paused.
fn pause_by_outage(vm: &mut Vm, outage: Outage) -> PausedByOutage {
    for attempt in 0..8 {
        let monitor = vm.session.path("events");
        let monitor_arg = format!("--qemu-arg=unix:{},server=on,wait=off", text(&monitor));
        let mut events = None;
        let faults = restore_with(vm, outage, &["--qemu-arg=-qmp", &monitor_arg], |_| {
            events = Some(Events::connect(&monitor));
        });
        let (status, since) = (waits(vm), Instant::now());
        while since.elapsed() < Duration::from_secs(3) {
            if phase(vm)["paused_by_us"] == true {
                eprintln!("{outage:?}: paused {:?} after the first wait", since.elapsed());
                return PausedByOutage { events: events.unwrap(), status, faults };
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        eprintln!("{outage:?}: attempt {attempt} blocks the monitor");
        end_outage(vm, outage, &faults);
        vm.session.firn(&["status", "web", "--watch"]).succeeds();
        vm.session.firn(&["stop", "web"]).succeeds();
    }
    unreachable!("no outage pauses the VM")
}

fn end_outage(vm: &Vm, outage: Outage, faults: &Path) {
    outage.end(vm);
    let _ = std::fs::remove_file(faults);
}

/// A guest that is blocked for longer than a second is paused, so that its clocks stop, and it runs again when storage is
/// back: also under a supervisor that did not pause it.
#[test]
fn a_long_outage_pauses_the_vm() {
    let mut vm = Vm::resumed();
    vm.session.firn(&["checkpoint", "web", "-o", "base.firn"]).succeeds();
    vm.session.firn(&["stop", "web"]).succeeds();
    for (outage, is_killed) in [(Outage::ReadError, false), (Outage::CutShort, true)] {
        let PausedByOutage { mut events, status, faults } = pause_by_outage(&mut vm, outage);
        if is_killed {
            // The `stop` follows the journal.
            std::thread::sleep(Duration::from_millis(500));
            kill_each(&status, &["supervisor_pid"]);
            eventually("a successor", PATIENCE, || vm.session.status("web")["recoveries"] == 1);
            waits(&vm);
            assert_eq!(phase(&vm)["paused_by_us"], true, "a successor has to resume it");
        }
        end_outage(&vm, outage, &faults);
        if !is_killed {
            events.next_is("STOP", "RESUME");
            events.next_is("RESUME", "STOP");
        }
        vm.is_well();
        vm.session.firn(&["status", "web", "--watch"]).succeeds();
        eprintln!("{outage:?}: further pauses {:?}", events.pauses_ms());
        assert_eq!(phase(&vm)["phase"], "running");
        assert_eq!(vm.session.status("web")["state"], "running");
        vm.is_well();
        vm.session.firn(&["stop", "web"]).succeeds();
    }
}

/// Bytes of RAM that the firmware does not touch.
const UNTOUCHED_BYTES: usize = 12 << 20;

fn untouched(pid: i64) -> Vec<u8> {
    let mut bytes = vec![0; UNTOUCHED_BYTES];
    process_memory::read_memory(&Process::open(pid as i32).unwrap(), ram(pid), &mut bytes).unwrap();
    bytes
}

/// A read error that only the background fill meets: the guest runs, and the fill is tried again until it succeeds.
#[test]
fn a_guest_that_misses_nothing_runs_through_an_outage() {
    let mut vm = Vm::new();
    let qemu = "qemu-system-x86_64 -M pc -m 64 -accel tcg -nodefaults -display none".split(' ');
    let run: Vec<&str> = ["run", "web", "--quiet", "--"].into_iter().chain(qemu).collect();
    vm.session.firn(&run).succeeds();
    let mut state = 1u64;
    let numbers = std::iter::repeat_with(|| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (state >> 56) as u8
    });
    let written: Vec<u8> = numbers.take(UNTOUCHED_BYTES).collect();
    let process = Process::open(vm.pid() as i32).unwrap();
    process_memory::write_memory(&process, ram(vm.pid()), &written).unwrap();
    // The firmware finds nothing to boot, and is idle.
    std::thread::sleep(Duration::from_secs(2));
    vm.session.firn(&["checkpoint", "web", "-o", "base.firn"]).succeeds();
    vm.session.firn(&["stop", "web"]).succeeds();
    let (begun, stop) = (vm.session.path("begun"), vm.session.path("stop"));
    let faults = format!("restore.fill@3=WAIT:{},image.read=EIO:{}", text(&begun), text(&stop));
    vm.session.arm(Some(&faults));
    vm.session.firn(&["restore", "base.firn", "--mode", "lazy"]).succeeds();
    vm.session.arm(None);
    eventually("the fill", PATIENCE, || begun.exists());
    // The guest gets what it needs.
    let faults =
        |vm: &Vm| vm.session.status("web")["progress"]["restore"]["faults"].as_u64().unwrap();
    let (mut last, mut since) = (0, Instant::now());
    eventually("an idle guest", PATIENCE, || {
        let now = faults(&vm);
        if now != std::mem::replace(&mut last, now) {
            since = Instant::now();
        }
        now > 0 && since.elapsed() > Duration::from_secs(2)
    });
    std::fs::write(&stop, "").unwrap();
    std::fs::remove_file(&begun).unwrap();
    let mut status = Value::Null;
    eventually("an outage", PATIENCE, || {
        status = vm.session.status("web");
        status["waiting"].is_object()
    });
    let error = status["waiting"]["error"].as_str().unwrap();
    assert!(error.contains("Input/output error"), "{status}");
    let ls = vm.session.firn(&["ls"]).succeeds().out;
    assert!(ls.contains("the guest runs, but some of its memory is missing"), "{ls}");
    let monitor = vm.session.runtime_dir().join("web/qmp.sock");
    let since = Instant::now();
    while since.elapsed() < Duration::from_secs(2) {
        assert!(firn_vmm::QemuVm::connect(&monitor).unwrap().status().unwrap().running);
        let status = vm.session.status("web");
        assert_eq!(
            (&status["state"], &status["waiting"]["guest_waits"]),
            (&"restoring".into(), &false.into())
        );
    }
    std::fs::remove_file(&stop).unwrap();
    vm.session.firn(&["status", "web", "--watch"]).succeeds();
    let status = vm.session.status("web");
    assert_eq!((&status["state"], &status["recoveries"]), (&"running".into(), &0.into()));
    assert!(untouched(vm.pid()) == written, "the memory is another");
}
