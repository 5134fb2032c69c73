//! Hooks of checkpoints and restores. The guest agent is one of the test, which answers at the socket that
//! QEMU serves otherwise: so it can be silent, and the test sees whether a guest stays frozen.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use serde_json::{Value, json};

use crate::session::{Answer, Session, eventually, kill, text};
use crate::tiny_guest::TinyGuest;

const PATIENCE: Duration = Duration::from_secs(60);

/// What the agent does, and what it has received.
#[derive(Default)]
struct AgentState {
    is_frozen: bool,
    commands: Vec<String>,
    /// It freezes, and does not report that.
    is_silent_about_freeze: bool,
    /// It answers nothing.
    is_silent: bool,
    /// It refuses to freeze.
    refuses: bool,
    /// Requests to thaw that it ignores.
    ignored_thaws: u32,
    /// Of a program: its exit code.
    exit_code: i64,
}

/// An agent in place of that of a guest.
struct FakeAgent(Arc<Mutex<AgentState>>);

impl FakeAgent {
    /// Answers at this socket from now on; the one of QEMU has another name then.
    fn start(socket: &Path, is_frozen: bool) -> Self {
        let _ = std::fs::remove_file(socket);
        let listener = UnixListener::bind(socket).unwrap();
        let state = Arc::new(Mutex::new(AgentState { is_frozen, ..AgentState::default() }));
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                serve(&client, &shared);
            }
        });
        Self(state)
    }

    fn state(&self) -> MutexGuard<'_, AgentState> {
        self.0.lock().unwrap()
    }

    fn count(&self, command: &str) -> usize {
        self.state().commands.iter().filter(|it| *it == command).count()
    }

    #[track_caller]
    fn is_thawed_soon(&self, what: &str) {
        eventually(&format!("{what}: the guest is thawed"), PATIENCE, || !self.state().is_frozen);
    }
}

/// Answers one client, as qemu-ga does.
fn serve(client: &UnixStream, state: &Mutex<AgentState>) {
    let mut writer = client.try_clone().unwrap();
    for line in BufReader::new(client).split(b'\n').map_while(Result::ok) {
        let line = line.strip_prefix(&[0xff]).unwrap_or(&line);
        let request: Value = serde_json::from_slice(line).unwrap();
        let command = request["execute"].as_str().unwrap();
        if let Some(answer) = answer(&mut state.lock().unwrap(), command, &request["arguments"])
            && writeln!(writer, "{answer}").is_err()
        {
            return;
        }
    }
}

fn answer(state: &mut AgentState, command: &str, arguments: &Value) -> Option<Value> {
    state.commands.push(command.to_owned());
    if state.is_silent {
        return None;
    }
    Some(json!({ "return": match command {
        "guest-sync" => arguments["id"].clone(),
        "guest-fsfreeze-status" if state.is_frozen => json!("frozen"),
        "guest-fsfreeze-status" => json!("thawed"),
        "guest-fsfreeze-freeze" if state.refuses => {
            return Some(json!({ "error": { "desc": "no file system can be frozen" } }));
        }
        "guest-fsfreeze-freeze" => {
            state.is_frozen = true;
            if state.is_silent_about_freeze {
                return None;
            }
            json!(2)
        }
        "guest-fsfreeze-thaw" if state.ignored_thaws > 0 => {
            state.ignored_thaws -= 1;
            return None;
        }
        "guest-fsfreeze-thaw" => {
            state.is_frozen = false;
            json!(2)
        }
        // "in the guest"
        "guest-exec-status" => json!({
            "exited": true, "exitcode": state.exit_code, "out-data": "aW4gdGhlIGd1ZXN0Cg=="
        }),
        "guest-exec" => {
            state.commands.push(format!("{} {}", arguments["path"], arguments["arg"]));
            json!({ "pid": 7 })
        }
        "guest-get-time" => json!(0),
        _ => json!({}),
    } }))
}

/// A running VM whose command line has an agent.
struct VmWithAgent {
    session: Session,
    guest: TinyGuest,
    agent: FakeAgent,
}

impl VmWithAgent {
    fn run() -> Self {
        Self::run_in(Session::new())
    }

    fn run_in(session: Session) -> Self {
        let socket = session.path("agent");
        let port = format!("socket,id=agent,path={},server=on,wait=off", text(&socket));
        let device = "virtserialport,chardev=agent,name=org.qemu.guest_agent.0";
        let words = ["-chardev", &port, "-device", "virtio-serial", "-device", device];
        let guest = TinyGuest::run(&session, &words);
        let agent = FakeAgent::start(&socket, false);
        Self { session, guest, agent }
    }

