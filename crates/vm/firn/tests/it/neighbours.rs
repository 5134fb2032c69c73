//! Two QEMUs of one command line, and two users of one QEMU: what is meant for one never reaches the other.

use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use crate::own_qemu::OwnQemu;
use crate::session::{Answer, Session, eventually, text};

/// How long a busy host may take for what is to take two seconds. Without the check it takes thirty.
const AT_ONCE: Duration = Duration::from_secs(15);
const PATIENCE: Duration = Duration::from_secs(120);

/// A container has a PID namespace: QEMU reports numbers of its threads that belong to other
/// processes here, or to none.
#[test]
fn a_vm_in_a_container_is_saved_from_outside() {
    let session = Session::new();
    let Some(mut contained) = OwnQemu::in_container(&session) else {
        return firn_skip::skip_test("no PID namespace can be made here (root)");
    };
    let status = std::fs::read_to_string(format!("/proc/{}/status", contained.pid())).unwrap();
    assert!(status.contains(&format!("NSpid:\t{}\t1\n", contained.pid())), "{status}");
    contained.attach(&session, "pod");
    session.firn(&["checkpoint", "pod", "-o", "pod.firn", "--strategy", "cow"]).succeeds();
    session.firn(&["checkpoint", "pod", "-o", "pod2.firn", "--parent", "pod.firn"]).succeeds();
    assert!(contained.is_running());
    let restored = session.json(&["restore", "pod2.firn", "--name", "copy", "--wait"]);
    assert_ne!(restored["pid"].to_string(), contained.pid());
    session.firn(&["stop", "copy"]).succeeds();
    session.firn(&["stop", "pod"]).succeeds();
    contained.ended();
}

#[test]
fn a_vm_and_its_copy_are_ended_each_by_its_own_name() {
    let session = Session::new();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let serial = format!("tcp:127.0.0.1:{port},server=on,wait=off");
    let files = ["-pidfile", "own.pid", "-D", "own.log", "-d", "guest_errors"];
    let own = [&files[..], &["-serial", &serial, "-vnc", "unix:own.vnc"]].concat();
    let mut mine = OwnQemu::start(&session, &own);
    mine.attach(&session, "mine");
    session.firn(&["checkpoint", "mine", "-o", "mine.firn"]).succeeds();
    let restored = session.json(&["restore", "mine.firn", "--name", "mine2", "--wait"]);
    let notes = restored["notes"].to_string();
    for taken in ["-qmp", "-pidfile", "-D", "-serial", "-vnc"] {
        assert!(notes.contains(&format!("\"{taken} ")), "{taken} is not in {notes}");
    }
    assert_eq!(notes.matches("is in use by process").count(), 5, "{notes}");
    for name in ["user-qmp", "user-own.pid", "user-own.log", "user-own.vnc"] {
        assert!(session.runtime_dir().join("mine2").join(name).exists(), "{name}");
    }
    assert_eq!(std::fs::read_to_string(session.path("own.pid")).unwrap().trim(), mine.pid());
    assert_eq!(mine.listener(), mine.pid(), "the socket is the original's still");

    // The original first: it ends as it was asked to, and flushes.
    session.firn(&["stop", "mine"]).succeeds();
    assert_eq!(mine.ended().code(), Some(0), "it was killed");
    assert_eq!(session.ls(), [("mine2".to_owned(), "running".to_owned())]);
    session.firn(&["checkpoint", "mine2", "-o", "mine2.firn"]).succeeds();
    session.firn(&["stop", "mine2"]).succeeds();

    // The copy first: the original runs, and can be saved.
    let mut mine = OwnQemu::start(&session, &own);
    mine.attach(&session, "mine");
    let out = session.firn(&["restore", "mine2.firn", "--name", "mine2", "--wait"]).succeeds().out;
    assert!(out.contains("user-qmp,server=on,wait=off: ") && out.contains("is in use by"), "{out}");
    session.firn(&["stop", "mine2"]).succeeds();
    assert!(mine.is_running());
    session.firn(&["checkpoint", "mine", "-o", "mine3.firn"]).succeeds();
    session.firn(&["stop", "mine"]).succeeds();
    assert_eq!(mine.ended().code(), Some(0), "it was killed");

    // With neither of them there nothing is in use: sockets are where the command line says.
    let again = session.json(&["restore", "mine3.firn", "--wait"]);
    assert_eq!(again["notes"].as_array().unwrap().len(), 0, "{again}");
    assert_eq!(mine.listener(), again["pid"].to_string());
}

