//! Injected system calls leave the thread, the process and its results as they were.

use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use firn_memory::{Process, TraceError, Tracee};
use firn_types::ThreadId;
use nix::libc::{SYS_close, SYS_getpid, SYS_gettid, SYS_poll};
use nix::sys::signal::Signal;

use crate::child::churn;
use crate::driver::{Child, Who, pause, resume};

const NONE: [u64; 6] = [0; 6];

/// Arguments of a `poll` of nothing that takes this long.
const fn milliseconds(ms: u64) -> [u64; 6] {
    [0, 0, ms, 0, 0, 0]
}

#[test]
fn the_call_runs_in_the_other_process() {
    let child = Child::spawn(&[1]);
    let mut tracee = child.tracee();
    assert_eq!(tracee.syscall(SYS_getpid, NONE).unwrap(), child.process.pid() as u64);
    assert_eq!(tracee.syscall(SYS_gettid, NONE).unwrap(), tracee.tid().0 as u64);
}

#[test]
fn an_error_there_is_an_error_here() {
    let child = Child::spawn(&[1]);
    let error = child.tracee().syscall(SYS_close, [9999, 0, 0, 0, 0, 0]).unwrap_err();
    assert!(matches!(error, TraceError::Call { number, .. } if number == SYS_close), "{error}");
}

/// All threads but this one.
fn others(process: &Process, tid: ThreadId) -> Vec<ThreadId> {
    process.list_threads().unwrap().into_iter().filter(|&other| other != tid).collect()
}

/// Interrupts the first thread repeatedly while it is in one call.
fn disturb(child: &Child, times: u32) {
    let others = others(&child.process, child.tids[0]);
    for _ in 0..times {
        let mut tracee = Tracee::seize(&child.process, &others).unwrap();
        assert_eq!(tracee.tid(), child.tids[0]);
        assert_eq!(tracee.syscall(SYS_gettid, NONE).unwrap(), child.tids[0].0 as u64);
        assert_eq!(tracee.syscall(SYS_poll, milliseconds(3)).unwrap(), 0);
        assert_eq!(tracee.syscall(SYS_gettid, NONE).unwrap(), child.tids[0].0 as u64);
        assert_eq!(tracee.syscall(SYS_getpid, NONE).unwrap(), child.process.pid() as u64);
    }
    assert!(!has_code_of_firn(&child.process));
}

/// Whether a mapping is left that is both writable and executable.
fn has_code_of_firn(process: &Process) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", process.pid())).unwrap();
    maps.lines().any(|line| line.contains(" rwxp "))
}

fn sleeps_undisturbed(call: &str) {
    let mut child = Child::spawn(&[1]);
    child.send(Who::First, &format!("{call} 400"));
    std::thread::sleep(Duration::from_millis(20));
    disturb(&child, 5);
    let ms = child.result(Who::First);
    assert!((400..3000).contains(&ms), "{call} took {ms} ms");
}

#[test]
fn an_interrupted_nanosleep_continues() {
    sleeps_undisturbed("nanosleep");
}

#[test]
fn an_interrupted_ppoll_continues() {
    sleeps_undisturbed("ppoll");
}

#[test]
fn an_interrupted_futex_continues() {
    sleeps_undisturbed("futex");
}

#[test]
fn an_interrupted_read_continues() {
    let mut child = Child::spawn(&[1]);
    child.send(Who::First, "pipe");
    std::thread::sleep(Duration::from_millis(20));
    disturb(&child, 5);
    child.ask(Who::Main, "poke");
    assert!(child.result(Who::First) < 1_000_000);
}

#[test]
fn a_running_thread_keeps_its_registers() {
    const ROUNDS: u64 = 30_000_000;
    let mut child = Child::spawn(&[1]);
    child.send(Who::First, &format!("churn {ROUNDS}"));
    child.send(Who::Second, &format!("churn {ROUNDS}"));
    std::thread::sleep(Duration::from_millis(5));
    disturb(&child, 20);
    let expected = churn(ROUNDS);
    assert_eq!(child.result(Who::First), expected);
    assert_eq!(child.result(Who::Second), expected);
}