    /// With this fault in its supervisor.
    fn run_with(fault: &str) -> Self {
        let mut session = Session::new();
        session.arm(Some(&fault.replace("DIR", text(&session.path("")))));
        let mut vm = Self::run_in(session);
        vm.session.arm(None);
        vm
    }

    fn save(&self, image: &str, options: &[&str]) -> Answer {
        self.session.firn(&[&["checkpoint", "web", "-o", image, "--freeze"], options].concat())
    }

    /// The journal has no freeze any more.
    #[track_caller]
    fn has_no_freeze(&self, what: &str) {
        self.agent.is_thawed_soon(what);
        eventually(&format!("{what}: the journal has that"), PATIENCE, || {
            self.session.status("web").get("frozen").is_none()
        });
    }

    /// The socket of the agent of a VM that was restored.
    fn restored_socket(&self, name: &str) -> PathBuf {
        let own = self.session.path(&format!("run/{name}/user-agent"));
        if own.exists() { own } else { self.session.path("agent") }
    }
}

#[test]
fn a_guest_is_frozen_for_the_cut_alone() {
    let mut vm = VmWithAgent::run();
    for strategy in ["trace", "cow", "pre-copy", "stop"] {
        let image = format!("{strategy}.firn");
        let save = ["checkpoint", "web", "-o", &image, "--freeze", "--strategy", strategy];
        let facts = vm.session.json(&save);
        assert_eq!(facts["freeze"]["thawed"], true, "{strategy}: {facts}");
        assert_eq!(facts["freeze"]["file_systems"], 2);
        let commands = std::mem::take(&mut vm.agent.state().commands);
        let status = "guest-fsfreeze-status";
        let freeze = ["guest-sync", status, "guest-fsfreeze-freeze"];
        let thaw = ["guest-sync", "guest-fsfreeze-thaw", status];
        assert_eq!(commands, [freeze, thaw].concat(), "{strategy}");
        vm.has_no_freeze(strategy);
        assert_eq!(vm.session.json(&["image", "inspect", &image])["meta"]["frozen"], true);
        vm.guest.answers();
    }
    vm.session.firn(&["checkpoint", "web", "-o", "plain.firn"]).succeeds();
    let meta = &vm.session.json(&["image", "inspect", "plain.firn"])["meta"];
    assert!(meta.get("frozen").is_none() && meta["version"] != 5, "{meta}");
    assert_eq!(vm.agent.state().commands, Vec::<String>::new());
}

/// The worst outcome is a guest that stays frozen.
#[test]
fn a_guest_is_thawed_wherever_the_supervisor_dies() {
    for point in [
        "freeze.recorded",
        "freeze.frozen",
        "save.stopped",
        "save.device-state",
        "save.resumed",
        "freeze.thawing",
        "freeze.thawed",
        "save.tracing",
        "save.finished",
    ] {
        let mut vm = VmWithAgent::run_with(point);
        let saved = vm.save("web.firn", &[]);
        assert_eq!(vm.session.status("web")["recoveries"], 1, "{point}: {}", saved.err);
        eprintln!("{point}: exit {}, {:?}", saved.code, vm.agent.state().commands);
        vm.has_no_freeze(point);
        vm.guest.answers();
        vm.save("again.firn", &[]).succeeds();
        vm.has_no_freeze(point);
        vm.guest.answers();
    }
}

#[test]
fn a_guest_is_thawed_if_the_save_fails() {
    for fault in ["image.index=EIO", "image.rename=EIO", "image.sync=ENOSPC"] {
        let mut vm = VmWithAgent::run_with(fault);
        let failed = vm.save("web.firn", &[]);
        assert_ne!(failed.code, 0, "{fault}");
        assert_eq!(vm.agent.count("guest-fsfreeze-freeze"), 1, "{fault}: {}", failed.err);
        assert!(!vm.agent.state().is_frozen, "{fault}");
        vm.has_no_freeze(fault);
        vm.guest.answers();
    }
}