#[test]
fn no_command_is_sent_to_another_qemu_on_the_same_socket() {
    let session = Session::new();
    let mut mine = OwnQemu::start(&session, &[]);
    mine.attach(&session, "mine");
    let mut other = OwnQemu::start(&session, &[]);
    let said = format!("is the monitor of process {} (", other.pid());
    let answer = session.firn(&["checkpoint", "mine", "-o", "mine.firn"]).fails(2, &said);
    assert!(answer.err.contains(&format!("not of process {}", mine.pid())), "{}", answer.err);
    let answer = mine.try_attach(&session, "again");
    assert_ne!(answer.code, 0);
    assert!(mine.is_running() && other.is_running());
    assert!(session.files("mine.firn").is_empty());
}

#[test]
fn a_monitor_that_another_process_has_is_an_error_that_names_it() {
    let session = Session::new();
    let qemu = OwnQemu::start(&session, &[]);
    let user = firn_vmm::QemuVm::connect(&qemu.qmp).unwrap();
    let me = format!("is in use by process {} (", std::process::id());
    // The promise, of which a busy host may keep Firn a few times.
    let is_quick = || {
        let begun = Instant::now();
        qemu.try_attach(&session, "mine").fails(4, &me);
        begun.elapsed() < Duration::from_secs(2)
    };
    assert!((0..5).any(|_| is_quick()), "it takes more than two seconds");
    let begun = Instant::now();
    let answer = qemu.try_attach(&session, "mine").fails(4, &me);
    assert!(answer.err.contains("second monitor"), "{}", answer.err);
    // With its backlog full too.
    let waiting: Vec<_> = (0..4).map_while(|_| connect_at_once(&qemu)).collect();
    qemu.try_attach(&session, "mine").fails(4, &me);
    assert!(begun.elapsed() < 2 * AT_ONCE, "{:?}", begun.elapsed());
    assert_eq!(session.ls(), []);
    drop((user, waiting));
    eventually("a free monitor", PATIENCE, || qemu.try_attach(&session, "mine").code == 0);
}

/// The user's own client has the monitor of a VM that Firn is attached to: each command says so at once, and harms nothing.
#[test]
fn a_monitor_that_its_user_needs_ends_no_vm() {
    let session = Session::new();
    let mut qemu = OwnQemu::start(&session, &[]);
    qemu.attach(&session, "mine");
    let user = firn_vmm::QemuVm::connect(&qemu.qmp).unwrap();
    let me = format!("is in use by process {} (", std::process::id());
    for words in [
        &["checkpoint", "mine", "-o", "mine.firn"][..],
        &["suspend", "mine", "-o", "mine.firn"],
        &["stop", "mine"],
    ] {
        // QEMU is not killed for that.
        let code = if words[0] == "stop" { 8 } else { 4 };
        let begun = Instant::now();
        let answer = session.firn(words);
        eprintln!("{words:?}: {} in {:?}: {}", answer.code, begun.elapsed(), answer.err.trim());
        answer.fails(code, &me);
        assert!(begun.elapsed() < AT_ONCE, "{words:?}: {:?}", begun.elapsed());
        assert!(qemu.is_running(), "{words:?}");
        assert_eq!(session.status("mine")["state"], "running", "{words:?}");
    }
    assert!(session.files("mine.firn").is_empty());
    // Firn needs no monitor to leave.
    session.firn(&["detach", "mine"]).succeeds();
    assert!(qemu.is_running());
    drop(user);
    eventually("a free monitor", PATIENCE, || qemu.try_attach(&session, "mine").code == 0);
    session.firn(&["checkpoint", "mine", "-o", "mine.firn"]).succeeds();
    session.firn(&["stop", "mine"]).succeeds();
    assert_eq!(qemu.ended().code(), Some(0), "it was killed");
}

fn connect_at_once(qemu: &OwnQemu) -> Option<std::os::fd::OwnedFd> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let socket = rustix::net::socket_with(family, kind, flags, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(&qemu.qmp).unwrap()).ok()?;
    Some(socket)
}

