//! Every state has a way out: `firn ls` shows a VM whatever has died, and at most two commands, each named by the one before,
//! end it or bring it back.

use std::process::Child;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use crate::agent::{Agent, Network, certified};
use crate::faults::base;
use crate::hypervisor_dies::{answer, nobody_is_left, start};
use crate::protect::{protect, standby_called};
use crate::session::{Answer, eventually, kill, signal};
use crate::storage::{self, Outage};
use crate::vm::Vm;

const PATIENCE: Duration = Duration::from_secs(120);

fn pid(status: &Value, role: &str) -> i64 {
    status[role].as_i64().unwrap()
}

/// Any two of the three may die at the same instant: the guest continues without a command.
#[test]
fn two_of_three_killed_together_in_a_lazy_restore() {
    let vm = base();
    let runs = std::env::var("FIRN_RUNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(3);
    let pairs = [
        ["guard_pid", "supervisor_pid"],
        ["watcher_pid", "supervisor_pid"],
        ["supervisor_pid", "guard_pid"],
    ];
    for run in 0..runs {
        vm.session.firn(&["restore", "base.firn", "--mode", "lazy"]).succeeds();
        let before = vm.session.status("web");
        pairs[run % 3].iter().for_each(|role| kill(pid(&before, role)));
        // Only the guest is asked.
        vm.is_well();
        vm.session.firn(&["status", "web", "--watch"]).succeeds();
        let after = vm.session.status("web");
        assert!(after["recoveries"].as_u64().unwrap() >= 1, "{after}");
        eventually("both guards", PATIENCE, || {
            let status = vm.session.status("web");
            status["guard_pid"].is_i64() && status["watcher_pid"].is_i64()
        });
        vm.session.firn(&["stop", "web"]).succeeds();
    }
}

/// What a failed command names.
fn named(answer: &Answer) -> Vec<String> {
    let mut quoted = answer.err.split('`').skip(1).step_by(2);
    let line = quoted.find(|line| line.starts_with("firn ")).unwrap_or_else(|| {
        unreachable!("no command is named: {}", answer.err);
    });
    line.split(' ').skip(1).map(str::to_owned).collect()
}

fn run(vm: &Vm, words: &[String]) -> Answer {
    vm.session.firn(&words.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Follows what `firn ls` names, and what that names; nothing is left of the VM then.
#[track_caller]
fn goes_in_two_commands(vm: &Vm, status: &Value, what: &str) {
    ends_in_two_commands(vm, "web", status, what);
    eventually("no VM", PATIENCE, || vm.session.ls().is_empty());
    nobody_is_left(vm, what);
}

/// The same of one of several VMs.
#[track_caller]
fn ends_in_two_commands(vm: &Vm, name: &str, status: &Value, what: &str) {
    let hint = status["unattended"]["hint"].as_str().unwrap_or_default();
    let first: &[&str] = match status["state"].as_str().unwrap() {
        _ if hint.contains(&format!("firn stop --force {name}")) => &["stop", "--force", name],
        "ended" => &["rm", name],
        _ => &["stop", name],
    };
    let answer = vm.session.firn(first);
    if answer.code != 0 {
        let second = named(&answer);
        eprintln!("{what}: {first:?} failed: {}; then {second:?}", answer.err.trim());
        run(vm, &second).succeeds();
    }
    eventually("it is gone", PATIENCE, || listed(vm, name) == Value::Null);
}

fn listed(vm: &Vm, name: &str) -> Value {
    let vms = vm.session.json(&["ls"]);
    vms.as_array().unwrap().iter().find(|vm| vm["name"] == name).cloned().unwrap_or(Value::Null)
}

#[test]
fn a_supervisor_that_does_not_answer_hides_nothing() {
    let vm = base();
    let session = &vm.session;
    session.firn(&["restore", "base.firn", "--wait"]).succeeds();
    let supervisor = pid(&session.status("web"), "supervisor_pid");
    signal(supervisor, Signal::STOP);
    let ls = session.firn(&["ls"]).succeeds().out;
    assert!(ls.contains("running, not answering"), "{ls}");
    assert!(ls.contains("is stopped by a signal") && ls.contains("firn stop --force web"), "{ls}");
    let status = session.firn(&["status", "web"]).succeeds().out;
    assert!(status.contains(&format!("kill -CONT {supervisor}")), "{status}");
    session.firn(&["stop", "web"]).fails(4, "is stopped by a signal");
    session.firn(&["rm", "web"]).fails(4, "is stopped by a signal");
    session.firn(&["checkpoint", "web", "-o", "new.firn"]).fails(4, "is stopped by a signal");
    vm.is_well();
    session.firn(&["stop", "--force", "web"]).succeeds();
    assert_eq!(session.ls(), []);
    nobody_is_left(&vm, "a mute supervisor");

    // A journal that can't be read.
    session.firn(&["restore", "base.firn", "--wait"]).succeeds();
    std::fs::write(session.runtime_dir().join("web/journal.json"), "{").unwrap();
    let status = session.status("web");
    ["guard_pid", "watcher_pid", "supervisor_pid"].iter().for_each(|it| kill(pid(&status, it)));
    let ls = session.firn(&["ls"]).succeeds().out;
    assert!(ls.contains("unknown") && ls.contains("journal.json"), "{ls}");
    session.firn(&["stop", "--force", "web"]).succeeds();
    assert_eq!(session.ls(), []);
    nobody_is_left(&vm, "no journal");

    // A QEMU that does not quit is not killed in silence.
    session.firn(&["restore", "base.firn", "--wait"]).succeeds();
    let qemu = vm.pid();
    signal(qemu, Signal::STOP);
    let stopped = session.firn(&["stop", "web"]).fails(8, "can't be asked to end");
    assert!(stopped.err.contains("firn stop --force web"), "{}", stopped.err);
    signal(qemu, Signal::CONT);
    vm.is_well();
    session.firn(&["stop", "web"]).succeeds();
    nobody_is_left(&vm, "stopped");
}

/// The image is deleted for good and all of Firn's processes are dead: QEMU is left, with a guest that waits for memory that
/// nothing has. The VM is listed with the reason, and can be ended and restored from another image.
#[test]
fn an_image_deleted_for_good_with_all_of_firn() {
    let mut vm = base();
    storage::restore(&mut vm, Outage::NoMemory);
    let status = storage::waits(&vm);
    std::fs::remove_file(vm.image("bad.firn")).unwrap();
    let kill_all = |status: &Value| {
        ["guard_pid", "watcher_pid", "supervisor_pid"]
            .iter()
            .for_each(|role| kill(pid(status, role)));
    };
    kill_all(&status);
    let ls = vm.session.firn(&["ls"]).succeeds().out;
    assert!(ls.contains("web"), "{ls}");
    let waiting = storage::waits(&vm);
    let error = waiting["waiting"]["error"].as_str().unwrap();
    assert!(error.contains("bad.firn") && error.contains("No such file"), "{error}");
    let ls = vm.session.firn(&["ls"]).succeeds().out;
    assert!(ls.contains("waiting for storage") && ls.contains("bad.firn"), "{ls}");
    let shown = vm.session.firn(&["status", "web"]).succeeds().out;
    assert!(shown.contains("bad.firn"), "{shown}");
    assert_eq!(waiting["pid"], status["pid"], "QEMU is the same");
    // Its name is not free, and a new image of it can't be made.
    let restored = vm.session.firn(&["restore", "base.firn", "--name", "web"]);
    assert!(restored.err.contains("`firn stop web`"), "{}", restored.err);
    restored.fails(4, "there is a VM called web already");
    let saved = vm.session.firn(&["checkpoint", "web", "-o", "new.firn"]);
    eprintln!("checkpoint: {} {}", saved.code, saved.err);
    assert_ne!(saved.code, 0);
    assert_eq!(vm.session.files("new.firn"), Vec::<String>::new());
    kill_all(&vm.session.status("web"));
    goes_in_two_commands(&vm, &listed(&vm, "web"), "no image, no Firn");
    vm.session.firn(&["restore", "base.firn", "--name", "web", "--wait"]).succeeds();
    vm.is_well();
}

/// A small generator: the same seed gives the same run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) % sides
    }
}

const VICTIMS: [&str; 4] = ["supervisor_pid", "guard_pid", "watcher_pid", "pid"];

/// What is under way when processes are killed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Work {
    /// A restore in this mode.
    Restore(&'static str),
    /// A checkpoint by this strategy, of a VM that has all its memory.
    Save(&'static str),
    /// Epochs are sent to a standby.
    Protection,
}

impl Work {
    fn choose(dice: &mut Dice) -> Self {
        match dice.roll(4) {
            0 | 1 => Self::Restore(["lazy", "locality", "auto"][dice.roll(3) as usize]),
            2 => Self::Save(["trace", "cow", "pre-copy"][dice.roll(3) as usize]),
            _ => Self::Protection,
        }
    }

    /// Begins it; returns the command that performs it, if one does.
    fn begin(self, vm: &Vm) -> Option<Child> {
        let restore = |more: &[&str]| {
            let words = [&["restore", "web.firn", "--name", "web"], more].concat();
            vm.session.firn(&words).succeeds();
        };
        match self {
            Self::Restore(mode) => {
                restore(&["--mode", mode]);
                None
            }
            Self::Save(strategy) => {
                restore(&["--mode", "eager", "--wait"]);
                let words = ["checkpoint", "web", "-o", "new.firn", "--strategy", strategy];
                Some(start(vm, &words))
            }
            Self::Protection => {
                restore(&["--mode", "eager", "--wait"]);
                let standby = standby_called(vm, "twin");
                protect(vm, "web", standby, &[]);
                None
            }
        }
    }
}

/// An agent of the VM's host, which starts supervisors again.
fn start_agent(vm: &Vm) -> Agent {
    let network = Network::loopback();
    certified(&network, &["a"], &[&vm.session]);
    Agent::start(&network, 0, &vm.session)
}

/// Supervisor, guards, QEMU, agent and image, killed at random, during restores, saves and protection.
#[test]
fn two_commands_after_random_kills() {
    // The standbys of a VM with disks would leave files.
    let (vm, without_disks) = (base(), Vm::with_base(false));
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let (runs, seed) = (number("FIRN_RUNS").unwrap_or(4), number("FIRN_SEED").unwrap_or(1));
    for seed in seed..seed + runs {
        let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        for _ in 0..8 {
            dice.roll(2);
        }
        let work = Work::choose(&mut dice);
        let vm = if work == Work::Protection { &without_disks } else { &vm };
        kill_at_random(vm, work, &mut dice, &format!("seed {seed}: {work:?}"));
    }
}

fn kill_at_random(vm: &Vm, work: Work, dice: &mut Dice, what: &str) {
    std::fs::copy(vm.image("base.firn"), vm.image("web.firn")).unwrap();
    let mut agent = (dice.roll(2) == 0).then(|| start_agent(vm));
    let command = work.begin(vm);
    let status = vm.session.status("web");
    let killed = 1 + dice.roll(15);
    let victims: Vec<&str> =
        (0..4).filter(|bit| killed >> bit & 1 == 1).map(|bit| VICTIMS[bit]).collect();
    let (is_agent_killed, is_deleted) = (dice.roll(2) == 0, dice.roll(3) == 0);
    std::thread::sleep(Duration::from_millis(dice.roll(300)));
    if is_deleted {
        std::fs::remove_file(vm.image("web.firn")).unwrap();
    }
    let has_agent = agent.is_some();
    if is_agent_killed {
        drop(agent.take());
    }
    victims.iter().for_each(|victim| kill(pid(&status, victim)));
    let what = format!(
        "{what}, {victims:?}, image deleted: {is_deleted}, agent: {has_agent}, killed: {is_agent_killed}"
    );
    let status = listed(vm, "web");
    assert_ne!(status, Value::Null, "{what}: it is not listed");
    eprintln!("{what}: {} {}", status["state"], status["unattended"]["why"]);
    ends_in_two_commands(vm, "web", &status, &what);
    if let Some(command) = command {
        is_whole_or_absent(vm, answer(command).code, &what);
    }
    if work == Work::Protection {
        ends_in_two_commands(vm, "twin", &listed(vm, "twin"), &what);
    }
    drop(agent);
    eventually("no VM", PATIENCE, || vm.session.ls().is_empty());
    nobody_is_left(vm, &what);
}

/// An image that a killed checkpoint was making.
#[track_caller]
fn is_whole_or_absent(vm: &Vm, code: i32, what: &str) {
    let image = vm.image("new.firn");
    assert!(
        code != 0 || image.exists(),
        "{what}: there is no image of a checkpoint that succeeded"
    );
    if image.exists() {
        vm.session.firn(&["image", "verify", "new.firn"]).succeeds();
        vm.session.firn(&["image", "rm", "new.firn"]).succeeds();
    }
}