#[test]
fn an_agent_that_does_not_answer_calls_the_checkpoint_off() {
    let mut vm = VmWithAgent::run();
    let refused = |vm: &VmWithAgent, why: &str| {
        let save = vm.save("web.firn", &["--hook-timeout", "1s"]).fails(1, why);
        assert!(save.err.contains("no checkpoint of web"), "{}", save.err);
        assert_eq!(vm.session.files("web.firn"), Vec::<String>::new());
        vm.has_no_freeze(why);
    };
    vm.agent.state().is_silent = true;
    refused(&vm, "did not answer guest-sync");
    assert_eq!(vm.agent.count("guest-fsfreeze-freeze"), 0);
    vm.agent.state().is_silent = false;
    vm.agent.state().refuses = true;
    refused(&vm, "no file system can be frozen");
    vm.agent.state().refuses = false;
    // It has frozen the guest, and the answer is lost.
    vm.agent.state().is_silent_about_freeze = true;
    refused(&vm, "did not answer guest-fsfreeze-freeze");
    vm.agent.state().is_silent_about_freeze = false;
    // Another program has frozen it. That is not for Firn to thaw.
    vm.agent.state().is_frozen = true;
    vm.save("web.firn", &[]).fails(1, "frozen already");
    assert!(vm.agent.state().is_frozen);
    vm.agent.state().is_frozen = false;
    // A request to thaw is lost: Firn repeats it.
    vm.agent.state().ignored_thaws = 1;
    vm.save("web.firn", &[]).succeeds();
    vm.has_no_freeze("a lost request");
    vm.guest.answers();
}

#[test]
fn a_cut_that_comes_too_late_is_no_checkpoint() {
    let mut vm = VmWithAgent::run_with("save.stopped=WAIT:DIR/stopped");
    let save = ["checkpoint", "web", "-o", "web.firn", "--freeze", "--hook-timeout", "1s"];
    let mut command = vm.session.command(&save);
    let saving = command.stderr(Stdio::piped()).spawn().unwrap();
    eventually("the VM is paused", PATIENCE, || vm.session.path("stopped").exists());
    vm.agent.is_thawed_soon("the time is over");
    std::fs::remove_file(vm.session.path("stopped")).unwrap();
    Answer::of(saving.wait_with_output().unwrap()).fails(1, "thawed before the cut");
    assert_eq!(vm.session.files("web.firn"), Vec::<String>::new());
    vm.has_no_freeze("late");
    vm.guest.answers();
    vm.save("web.firn", &[]).succeeds();
}

#[test]
fn a_vm_without_an_agent_is_not_frozen() {
    let session = Session::new();
    let mut guest = TinyGuest::run(&session, &[]);
    let refused = session.firn(&["checkpoint", "web", "-o", "web.firn", "--freeze"]);
    let refused = refused.fails(5, "no guest agent");
    assert!(refused.err.contains("org.qemu.guest_agent.0"), "{}", refused.err);
    assert_eq!(session.files("web.firn"), Vec::<String>::new());
    guest.answers();
    session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
    session.firn(&["stop", "web"]).succeeds();
    let failed = session.firn(&["restore", "web.firn", "--guest-exec", "/bin/true"]);
    failed.fails(5, "no guest agent");
    session.firn(&["status", "web", "--watch"]).succeeds();
    assert_eq!(session.status("web")["state"], "running");
}

/// Its image has a frozen guest, so each restore has to thaw it: also if its supervisor dies first.
#[test]
fn a_restored_guest_is_thawed() {
    let vm = VmWithAgent::run();
    vm.save("web.firn", &[]).succeeds();
    vm.session.firn(&["stop", "web"]).succeeds();
    let _ = std::fs::remove_file(vm.session.path("agent"));
    for kills in [false, true] {
        vm.session.firn(&["restore", "web.firn", "--wait"]).succeeds();
        assert_eq!(vm.session.status("web")["frozen"], true);
        let shown = vm.session.firn(&["status", "web"]).succeeds().out;
        assert!(shown.contains("frozen"), "{shown}");
        if kills {
            kill(vm.session.status("web")["supervisor_pid"].as_i64().unwrap());
        }
        let agent = FakeAgent::start(&vm.restored_socket("web"), true);
        agent.is_thawed_soon("restored");
        eventually("the journal has that", PATIENCE, || {
            vm.session.status("web").get("frozen").is_none()
        });
        vm.session.firn(&["stop", "web"]).succeeds();
        let _ = std::fs::remove_file(vm.session.path("agent"));
    }
}