#[test]
fn a_dead_process_is_reported_as_gone() {
    let mut child = Child::spawn(&[1]);
    let process = child.process.clone();
    child.kill();
    let error = Tracee::seize(&process, &[]).unwrap_err();
    assert!(error.to_string().contains("does not exist"), "{error}");
}

#[test]
fn death_in_the_middle_is_an_error() {
    let mut child = Child::spawn(&[1]);
    let process = child.process.clone();
    let mut tracee = Tracee::seize(&process, &[]).unwrap();
    child.kill_traced();
    let error = tracee.syscall(SYS_getpid, NONE).unwrap_err();
    assert!(error.to_string().contains("does not exist"), "{error}");
}

#[test]
fn a_stopped_process_stays_stopped() {
    let mut child = Child::spawn(&[1]);
    pause(&child);
    {
        let mut tracee = child.tracee();
        assert_eq!(tracee.syscall(SYS_getpid, NONE).unwrap(), child.process.pid() as u64);
        assert_eq!(tracee.syscall(SYS_poll, milliseconds(20)).unwrap(), 0);
    }
    child.send(Who::First, "churn 10");
    assert_eq!(child.has_result(Who::First, Duration::from_millis(50)), None);
    pause(&child);
    resume(&child);
    assert_eq!(child.result(Who::First), churn(10));
}

/// Names the process and the thread that [`tracer_process`] traces.
const TRACER: &str = "FIRN_MEMORY_TEST_TRACER";

/// A Firn that is killed in the middle of a call: this executable, run again with [`TRACER`] set.
#[test]
fn tracer_process() {
    let Ok(names) = std::env::var(TRACER) else { return };
    let (pid, tid) = names.split_once(' ').unwrap();
    let (process, tid) =
        (Process::open(pid.parse().unwrap()).unwrap(), ThreadId(tid.parse().unwrap()));
    let mut tracee = Tracee::seize(&process, &others(&process, tid)).unwrap();
    assert_eq!(tracee.tid(), tid);
    for _ in 0..3 {
        tracee.syscall(SYS_gettid, NONE).unwrap();
    }
    let _ = tracee.syscall(SYS_poll, milliseconds(500));
}

/// Another Firn, armed with a fault.
fn tracer_of(child: &Child, fault: &str) -> std::process::Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "injection::tracer_process", "--nocapture"])
        .env(TRACER, format!("{} {}", child.process.pid(), child.tids[0].0))
        .env(firn_fault::VARIABLE, fault)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// Makes another Firn start a long call in the first thread, and kills it in the middle.
