//! `firn console` of a guest's serial port.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::process::Stdio;

use crate::session::{Session, text};
use crate::vm::Vm;

/// Types a word on a console: the guest's terminal prints each character that is typed.
#[track_caller]
fn echoes(session: &Session, name: &str, word: &str) {
    let mut console = session.command(&["console", name]);
    let console = console.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut console = console.spawn().unwrap();
    console.stdin.take().unwrap().write_all(format!("{word}\n").as_bytes()).unwrap();
    let ended = console.wait_with_output().unwrap();
    let (printed, errors) = (text_of(&ended.stdout), text_of(&ended.stderr));
    assert!(ended.status.success(), "{errors}");
    assert!(printed.contains(word), "{printed:?} {errors}");
}

fn text_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// It has one client at a time, survives a restore, and a second VM from the same image has its own.
#[test]
fn a_console_has_one_client_and_is_restored() {
    let vm = Vm::new();
    let socket = vm.session.path("tty");
    let chardev = format!("socket,id=tty,path={},server=on,wait=off", text(&socket));
    let vm = vm.with(&["-chardev", &chardev, "-serial", "chardev:tty"]);
    let vm = vm.booted(&["--mib", "16", "--rate", "200"]);
    let session = &vm.session;
    echoes(session, "web", "first-word");
    let facts = session.json(&["console", "web"]);
    assert_eq!((&facts["device"], &facts["socket"]), (&"tty".into(), &text(&socket).into()));

    let other = UnixStream::connect(&socket).unwrap();
    session.firn(&["console", "web"]).fails(4, "another program is connected to the console");
    drop(other);
    session.firn(&["console", "web", "--device", "com2"]).fails(2, "no console called com2");

    session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
    session.firn(&["restore", "web.firn", "--name", "twin", "--wait"]).succeeds();
    let own = session.json(&["console", "twin"])["socket"].as_str().unwrap().to_owned();
    assert_ne!(own, text(&socket));
    echoes(session, "twin", "word-of-twin");
    echoes(session, "web", "word-of-web");
    session.firn(&["stop", "twin"]).succeeds();
    session.firn(&["stop", "web"]).succeeds();
    session.firn(&["restore", "web.firn", "--wait"]).succeeds();
    echoes(session, "web", "word-after-restore");
}