#[test]
fn commands_run_on_the_host_before_and_after_a_checkpoint() {
    let vm = VmWithAgent::run();
    let session = &vm.session;
    let (before, after) = (session.path("before"), session.path("after"));
    let write = |path: &Path| {
        format!("echo $FIRN_VM $FIRN_IMAGE $FIRN_RESULT > {}; echo noise", text(path))
    };
    let (first, last) = (write(&before), write(&after));
    let image = session.path("web.firn");
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    let hooks = ["--before", &first, "--after", &last];
    let save = [&["checkpoint", "web", "-o", "web.firn"], &hooks[..]].concat();
    // Standard output has the facts alone.
    session.json(&save);
    assert_eq!(read(&before), format!("web {}\n", text(&image)));
    assert_eq!(read(&after), format!("web {} ok\n", text(&image)));
    // It calls the checkpoint off, and --after has nothing to undo.
    std::fs::remove_file(&after).unwrap();
    let off = ["checkpoint", "web", "-o", "off.firn", "--before", "exit 7", "--after", &last];
    let off = session.firn(&off).fails(1, "the command of --before failed: exit status: 7");
    assert!(off.err.contains("no checkpoint of web"), "{}", off.err);
    assert!(!after.exists() && !session.path("off.firn").exists());
    let long = ["checkpoint", "web", "-o", "off.firn", "--before", "sleep 60"];
    let long = session.firn(&[&long[..], &["--hook-timeout", "1s"]].concat());
    long.fails(1, "was ended: it ran for 1 s");
    // The checkpoint fails, and --after runs.
    let failed = [&["checkpoint", "none", "-o", "no.firn"], &hooks[..]].concat();
    session.firn(&failed).fails(3, "no VM called none");
    assert!(read(&after).ends_with("no.firn failed\n"), "{}", read(&after));
    // --after fails: there is a checkpoint.
    let save = ["checkpoint", "web", "-o", "second.firn", "--after", "false"];
    let failed = session.firn(&save).fails(1, "the command of --after failed: exit status: 1");
    assert!(failed.err.contains("second.firn is complete"), "{}", failed.err);
    session.firn(&["image", "verify", "second.firn"]).succeeds();
    session
        .firn(&["checkpoint", "web", "-o", "x.firn", "--hook-timeout", "0s"])
        .fails(2, "above 0");
}

#[test]
fn programs_run_in_a_restored_guest_and_then_on_the_host() {
    let vm = VmWithAgent::run();
    vm.session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
    vm.session.firn(&["stop", "web"]).succeeds();
    let _ = std::fs::remove_file(vm.session.path("agent"));
    let after = vm.session.path("after");
    let command = format!("echo $FIRN_VM $FIRN_IMAGE > {}", text(&after));
    let restore = |exit_code: i64, program: &str| {
        let args = ["restore", "web.firn", "--guest-exec", program, "--after", &command];
        let resumed = vm.session.path("resumed");
        let mut command = vm.session.command(&args);
        command.env("FIRN_FAULT", format!("restore.resumed=WAIT:{}", text(&resumed)));
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        eventually("the VM runs", PATIENCE, || resumed.exists());
        let agent = FakeAgent::start(&vm.restored_socket("web"), false);
        agent.state().exit_code = exit_code;
        std::fs::remove_file(&resumed).unwrap();
        (Answer::of(child.wait_with_output().unwrap()), agent)
    };
    let (answer, agent) = restore(0, "/bin/hostname 'box 1'");
    let answer = answer.succeeds();
    assert!(answer.out.contains("/bin/hostname in the guest: exit code 0\n  in the guest"));
    assert!(agent.state().commands.contains(&"\"/bin/hostname\" [\"box 1\"]".to_owned()));
    let image = vm.session.path("web.firn");
    assert_eq!(std::fs::read_to_string(&after).unwrap(), format!("web {}\n", text(&image)));
    vm.session.firn(&["stop", "web"]).succeeds();
    let _ = std::fs::remove_file(vm.session.path("agent"));
    std::fs::remove_file(&after).unwrap();
    let (answer, _agent) = restore(3, "/bin/hostname x");
    let failed = answer.fails(1, "/bin/hostname in the guest ended with exit code 3");
    assert!(failed.err.contains("web was restored") && !after.exists(), "{}", failed.err);
    vm.session.firn(&["status", "web", "--watch"]).succeeds();
    assert_eq!(vm.session.status("web")["state"], "running");
    vm.session.firn(&["stop", "web"]).succeeds();
    vm.session
        .firn(&["restore", "web.firn", "--guest-exec", "'x"])
        .fails(2, "a quote is not closed");
}