#[test]
fn one_qemu_has_one_supervisor() {
    let (session, elsewhere) = (Session::new(), Session::new());
    let qemu = OwnQemu::start(&session, &[]);
    qemu.attach(&session, "mine");
    let pid = qemu.pid();
    qemu.try_attach(&session, "yours").fails(4, &format!("process {pid} is VM mine"));
    let other = qemu.try_attach(&elsewhere, "yours").fails(4, &format!("process {pid} is VM mine"));
    assert!(other.err.contains("firn detach mine"), "{}", other.err);
    assert_eq!((session.ls().len(), elsewhere.ls().len()), (1, 0));
    let supervisor = session.status("mine")["supervisor_pid"].as_i64().unwrap();
    crate::session::kill(supervisor);
    let again = || session.status("mine")["recoveries"].as_u64() == Some(1);
    eventually("another supervisor", PATIENCE, again);
    qemu.try_attach(&elsewhere, "yours").fails(4, &format!("process {pid} is VM mine"));
    session.firn(&["detach", "mine"]).succeeds();
    qemu.attach(&elsewhere, "yours");
    elsewhere.firn(&["detach", "yours"]).succeeds();
    // Whatever holds it is named.
    let directory = std::fs::File::open(format!("/proc/{pid}")).unwrap();
    flock(&directory, FlockOperation::LockExclusive).unwrap();
    let me = format!("is held by process {} (", std::process::id());
    qemu.try_attach(&session, "mine").fails(4, &me);
    drop(directory);
    qemu.attach(&session, "mine");
}

#[test]
fn a_restore_starts_only_a_qemu() {
    let session = Session::new();
    let mine = OwnQemu::named("/bin/sh", &session, &[]);
    mine.attach(&session, "mine");
    session.firn(&["checkpoint", "mine", "-o", "mine.firn"]).succeeds();
    let refused = session.firn(&["restore", "mine.firn", "--name", "mine2"]);
    let refused = refused.fails(5, "the image's command line starts /bin/sh");
    assert!(refused.err.contains("--qemu"), "{}", refused.err);
    assert_eq!(session.ls().len(), 1);
    // Nor does a check of the image start it.
    let verify = session.firn(&["image", "verify", "--restorable", "mine.firn"]);
    assert!(format!("{}{}", verify.out, verify.err).contains("is no QEMU that this host allows"));
    verify.fails(5, "could not restore");
    let qemu = firn_lab::guest::default_program();
    let named = ["restore", "mine.firn", "--name", "mine2", "--qemu", qemu.to_str().unwrap()];
    session.firn(&named).succeeds();
}

#[test]
fn a_restore_changes_only_the_requested_options() {
    let session = Session::new();
    let disk = session.path("disk.raw");
    std::fs::write(&disk, vec![7; 1 << 20]).unwrap();
    let held = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = held.local_addr().unwrap().port();
    drop(held);
    let forward = format!("user,id=net0,hostfwd=tcp:127.0.0.1:{port}-:22");
    let own = ["-netdev", &forward, "-device", "e1000,netdev=net0,id=card,romfile="];
    let drive = ["-drive", "file=disk.raw,format=raw,if=none,id=disk0,readonly=on"];
    let device = ["-device", "virtio-blk-pci,drive=disk0"];
    let mut mine = OwnQemu::start(&session, &[&own[..], &drive, &device].concat());
    mine.attach(&session, "mine");
    session.firn(&["checkpoint", "mine", "-o", "mine.firn"]).succeeds();
    let restore = ["restore", "mine.firn", "--name", "mine2"];
    let taken = session.firn(&restore).fails(4, &format!("TCP port {port} of 127.0.0.1"));
    assert!(taken.err.contains("--netdev"), "{}", taken.err);
    let netdev = [&restore[..], &["--netdev", "net0=user"]].concat();
    session.firn(&netdev).succeeds();
    session.firn(&["stop", "mine2"]).succeeds();
    session.firn(&["stop", "mine"]).succeeds();
    mine.ended();

    std::fs::rename(&disk, session.path("moved.raw")).unwrap();
    session.firn(&restore).fails(5, "disk.raw is not there");
    session
        .firn(&[&restore[..], &["--disk", "other=moved.raw"]].concat())
        .fails(2, "no disk other");
    let changes = [
        &restore[..],
        &["--disk", "disk.raw=moved.raw", "--set", "netdev.net0.hostname=two"],
        &["--qemu-arg=-name", "--qemu-arg=second", "--wait"],
    ];
    let restored = session.json(&changes.concat());
    let args = restored["args"].to_string();
    for changed in ["/moved.raw,format=raw", "hostname=two", "\"-name\",\"second\""] {
        assert!(args.contains(changed), "{changed} is not in {args}");
    }
    // They are the VM's own from then on.
    session.firn(&["checkpoint", "mine2", "-o", "mine2.firn"]).succeeds();
    session.firn(&["stop", "mine2"]).succeeds();
    let again = session.json(&["restore", "mine2.firn", "--wait"])["args"].to_string();
    assert!(again.contains("hostname=two") && again.contains(text(&session.path("moved.raw"))));
    session.firn(&["stop", "mine2"]).succeeds();
    let wrong = ["restore", "mine2.firn", "--set", "netdev.net1.hostname=x"];
    session.firn(&wrong).fails(2, "no such option");
}

