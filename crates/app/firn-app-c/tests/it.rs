//! The library as C, Python and Rust programs use it.

#![cfg(test)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests may fail so")]

#[path = "../../firn-app/examples/counter.rs"]
#[allow(dead_code, missing_docs, reason = "its main is for its own program")]
mod counter;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Installs the library below a directory, as a package would.
fn install(prefix: &Path) {
    // The library is built for this test, and lies beside it.
    let program = std::env::current_exe().unwrap();
    let built = program.parent().unwrap();
    run(&here().join("install.sh"), [prefix.as_os_str(), built.as_os_str()]);
}

fn run<S: AsRef<OsStr>>(program: &Path, arguments: impl IntoIterator<Item = S>) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", program.display());
    String::from_utf8(output.stdout).unwrap()
}

/// Flags that pkg-config gives for the installed library.
fn flags(prefix: &Path) -> Vec<String> {
    let output = Command::new("pkg-config")
        .args(["--cflags", "--libs", "firnapp"])
        .env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"))
        .output()
        .unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap().split_whitespace().map(str::to_owned).collect()
}

fn compile(prefix: &Path) -> PathBuf {
    let program = prefix.join("counter-c");
    let mut arguments =
        vec!["-Wall".to_owned(), "-Wextra".into(), "-Werror".into(), "-std=c99".into()];
    arguments.push(here().join("examples/counter.c").display().to_string());
    arguments.extend(flags(prefix));
    arguments.push(format!("-Wl,-rpath,{}", prefix.join("lib").display()));
    arguments.extend(["-o".into(), program.display().to_string()]);
    run(Path::new("cc"), arguments);
    program
}

#[test]
fn the_examples_count_on_in_each_others_logs() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path();
    install(prefix);
    let log = prefix.join("counter.log");
    let c = compile(prefix);
    let python = |log: &Path| {
        let script = here().join("examples/counter.py");
        let library = prefix.join("lib/libfirnapp.so");
        run(Path::new("python3"), [script.as_os_str(), library.as_os_str(), log.as_os_str()])
    };
    assert_eq!(run(&c, [&log]), "start 1\n");
    assert_eq!(run(&c, [&log]), "start 2\n");
    assert_eq!(python(&log), "start 3\n");
    assert_eq!(counter::count_start(&log).unwrap(), 4);
    assert_eq!(run(&c, [&log]), "start 5\n");
    // An error has words.
    let failed = Command::new(&c).arg("/nowhere/log").output().unwrap();
    let words = String::from_utf8(failed.stderr).unwrap();
    assert!(words.starts_with("open: the backup failed: cannot open /nowhere/log"), "{words}");
}

#[test]
fn the_man_page_has_every_function() {
    let read = |path: &str| std::fs::read_to_string(here().join(path)).unwrap();
    let (header, page) = (read("include/firnapp.h"), read("man/firnapp.3"));
    let functions: Vec<_> = header
        .lines()
        .filter(|line| line.ends_with(");") && line.contains("firn_app_"))
        .filter_map(|line| line.split('(').next()?.split([' ', '*']).next_back())
        .collect();
    assert_eq!(functions.len(), 13, "{functions:?}");
    for function in functions {
        assert!(page.contains(&format!("{function}(")), "{function}");
        assert!(read("src/lib.rs").contains(&format!("fn {function}(")), "{function}");
    }
}

/// A child that was forked gets an error in words; what it writes and closes is its own.
#[test]
fn a_forked_child_is_refused_and_harms_nothing() {
    const SCRIPT: &str = r#"
import os, sys
exec(open(sys.argv[1]).read().split("class State")[0])
lib = ctypes.CDLL(sys.argv[2])
lib.firn_app_error.restype = ctypes.c_char_p
lib.firn_app_recover.restype = lib.firn_app_commit.restype = ctypes.c_int64
lib.firn_app_acknowledged.restype = ctypes.c_uint64

def opened(tracker):
    session, memory = ctypes.c_void_p(), ctypes.c_void_p()
    options = Options(name=b"forks", tracker=tracker, file=sys.argv[3].encode() + tracker)
    assert lib.firn_app_open(ctypes.byref(options), ctypes.byref(session)) == 0, lib.firn_app_error()
    assert lib.firn_app_allocate(session, b"area", ctypes.c_size_t(9000), ctypes.byref(memory)) == 0
    return session, (ctypes.c_ubyte * 9000).from_address(memory.value)

def commit(session, area, byte):
    assert lib.firn_app_begin(session) == 0
    area[5000] = byte
    return lib.firn_app_commit(session)

for tracker in (b"pt", b"emul", b"pt_assisted", b"scan", b"compare"):
    session, area = opened(tracker)
    assert commit(session, area, 1) == 1
    assert lib.firn_app_begin(session) == 0
    child = os.fork()
    if child == 0:
        calls = [lib.firn_app_commit(session), lib.firn_app_abort(session), lib.firn_app_begin(session), lib.firn_app_flush(session)]
        words = lib.firn_app_error().decode()
        area[5000] = 9
        right = calls == [-7] * 4 and f"belongs to process {os.getppid()}" in words and area[5000] == 9
        lib.firn_app_close(session)
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0, tracker
    area[5001] = 2
    assert lib.firn_app_commit(session) == 2
    assert lib.firn_app_acknowledged(session) == 2
    lib.firn_app_close(session)
    session, area = opened(tracker)
    assert lib.firn_app_recover(session) == 2
    print(tracker.decode(), area[5000], area[5001])
    lib.firn_app_close(session)
"#;
    let dir = tempfile::tempdir().unwrap();
    install(dir.path());
    let library = dir.path().join("lib/libfirnapp.so");
    let (example, log) = (here().join("examples/counter.py"), dir.path().join("log-"));
    let arguments = ["-c".as_ref(), SCRIPT.as_ref(), example.as_os_str(), library.as_os_str()];
    let said = run(Path::new("python3"), arguments.into_iter().chain([log.as_os_str()]));
    assert_eq!(said, "pt 1 2\nemul 1 2\npt_assisted 1 2\nscan 1 2\ncompare 1 2\n");
}

/// Without a host below there is an error, in words.
#[test]
fn a_host_that_is_not_there_is_said_to_be_missing() {
    const SCRIPT: &str = r#"
import sys
exec(open(sys.argv[1]).read().split("class State")[0])
lib = ctypes.CDLL(sys.argv[2])
lib.firn_app_error.restype = ctypes.c_char_p
for key in (None, b"5a" * 32):
    session = ctypes.c_void_p()
    options = Options(name=b"ledger", tracker=b"pt_host", host_key=key)
    print(lib.firn_app_open(ctypes.byref(options), ctypes.byref(session)), lib.firn_app_error().decode())
"#;
    let dir = tempfile::tempdir().unwrap();
    install(dir.path());
    let library = dir.path().join("lib/libfirnapp.so");
    let example = here().join("examples/counter.py");
    let arguments = ["-c".as_ref(), SCRIPT.as_ref(), example.as_os_str(), library.as_os_str()];
    let said = run(Path::new("python3"), arguments);
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].starts_with("-1 pt_host needs host_key"), "{}", lines[0]);
    assert!(lines[1].starts_with("-3 no device to call the host through"), "{}", lines[1]);
}