fn killed_in_a_long_call(child: &Child) {
    let mut tracer = tracer_of(child, "");
    let syscall = format!("/proc/{}/task/{}/syscall", child.process.pid(), child.tids[0].0);
    let poll = format!("{SYS_poll} 0x0 0x0 0x1f4 ");
    for attempt in 0.. {
        assert!(attempt < 10_000, "the call is never made");
        if std::fs::read_to_string(&syscall).unwrap().starts_with(&poll) {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    tracer.kill().unwrap();
    tracer.wait().unwrap();
}

/// Makes another Firn borrow the first thread, and be killed at this point.
fn killed_at(child: &Child, point: &str) {
    let ended = tracer_of(child, point).wait().unwrap();
    assert_eq!(ended.signal(), Some(Signal::SIGKILL as i32), "{point}");
}

#[test]
fn a_thread_is_lost_at_no_step() {
    const ROUNDS: u64 = 300_000_000;
    for point in
        ["inject.registers-set", "inject.registers-set@3", "inject.called", "inject.called@3"]
    {
        for call in ["nanosleep 800", "futex 800", "ppoll 800"] {
            let mut child = Child::spawn(&[1]);
            child.send(Who::First, call);
            std::thread::sleep(Duration::from_millis(20));
            killed_at(&child, point);
            let ms = child.result(Who::First);
            assert!((800..4000).contains(&ms), "{point}: {call} took {ms} ms");
            assert_eq!(child.ask(Who::First, "churn 1000"), churn(1000));
        }
        let mut child = Child::spawn(&[1]);
        child.send(Who::First, &format!("churn {ROUNDS}"));
        killed_at(&child, point);
        assert_eq!(child.result(Who::First), churn(ROUNDS), "{point}");
    }
}

#[test]
fn a_thread_is_lost_at_no_moment() {
    const ROUNDS: u64 = 1_000_000_000;
    let mut child = Child::spawn(&[1]);
    child.send(Who::First, &format!("churn {ROUNDS}"));
    for us in (0..40).map(|at| at * 500) {
        let mut tracer = tracer_of(&child, "");
        std::thread::sleep(Duration::from_micros(us));
        tracer.kill().unwrap();
        tracer.wait().unwrap();
    }
    assert_eq!(child.result(Who::First), churn(ROUNDS));
}

#[test]
fn a_signal_in_the_middle_is_handled() {
    const ROUNDS: u64 = 100_000_000;
    let mut child = Child::spawn(&[1]);
    child.ask(Who::Main, "handle");
    child.send(Who::First, &format!("churn {ROUNDS}"));
    let others = others(&child.process, child.tids[0]);
    for _ in 0..20 {
        let mut tracee = Tracee::seize(&child.process, &others).unwrap();
        for _ in 0..5 {
            child.signal(child.tids[0]);
            assert_eq!(tracee.syscall(SYS_gettid, NONE).unwrap(), child.tids[0].0 as u64);
        }
    }
    assert_eq!(child.result(Who::First), churn(ROUNDS));
    assert!(child.ask(Who::Main, "handled") >= 20);
}

#[test]
fn a_signal_ends_the_call_that_it_would_have_ended() {
    let mut child = Child::spawn(&[1]);
    child.ask(Who::Main, "handle");
    child.send(Who::First, "ppoll 20000");
    std::thread::sleep(Duration::from_millis(20));
    {
        let others = others(&child.process, child.tids[0]);
        let mut tracee = Tracee::seize(&child.process, &others).unwrap();
        child.signal(child.tids[0]);
        tracee.syscall(SYS_gettid, NONE).unwrap();
    }
    assert_eq!(child.result(Who::First), 1_000_000, "not interrupted");
    assert_eq!(child.ask(Who::Main, "handled"), 1);
}

#[test]
fn a_thread_resumes_its_work_without_firn() {
    for call in ["nanosleep 800", "futex 800", "ppoll 800"] {
        let mut child = Child::spawn(&[1]);
        child.send(Who::First, call);
        std::thread::sleep(Duration::from_millis(20));
        killed_in_a_long_call(&child);
        let ms = child.result(Who::First);
        assert!((800..4000).contains(&ms), "{call} took {ms} ms");
        assert_eq!(child.ask(Who::First, "churn 1000"), churn(1000));
    }
}

#[test]
fn a_running_thread_resumes_its_work_without_firn() {
    const ROUNDS: u64 = 30_000_000;
    let mut child = Child::spawn(&[1]);
    child.send(Who::First, &format!("churn {ROUNDS}"));
    std::thread::sleep(Duration::from_millis(5));
    killed_in_a_long_call(&child);
    assert_eq!(child.result(Who::First), churn(ROUNDS));
}

#[test]
fn an_error_of_a_long_call_is_returned() {
    let child = Child::spawn(&[1]);
    let error = child.tracee().syscall(SYS_close, [9999, 0, 0, 0, 0, 0]).unwrap_err();
    assert!(matches!(error, TraceError::Call { number, .. } if number == SYS_close), "{error}");
    assert!(!has_code_of_firn(&child.process));
}