/// A command by a root that must not suspend seccomp filters; `None` where there is no such root.
fn without_sys_admin(session: &Session, args: &[&str]) -> Option<Answer> {
    let command = session.command(args);
    let mut limited = Command::new("setpriv");
    limited.args(["--bounding-set", "-sys_admin", "--"]);
    limited.arg(command.get_program()).args(command.get_args());
    limited.current_dir(session.path("")).stdin(Stdio::null());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    rustix::process::geteuid().is_root().then(|| Answer::of(limited.output().unwrap()))
}

/// QEMU's own sandbox lets Firn's calls pass. Another program's filter might kill it for them: it is left alone.
#[test]
fn a_sandboxed_qemu_survives() {
    let session = Session::new();
    let denies = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
    let shared = ["-object", "memory-backend-memfd,id=ram,size=64M,share=on"];
    let sandbox = ["-machine", "memory-backend=ram", "-sandbox", denies];
    let mut qemu = OwnQemu::start(&session, &[&shared[..], &sandbox].concat());
    let (pid, qmp) = (qemu.pid(), text(&qemu.qmp).to_owned());
    let attach = ["attach", "mine", "--pid", &pid, "--qmp", &qmp];
    let Some(attached) = without_sys_admin(&session, &attach) else {
        return firn_skip::skip_test("this needs root");
    };
    attached.succeeds();
    let program = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap();
    // A copy does not find its modules by itself.
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let module =
        maps.lines().find_map(|line| line.split(' ').rfind(|it| it.contains("/accel-tcg")));
    let modules = module.and_then(|it| it.rsplit_once('/')).map_or("/", |(dir, _)| dir).to_owned();
    for strategy in ["trace", "cow", "pre-copy", "stop"] {
        let save = ["checkpoint", "mine", "-o", "mine.firn", "--strategy", strategy];
        without_sys_admin(&session, &save).unwrap().succeeds();
        assert!(qemu.is_running(), "{strategy}");
    }
    session.firn(&["restore", "mine.firn", "--name", "mine2", "--wait"]).succeeds();
    session.firn(&["stop", "mine2"]).succeeds();
    session.firn(&["stop", "mine"]).succeeds();
    assert_eq!(qemu.ended().code(), Some(0), "it was killed");

    // By its name it is no QEMU, and nothing is known of its filter.
    let copy = session.path("hypervisor");
    std::fs::copy(&program, &copy).unwrap();
    let words = ["-sandbox", denies, "-L", "/usr/share/qemu", "-L", "/usr/share/seabios"];
    let mut other = OwnQemu::of_program((&copy, &modules), "hypervisor", &session, &words);
    let (pid, qmp) = (other.pid(), text(&other.qmp).to_owned());
    let attach = ["attach", "mine", "--pid", &pid, "--qmp", &qmp];
    let attached = without_sys_admin(&session, &attach).unwrap();
    eprintln!("attach: {} {}", attached.code, attached.err);
    if attached.code == 0 {
        let save = ["checkpoint", "mine", "-o", "other.firn"];
        let saved = without_sys_admin(&session, &save).unwrap();
        let saved = saved.fails(7, "have a seccomp filter that Firn may not suspend");
        assert!(saved.err.contains("CAP_SYS_ADMIN"), "{}", saved.err);
    }
    assert!(session.files("other.firn").is_empty());
    assert!(other.is_running() && other.listener() == other.pid(), "it was killed");
}
