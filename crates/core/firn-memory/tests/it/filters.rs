//! Firn never makes a thread do a call if its seccomp filter kills for an unexpected call.

use std::process::{Command, Stdio};

use firn_memory::{Process, TraceError, Tracee};
use firn_types::ThreadId;
use nix::libc::SYS_userfaultfd;

use crate::driver::{Child, Who};

/// Names the process that [`tracer_process`] traces.
const TRACER: &str = "FIRN_MEMORY_TEST_FILTERED";

/// Arguments of a userfaultfd(2) whose descriptor closes with the process.
const FLAGS: [u64; 6] = [nix::libc::O_CLOEXEC as u64, 0, 0, 0, 0, 0];

/// The result that a Firn without CAP_SYS_ADMIN gets: this executable, run again with [`TRACER`]
/// set.
#[test]
fn tracer_process() {
    let Ok(pid) = std::env::var(TRACER) else { return };
    let process = Process::open(pid.parse().unwrap()).unwrap();
    let traced = Tracee::seize(&process, &[]).and_then(|mut tracee| {
        let (tid, made) = (tracee.tid(), tracee.syscall(SYS_userfaultfd, FLAGS));
        made.map(|_| tid)
    });
    let line = match traced {
        Ok(ThreadId(tid)) => format!("thread {tid}"),
        Err(TraceError::Filtered { .. }) => "filtered".to_owned(),
        Err(error) => format!("{error:?}"),
    };
    println!("\ntraced: {line}");
}

/// The result of a Firn without CAP_SYS_ADMIN; `None` if this user cannot start one.
fn traced_without_admin(child: &Child) -> Option<String> {
    let output = Command::new("setpriv")
        .args(["--bounding-set", "-sys_admin", "--"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "filters::tracer_process", "--nocapture"])
        .env(TRACER, child.process.pid().to_string())
        .stderr(Stdio::inherit())
        .output();
    let text = String::from_utf8(output.ok()?.stdout).unwrap();
    text.lines().find_map(|line| line.strip_prefix("traced: ")).map(str::to_owned)
}

#[test]
fn no_call_is_injected_under_an_unknown_filter() {
    let mut child = Child::spawn(&[1]);
    assert_eq!(child.ask(Who::Main, "filter all"), 0);
    let Some(traced) = traced_without_admin(&child) else {
        return firn_skip::skip_test("this needs root and setpriv");
    };
    assert_eq!(traced, "filtered");
    assert_eq!(child.ask(Who::First, "churn 10"), crate::child::churn(10), "it was killed");
}

#[test]
fn the_call_is_injected_into_a_thread_without_a_filter() {
    let mut child = Child::spawn(&[1]);
    assert_eq!(child.ask(Who::First, "filter one"), 0);
    assert_eq!(child.ask(Who::Main, "filter one"), 0);
    let Some(traced) = traced_without_admin(&child) else {
        return firn_skip::skip_test("this needs root and setpriv");
    };
    let filtered = [child.tids[0].0, child.process.pid()].map(|tid| format!("thread {tid}"));
    assert!(traced.starts_with("thread ") && !filtered.contains(&traced), "{traced}");
    assert_eq!(child.ask(Who::First, "churn 10"), crate::child::churn(10), "it was killed");
}

/// A filter that Firn may suspend judges nothing.
#[test]
fn a_filter_is_suspended_where_that_is_allowed() {
    let mut child = Child::spawn(&[1]);
    assert_eq!(child.ask(Who::Main, "filter all"), 0);
    match Tracee::seize(&child.process, &[]) {
        Ok(mut tracee) => drop(tracee.syscall(SYS_userfaultfd, FLAGS)),
        Err(TraceError::Filtered { .. }) => {
            firn_skip::skip_test("this user may not suspend filters")
        }
        Err(error) => panic!("{error:?}"),
    }
    assert_eq!(child.ask(Who::First, "churn 10"), crate::child::churn(10), "it was killed");
}
