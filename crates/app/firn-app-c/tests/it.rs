//! The library as C, Python and Rust programs use it.

#![cfg(test)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests may fail so")]

#[path = "../../firn-app/examples/counter.rs"]
#[allow(dead_code, missing_docs, reason = "its main is for its own program")]
mod counter;

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt as _;
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

/// A library that was installed for a package: below a directory, for another prefix.
struct Installed {
    dir: tempfile::TempDir,
}

impl Installed {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let program = std::env::current_exe().unwrap();
        let output = Command::new(here().join("install.sh"))
            .args([Path::new("/opt/firn"), program.parent().unwrap()])
            .env("DESTDIR", dir.path())
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Self { dir }
    }

    fn library_directory(&self) -> PathBuf {
        self.dir.path().join("opt/firn/lib")
    }

    /// The example of the installed manual page, compiled against the installed files.
    fn compile_example(&self) -> PathBuf {
        let page = self.dir.path().join("opt/firn/share/man/man3/firnapp.3");
        let page = std::fs::read_to_string(page).unwrap();
        let start = page.find("#include <firnapp.h>\n#include <stdio.h>").unwrap();
        let example = page[start..].split(".fi\n").next().unwrap().replace("\\e", "\\");
        let lines = example.lines().count();
        assert!(lines <= 30, "{lines} lines");
        let [source, program] = ["starts.c", "starts"].map(|name| self.dir.path().join(name));
        std::fs::write(&source, example).unwrap();
        let flags = Command::new("pkg-config")
            .args(["--cflags", "--libs", "firnapp"])
            .env("PKG_CONFIG_PATH", self.library_directory().join("pkgconfig"))
            .env("PKG_CONFIG_SYSROOT_DIR", self.dir.path())
            .output()
            .unwrap();
        let flags = String::from_utf8(flags.stdout).unwrap();
        let mut arguments: Vec<String> =
            ["-Wall", "-Wextra", "-Werror", "-std=c99"].map(str::to_owned).into();
        arguments.push(source.display().to_string());
        arguments.extend(flags.split_whitespace().map(str::to_owned));
        arguments.extend(["-o".into(), program.display().to_string()]);
        run(Path::new("cc"), arguments);
        program
    }

    /// The wheel of the Python package, unpacked as an installer does.
    fn install_python(&self) -> PathBuf {
        const SCRIPT: &str = "import sys, zipfile, wheel_backend\n\
            wheel = wheel_backend.build_wheel(sys.argv[1])\n\
            zipfile.ZipFile(f'{sys.argv[1]}/{wheel}').extractall(f'{sys.argv[1]}/site')";
        let output = Command::new("python3")
            .args(["-B", "-c", SCRIPT])
            .arg(self.dir.path())
            .current_dir(here().join("python"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let site = self.dir.path().join("site");
        let info = site.join("firnapp-0.1.0.dist-info");
        assert!(info.join("METADATA").exists() && info.join("RECORD").exists());
        site
    }

    fn python(&self, script: &str) -> Command {
        let mut command = Command::new("python3");
        command.args(["-c", script]).env("PYTHONPATH", self.install_python());
        command.env("LD_LIBRARY_PATH", self.library_directory()).current_dir(self.dir.path());
        command
    }

    /// Runs a program that counts its starts and prints them, and kills it at some instant, many
    /// times. At the end the count includes all starts that were printed.
    fn check_kills(&self, command: impl Fn() -> Command, delay_max: u64) {
        let (mut printed, mut runs) = (0, 0);
        for delay in (0..12).map(|number| number * delay_max / 11) {
            let mut started = command().stdout(std::process::Stdio::piped()).spawn().unwrap();
            std::thread::sleep(std::time::Duration::from_millis(delay));
            started.kill().unwrap();
            let output = started.wait_with_output().unwrap();
            runs += 1;
            printed += u64::from(!output.stdout.is_empty());
        }
        let output = command().output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        let count = text.strip_prefix("start ").and_then(|text| text.split_whitespace().next());
        let count: u64 = count.unwrap_or_else(|| panic!("{text}{errors}")).parse().unwrap();
        assert!((printed + 1..=runs + 1).contains(&count), "{printed} of {runs}: {text}");
    }
}

#[test]
fn the_example_of_the_man_page_survives_kills() {
    let installed = Installed::new();
    let program = installed.compile_example();
    let command = || {
        let mut command = Command::new(&program);
        command.env("LD_LIBRARY_PATH", installed.library_directory());
        command.current_dir(installed.dir.path());
        command
    };
    installed.check_kills(command, 22);
}

/// The code of the package's README.
fn python_example() -> String {
    let text = std::fs::read_to_string(here().join("python/README.md")).unwrap();
    let code = text.split("```python\n").nth(1).unwrap().split("```").next().unwrap();
    let lines = code.lines().filter(|line| !line.is_empty()).count();
    assert!(lines <= 20, "{lines} lines");
    code.to_owned()
}

#[test]
fn the_example_of_the_python_package_survives_kills() {
    let installed = Installed::new();
    installed.install_python();
    let code = python_example();
    let command = || {
        let mut command = Command::new("python3");
        command.args(["-c", &code]).env("PYTHONPATH", installed.dir.path().join("site"));
        command.env("LD_LIBRARY_PATH", installed.library_directory());
        command.current_dir(installed.dir.path());
        command
    };
    installed.check_kills(command, 220);
}

#[test]
fn the_python_package_has_areas_transactions_and_errors() {
    const SCRIPT: &str = r#"
import firnapp

session = firnapp.Session("python", file="python.log", fsync_ms=-1, tracker="pt_assisted")
area, other = session.allocate("area", 9000), session.allocate("other", 10)
assert (len(area), area.readonly, area.format, session.tracker) == (9000, False, "B", "pt_assisted")
with session.transaction():
    area[5000:5003] = b"abc"
try:
    with session.transaction():
        area[5000:5003] = b"xyz"
        raise KeyError("a mistake")
except KeyError:
    pass
assert bytes(area[5000:5003]) == b"abc"
with session.transaction():
    area[8] = 7
print([(change.area, change.offset, change.length) for change in session.changes()], session.acknowledged)
try:
    session.allocate("area", 5)
except firnapp.Error as error:
    print(error.errno, error.strerror)
part = other[:10]
for call in (lambda: session.forget(other), session.close):
    try:
        call()
        print("a slice is in use")
    except BufferError as error:
        pass
part[0] = 1
del part
session.forget(other)
other = session.allocate("again", 10)
session.forget(other)
session.flush()
print(session.status())
session.close()
for view in (area, other):
    try:
        view[0]
    except ValueError as error:
        print(error)
targets = [firnapp.Target(file="python.log"), firnapp.Target(file="second.log")]
with firnapp.Session("python", targets=targets, require="all", timeout_ms=3000) as session:
    area = session.allocate("area", 9000)
    print(session.recover(), bytes(area[5000:5003]), area[8], len(session.status()))
try:
    firnapp.Session("python")
except firnapp.Error as error:
    print(error.errno)
"#;
    let installed = Installed::new();
    let output = installed.python(SCRIPT).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let text = String::from_utf8(output.stdout).unwrap();
    let expected = "[(0, 8, 8)] 2\n\
        -1 the area \"area\" overlaps with the area \"area\", or has its name\n\
        [<python.log: connected, transaction 2>]\n\
        operation forbidden on released memoryview object\n\
        operation forbidden on released memoryview object\n\
        2 b'abc' 7 2\n\
        -1\n";
    assert_eq!(text, expected, "{errors}");
}

#[test]
fn an_area_is_forgotten_by_its_number() {
    const SCRIPT: &str = r#"
result, session = opened(Target(file=path("log"), fsync_ms=-1))
memory = [ctypes.c_void_p() for _ in range(3)]
for number, start in enumerate(memory):
    assert lib.firn_app_allocate(session, b"area%d" % number, ctypes.c_size_t(9000), ctypes.byref(start)) == number
assert lib.firn_app_begin(session) == 0 and lib.firn_app_commit(session) == 1
print(lib.firn_app_forget_area(session, 1), lib.firn_app_forget_area(session, 1), lib.firn_app_error().decode())
print(lib.firn_app_forget_area(session, 7), lib.firn_app_forget_area(session, -1))
assert lib.firn_app_begin(session) == 0
print(lib.firn_app_forget_area(session, 0), lib.firn_app_error().decode())
ctypes.memset(memory[2].value + 100, 5, 8)
assert lib.firn_app_commit(session) == 2
class Change(ctypes.Structure):
    _fields_ = [("area", ctypes.c_uint32), ("offset", ctypes.c_size_t), ("length", ctypes.c_size_t)]
found = (Change * 4)()
lib.firn_app_changes.restype = ctypes.c_int64
count = lib.firn_app_changes(session, found, ctypes.c_size_t(4))
print([(change.area, change.offset, change.length) for change in found[:count]])
lib.firn_app_close(session)
"#;
    let dir = tempfile::tempdir().unwrap();
    let output = run_script(SCRIPT, dir.path());
    let expected = "0 -1 the session has no area 1\n-1 -1\n\
        -2 forget an area: a transaction is open\n[(2, 96, 16)]\n";
    assert_eq!(output, expected);
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
    assert_eq!(functions.len(), 19, "{functions:?}");
    for function in functions {
        assert!(page.contains(&format!("{function}(")), "{function}");
        let code = ["src/lib.rs", "src/status.rs", "src/standby.rs"].map(read).concat();
        assert!(code.contains(&format!("fn {function}(")), "{function}");
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
fn a_missing_host_is_reported() {
    const SCRIPT: &str = r#"
import sys
exec(open(sys.argv[1]).read().split("class State")[0])
lib = ctypes.CDLL(sys.argv[2])
lib.firn_app_error.restype = ctypes.c_char_p
for key in (None, b"5a" * 32):
    session = ctypes.c_void_p()
    options = Options(name=b"ledger", tracker=b"pt_host", host_key=key, no_backup=1)
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

/// Runs a script that has the declarations of the example, with the library and a directory.
fn run_script(script: &str, dir: &Path) -> String {
    install(dir);
    let start = r#"
import sys
exec(open(sys.argv[1]).read().split("class State")[0])
lib, directory = ctypes.CDLL(sys.argv[2]), sys.argv[3]
lib.firn_app_error.restype = lib.firn_app_standby_address.restype = ctypes.c_char_p
for name in ("recover", "commit", "standby_take_over"):
    getattr(lib, "firn_app_" + name).restype = ctypes.c_int64

class Target(ctypes.Structure):
    _fields_ = [(name, ctypes.c_char_p) for name in ("file", "remote", "certificate", "key", "authority")]
    _fields_ += [("lag_max", ctypes.c_uint64), ("fsync_ms", ctypes.c_int), ("compress", ctypes.c_int)]

class Status(ctypes.Structure):
    _fields_ = [("target", ctypes.c_char_p), ("condition", ctypes.c_int), ("since", ctypes.c_int64)]
    _fields_ += [(name, ctypes.c_uint64) for name in ("acknowledged", "commits_behind", "bytes_behind", "state_transfers")]
    _fields_ += [("last_error", ctypes.c_char_p)]

def opened(*targets, **options):
    session, array = ctypes.c_void_p(), (Target * len(targets))(*targets)
    options = {"name": b"ledger", "targets": ctypes.cast(array, ctypes.c_void_p), "target_count": len(targets),
               "target_size": ctypes.sizeof(Target), "timeout_ms": 200} | options
    return lib.firn_app_open(ctypes.byref(Options(**options)), ctypes.byref(session)), session

def area_of(session):
    memory = ctypes.c_void_p()
    assert lib.firn_app_allocate(session, b"area", ctypes.c_size_t(9000), ctypes.byref(memory)) == 0, lib.firn_app_error()
    assert lib.firn_app_recover(session) >= 0, lib.firn_app_error()
    return (ctypes.c_ubyte * 9000).from_address(memory.value)

def commit(session, area, byte):
    assert lib.firn_app_begin(session) == 0, lib.firn_app_error()
    area[5000] = byte
    return lib.firn_app_commit(session)

def status(session):
    found = (Status * 4)()
    count = lib.firn_app_status(session, found, ctypes.c_size_t(ctypes.sizeof(Status)), ctypes.c_size_t(4))
    return found[:count]

def path(name):
    return f"{directory}/{name}".encode()
"#;
    let (example, library) = (here().join("examples/counter.py"), dir.join("lib/libfirnapp.so"));
    let script = format!("{start}{script}");
    let arguments = ["-c".as_ref(), script.as_ref(), example.as_os_str(), library.as_os_str()];
    run(Path::new("python3"), arguments.into_iter().chain([dir.as_os_str()]))
}

#[test]
fn options_that_are_wrong_are_refused() {
    const SCRIPT: &str = r#"
file = Target(file=path("log"))
both = Target(file=path("log"), remote=b"127.0.0.1:1", certificate=b"c", key=b"k", authority=b"a")
size = ctypes.sizeof(Options)
for targets, options in [
    ((), {}), ((file,), {"no_backup": 1}), ((file,), {"require": b"most"}), ((file,), {"target_size": 8}),
    ((Target(),), {}), ((both,), {}), ((file,), {"targets": None}),
]:
    print(opened(*targets, **options)[0], lib.firn_app_error().decode())
class Larger(Options):
    _fields_ = [("new", ctypes.c_uint64)]
session = ctypes.c_void_p()
for struct_size, new in ((0, 0), (size - 8, 0), (size + 8, 1), (size + 8, 0)):
    options = Larger(name=b"ledger", no_backup=1)
    options.struct_size, options.new = struct_size, new
    result = lib.firn_app_open(ctypes.byref(options), ctypes.byref(session))
    print(result, lib.firn_app_error().decode() if result else "opened")
"#;
    let dir = tempfile::tempdir().unwrap();
    let output = run_script(SCRIPT, dir.path());
    let lines: Vec<&str> = output.lines().collect();
    let expected = [
        "-1 no target: set file, remote or targets; no_backup = 1",
        "-1 no_backup is set, and there is a target",
        "-1 \"most\" is no count of backups: all, any, or a number",
        "-1 target_size",
        "-1 a target has file or remote",
        "-1 a target has file or remote",
        "-1 targets is null",
        "-1 firn_app_options: struct_size is 0",
        "-1 firn_app_options: struct_size is",
        "-1 firn_app_options has members that this version",
        "0 opened",
    ];
    assert_eq!(lines.len(), expected.len(), "{output}");
    for (line, expected) in lines.iter().zip(expected) {
        assert!(line.starts_with(expected), "{line}, not {expected}");
    }
    assert!(!dir.path().join("log").exists());
}

fn write_keys(dir: &Path) {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    std::fs::write(dir.join("ca"), authority.pem()).unwrap();
    for side in ["primary", "standby"] {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &authority).unwrap();
        std::fs::write(dir.join(format!("{side}.cert")), certificate.pem()).unwrap();
        let path = dir.join(format!("{side}.key"));
        std::fs::write(&path, key.serialize_pem()).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    }
}

#[test]
fn a_standby_takes_over_and_the_primary_reads_its_status() {
    const SCRIPT: &str = r#"
class StandbyOptions(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t)]
    _fields_ += [(name, ctypes.c_char_p) for name in ("listen", "directory", "certificate", "key", "authority", "sessions")]
    _fields_ += [("fsync_ms", ctypes.c_int)]

standby = ctypes.c_void_p()
options = StandbyOptions(listen=b"127.0.0.1:0", directory=directory.encode(), certificate=path("standby.cert"),
                         key=path("standby.key"), authority=path("ca"), fsync_ms=-1)
print(lib.firn_app_standby_start(ctypes.byref(options), ctypes.byref(standby)), lib.firn_app_error().decode()[:50])
options.struct_size = ctypes.sizeof(options)
assert lib.firn_app_standby_start(ctypes.byref(options), ctypes.byref(standby)) == 0, lib.firn_app_error()
remote = Target(remote=lib.firn_app_standby_address(standby), certificate=path("primary.cert"),
                key=path("primary.key"), authority=path("ca"))
result, primary = opened(Target(file=path("local.log"), fsync_ms=-1), remote, require=b"all")
assert result == 0, lib.firn_app_error()
area = area_of(primary)
for number in range(1, 4):
    assert commit(primary, area, number) == number
print([(found.target == path("local.log"), found.condition, found.acknowledged, found.last_error) for found in status(primary)])

result, second = opened(no_backup=1, targets=None, target_count=0)
assert result == 0, lib.firn_app_error()
memory = area_of(second)
print(lib.firn_app_standby_take_over(standby, second), memory[5000])
print(commit(primary, area, 9), "is stored by 1 of 2 backups" in lib.firn_app_error().decode())
found = status(primary)
print([target.condition for target in found], found[1].commits_behind, found[1].last_error is not None)
assert commit(second, memory, 4) == 4, lib.firn_app_error()
lib.firn_app_close(second)
lib.firn_app_close(primary)
lib.firn_app_standby_stop(None)
"#;
    let dir = tempfile::tempdir().unwrap();
    write_keys(dir.path());
    let output = run_script(SCRIPT, dir.path());
    let lines: Vec<&str> = output.lines().collect();
    assert!(lines[0].starts_with("-1 firn_app_standby_options: struct_size is 0"), "{output}");
    assert_eq!(lines[1], "[(True, 0, 3, None), (False, 0, 3, None)]");
    assert_eq!(lines[2..], ["3 3", "-4 True", "[0, 2] 1 True"]);
}
